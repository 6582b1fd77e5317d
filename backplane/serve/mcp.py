"""Runs backplane as a server of the Model Context Protocol, with the tools `run`, `receipts` and `validate`.

The server speaks JSON-RPC lines on two descriptors. If the policy would ask a user about a call, the call is denied. A
run ends if its request is cancelled. When stdin ends, all runs are cancelled, and open requests are answered.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import anyio
import msgspec

from backplane import api, config
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, AssistantMessage, Failed, RunCompleted, RunStarted, ToolCall
from backplane.contract.receipt import Receipt
from backplane.contract.work import REPLAY, PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError, ConfigError, PolicyError, unforeseen
from backplane.process.aio import in_daemon
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Notification,
    Request,
    RpcError,
)
from backplane.protocol.mcp import greeting, text_result
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import backend_name, opening_of
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store
from backplane.runtime.orders import read_policy
from backplane.runtime.run import Run
from backplane.schemas.validate import validate

TEXT_CHARS_MAX: Final = 100_000
"""Maximum length of a text in an answer: a model reads far less, and a client may refuse more."""

ROWS_MAX: Final = 200
FINDINGS_MAX: Final = 50
"""Maximum number of findings listed for one document; further findings are only counted."""

DOCUMENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of a document, so that checking it takes only seconds; `backplane validate` has no such limit."""

VALIDATIONS_MAX: Final = 4
"""Maximum number of documents checked at once, including those of cancelled requests; others wait."""

ID_CHARS: Final = 80
"""Maximum length of a run's name in an error."""

LINE_CHARS: Final = 200
"""Maximum length of a progress message, and of a method's name in an error."""

RUN_REST_S: Final = 1.0
"""Seconds from the end of stdin until open runs are cancelled; clients send SIGTERM after two seconds."""

REST_S: Final = 15.0
"""Seconds to answer open requests after the end of stdin: a host may need time to cancel its run."""


def _about(description: str, **bounds: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, **bounds)


class RunInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a coding agent do a task in a folder, and seal a receipt of the run.

    By default the agent works in a copy and returns a patch; the folder stays unchanged.
    """

    task: Annotated[str, _about("what to do, in words")]
    backend: Annotated[str | None, _about("the agent (default: the configured one, or the router's choice)")] = None
    root: Annotated[str | None, _about("folder to work on, in this server's folder (default: the whole folder)")] = None
    mode: Annotated[Literal["staged", "pass_through"], _about("work in a copy, or in place")] = "staged"
    lane: Annotated[
        Literal["patch_first", "workspace_first"], _about("leave the result as a patch, or apply it when complete")
    ] = "patch_first"
    model: Annotated[str | None, _about("the model that the agent uses")] = None
    allow_tools: Annotated[tuple[str, ...], _about("allow only these tools")] = ()
    deny_tools: Annotated[tuple[str, ...], _about("deny these tools")] = ()
    timeout_s: Annotated[config.Seconds | None, _about("seconds for the whole run")] = None


class ReceiptsInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the receipts of runs in this server's folder, newest first.

    With an id, show one receipt with its patch, and whether the receipt still verifies.
    """

    id: Annotated[str | None, _about("a run's id or its beginning")] = None
    limit: Annotated[int, _about("rows of the list", ge=1, le=ROWS_MAX)] = 20


class ValidateInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Check a work order, receipt, event, envelope, transcript, policy or configuration, recognised by its content.

    Returns every fault with its JSON pointer.
    """

    document: Annotated[str | dict[str, Any], _about("the document, as text or as JSON")]


class _Tool(msgspec.Struct, frozen=True):
    """A tool of this server: the type of its arguments, its title, and the method that runs it."""

    input: type[msgspec.Struct]
    title: str
    call: Callable[[McpSession, Any, Request], Awaitable[Json]]
    destructive: bool = False

    def row(self, name: str) -> Json:
        """Return the tool's entry for `tools/list`; the docstring of `input` is its description."""
        schema = msgspec.json.schema(self.input)["$defs"][self.input.__name__]
        hints = {"readOnlyHint": not self.destructive, "openWorldHint": self.destructive}
        return {
            "name": name,
            "title": self.title,
            "description": " ".join(schema["description"].split()),
            "inputSchema": {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")},
            "annotations": hints | ({"destructiveHint": True} if self.destructive else {}),
        }


class McpSession:
    """Serves one client.

    Args:
        root: the folder in which runs may work.
        settings_file: the configuration file; None searches for one as the command line does.
    """

    def __init__(self, root: Path, settings_file: Path | None, environ: Mapping[str, str], version: str) -> None:
        self._root, self._file, self._environ, self._version = root.resolve(), settings_file, environ, version
        self._greeted = False
        self._pipe: Pipe
        self._runs: list[Run] = []
        """The runs that have not ended."""

    async def serve(self, stdin: int, stdout: int) -> int | None:
        """Answer requests until stdin ends or a signal comes; then cancel the open runs.

        Returns:
            The number of the signal; None at the end of stdin.
        """
        self._validations = anyio.CapacityLimiter(VALIDATIONS_MAX)
        self._pipe = Pipe(stdout, stdin, answer=self._answer, hear=self._hear, strict=True, rest_s=REST_S)
        return await self._pipe.serve(again=self._hurry)

    def _hurry(self) -> None:
        """End the runs faster, because of a second signal."""
        for run in self._runs:
            run.hurry()

    async def _hear(self, received: Notification) -> None:
        if received.method == "notifications/cancelled":
            id = received.params.get("requestId")
            if isinstance(id, str | int) and not isinstance(id, bool):  # As a key of a dict, True equals 1.
                self._pipe.drop(id)

    async def _answer(self, asked: Request) -> Json | RpcError:
        if asked.method == "ping":
            return {}
        if asked.method == "initialize":
            self._greeted = True
            return greeting(asked.params, name="backplane", title="Backplane", version=self._version)
        if not self._greeted:
            return RpcError(INVALID_REQUEST, "initialize comes first")
        if asked.method == "tools/list":
            return {"tools": [tool.row(name) for name, tool in _TOOLS.items()]}
        if asked.method == "tools/call":
            return await self._call(asked)
        return RpcError(METHOD_NOT_FOUND, f"this server has no method {asked.method[:LINE_CHARS]}")

    async def _call(self, asked: Request) -> Json | RpcError:
        name, arguments = asked.params.get("name"), asked.params.get("arguments")
        if not isinstance(name, str) or name not in _TOOLS:
            return RpcError(INVALID_PARAMS, f"no tool {str(name)[:80]!r}; there are {', '.join(_TOOLS)}")
        try:
            given = msgspec.convert({} if arguments is None else arguments, _TOOLS[name].input)
        except msgspec.ValidationError as error:
            return _failed(ConfigError("config_invalid", f"arguments of {name}: {error}"))
        try:
            return await _TOOLS[name].call(self, given, asked)
        except Exception as error:  # The outermost handler: the server and other requests continue.
            return _failed(unforeseen(error))

    async def _run(self, given: RunInput, asked: Request) -> Json:
        if given.backend is not None and given.backend.startswith(REPLAY):
            await anyio.to_thread.run_sync(self._require_here, given.backend.removeprefix(REPLAY))
        settings = config.load(self._file, self._environ, self._root, {"run_s": given.timeout_s})
        order = self._order(given, settings.policy)
        tell = self._progress(asked)
        answer = error = None
        home = config.home(self._environ)
        async with api.attempting(order, {"backend": given.backend, "settings": settings, "home": home}) as attempts:
            while True:
                with ExitStack() as after:  # The run stays in `_runs` until it has ended completely.
                    async with attempts.begin() as run, anyio.create_task_group() as tasks:
                        self._runs.append(run)
                        after.callback(self._runs.remove, run)
                        tasks.start_soon(self._end_with_client, run)
                        async for event in run:
                            answer = event.text if isinstance(event, AssistantMessage) else answer
                            error = event.message if isinstance(event, Failed) else error
                            await tell(event)
                        tasks.cancel_scope.cancel()
                if self._pipe.signal is not None or not await attempts.goes_on(run):
                    break
        said = {**summary(run.stored, run.backend_id), "answer": _cut(answer), "error": error}
        return _result(said, is_error=run.stored.outcome == "failed")

    async def _end_with_client(self, run: Run) -> None:
        await self._pipe.ended.wait()
        await anyio.sleep(RUN_REST_S)
        await run.cancel("the client said nothing more")

    def _order(self, given: RunInput, policy: PolicyProfile | str | None) -> WorkOrder:
        if not given.task.strip():
            raise ConfigError("config_invalid", "the task is empty", hint="say in words what to do")
        try:
            root = (self._root / (given.root or ".")).resolve()
        except (ValueError, RuntimeError, OSError) as error:  # A NUL, a loop of links, or a name that is too long.
            raise ConfigError("config_invalid", f"the root {given.root!r} names no folder: {error}") from error
        if not root.is_relative_to(self._root):
            fact = f"{given.root!r} is not in {self._root}"
            raise ConfigError("config_invalid", fact, hint="start the server with --root for another folder")
        return WorkOrder(
            given.task,
            lane=given.lane,
            workspace=WorkspaceSpec(root=str(root), mode=given.mode),
            policy=_policy(policy, given),
            config=RuntimeConfig(model=given.model),
        )

    def _progress(self, asked: Request) -> Callable[[AgentEvent], Awaitable[None]]:
        """Return a function that reports a run's events as progress if the client asked for progress."""
        meta = asked.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        sent = 0

        async def tell(event: AgentEvent) -> None:
            nonlocal sent
            line = _line(event)
            if line is None or not isinstance(token, str | int) or isinstance(token, bool):
                return
            sent += 1
            params = {"progressToken": token, "progress": sent, "message": line}
            await self._pipe.notify("notifications/progress", params)

        return tell

    async def _receipts(self, given: ReceiptsInput, asked: Request) -> Json:
        return await anyio.to_thread.run_sync(self._read_receipts, given)

    def _read_receipts(self, given: ReceiptsInput) -> Json:
        with Store.open(config.home_path(self._environ), readonly=True) as store:
            if given.id is None:
                rows = islice((row for row in store.newest() if self._is_here(store, row.run_id)), given.limit)
                return _result({"receipts": [_row(row, backend_name(store.folder(row.run_id))) for row in rows]})
            row = self._find(store, given.id)
            receipt = store.load(row.run_id)
            wrong = [str(finding) for finding in store.verify(row.run_id)]
            name = backend_name(store.folder(row.run_id))
            said = {**summary(receipt, name), "events": row.trace_count, "verifies": not wrong}
            return _result({**said, "wrong": wrong[:FINDINGS_MAX]} if wrong else said)

    def _require_here(self, name: str) -> None:
        with Store.open(config.home_path(self._environ), readonly=True) as store:
            self._find(store, name)

    def _find(self, store: Store, name: str) -> ReceiptRow:
        """Return a run's row. Raises like `Store.find`, and PolicyError for a run outside of this server's folder."""
        row = store.find(name)
        if not self._is_here(store, row.run_id):
            fact = f"the run {name[:ID_CHARS]!r} worked outside of {self._root}, the folder of this server"
            raise PolicyError("policy_denied", fact, hint="start the server with --root for another folder")
        return row

    def _is_here(self, store: Store, run_id: str) -> bool:
        """Return True if a run worked in this server's folder; False if its order was pruned."""
        root = opening_of(store.folder(run_id)).order.workspace.root if is_run_id(run_id) else ""
        return bool(root) and Path(root).resolve().is_relative_to(self._root)

    async def _validate(self, given: ValidateInput, asked: Request) -> Json:
        text = given.document
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else msgspec.json.encode(text)
        if len(data) > DOCUMENT_BYTES_MAX:
            fact = f"the document has {len(data)} bytes, over the limit of {DOCUMENT_BYTES_MAX}"
            raise ConfigError("config_invalid", fact, hint="use the command `backplane validate`")
        async with self._validations:
            found = await in_daemon(functools.partial(validate, data, "document"))
        shown = [
            {
                "pointer": one.pointer,
                "message": one.message,
                **({"line": one.line} if one.line is not None else {}),
                **({"note": True} if one.note else {}),
            }
            for one in found.findings[:FINDINGS_MAX]
        ]
        omitted = len(found.findings) - len(shown)
        return _result({"kind": found.kind, "valid": found.valid, "findings": shown, "omitted": omitted})


_TOOLS: Final = {
    "run": _Tool(RunInput, "Run a work order", McpSession._run, destructive=True),
    "receipts": _Tool(ReceiptsInput, "Read receipts", McpSession._receipts),
    "validate": _Tool(ValidateInput, "Validate a document", McpSession._validate),
}


def _policy(configured: PolicyProfile | str | None, given: RunInput) -> PolicyProfile:
    """Return the configured policy with the caller's rules, which can only make it stricter."""
    profile = PolicyProfile() if configured is None else read_policy(configured)
    if profile.allowed_tools and given.allow_tools:
        fact = "the configured policy has a list of allowed tools, which allow_tools would widen"
        raise ConfigError("config_invalid", fact, hint="forbid the others with deny_tools")
    return msgspec.structs.replace(
        profile,
        allowed_tools=(*profile.allowed_tools, *given.allow_tools),
        disallowed_tools=(*profile.disallowed_tools, *given.deny_tools),
    )


def summary(receipt: Receipt, name: str | None) -> dict[str, Json]:
    """Summarise a receipt for a caller: the run's end, its cost, and its patch.

    The patch is null if the receipt lacks it because it contains a secret, or could not be searched for secrets.

    Args:
        name: the configured name of the backend, as `run` takes it; None if it is unknown.
    """
    usage = {name: value for name, value in msgspec.to_builtins(receipt.usage).items() if value is not None}
    return {
        "run_id": receipt.meta.run_id,
        "backend_name": name,
        "backend": receipt.backend.id,
        "outcome": receipt.outcome,
        "end": receipt.backplane.get("end"),
        "duration_ms": receipt.meta.duration_ms,
        "usage": usage,
        "patch": _cut(receipt.verification.git_diff),
        "receipt_sha256": receipt.receipt_sha256,
    }


def _row(row: ReceiptRow, backend_name: str | None) -> Json:
    names = ("run_id", "backend", "outcome", "reason", "started_at", "duration_ms")
    return {**{name: getattr(row, name) for name in names}, "backend_name": backend_name}


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= TEXT_CHARS_MAX:
        return text
    return text[:TEXT_CHARS_MAX] + f"\n… {len(text) - TEXT_CHARS_MAX} more characters"


def _line(event: AgentEvent) -> str | None:
    """Return an event's progress message; None for events that are too small or too frequent to report."""
    if isinstance(event, ToolCall):
        return f"calls {event.tool_name}"[:LINE_CHARS]
    if isinstance(event, AssistantMessage):
        return event.text[:LINE_CHARS]
    if isinstance(event, RunStarted | RunCompleted | Failed):
        return event.message[:LINE_CHARS]
    return None


def _result(content: dict[str, Json], *, is_error: bool = False) -> Json:
    text = msgspec.json.encode(content).decode()
    return {**text_result(text, is_error=is_error), "structuredContent": content}


def _failed(error: BackplaneError) -> Json:
    said = {"error": error.message, "code": error.code}
    said |= {name: value for name in ("evidence", "hint") if (value := getattr(error, name))}
    return _result(said, is_error=True)
