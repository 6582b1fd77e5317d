"""A dialect as one value: what its file's tables and functions are for, and what all dialects do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import agent_events
from backplane.dialects.codec import Calls, Kin, Ledger
from backplane.dialects.limits import Limits, fitted, runnable
from backplane.dialects.losses import Comparison, check_meaning
from backplane.dialects.streams import BlockReader
from backplane.ir import Answer, Conversation, ToolSpec, Translated

ReadT = TypeVar("ReadT", Conversation, Answer)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor's dialect; a vendor's file ends with its own."""

    NAME: str
    TOOL_NAMES: Mapping[str, str]
    """The names that the vendor's agent gives its tools → neutral names."""
    CAPABILITIES: Manifest
    DEFAULTS: Mapping[str, Json]
    read_request: Callable[[Json, Ledger, Calls], Conversation]
    write_request: Callable[[Conversation, Ledger], dict[str, Any]]
    read_answer: Callable[[Json, Ledger, Calls], Answer]
    write_answer: Callable[[Answer, Ledger], dict[str, Any]]
    read_tool: Callable[[Json, str], ToolSpec]
    write_tool: Callable[[ToolSpec, Ledger], Json]
    read_stream: Callable[[], BlockReader]
    """Makes the reader of one stream's chunks."""
    write_stream: Callable[[str], Any]
    """Makes the writer of one stream's chunks, for events of the dialect given."""
    event_name: Callable[[Json], str | None]
    """Returns the name under which a chunk is sent."""
    FRAMING: str = "sse"
    DONE: bool = False
    """Whether a stream ends with the word `[DONE]`."""
    CONTEXT_WINDOWS: Mapping[str, int] = {}
    """Model → tokens of its context, where it is a matter of the model's name."""
    kin: Kin = {}
    limits: Limits = Limits()
    """What the server refuses although its types take it."""
    listed: str = "/messages"
    """Pointer of the list of messages."""
    answered: str = ""
    """Pointer of an answer's list of blocks; empty where it follows from the first block."""
    content: frozenset[str] = frozenset({"messages", "choices"})
    """Members that hold messages, compared block by block."""
    places: Mapping[str, str] = {}
    """Portable field or option → member, where a loss has to name one."""

    def tool_to_ir(self, tool: Json) -> Translated[ToolSpec]:
        """Read one tool definition."""
        return Translated(self.read_tool(tool, ""))

    def tool_from_ir(self, tool: ToolSpec, source: str = "") -> Translated[Json]:
        """Write one tool definition; None with a loss where only `source` runs it."""
        ledger = Ledger(source or self.NAME, self.NAME, self.kin)
        written = write_tools((tool,), ledger, self.write_tool)
        return Translated(written[0] if written else None, ledger.done())

    def to_ir(self, request: Json) -> Translated[Conversation]:
        """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
        ledger, calls = Ledger(self.NAME, self.NAME), Calls()
        read = self.read_request(request, ledger, calls)
        return self._read(read, request, ledger, calls)

    def from_ir(self, conversation: Conversation) -> Translated[Json]:
        """Write a request. Raises `TranslationError` where its meaning would break."""
        ledger = Ledger(conversation.dialect, self.NAME, self.kin)
        if not ledger.is_home:
            return Translated(self._foreign(conversation, ledger), ledger.done())
        if conversation.raw is not None and self.to_ir(conversation.raw).value == conversation:
            return Translated(conversation.raw)
        return Translated(self.write_request(conversation, ledger), ledger.done())

    def _foreign(self, conversation: Conversation, ledger: Ledger) -> Json:
        check_meaning(conversation, ledger)
        fit = fitted(conversation, self.limits, ledger)
        written = self.write_request(fit, ledger)
        ledger.done()
        back = self.to_ir(written).value
        self._comparison(ledger).requests(msgspec.structs.replace(fit, messages=conversation.messages), back)
        return written

    def _comparison(self, ledger: Ledger) -> Comparison:
        from backplane.dialects import DIALECTS, dialect

        source = dialect(ledger.source) if ledger.source in DIALECTS else self
        return Comparison(ledger, source.places, source.listed, source.answered)

    def canonical(self, read: Conversation | Answer) -> Json:
        """Write what was read as this dialect would write it for another one."""
        ledger = Ledger("", self.NAME)
        read = msgspec.structs.replace(read, dialect="")
        if isinstance(read, Answer):
            return self.write_answer(read, ledger)
        return self.write_request(fitted(read, self.limits, ledger), ledger)

    def response_to_ir(self, response: Json) -> Translated[Answer]:
        """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
        ledger, calls = Ledger(self.NAME, self.NAME), Calls()
        read = self.read_answer(response, ledger, calls)
        return self._read(read, response, ledger, calls)

    def _read(self, read: ReadT, raw: Json, ledger: Ledger, calls: Calls) -> Translated[ReadT]:
        if calls.made:
            ledger.synthesise(self.listed, "identity", f"ids for {calls.made} calls that had none")
        return Translated(msgspec.structs.replace(read, raw=raw), ledger.done())

    def response_from_ir(self, answer: Answer) -> Translated[Json]:
        """Write a response."""
        ledger = Ledger(answer.dialect, self.NAME, self.kin)
        if ledger.is_home and answer.raw is not None and self.response_to_ir(answer.raw).value == answer:
            return Translated(answer.raw)
        written = self.write_answer(answer if ledger.is_home else runnable(answer, self.limits, ledger), ledger)
        if not ledger.is_home and (answer.candidates or answer.error is None):
            self._comparison(ledger).answers(answer, self.response_to_ir(written).value)
        return Translated(written, ledger.done())

    def map_work_order(self, order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
        """Write an order as a request; `config` as for `agent_events.order_conversation`."""
        return self.from_ir(agent_events.order_conversation(order, config, self.NAME, self.DEFAULTS))

    def map_response(self, response: Json, now: str = agent_events.EPOCH) -> list[AgentEvent]:
        """Say a response as agent events, all at the time `now`."""
        return agent_events.answer_events(self.response_to_ir(response).value, now)

    def StreamReader(self) -> BlockReader:
        """Make the reader of one stream's chunks."""
        return self.read_stream()

    def StreamWriter(self, source: str = "") -> Any:
        """Make the writer of one stream's chunks, for events of the dialect `source`."""
        return self.write_stream(source or self.NAME)

    def StreamState(self, now: str = agent_events.EPOCH) -> agent_events.State:
        """Make the state of one stream on its way to agent events."""
        return agent_events.State(self.NAME, self.StreamReader(), now)

    def map_stream_event(self, chunk: Json, state: agent_events.State) -> list[AgentEvent]:
        """Say one chunk as agent events; a call comes whole, when its arguments have ended."""
        return agent_events.chunk_events(chunk, state)

    def to_passthrough_event(self, raw: Json, now: str = agent_events.EPOCH) -> AgentEvent:
        """Carry a vendor's message through the contract unread."""
        return agent_events.passthrough_event(raw, now)

    def from_passthrough_event(self, event: AgentEvent) -> Json:
        """Return the vendor's message that an event carries, None when it carries none."""
        return agent_events.passed_through(event)


def no_name(chunk: Json) -> str | None:
    """Return the name under which a chunk is sent; this vendor sends none."""
    return None


def type_name(chunk: Json) -> str | None:
    """Return the name under which a chunk is sent: its type."""
    return str(chunk.get("type", "error"))


def write_tools(tools: tuple[ToolSpec, ...], ledger: Ledger, write: Callable[[ToolSpec, Ledger], Json]) -> list[Json]:
    """Write the tool definitions that the target has words for."""
    out: list[Json] = []
    for tool in tools:
        if tool.kind != "server":
            out.append(write(tool, ledger))
        elif ledger.is_home:
            out.append(tool.payload)
        else:
            ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
    return out
