"""Runs backplane as an agent of the Agent Client Protocol, for editors: every backend is a mode of a session.

JSON-RPC lines on two descriptors, protocol version 1. A session here is one of `providers`, kept in the state folder,
and each prompt is a run with a receipt. The agent works in the editor's folder itself.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from backplane import config
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.conversation import AgentMessage, Image, Message, SessionFile, ToolResultMessage, UserMessage
from backplane.contract.events import (
    AgentEvent,
    Approval,
    AssistantDelta,
    AssistantMessage,
    Reasoning,
    ToolCall,
    ToolResult,
)
from backplane.errors import BackplaneError, ConfigError, unforeseen
from backplane.policy.paths import SPELLINGS
from backplane.process.aio import ending_signals
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

PROTOCOL: Final = 1
REST_S: Final = 15.0
"""Seconds for answering open requests after the end of stdin."""
SESSIONS_MAX: Final = 64
"""Open sessions of one editor; each may have an agent's process."""
PAGE_ROWS: Final = 50
"""Rows of one answer to `session/list`."""
TITLE_CHARS: Final = 80
IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Bytes of one image of a prompt; vendors refuse larger ones."""
TEXT_BYTES_MAX: Final = 1024 * 1024
"""Bytes of one embedded file of a prompt; more would not fit into a model's window."""

KINDS: Final[Mapping[str, str]] = {
    "read_file": "read", "write_file": "edit", "edit_file": "edit", "bash": "execute", "glob": "search",
    "grep": "search", "list_files": "search", "web_fetch": "fetch", "web_search": "fetch",
}  # fmt: skip
"""Neutral name of a tool → kind in the protocol; all others are `other`."""

STOPS: Final[Mapping[str, str]] = {
    "end_turn": "end_turn", "stop_sequence": "end_turn", "tool_use": "end_turn", "max_tokens": "max_tokens",
    "user_interrupt": "cancelled",
}  # fmt: skip

ALLOW, ALWAYS, REJECT = "allow", "allow_always", "reject"
OPTIONS: Final[list[Json]] = [
    {"optionId": ALLOW, "name": "Allow", "kind": "allow_once"},
    {"optionId": ALWAYS, "name": "Allow such calls in this reply", "kind": "allow_always"},
    {"optionId": REJECT, "name": "Reject", "kind": "reject_once"},
]


class _Open:
    """An open session, its providers, and whether a prompt is under way."""

    def __init__(self, registry: ProviderRegistry, session: Session) -> None:
        self.registry, self.session = registry, session
        self.prompting = False
        self.is_cancelled = False


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
        self._pipe: Pipe
        self._signal: int | None = None

    async def serve(self, stdin: int, stdout: int) -> int | None:
        """Answer requests until stdin ends or a signal comes; then close all sessions.

        Returns:
            The number of the signal; None at the end of stdin.
        """
        self._pipe = Pipe(stdout, stdin, answer=self._answer, hear=self._hear, strict=True, rest_s=REST_S)
        async with anyio.create_task_group() as tasks:
            work = anyio.CancelScope()
            tasks.start_soon(self._watch_signals, work)
            tasks.start_soon(self._end_with_editor)
            with work:
                await self._pipe.run()
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for id in list(self._sessions):
                    closing.start_soon(self._close, id)
        return self._signal

    async def _watch_signals(self, work: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            async for number in received:
                self._signal = self._signal or int(number)
                work.cancel()

    async def _end_with_editor(self) -> None:
        """Stop all turns when the editor has closed its end."""
        await self._pipe.ended.wait()
        for one in self._sessions.values():
            await one.session.interrupt()

    async def _hear(self, received: Notification) -> None:
        if received.method == "session/cancel":
            one = self._sessions.get(str(received.params.get("sessionId")))
            if one is not None and one.prompting:
                one.is_cancelled = True
                await one.session.interrupt()

    async def _answer(self, asked: Request) -> Json | RpcError:
        method = _METHODS.get(asked.method)
        if method is None:
            return RpcError(METHOD_NOT_FOUND, f"this agent has no method {asked.method[:200]}")
        try:
            return await getattr(self, method)(asked.params)
        except _WrongParams as error:
            return RpcError(INVALID_PARAMS, str(error))
        except Exception as error:  # The outermost handler: other requests go on.
            known = error.cause if isinstance(error, ProviderError) else unforeseen(error)
            words = f"{known.message}; {known.hint}" if known.hint else known.message
            return RpcError(INTERNAL_ERROR, f"{known.code}: {words}")

    # Sessions ---------------------------------------------------------------------------------------------------------

    async def initialize(self, _params: Mapping[str, Any]) -> Json:
        """Say what this agent can; it speaks one version, which is the answer to any other."""
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

    async def new(self, params: Mapping[str, Any]) -> Json:
        """Begin a session in the editor's folder."""
        return await self._begun(params, None)

    async def load(self, params: Mapping[str, Any]) -> Json:
        """Continue a stored session, and show what was said in it before the answer."""
        found = await self.resume(params)
        session = self._sessions[_text(params, "sessionId")].session
        for message in session.get_history():
            for update in _replayed(message):
                await self._update(session.id, update)
        return found

    async def resume(self, params: Mapping[str, Any]) -> Json:
        """Continue a stored session."""
        id = _text(params, "sessionId")
        if id in self._sessions:
            raise _WrongParams(f"the session {id} is open already")
        return await self._begun(params, id)

    async def _begun(self, params: Mapping[str, Any], id: str | None) -> Json:
        """Open a session, and return its id and modes."""
        folder = _folder(params)
        registry = self._registry(folder, params)
        await registry.__aenter__()
        try:
            wish: SessionConfig = SessionConfig(
                root=str(folder), mode="pass_through", policy=self._policy, on_ask="stream"
            )
            if id is None:
                session = await registry.get(self._backend).create_session(wish)
                await session.save()
            else:
                file = await anyio.to_thread.run_sync(_stored, registry.plane.home, id)
                if file.id != id:
                    raise _WrongParams(f"no session {id[:80]!r} is stored")
                session = await registry.get(file.provider).resume(file.id, wish)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await registry.__aexit__(None, None, None)
            raise
        self._sessions[session.id] = _Open(registry, session)
        return {**({"sessionId": session.id} if id is None else {}), "modes": _modes(registry, session)}

    def _registry(self, folder: Path, params: Mapping[str, Any]) -> ProviderRegistry:
        """Return the providers for a folder, with the MCP servers of the editor."""
        if len(self._sessions) >= SESSIONS_MAX:
            raise _WrongParams(f"{SESSIONS_MAX} sessions are open; close one")
        settings = config.load(self._file, self._environ, folder)
        servers = _servers(params.get("mcpServers") or ())
        settings = msgspec.structs.replace(settings, mcp_servers={**settings.mcp_servers, **servers})
        return ProviderRegistry(settings, config.home(self._environ), self._environ)

    async def list(self, params: Mapping[str, Any]) -> Json:
        """List stored sessions, the most recently used first, a page at a time."""
        cwd, cursor = params.get("cwd"), params.get("cursor")
        start = int(cursor) if isinstance(cursor, str) and cursor.isdecimal() else 0
        found = await anyio.to_thread.run_sync(lambda: list(store.listed(config.home_path(self._environ))))
        files = [one for one in found if isinstance(one, SessionFile) and (cwd is None or one.root == cwd)]
        rows: list[Json] = [_row(file) for file in files[start : start + PAGE_ROWS]]
        more: dict[str, Json] = {"nextCursor": str(start + PAGE_ROWS)} if len(files) > start + PAGE_ROWS else {}
        return {"sessions": rows, **more}

    async def close(self, params: Mapping[str, Any]) -> Json:
        """Close a session; a turn under way is cancelled, and the session stays stored."""
        await self._close(self._find(params).session.id)
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

    async def set_mode(self, params: Mapping[str, Any]) -> Json:
        """Continue a session on another backend."""
        one, mode = self._find(params), _text(params, "modeId")
        if mode not in one.registry.list():
            raise _WrongParams(f"no backend {mode[:80]!r}; there are {', '.join(one.registry.list())}")
        if one.prompting:
            raise _WrongParams("a prompt is under way; cancel it before another backend continues")
        if mode != one.session.provider:
            one.prompting = True
            try:
                await one.session.handover(one.registry.get(mode))
            finally:
                one.prompting = False
        return {}

    def _find(self, params: Mapping[str, Any]) -> _Open:
        id = _text(params, "sessionId")
        if id not in self._sessions:
            raise _WrongParams(f"no session {id[:80]!r} is open; begin one with session/new")
        return self._sessions[id]

    # A prompt ---------------------------------------------------------------------------------------------------------

    async def prompt(self, params: Mapping[str, Any]) -> Json:
        """Send a prompt, show what happens, and return why the turn ended."""
        one = self._find(params)
        if one.prompting:
            raise _WrongParams("a prompt is under way in this session")
        said = _message(params.get("prompt"))
        one.prompting, one.is_cancelled = True, False
        try:
            async with anyio.create_task_group() as asks:
                outcome = await self._turn(one, said, asks)
        finally:
            one.prompting = False
        if one.is_cancelled:
            return {"stopReason": "cancelled"}
        outcome.check()
        return {"stopReason": STOPS[outcome.stop_reason]}

    async def _turn(self, one: _Open, said: UserMessage, asks: anyio.abc.TaskGroup) -> TurnOutcome:
        shown = _Shown()
        was_sent = False
        async for event in one.session.send_message(said):
            if one.is_cancelled and not was_sent:  # The request came before the turn could be interrupted.
                was_sent = True
                await one.session.interrupt()
            if isinstance(event, TurnOutcome):
                asks.cancel_scope.cancel()
                return event
            if isinstance(event, Approval):
                asks.start_soon(self._ask, one, event)
            for update in shown.updates(event):
                await self._update(one.session.id, update)
        raise ConfigError("config_invalid", "the turn ended without its outcome")

    async def _ask(self, one: _Open, approval: Approval) -> None:
        """Let the editor answer an approval; a question in words is denied, as the protocol has no answer to one."""
        id = str(approval.body.get("id"))
        if not one.session.awaits_answer(id):
            return
        if approval.kind == "input":
            decision = Decision("deny", "this editor can answer no questions in words; ask in your reply")
        else:
            call = approval.body.get("tool_use_id") or id
            title = approval.tool or "apply a patch"
            shown = {"toolCallId": str(call), **_call(title, approval.input), "status": "pending"}
            params = {"sessionId": one.session.id, "toolCall": shown, "options": OPTIONS}
            decision = _decision((await self._pipe.call("session/request_permission", params, timeout_s=None)).result)
        with suppress(BackplaneError):  # Another way has answered it, or the turn has ended.
            one.session.answer(id, decision)

    async def _update(self, id: str, update: dict[str, Json]) -> None:
        await self._pipe.notify("session/update", {"sessionId": id, "update": update})


_METHODS: Final = {
    "initialize": "initialize", "session/new": "new", "session/load": "load", "session/resume": "resume",
    "session/list": "list", "session/close": "close", "session/set_mode": "set_mode", "session/prompt": "prompt",
}  # fmt: skip


class _WrongParams(Exception):
    """Parameters of a request that cannot be heeded."""


class _Shown:
    """Makes the updates of a turn; words that came in pieces are not shown again as a whole."""

    def __init__(self) -> None:
        self._in_pieces = False

    def updates(self, event: AgentEvent) -> list[dict[str, Json]]:
        """Return the updates that an event is for an editor."""
        if isinstance(event, Reasoning):
            return [_words("agent_thought_chunk", event.reasoning)] if event.reasoning else []
        if isinstance(event, AssistantDelta):
            self._in_pieces = True
            return [_words("agent_message_chunk", event.text)] if event.text else []
        if isinstance(event, AssistantMessage):
            was_shown, self._in_pieces = self._in_pieces, False
            return [] if was_shown or not event.text else [_words("agent_message_chunk", event.text)]
        if isinstance(event, ToolCall):
            call = _call(event.tool_name, event.input)
            return [
                {"sessionUpdate": "tool_call", "toolCallId": str(event.tool_use_id), **call, "status": "in_progress"}
            ]
        if isinstance(event, ToolResult):
            return [_result(str(event.tool_use_id), event.output, is_error=event.is_error)]
        return []


def _words(kind: str, text: str) -> dict[str, Json]:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def _call(name: str, given: Json) -> dict[str, Json]:
    """Return the members that show a call: title, kind, input, and the files that it names."""
    found = given if isinstance(given, dict) else {}
    words = next(
        (
            found[key]
            for key in ("command", "cmd", "path", "file_path", "filePath", "url", "pattern")
            if isinstance(found.get(key), str)
        ),
        "",
    )
    paths = [found[key] for key in ("path", "file_path", "filePath") if isinstance(found.get(key), str)]
    neutral = SPELLINGS.get(name, name)
    title = f"{name} {words}".strip().replace("\n", " ")[:TITLE_CHARS]
    kind = KINDS.get(neutral) or next((kind for tool, kind in KINDS.items() if tool in name.lower()), "other")
    places: list[Json] = [{"path": path} for path in paths]
    return {"title": title, "kind": kind, "rawInput": given, "locations": places}


def _result(id: str, output: Json, *, is_error: bool) -> dict[str, Json]:
    text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
    content: list[Json] = [{"type": "content", "content": {"type": "text", "text": text}}] if text else []
    status = "failed" if is_error else "completed"
    return {"sessionUpdate": "tool_call_update", "toolCallId": id, "status": status, "content": content}


def _replayed(message: Message) -> list[dict[str, Json]]:
    """Return the updates that show a message of a stored session."""
    if isinstance(message, UserMessage):
        return [_words("user_message_chunk", message.content)]
    if isinstance(message, ToolResultMessage):
        return [_result(message.tool_call_id, message.content, is_error=message.is_error)]
    assert isinstance(message, AgentMessage)
    thoughts = [_words("agent_thought_chunk", block.text) for block in message.thinking if block.text]
    said = [_words("agent_message_chunk", message.content)] if message.content else []
    calls: list[dict[str, Json]] = [
        {"sessionUpdate": "tool_call", "toolCallId": call.id, **_call(call.name, call.arguments), "status": "completed"}
        for call in message.tool_calls
    ]
    return [*thoughts, *said, *calls]


def _decision(answer: Any) -> Decision:
    """Return the decision that an editor's answer is; whatever is no permission denies."""
    outcome = answer.get("outcome") if isinstance(answer, dict) else None
    chosen = outcome.get("optionId") if isinstance(outcome, dict) and outcome.get("outcome") == "selected" else None
    if chosen in (ALLOW, ALWAYS):
        return Decision("allow", remember="run" if chosen == ALWAYS else "once")
    return Decision("deny", "the user rejected it in the editor")


def _modes(registry: ProviderRegistry, session: Session) -> Json:
    modes: list[Json] = [{"id": name, "name": name} for name in registry.list()]
    return {"currentModeId": session.provider, "availableModes": modes}


def _row(file: SessionFile) -> Json:
    messages = (message for turn in file.turns for message in turn.messages)
    words = next((one.content for one in messages if isinstance(one, UserMessage)), "")
    title = " ".join(words.split())[:TITLE_CHARS] or None
    return {"sessionId": file.id, "cwd": file.root or "/", "title": title, "updatedAt": file.created_at}


def _stored(home: Path, id: str) -> SessionFile:
    return store.read(store.path_of(home, store.find(home, id)))


def _text(params: Mapping[str, Any], name: str) -> str:
    found = params.get(name)
    if not isinstance(found, str) or not found:
        raise _WrongParams(f"the request has no text {name!r}")
    return found


def _folder(params: Mapping[str, Any]) -> Path:
    folder = Path(_text(params, "cwd"))
    if not folder.is_absolute() or not folder.is_dir():
        raise _WrongParams(f"cwd {str(folder)[:200]!r} is no absolute path of a folder")
    return folder


def _servers(rows: Any) -> dict[str, config.ServerSettings]:
    """Return the editor's MCP servers as settings."""
    found: dict[str, config.ServerSettings] = {}
    for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise _WrongParams("an MCP server has no name")
        try:
            found[row["name"]] = _server(row)
        except (TypeError, ValueError, KeyError, msgspec.ValidationError) as error:
            raise _WrongParams(f"the MCP server {row['name'][:80]!r} cannot be used: {error}") from error
    return found


def _server(row: dict[str, Any]) -> config.ServerSettings:
    pairs = {part: {one["name"]: str(one["value"]) for one in row.get(part) or ()} for part in ("env", "headers")}
    if "url" in row:
        if row.get("type") == "sse":
            raise ValueError("SSE servers are not supported; use HTTP or stdio")
        return config.ServerSettings(url=str(row["url"]), headers=pairs["headers"])
    return config.ServerSettings(command=(str(row["command"]), *map(str, row.get("args") or ())), env=pairs["env"])


def _message(blocks: Any) -> UserMessage:
    """Return the message that a prompt's blocks are; what cannot be carried is refused."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
        raise _WrongParams("the prompt is empty")
    words: list[str] = []
    images: list[Image] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            words.append(str(block.get("text", "")))
        elif kind == "resource_link":
            words.append(f"[{block.get('name', 'file')}]({block.get('uri', '')})")
        elif kind == "resource":
            words.append(_embedded(block.get("resource")))
        elif kind == "image":
            images.append(_image(block))
        else:
            raise _WrongParams(f"the prompt has a block {str(kind)[:40]!r}, which this agent cannot take")
    text = "\n\n".join(filter(None, words))
    if not text.strip() and not images:
        raise _WrongParams("the prompt is empty")
    return UserMessage(content=text, images=tuple(images))


def _embedded(resource: Any) -> str:
    text = resource.get("text") if isinstance(resource, dict) else None
    if not isinstance(text, str) or len(text) > TEXT_BYTES_MAX:
        raise _WrongParams(f"an embedded file is no text of at most {TEXT_BYTES_MAX} bytes; link it instead")
    return f'<file uri="{resource.get("uri", "")}">\n{text}\n</file>'


def _image(block: dict[str, Any]) -> Image:
    data, kind = block.get("data"), block.get("mimeType")
    if not isinstance(data, str) or not isinstance(kind, str) or len(data) > IMAGE_BYTES_MAX * 4 // 3:
        raise _WrongParams(f"an image has no data, no mimeType, or more than {IMAGE_BYTES_MAX} bytes")
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise _WrongParams(f"the data of an image is no base64: {error}") from error
    return Image(media_type=kind, data=data)
