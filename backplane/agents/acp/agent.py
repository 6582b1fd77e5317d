"""Drives an agent by the Agent Client Protocol (ACP): initialize, a session, prompts, permission requests, cancel.

We offer no file system and no terminal, so every agent works on the disk itself, inside the sandbox. Other requests of
an agent are refused as unknown. The protocol has no input within a turn, so new input waits for the turn's end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from backplane.agents.acp.log import FAILURES_MAX, LOOK_S, FailedRequest, log_reader
from backplane.agents.acp.reader import EventReader, read_usage
from backplane.agents.agent import STOPPED, Ending, ended_by_itself, failed, id_of, require_version
from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.gemini.record import Record, home_of
from backplane.agents.order import RunSpec, snippets
from backplane.agents.session import AgentRun
from backplane.agents.start import AgentStart
from backplane.contract.canonical import Json
from backplane.dialects.ir import TokenCounts
from backplane.errors import BackendError, ConfigError
from backplane.protocol.jsonrpc import Notification, Request, RpcError

PROTOCOL_VERSION: Final = 1
OFFER: Final = {
    "protocolVersion": PROTOCOL_VERSION,
    "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
    "clientInfo": {"name": "backplane", "version": "0.1.0"},
}
SETTLE_S: Final = 0.1
"""Seconds to wait after the answer to a prompt, because updates that were sent before it may arrive after it."""
HISTORY_S: Final = 0.5
"""Seconds without an update after which an agent has replayed an older conversation; it does so without a pause."""
BROKEN: Final = "the stream of the model's answer broke, and the agent took its words for the whole answer"
WITHDRAWN: Final = "the turn was stopped before anybody had answered"


class AcpSession(msgspec.Struct, frozen=True):
    """Session that an agent has opened."""

    id: str
    modes: tuple[str, ...] = ()
    """Ids of the modes that the session can be set to."""
    mode: str | None = None
    """The current mode; None if the agent does not report it."""
    options: dict[str, tuple[str, ...]] = {}
    """The agent's own settings: id → possible values."""
    models: tuple[str, ...] = ()
    model: str | None = None
    """The current model; None if the agent does not report it."""


class Agent(BaseAgent):
    """The agent of one run."""

    login_code = -32000
    reader: EventReader

    def __init__(self, session: AgentRun, begun: AgentStart) -> None:
        row, run = begun.row, session.run
        self.record = Record(home_of(begun.config)) if row.usage == "record" else None
        names: dict[str, Any] = {"servers": begun.servers().keys(), "name_of": session.gate.name_of}
        super().__init__(session, EventReader(run.now, session.root, row.tools, record=self.record, **names))
        self.reader.is_history = begun.conversation.wanted is not None
        self.connect(begun)
        self._log: Callable[[], list[FailedRequest]] = list
        """Returns the failed requests that are new in the agent's log."""
        self._failures, self._failed_s = 0, 0.0
        """`_failures`: failed requests since the last sign of life; `_failed_s`: time of that sign, monotonic clock."""
        self._said: dict[str, Any] = {}
        """The agent's answer to `initialize`."""
        self._id = ""
        self._result: dict[str, Any] = {}
        """Result of the last prompt."""

    @classmethod
    def spec(cls, begun: AgentStart) -> RunSpec:
        """Return the order, with its context as blocks of the protocol."""
        spec = super().spec(begun)
        shape = [] if spec.shape is None else [text_block(spec.shape.request())]
        pictures = [block for block in mappings(spec.prompt) if block["type"] == "image"]
        turns_max = spec.turns_max if begun.row.usage == "record" else None
        return msgspec.structs.replace(spec, prompt=[*prompt_of(begun), *shape, *pictures], turns_max=turns_max)

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "image", "mimeType": media_type, "data": data}

    async def hear(self, message: Notification) -> None:
        """Read an update; first read the log, if the agent requests an answer anew after a failed request."""
        if self.begun.row.asks_anew:
            await self._read_log()
        await self.session.hear(message)

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Agree on the protocol, open the session, and set its mode and model."""
        self._said = await self.must("initialize", OFFER)
        require_version(self._said.get("protocolVersion"), PROTOCOL_VERSION)
        blocks = mappings(self.session.spec.prompt)
        if any(block.get("type") == "image" for block in blocks) and not self._can("promptCapabilities", "image"):
            raise BackendError("capability_unsupported", "this agent says that it takes no pictures")
        row, asked = self.begun.row, self.begun.conversation
        session = await self._open_session()
        self.begun.keep_name(session.id)
        await self.session.announce(session.id, agent=self._said.get("agentInfo"), kept=asked.kept)
        await self._set(session)
        if self.record is not None:
            self.record.id = session.id
            await self._history_over()
            self.record.skip()
        if row.failed_request:
            self._log = log_reader(row, self.begun.config, session.id, lambda: self.begun.child.stderr_tail)
            self.session.tasks.start_soon(self._watch_log)
        self._id, self.reader.is_history = session.id, False

    async def _history_over(self) -> None:
        """Wait for the rest of an older conversation, which this agent replays after its answer."""
        seen = -1
        while self.reader.is_history and seen != self.reader.left_out:
            seen = self.reader.left_out
            await anyio.sleep(HISTORY_S)

    async def _open_session(self) -> AcpSession:
        servers = servers_of(self.begun)
        if any("url" in server for server in servers) and not self._can("mcpCapabilities", "http"):
            raise BackendError("capability_unsupported", "this agent reaches no MCP server by its address")
        params: dict[str, Json] = {"cwd": self.session.root, "mcpServers": servers}
        if (wanted := self.begun.conversation.wanted) is not None:
            return await self._resume(wanted, params)
        said = await self.must("session/new", params)
        id_of(said.get("sessionId"), "session/new", "session")
        return read_session(said)

    async def _resume(self, id: str, params: dict[str, Json]) -> AcpSession:
        """Resume a conversation; the agent may replay its history before it answers."""
        is_fork = self.begun.conversation.fork is not None
        method = self._resuming(fork=is_fork)
        if method is None:
            word = "fork" if is_fork else "resume"
            raise BackendError("capability_unsupported", f"this agent says that it cannot {word} a conversation")
        if self.record is not None and self.begun.config is not None:
            id = self.record.copy(id) if is_fork else id
            self.record.claim(id, self.session.root)
        reply = await self.pipe.call(method, {"sessionId": id, **params}, timeout_s=self.answer_s)
        said = mapping(reply.result) | ({} if method == "session/fork" else {"sessionId": id})
        if reply.fault is not None or not isinstance(said.get("sessionId"), str):
            why = words_of(reply.fault) if reply.fault is not None else "it names no session"
            raise ConfigError("config_invalid", f"the agent cannot go on with conversation {id}: {why}")
        return read_session(said)

    def _resuming(self, *, fork: bool) -> str | None:
        """Return the method that resumes or forks a conversation; None if the agent announced none."""
        if fork and (self.record is None or self.begun.config is None):
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
        """Set the row's mode and the order's model. Raises BackendError."""
        mode, model, named = self.begun.row.mode, self.begun.model, self.begun.row.model_by
        if mode and mode in session.modes and session.mode != mode:
            fault = await self.call("session/set_mode", sessionId=session.id, modeId=mode)
            if fault is not None:
                raise BackendError("capability_unsupported", f"the agent's mode cannot be set: {fault.message}")
        if model is not None and named.variable is None and not named.arguments:
            await self._set_model(session, model)

    async def _set_model(self, session: AcpSession, model: str) -> None:
        offers = {one: ("session/set_model", {"modelId": one}) for one in session.models}
        for one in session.options.get("model", ()):
            offers[one] = ("session/set_config_option", {"configId": "model", "value": one})
        configuration = self.begun.row.config
        if model == session.model or (configuration is not None and configuration.model is not None and not offers):
            return
        if model not in offers:
            offered = ", ".join([*offers][:20]) or "none by name"
            raise BackendError("backend_model_not_found", f"the agent has no model {model!r}", hint=f"it has {offered}")
        method, params = offers[model]
        fault = await self.call(method, sessionId=session.id, **params)
        if fault is not None:
            raise BackendError("backend_model_not_found", f"the model {model!r} cannot be set: {fault.message}")

    # The agent's log --------------------------------------------------------------------------------------------------

    async def _watch_log(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            await self._read_log()

    async def _read_log(self) -> None:
        """Report each failed request as a retry, and end the run after `FAILURES_MAX` without a sign of life."""
        heard_s = self.session.silence.heard_s
        failures = self._log()
        # Make the events before any `await`: text that arrives during one belongs to the next answer.
        events = [self.reader.failed_request(one.words, asks_anew=self.begun.row.asks_anew) for one in failures]
        for failure, event in zip(failures, events, strict=True):
            self._failures = self._failures + 1 if self._failed_s == heard_s else 1
            self._failed_s = heard_s
            if self._failures >= FAILURES_MAX:
                words = f"the model's service failed: {failure.words}"
                self.session.cut(failed(self.session.code_of(failure.words, failure.label), words))
                return
            await self.session.run.emit(event)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        blocks = [text_block(words)] if isinstance(words, str) else words
        self.reader.begin()
        self._result = {}
        reply = await self.pipe.call("session/prompt", {"sessionId": self._id, "prompt": blocks}, timeout_s=None)
        await anyio.sleep(SETTLE_S)
        await self._read_log()
        if reply.fault is not None:
            return await self._refused(reply.fault)
        self._result = mapping(reply.result)
        return await self._ended(str(self._result.get("stopReason")))

    async def stop(self) -> bool:
        await self.pipe.notify("session/cancel", {"sessionId": self._id})
        return True

    async def _refused(self, fault: RpcError) -> Ending:
        if fault.gone:
            raise BackendError("backend_crashed", "the agent's program ended in the middle of its turn")
        self._count(None)
        await self.session.emit(self.reader.take_back())
        words, status = words_of(fault), mapping(fault.data).get("statusCode")
        return failed(self.session.code_of(words, status=status if is_count(status) else fault.code), words)

    async def _ended(self, reason: str) -> Ending:
        reader, is_over = self.reader, reason == "end_turn"
        events = reader.recorded()
        is_broken = is_over and reader.is_broken
        events += reader.take_back() if is_broken else []
        await self.session.emit([*events, *reader.end(reason)])
        self._count(self._used())
        if reason == "cancelled":
            return STOPPED
        if is_broken:
            return failed("backend_unavailable", BROKEN)
        if reason == "refusal":
            return failed("backend_content_filtered", "the model refused to go on")
        if not is_over:
            return ended_by_itself(reason)
        return self.judge()

    def _count(self, usage: TokenCounts | None) -> None:
        if self.begun.row.usage not in ("chunks", "record"):
            self.reader.count(usage)

    def _used(self) -> TokenCounts | None:
        """Return the tokens of the turn from this agent's message; None if that counts only a part of the turn."""
        where = self.begun.row.usage
        is_whole = where == "turn" or (where == "last_call" and not self.reader.acted)
        usage = self._result.get("usage") or mapping(self._result.get("_meta")).get("usage")
        return read_usage(usage) if is_whole else None

    # Its questions ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Json | RpcError:
        if request.method != "session/request_permission":
            return await super().answer(request)
        call, events = self.reader.asked(mapping(request.params.get("toolCall")))
        await self.session.emit(events)  # Reported even if the turn is stopped.
        verdict = await self.session.attend(self.decide((), self.reader.request(call)), None)
        if verdict is None or verdict.refused is not None:
            await self.session.emit(self.reader.refuse(call, WITHDRAWN))
        option = None if verdict is None else choose(request.params.get("options"), verdict.refused is None)
        if option is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": option}}

    def raw(self) -> dict[str, Json]:
        return {name: self._result[name] for name in ("usage", "_meta", "stopReason") if name in self._result}


# The order in the protocol's form -------------------------------------------------------------------------------------


def prompt_of(begun: AgentStart) -> list[Json]:
    """Return the order's snippets and files, then the task, as blocks of a message."""
    order = begun.run.order
    named = [
        {"type": "resource_link", "uri": Path(begun.root, path).as_uri(), "name": path} for path in order.context.files
    ]
    return [*map(text_block, snippets(begun.run)), *named, text_block(order.task)]


def servers_of(begun: AgentStart) -> list[dict[str, Json]]:
    """Return the MCP servers in the protocol's form, which has lists of pairs for mappings."""
    made: list[dict[str, Json]] = []
    for name, server in begun.servers().items():
        given = {"args": [], "env": {}} if "command" in server else {"type": "http", "headers": {}}
        made.append({"name": name, **{member: _pairs(value) for member, value in {**given, **server}.items()}})
    return made


def _pairs(value: Any) -> Any:
    return [{"name": name, "value": text} for name, text in value.items()] if isinstance(value, dict) else value


def text_block(text: Json) -> Json:
    return {"type": "text", "text": text}


# Parts of messages ----------------------------------------------------------------------------------------------------


def words_of(fault: RpcError) -> str:
    """Return the texts of an error in one line."""
    details = {"message": fault.data} if isinstance(fault.data, str) else mapping(fault.data)
    words = [str(details[name]) for name in ("details", "message", "statusCode") if details.get(name)]
    return "; ".join(dict.fromkeys([fault.message, *words]))


def choose(options: Json, allow: bool) -> str | None:
    """Return the id of the option that allows or rejects; None if there is none: then the request is cancelled."""
    by_kind = {option.get("kind"): option.get("optionId") for option in mappings(options)}
    # Each agent has its own ids, so the kind decides. Each call is asked about, so `once` comes first.
    kinds = ("allow_once", "allow_always") if allow else ("reject_once", "reject_always")
    return next((by_kind[kind] for kind in kinds if isinstance(by_kind.get(kind), str)), None)


def read_session(said: dict[str, Any]) -> AcpSession:
    """Read the models, modes and settings in the answer to `session/new`, from either of the two places for them."""
    modes, models = mapping(said.get("modes")), mapping(said.get("models"))
    options = mappings(said.get("configOptions"))
    chosen = [option.get("currentValue") for option in options if option.get("id") == "model"]
    return AcpSession(
        id=said["sessionId"],
        modes=_ids(modes.get("availableModes"), "id"),
        mode=_first_text(modes.get("currentModeId")),
        options={str(option.get("id")): _ids(option.get("options"), "value") for option in options},
        models=_ids(models.get("availableModels"), "modelId"),
        model=_first_text(*chosen, models.get("currentModelId")),
    )


def _first_text(*values: Json) -> str | None:
    return next((value for value in values if isinstance(value, str)), None)


def _ids(value: Json, name: str) -> tuple[str, ...]:
    # An agent may group its values: then each group has a list of them.
    flat = [inner for one in mappings(value) for inner in (mappings(one.get("options")) or [one])]
    return tuple(one[name] for one in flat if isinstance(one.get(name), str))
