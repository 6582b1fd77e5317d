"""An agent behind the Agent Client Protocol: initialize, a session, prompts, questions, cancel.

It is offered no file system and no terminal, so every agent works on disk itself and the layers around it see what it
does. Whatever else an agent asks is refused as unknown. The protocol has no place for words in a turn, so they wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.abc
import msgspec

from backplane.agents.acp.log import FAILURES_MAX, LOOK_S, FailedRequest, FileReader, StderrReader
from backplane.agents.acp.reader import AcpCall, EventReader, read_usage
from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.gate import ToolRequest
from backplane.agents.gemini.record import Record, home_of
from backplane.agents.order import (
    AgentFolders,
    Continuation,
    RunSpec,
    budget_of,
    folders_of,
    image_blocks,
    keep_name,
    price_from,
    read_conversation,
    server_rows,
    shape_of,
    snippets,
)
from backplane.agents.program import BegunProgram
from backplane.agents.rows import SESSION, AgentRow
from backplane.agents.session import WORDS_CHARS_MAX, AgentRun, Ending, failed, id_of, silent
from backplane.agents.session import Agent as BaseAgent
from backplane.contract.canonical import Json
from backplane.errors import BackendError, ConfigError
from backplane.host import Given, HostRun
from backplane.policy.rules import Policy
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Notification, Request, Response, RpcError

if TYPE_CHECKING:
    from backplane.dialects.ir import TokenCounts
    from backplane.process.child import Child

PROTOCOL_VERSION: Final = 1
OFFER: Final = {
    "protocolVersion": PROTOCOL_VERSION,
    "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
    "clientInfo": {"name": "backplane", "version": "0.1.0"},
}
SETTLE_S: Final = 0.1
"""After the answer to a prompt: updates that were sent before it may still come."""
HISTORY_S: Final = 0.5
"""Seconds without an update after which an older conversation counts as replayed; an agent replays it in one go."""
BROKEN: Final = "the stream of the model's answer broke, and the agent took its words for the whole answer"
WITHDRAWN: Final = "the turn was stopped before anybody had answered"


class AcpSession(msgspec.Struct, frozen=True):
    """Session that an agent has opened."""

    id: str
    modes: tuple[str, ...] = ()
    """Ids of the modes it can be set to."""
    mode: str | None = None
    options: dict[str, tuple[str, ...]] = {}
    """Its own settings: id → values to choose from."""
    models: tuple[str, ...] = ()
    model: str | None = None
    """The one it has now."""


class Agent(BaseAgent):
    """The agent of one run."""

    login_code = -32000
    reader: EventReader

    def __init__(self, session: AgentRun, profile: AgentRow, place: AgentFolders, child: Child) -> None:
        self.profile, self.place = profile, place
        run = session.run
        self.record = Record(home_of(place.config)) if profile.usage == "record" else None
        servers = [*server_rows(run, profile.mcp_servers)]
        reader = EventReader(
            run.now, session.root, profile.tools, profile.notices, record=self.record, servers=servers,
            by_own_word=named_by_rules(run.policy),
        )  # fmt: skip
        super().__init__(session, reader)
        self.reader.is_history = session.spec.conversation.wanted is not None
        self.pipe, self._child = session.pipe(child, self, hear=self._hear), child
        self._log: Callable[[], list[FailedRequest]] = list
        """Gives what is new in the agent's log."""
        self._failures, self._failed_s = 0, 0.0
        """Failed requests since the last sign of life, and when that came."""
        self._said: dict[str, Any] = {}
        """Its answer to `initialize`."""
        self._id = ""
        self._result: dict[str, Any] = {}
        """Result of the last prompt."""
        self._is_stopping = False

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Agree on the protocol, open the session, and set what the order asks for."""
        self._said = await self.must("initialize", OFFER)
        version = self._said.get("protocolVersion")
        if version != PROTOCOL_VERSION:
            raise BackendError("protocol_version_mismatch", f"the agent speaks protocol version {version}, not 1")
        blocks = mappings(self.session.spec.prompt)
        if any(block.get("type") == "image" for block in blocks) and not self._can("promptCapabilities", "image"):
            raise BackendError("capability_unsupported", "this agent says that it takes no pictures")
        asked = self.session.spec.conversation
        session = await self._open_session(asked)
        if asked.kept:
            keep_name(self.place, session.id, self.session.root)
        await self.session.announce(session.id, agent=self._said.get("agentInfo"), kept=asked.kept)
        await self._set(session)
        if self.record is not None:
            self.record.id = session.id
            await self._history_over()
            self.record.skip()
        if self.profile.failed_request:
            self._log = self._log_of(session.id)
            tasks.start_soon(self._watch_log)
        self._id, self.reader.is_history = session.id, False

    def _log_of(self, id: str) -> Callable[[], list[FailedRequest]]:
        """Return what finds the failed requests of a session that are new in the agent's log."""
        pattern, name = self.profile.failed_request, self.profile.log.replace(SESSION, id)
        if name and self.place.config is not None:
            return FileReader(pattern, Path(self.place.config), name).read
        stderr = StderrReader(pattern)
        return lambda: stderr.read(self._child.stderr_tail)

    async def _watch_log(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            await self._read_log()

    async def _hear(self, message: Notification) -> None:
        """Hear an update, after what the agent wrote to its log before it."""
        if self.profile.asks_anew:
            await self._read_log()
        await self.session.hear(message)

    async def _read_log(self) -> None:
        """Report each failed request as a retry, and end the run after `FAILURES_MAX` without a sign of life."""
        heard_s = self.session.silence.heard_s
        failures = self._log()
        # Before anything is waited for: a word that comes meanwhile is of the next answer.
        events = [self.reader.failed_request(one.words, asks_anew=self.profile.asks_anew) for one in failures]
        for failure, event in zip(failures, events, strict=True):
            self._failures = self._failures + 1 if self._failed_s == heard_s else 1
            self._failed_s = heard_s
            if self._failures >= FAILURES_MAX:
                words = f"the model's service failed: {failure.words}"
                self.session.cut(failed(self.session.code_of(failure.words, failure.label), words))
                return
            await self.session.run.emit(event)

    async def _history_over(self) -> None:
        """Wait for the rest of an older conversation, which this agent tells after it has answered."""
        seen = -1
        while self.reader.is_history and seen != self.reader.left_out:
            seen = self.reader.left_out
            await anyio.sleep(HISTORY_S)

    async def _open_session(self, asked: Continuation) -> AcpSession:
        servers = servers_of(self.session.run, self.profile)
        if any("url" in server for server in servers) and not self._can("mcpCapabilities", "http"):
            raise BackendError("capability_unsupported", "this agent reaches no MCP server by its address")
        params: dict[str, Json] = {"cwd": self.session.root, "mcpServers": servers}
        if asked.wanted is None:
            said = await self.must("session/new", params)
            id_of(said.get("sessionId"), "session/new", "session")
            return read_session(said)
        return await self._resume(asked, asked.wanted, params)

    async def _resume(self, asked: Continuation, id: str, params: dict[str, Json]) -> AcpSession:
        """Go on with a conversation that is there; the agent may tell its history before it answers."""
        method = self._resuming(fork=asked.fork is not None)
        if method is None:
            word = "fork" if asked.fork is not None else "resume"
            raise BackendError("capability_unsupported", f"this agent says that it cannot {word} a conversation")
        if self.record is not None and self.place.config is not None:
            id = self.record.copy(id) if asked.fork is not None else id
            self.record.claim(id, self.session.root)
        reply = await self.pipe.call(method, {"sessionId": id, **params}, timeout_s=self.answer_s)
        said = mapping(reply.result) | ({} if method == "session/fork" else {"sessionId": id})
        if reply.fault is not None or not isinstance(said.get("sessionId"), str):
            why = words_of(reply.fault) if reply.fault is not None else "it names no session"
            raise ConfigError("config_invalid", f"the agent cannot go on with conversation {id}: {why}")
        return read_session(said)

    def _resuming(self, *, fork: bool) -> str | None:
        """The call that goes on with a conversation, or with a copy of it; None where the agent announced none."""
        if fork and (self.record is None or self.place.config is None):
            return "session/fork" if self._can("sessionCapabilities", "fork") else None
        if self._can("sessionCapabilities", "resume"):
            return "session/resume"
        return "session/load" if self._can("loadSession") else None

    def _can(self, *path: str) -> bool:
        """Return True if the agent announced a capability: `_can("promptCapabilities", "image")`."""
        place: Json = self._said.get("agentCapabilities")
        for name in path:
            place = mapping(place).get(name)
        return place is not None and place is not False

    async def _set(self, session: AcpSession) -> None:
        mode = self.profile.mode
        if mode and mode in session.modes and session.mode != mode:
            fault = await self._change(session, "session/set_mode", modeId=mode)
            if fault is not None:
                raise BackendError("capability_unsupported", f"the agent's mode cannot be set: {fault.message}")
        model, named = self.session.run.order.config.model or self.profile.model, self.profile.model_by
        if model is not None and named.variable is None and not named.arguments:
            await self._set_model(session, model)

    async def _set_model(self, session: AcpSession, model: str) -> None:
        offers = {one: ("session/set_model", {"modelId": one}) for one in session.models}
        for one in session.options.get("model", ()):
            offers[one] = ("session/set_config_option", {"configId": "model", "value": one})
        is_configured = self.profile.config is not None and self.profile.config.model is not None
        if model == session.model or (is_configured and not offers):
            return
        if model not in offers:
            offered = ", ".join([*offers][:20]) or "none by name"
            raise BackendError("backend_model_not_found", f"the agent has no model {model!r}", hint=f"it has {offered}")
        method, params = offers[model]
        fault = await self._change(session, method, **params)
        if fault is not None:
            raise BackendError("backend_model_not_found", f"the model {model!r} cannot be set: {fault.message}")

    async def _change(self, session: AcpSession, method: str, **params: Json) -> RpcError | None:
        return (await self.pipe.call(method, {"sessionId": session.id, **params}, timeout_s=self.answer_s)).fault

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        blocks = [text_block(words)] if isinstance(words, str) else words
        self.reader.begin()
        self._result = {}
        reply = await self.pipe.call("session/prompt", {"sessionId": self._id, "prompt": blocks}, timeout_s=None)
        await anyio.sleep(SETTLE_S)
        await self._read_log()
        self._is_stopping = False
        return await self._refused(reply.fault) if reply.fault is not None else await self._ended(reply)

    async def stop(self) -> bool:
        self._is_stopping = True
        await self.pipe.notify("session/cancel", {"sessionId": self._id})
        return True

    async def _refused(self, fault: RpcError) -> Ending:
        if fault.gone:
            raise BackendError("backend_crashed", "the agent's program ended in the middle of its turn")
        self._count(None)
        for event in self.reader.take_back():
            await self.session.run.emit(event)
        status = mapping(fault.data).get("statusCode")
        return failed(
            self.session.code_of(words_of(fault), status=status if is_count(status) else fault.code), words_of(fault)
        )

    async def _ended(self, reply: Response) -> Ending:
        self._result = mapping(reply.result)
        reason, reader = str(self._result.get("stopReason")), self.reader
        counted = isinstance(self._result.get("usage"), dict)
        failure = reader.take_failure(counted=counted) if reason == "end_turn" else None
        recorded = reader.recorded()
        if reason == "end_turn" and reader.is_broken:
            failure = failure or ("backend_unavailable", BROKEN)
            recorded += reader.take_back()
        for event in [*recorded, *reader.end(reason)]:
            await self.session.run.emit(event)
        self._count(self._used())
        if reason == "cancelled":
            return Ending(outcome="partial", stopped=True)
        if failure is not None:
            return failed(*failure)
        if reason == "refusal":
            return failed("backend_content_filtered", "the model refused to go on")
        if reason == "end_turn" and not reader.closed_with_words:
            hidden = None if reader.denied else reader.silent
            return silent(hidden if reader.ever_acted else "backend_unavailable")
        if reason != "end_turn":
            return Ending(outcome="partial", note=f"the agent stopped by itself: {reason[:WORDS_CHARS_MAX]}")
        return Ending(text=reader.last_words)

    def _count(self, usage: TokenCounts | None) -> None:
        if self.profile.usage not in ("chunks", "record"):
            self.reader.count(usage)

    def _used(self) -> TokenCounts | None:
        """Tokens of the turn, from where this agent tells them; what it tells of a part alone stays unknown."""
        where = self.profile.usage
        is_whole = where == "turn" or (where == "last_call" and not self.reader.acted)
        usage = self._result.get("usage") or mapping(self._result.get("_meta")).get("usage")
        return read_usage(usage) if is_whole else None

    # Its questions ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Json | RpcError:
        if request.method != "session/request_permission":
            return RpcError(METHOD_NOT_FOUND, f"this client has no method {request.method}")
        call, events = self.reader.asked(mapping(request.params.get("toolCall")))
        for event in events:
            await self.session.run.emit(event)
        self.session.hold_limits()
        refused: str | None = WITHDRAWN
        if not self._is_stopping:
            refused = await self.session.attend(self._refusal(call), WITHDRAWN)
        for event in [] if refused is None else self.reader.deny(call, refused):
            await self.session.run.emit(event)
        option = None if refused == WITHDRAWN else choose(request.params.get("options"), refused is None)
        if option is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": option}}

    async def _refusal(self, call: AcpCall) -> str | None:
        """Return why a call may not run; None if it may."""
        neutral = self.reader.neutral(call)
        request = ToolRequest(
            id=call.id, tool=call.tool or neutral, name=call.name, input=call.input, neutral=(neutral,)
        )
        return (await self.session.gate.decide(request)).refused

    def raw(self) -> dict[str, Json]:
        return {name: self._result[name] for name in ("usage", "_meta", "stopReason") if name in self._result}


# The order in the protocol's words ------------------------------------------------------------------------------------


def prompt_of(run: Given) -> list[Json]:
    """The order's snippets and files, then the task."""
    named = [
        {"type": "resource_link", "uri": Path(run.order.workspace.root, path).as_uri(), "name": path}
        for path in run.order.context.files
    ]
    return [*map(text_block, snippets(run)), *named, text_block(run.order.task)]


def servers_of(run: Given, profile: AgentRow) -> list[Json]:
    """MCP servers, of which a mapping is a list of pairs here."""
    made: list[Json] = []
    for name, row in server_rows(run, profile.mcp_servers).items():
        given = {"args": [], "env": {}} if "command" in row else {"type": "http", "headers": {}}
        made.append({"name": name, **{member: _pairs(value) for member, value in {**given, **row}.items()}})
    return made


def _pairs(value: Any) -> Any:
    return [{"name": name, "value": text} for name, text in value.items()] if isinstance(value, dict) else value


def named_by_rules(policy: Policy) -> Callable[[str, str], bool]:
    """Return a function of a tool's own and neutral name: True if a rule of the policy names the own one alone."""

    def verdict(name: str, neutral: str) -> str:
        return policy.decide_tool_call(name, _ANYWHERE, aliases={name: neutral}).allowed

    def by_own_word(own: str, neutral: str) -> bool:
        whole = verdict(own, neutral)
        return verdict(neutral, neutral) != whole and verdict(own, own) == whole

    return by_own_word


_ANYWHERE: Final = {"path": "a", "url": "http://a"}
"""Input that names a place, so that the names of the tool alone decide."""


def image_block(media_type: str, data: str) -> Json:
    return {"type": "image", "mimeType": media_type, "data": data}


def text_block(text: Json) -> Json:
    return {"type": "text", "text": text}


def spec_of(run: Given, profile: AgentRow) -> RunSpec:
    """The order, as any agent's run takes it. Raises ConfigError, BackendError."""
    shape = shape_of(run)
    return RunSpec(
        prompt=[
            *prompt_of(run),
            *([text_block(shape.request())] if shape is not None else []),
            *image_blocks(run, image_block),
        ],
        silence_s=profile.silence_s,
        conversation=read_conversation(run),
        shape=shape,
        price=price_from(profile.prices),
        labels=profile.labels,
        budget_micros=budget_of(run),
        turns_max=run.order.config.max_turns if profile.usage == "record" else None,
    )


def speak(profile: AgentRow, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError, BackendError."""
    place = folders_of(run, begun.state, own=profile.own_state)
    return AgentRun(run, spec_of(run, profile), lambda session: Agent(session, profile, place, child))


# Parts of messages ----------------------------------------------------------------------------------------------------


def words_of(fault: RpcError) -> str:
    """All that a refusal says, in one line."""
    details = {"message": fault.data} if isinstance(fault.data, str) else mapping(fault.data)
    words = [str(details[name]) for name in ("details", "message", "statusCode") if details.get(name)]
    return "; ".join(dict.fromkeys([fault.message, *words]))


_KINDS: Final = {True: ("allow_once", "allow_always"), False: ("reject_once", "reject_always")}
"""Options by their kind: ids are each agent's own. One call at a time is asked, so `once` comes first."""


def choose(options: Json, allow: bool) -> str | None:
    """The id of the option that says yes or no; None when there is none, which only cancelling the turn answers."""
    by_kind = {option.get("kind"): option.get("optionId") for option in mappings(options)}
    return next((by_kind[kind] for kind in _KINDS[allow] if isinstance(by_kind.get(kind), str)), None)


def read_session(said: dict[str, Any]) -> AcpSession:
    """Read what `session/new` offers, from either of the two places where agents put it."""
    modes, models, options = (
        mapping(said.get("modes")),
        mapping(said.get("models")),
        mappings(said.get("configOptions")),
    )
    current = modes.get("currentModeId")
    chosen = [option.get("currentValue") for option in options if option.get("id") == "model"]
    model = next((one for one in (*chosen, models.get("currentModelId")) if isinstance(one, str)), None)
    return AcpSession(
        id=said["sessionId"],
        modes=_ids(modes.get("availableModes"), "id"),
        mode=current if isinstance(current, str) else None,
        options={str(option.get("id")): _ids(option.get("options"), "value") for option in options},
        models=_ids(models.get("availableModels"), "modelId"),
        model=model,
    )


def _ids(value: Json, name: str) -> tuple[str, ...]:
    # An agent may group its choices: then the groups hold the list.
    flat = [inner for one in mappings(value) for inner in (mappings(one.get("options")) or [one])]
    return tuple(one[name] for one in flat if isinstance(one.get(name), str))
