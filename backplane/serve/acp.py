"""Runs backplane as an agent of the Agent Client Protocol, for editors: every backend is a mode of a session.

It speaks JSON-RPC lines on two descriptors, protocol version 1. A session is a `providers.Session`, stored in the state
folder, and each prompt is a run with a receipt. The agent works in the editor's folder, not in a copy.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from backplane import config
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.conversation import SessionFile, UserMessage
from backplane.contract.events import Approval, ApprovalAnswered
from backplane.errors import BackendError, BackplaneError, ConfigError, unforeseen
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    Notification,
    Request,
    RpcError,
)
from backplane.providers import ProviderRegistry, Session, SessionConfig, TurnOutcome, store
from backplane.providers.failures import ProviderError
from backplane.runtime import readiness
from backplane.runtime.backends import find as find_backend
from backplane.runtime.orders import read_policy
from backplane.serve import editor

PROTOCOL: Final = 1
NOT_FOUND: Final = -32002
"""The protocol's code for a session that does not exist; clients that close a session accept it as success."""
REST_S: Final = 15.0
"""Seconds to answer open requests after the end of stdin."""
PAGE_ROWS: Final = 50
"""Rows of one answer to `session/list`."""
WITHDRAW: Final = "$/cancel_request"
"""Notification that closes the editor's question, because the call was answered elsewhere or too late."""

STOPS: Final[Mapping[str, str]] = {
    "end_turn": "end_turn", "stop_sequence": "end_turn", "tool_use": "end_turn", "max_tokens": "max_tokens",
    "user_interrupt": "cancelled",
}  # fmt: skip
"""Why a turn ended → the protocol's stop reason."""


class _Refused(Exception):
    """Error for a request that is refused; its text and code go to the editor."""

    def __init__(self, message: str, code: int = INVALID_PARAMS) -> None:
        super().__init__(message)
        self.code = code


class _Open:
    """An open session, its folder and its providers."""

    def __init__(self, registry: ProviderRegistry, session: Session, root: str) -> None:
        self.registry, self.session, self.root = registry, session, root
        self.is_busy = False
        self.is_cancelled = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Refuse other prompts and modes until the block ends."""
        if self.is_busy:
            raise _Refused("a prompt is under way in this session; cancel it, or wait for its end")
        self.is_busy, self.is_cancelled = True, False
        try:
            yield
        finally:
            self.is_busy = False


class AcpAgent:
    """Serves one editor.

    Args:
        settings_file: the configuration file; None searches for one in a session's folder and the user's.
        backend: backend of new sessions; None takes the configured default.
        policy: policy of new sessions: a file or a shipped one; None takes the configured one.
    """

    def __init__(
        self, settings_file: Path | None, environ: Mapping[str, str], version: str, *, backend: str | None = None,
        policy: str | None = None,
    ) -> None:  # fmt: skip
        self._file, self._environ, self._version = settings_file, environ, version
        self._backend, self._policy = backend, policy
        self._sessions: dict[str, _Open] = {}
        self._opening = anyio.Lock()
        """Held while a session is opened, so that two requests cannot open the same one."""
        self._pipe: Pipe

    def check(self, folder: Path) -> None:
        """Check the backend and the policy of new sessions; a backend that is not ready yet is no error.

        Args:
            folder: folder in which a configuration file is searched for.

        Raises:
            ConfigError: `config_invalid`, the configuration is wrong, or there is no such policy.
            PolicyError: `policy_invalid`.
            BackendError: `backend_not_found`.
        """
        settings = config.load(self._file, self._environ, folder)
        if self._policy is not None:
            read_policy(self._policy)
        if self._backend is not None:
            try:
                find_backend(self._backend, settings, self._environ)
            except BackendError as error:
                if error.code != "backend_unavailable":
                    raise

    async def serve(self, stdin: int, stdout: int) -> int | None:
        """Answer requests until stdin ends or a signal comes; then close all sessions.

        Returns:
            The number of the signal; None at the end of stdin.
        """
        self._pipe = Pipe(stdout, stdin, answer=self._answer, hear=self._hear, strict=True, rest_s=REST_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_with_editor)
            number = await self._pipe.serve()
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for id in list(self._sessions):
                    closing.start_soon(self._close, id)
        return number

    async def _end_with_editor(self) -> None:
        """Stop all turns when the editor has closed stdin."""
        await self._pipe.ended.wait()
        for one in self._sessions.values():
            await one.session.interrupt()

    async def _hear(self, received: Notification) -> None:
        if received.method == "session/cancel":
            await anyio.lowlevel.checkpoint()  # So that a prompt that was read just before begins first.
            one = self._sessions.get(str(received.params.get("sessionId")))
            if one is not None and one.is_busy:
                one.is_cancelled = True
                await one.session.interrupt()

    async def _answer(self, asked: Request) -> Json | RpcError:
        answer = _METHODS.get(asked.method)
        if answer is None:
            return RpcError(METHOD_NOT_FOUND, f"this agent has no method {asked.method[:200]}")
        try:
            params = msgspec.convert(asked.params, editor.EditorParams)
        except msgspec.ValidationError as error:
            return RpcError(INVALID_PARAMS, f"{asked.method}: {error}")
        try:
            return await answer(self, params)
        except _Refused as error:
            return RpcError(error.code, str(error))
        except Exception as error:  # The outermost handler: other requests go on.
            known = error.cause if isinstance(error, ProviderError) else unforeseen(error)
            words = f"{known.message}; {known.hint}" if known.hint else known.message
            return RpcError(INTERNAL_ERROR, f"{known.code}: {words}")

    # Sessions ---------------------------------------------------------------------------------------------------------

    async def initialize(self, _params: editor.EditorParams) -> Json:
        """Return this agent's abilities, and its only protocol version, whatever the editor asked for."""
        return {
            "protocolVersion": PROTOCOL,
            "agentInfo": {"name": "backplane", "title": "Backplane", "version": self._version},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": True, "sse": False},
                "sessionCapabilities": {"list": {}, "resume": {}, "close": {}},
            },
            "authMethods": [],
        }

    async def new(self, params: editor.EditorParams) -> Json:
        """Begin a session in the editor's folder; it is stored when its first prompt comes."""
        one = await self._open(params, None)
        return {"sessionId": one.session.id, "modes": _modes(one)}

    async def load(self, params: editor.EditorParams) -> Json:
        """Continue a stored session, and show its messages before the answer."""
        one = await self._open(params, params.session_id)
        for message in one.session.get_history():
            for update in editor.replayed(message, one.root):
                await self._update(one, update)
        return {"modes": _modes(one)}

    async def resume(self, params: editor.EditorParams) -> Json:
        """Continue a stored session."""
        return {"modes": _modes(await self._open(params, params.session_id))}

    async def _open(self, params: editor.EditorParams, id: str | None) -> _Open:
        """Open a stored session, or a new one if the id is None."""
        folder = _folder(params.cwd or "")
        async with self._opening:
            if id in self._sessions:
                raise _Refused(f"the session {id} is open already; close it first")
            registry = self._registry(folder, params)
            await registry.__aenter__()
            try:
                session = await self._session(registry, folder, id)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await registry.__aexit__(None, None, None)
                raise
            one = self._sessions[session.id] = _Open(registry, session, str(folder))
            return one

    def _registry(self, folder: Path, params: editor.EditorParams) -> ProviderRegistry:
        """Return the providers for a folder, with the MCP servers of the editor."""
        try:
            servers = {server.name: server.settings() for server in params.mcp_servers or ()}
        except ValueError as error:
            raise _Refused(f"an MCP server cannot be used: {error}") from error
        settings = config.load(self._file, self._environ, folder)
        settings = msgspec.structs.replace(settings, mcp_servers={**settings.mcp_servers, **servers})
        return ProviderRegistry(settings, config.home(self._environ), self._environ)

    async def _session(self, registry: ProviderRegistry, folder: Path, id: str | None) -> Session:
        wish: SessionConfig = SessionConfig(root=str(folder), mode="pass_through", policy=self._policy, on_ask="stream")
        if id is None:
            return await registry.get(self._backend).create_session(wish)
        try:
            file = await anyio.to_thread.run_sync(lambda: store.read(store.path_of(registry.plane.home, id)))
        except ConfigError as error:
            raise _Refused(f"no session {id[:80]!r} can be read: {error.message}", NOT_FOUND) from error
        return await registry.get(file.provider).resume(file.id, wish)

    async def list(self, params: editor.EditorParams) -> Json:
        """List stored sessions, the most recently used first, a page at a time."""
        start, home = int(params.cursor or 0), config.home_path(self._environ)

        def rows() -> list[Json]:
            found = (one for one in store.listed(home) if isinstance(one, SessionFile))
            return [_row(home, one) for one in found if params.cwd in (None, one.root)]

        all_rows = await anyio.to_thread.run_sync(rows)
        end = start + PAGE_ROWS
        more: dict[str, Json] = {"nextCursor": str(end)} if len(all_rows) > end else {}
        return {"sessions": all_rows[start:end], **more}

    async def close(self, params: editor.EditorParams) -> Json:
        """Close a session; a turn under way is cancelled, and the session stays stored."""
        await self._close(self._find(params.session_id).session.id)
        return {}

    async def _close(self, id: str) -> None:
        one = self._sessions.pop(id, None)
        if one is None:
            return
        one.is_cancelled = True
        try:
            await one.session.close()
        finally:
            await one.registry.__aexit__(None, None, None)

    async def set_mode(self, params: editor.EditorParams) -> Json:
        """Continue a session on another backend."""
        one = self._find(params.session_id)
        names = one.registry.list()
        if params.mode_id not in names:
            raise _Refused(f"no backend {params.mode_id[:80]!r}; there are {', '.join(names)}")
        with one.busy():
            if params.mode_id != one.session.provider:
                await one.session.handover(one.registry.get(params.mode_id))
        return {}

    def _find(self, id: str) -> _Open:
        if id not in self._sessions:
            raise _Refused(f"no session {id[:80]!r} is open; begin one with session/new", NOT_FOUND)
        return self._sessions[id]

    # A prompt ---------------------------------------------------------------------------------------------------------

    async def prompt(self, params: editor.EditorParams) -> Json:
        """Send a prompt, show the turn's events in the editor, and return why the turn ended."""
        one, said = self._find(params.session_id), editor.message_of(params.prompt)
        if said is None:
            raise _Refused("the prompt is empty")
        with one.busy():
            outcome = await self._turn(one, said)
        if one.is_cancelled:
            return {"stopReason": "cancelled"}
        outcome.check()
        return {"stopReason": STOPS[outcome.stop_reason]}

    async def _turn(self, one: _Open, said: UserMessage) -> TurnOutcome:
        shown, was_interrupted = editor.TurnUpdates(one.root), False
        open_asks: dict[str, anyio.CancelScope] = {}
        async with anyio.create_task_group() as asks:
            async for event in one.session.send_message(said):
                if one.is_cancelled and not was_interrupted:  # The cancel came before the turn could be interrupted.
                    was_interrupted = True
                    await one.session.interrupt()
                if isinstance(event, TurnOutcome):
                    asks.cancel_scope.cancel()
                    return event
                if isinstance(event, Approval):
                    scope = open_asks[str(event.body.get("id"))] = anyio.CancelScope()
                    asks.start_soon(self._ask, one, event, scope)
                elif isinstance(event, ApprovalAnswered):
                    # By the editor, by another way to answer, or because the run's time limit was reached.
                    open_asks.pop(str(event.body.get("id")), anyio.CancelScope()).cancel()
                for update in shown.updates(event):
                    await self._update(one, update)
        raise ConfigError("config_invalid", "the turn ended without its outcome")

    async def _ask(self, one: _Open, approval: Approval, scope: anyio.CancelScope) -> None:
        """Let the editor answer an approval; a question for a text is denied, as the protocol has no answer for it."""
        id = str(approval.body.get("id"))
        if not one.session.awaits_answer(id):
            return
        decision = Decision("deny", "this editor can answer no questions in words; ask in your reply")
        if approval.kind != "input":
            call = str(approval.body.get("tool_use_id") or id)
            shown = editor.call_of(call, approval.tool or "apply a patch", approval.input, one.root)
            pending = {**shown, "status": "pending"}
            question = {"sessionId": one.session.id, "toolCall": pending, "options": editor.OPTIONS}
            with scope:
                answer = await self._pipe.call(
                    "session/request_permission", question, timeout_s=None, withdraw=WITHDRAW
                )
                decision = editor.decision_of(answer.result)
        with suppress(BackplaneError):  # It was answered in another way, or the turn has ended.
            one.session.answer(id, decision)

    async def _update(self, one: _Open, update: editor.Update) -> None:
        await self._pipe.notify("session/update", {"sessionId": one.session.id, "update": update})


_METHODS: Final[Mapping[str, Callable[[AcpAgent, editor.EditorParams], Awaitable[Json]]]] = {
    "initialize": AcpAgent.initialize, "session/new": AcpAgent.new, "session/load": AcpAgent.load,
    "session/resume": AcpAgent.resume, "session/list": AcpAgent.list, "session/close": AcpAgent.close,
    "session/set_mode": AcpAgent.set_mode, "session/prompt": AcpAgent.prompt,
}  # fmt: skip


def _folder(cwd: str) -> Path:
    folder = Path(cwd)
    if not folder.is_absolute() or not os.path.isdir(folder):
        raise _Refused(f"cwd {cwd[:200]!r} is no absolute path of a folder")
    return folder


def _modes(one: _Open) -> Json:
    """Return the session's backend, and all that are ready on this machine, as modes."""
    plane, own = one.registry.plane, one.session.provider
    ready = (status.id for status in readiness.known(plane.settings, plane.environ) if status.ready)
    modes: list[Json] = [{"id": name, "name": name} for name in sorted({own, *ready})]
    return {"currentModeId": own, "availableModes": modes}


def _row(home: Path, file: SessionFile) -> Json:
    title = " ".join((file.first_words or "").split())[: editor.TITLE_CHARS] or None
    changed = store.changed_at(home, file)
    return {"sessionId": file.id, "cwd": file.root or "/", "title": title, "updatedAt": changed}
