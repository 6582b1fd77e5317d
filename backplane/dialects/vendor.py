"""Defines `Dialect`: the tables and functions of a vendor's file, and the methods that use them for all dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import agent_events
from backplane.dialects.common import Counters, LossLedger
from backplane.dialects.diff import code_of, differences, patched
from backplane.dialects.ir import Answer, Conversation, Message, ToolOutput, ToolUse, Translated
from backplane.dialects.limits import ServerLimits, check_meaning, fitted, runnable
from backplane.dialects.outcome import Endings
from backplane.dialects.schemas import accepted_tool
from backplane.dialects.streams import BlockReader, BlockWriter

ReadT = TypeVar("ReadT", Conversation, Answer)


def no_name(chunk: Json) -> str | None:
    """Return the event name of a chunk: None, for vendors that send none."""
    return None


def same(document: Json) -> Json:
    """Return a document unchanged."""
    return document


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor's dialect: its tables and functions; each vendor's file ends with its `Dialect`."""

    NAME: str
    TOOL_NAMES: Mapping[str, str]
    """Tool names of the vendor's agent → neutral names."""
    CAPABILITIES: Manifest
    """Capabilities of a model that is called in this dialect without an agent."""
    DEFAULTS: Mapping[str, Json]
    """`model` and options for an order without them."""
    DONE: bool = False
    """True if a stream ends with `[DONE]`."""
    read_request: Callable[[Json], Conversation]
    """Reads a request; raises `TranslationError` `dialect_mapping_failed` if the document is no request."""
    write_request: Callable[[Conversation, LossLedger], dict[str, Any]]
    read_answer: Callable[[Json], Answer]
    """Reads a response; raises `TranslationError` `dialect_mapping_failed` if the document is no response."""
    write_answer: Callable[[Answer, LossLedger], dict[str, Any]]
    read_stream: Callable[[Any], BlockReader]
    """Makes the reader of one stream's chunks; its argument is this `Dialect`."""
    write_stream: Callable[[Any, str], BlockWriter]
    """Makes the writer of one stream's chunks, for events that were read from the named dialect."""
    event_name: Callable[[Json], str | None] = no_name
    """Returns the event name of a chunk; None if it has none."""
    usage: Counters
    endings: Endings
    error: Mapping[str, Json] = {}
    """Members that a written error has beside its `message`."""
    error_head: Mapping[str, Json] = {}
    """Members that a written error response has beside `error`."""
    limits: ServerLimits = ServerLimits()
    """The server's documented limits that the types of its API do not express."""
    normal: Callable[[Json], Json] = same
    """Converts a document to the main spelling of its members, if the vendor accepts two."""
    aliases: Mapping[str, str] = {}
    """Main spelling of a member → the other one, if it is more than camelCase and snake_case of one name."""
    spell: Callable[[str], str] = str
    """Returns a member's name in the vendor's main spelling."""

    def to_ir(self, request: Json) -> Translated[Conversation]:
        """Read a request. Raises `TranslationError` `dialect_mapping_failed` if the document is no request."""
        return self._read(self.read_request(request), request)

    def from_ir(self, conversation: Conversation) -> Translated[Json]:
        """Write a request. Raises `TranslationError` if its meaning would change."""
        ledger = LossLedger(conversation.dialect, self.NAME, places=conversation.options_at)
        if not ledger.is_home:
            return Translated(self._foreign(conversation, ledger), ledger.done())
        return self._home(conversation, self.read_request, self.write_request, ledger)

    def _home(
        self,
        value: ReadT,
        read: Callable[[Json], ReadT],
        write: Callable[[ReadT, LossLedger], dict[str, Any]],
        ledger: LossLedger,
    ) -> Translated[Json]:
        """Write a value that was read from this dialect: the document that was read, with the edits, or a new document.

        The unedited members stay as they were read, unless the document would then have another meaning.
        """
        raw = value.raw
        if raw is None:
            return Translated(write(value, ledger), ledger.done())
        before = msgspec.structs.replace(read(raw), raw=raw)
        if before == value:
            return Translated(raw)
        first = LossLedger(self.NAME, self.NAME, is_answer=ledger.is_answer, places=ledger.places)
        unedited, written = write(before, first), write(value, ledger)
        ledger.losses = [loss for loss in ledger.losses if loss not in first.losses]  # The document still has these.
        doubts: list[Json] = []
        edited = patched(raw, unedited, written, doubts, self.spell)
        if not doubts or write(read(edited), first) == written:
            return Translated(edited, ledger.done())
        for at, kind in differences(raw, unedited, exact=True):
            ledger.note(kind, at, code_of(at, kind), "after an edit it is written in another form")
        return Translated(written, ledger.done())

    def _foreign(self, conversation: Conversation, ledger: LossLedger) -> Json:
        check_meaning(conversation, ledger)
        fit = self._with_schemas(fitted(conversation, self.limits, ledger), ledger)
        return self.write_request(fit, ledger)

    def _with_schemas(self, conversation: Conversation, ledger: LossLedger) -> Conversation:
        """Return the conversation with schemas of its tools that the server accepts."""
        done = [accepted_tool(tool, self.NAME, ledger.source, tool.at) for tool in conversation.tools]
        ledger.add(loss for _, losses in done for loss in losses)
        return msgspec.structs.replace(conversation, tools=tuple(tool for tool, _ in done))

    def response_to_ir(self, response: Json) -> Translated[Answer]:
        """Read a response. Raises `TranslationError` `dialect_mapping_failed` if the document is no response."""
        return self._read(self.read_answer(response), response)

    def _read(self, read: ReadT, raw: Json) -> Translated[ReadT]:
        ledger = LossLedger(self.NAME, self.NAME)
        holders = read.messages if isinstance(read, Conversation) else [one.message for one in read.candidates]
        made = [
            part for one in holders for part in one.parts if isinstance(part, ToolUse | ToolOutput) and part.id_made
        ]
        if made:
            at = "/" + made[0].at.split("/")[1] if made[0].at else ""
            ledger.synthesise(at, "identity", f"ids for {len(made)} calls and results that had none")
        return Translated(msgspec.structs.replace(read, raw=raw), ledger.done())

    def response_from_ir(self, answer: Answer) -> Translated[Json]:
        """Write an answer as a response of this vendor, and return the losses."""
        ledger = LossLedger(answer.dialect, self.NAME, is_answer=True)
        if ledger.is_home:
            return self._home(answer, self.read_answer, self._write_answer, ledger)
        return Translated(self._write_answer(runnable(answer, self.limits, ledger), ledger), ledger.done())

    def _write_answer(self, answer: Answer, ledger: LossLedger) -> dict[str, Any]:
        """Write a response, or the vendor's error object if the answer failed without any content."""
        said = answer.candidates if ledger.is_home else [one for one in answer.candidates if one.message.parts]
        if answer.error is None or said:
            return self.write_answer(answer, ledger)
        if ledger.is_home:
            return ledger.own({"error": {"message": answer.error}}, answer)
        error = {**self.error, "message": answer.error}
        if answer.error_type is not None:
            code, status = ERROR_TYPES[answer.error_type]
            known = {"type": answer.error_type, "status": status, "code": code if "status" in error else None}
            error |= {name: value for name, value in known.items() if name in error}
        return {**self.error_head, "error": error}

    def map_work_order(self, order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
        """Write an order as a request; `config` as in `agent_events.order_conversation`."""
        return self.from_ir(agent_events.order_conversation(order, config, self.NAME, self.DEFAULTS))

    def map_response(self, response: Json, now: str = agent_events.EPOCH) -> list[AgentEvent]:
        """Convert a response to agent events, all with the time `now`."""
        return agent_events.answer_events(self.response_to_ir(response).value, now)

    def StreamReader(self) -> BlockReader:
        """Make the reader of one stream's chunks."""
        return self.read_stream(self)

    def StreamWriter(self, source: str = "") -> Any:
        """Make the writer of one stream's chunks, for events that were read from the dialect `source`."""
        return self.write_stream(self, source)

    def StreamState(self, now: str = agent_events.EPOCH) -> agent_events.State:
        """Return a new state for the translation of one stream to agent events."""
        return agent_events.State(self.NAME, self.StreamReader(), now)

    def map_stream_event(self, chunk: Json, state: agent_events.State) -> list[AgentEvent]:
        """Convert one chunk to agent events; a call becomes one event when its arguments are complete."""
        return agent_events.say(state.reader.read(chunk), state)


ERROR_TYPES: Final[dict[str, tuple[int, str]]] = {
    "invalid_request_error": (400, "INVALID_ARGUMENT"), "authentication_error": (401, "UNAUTHENTICATED"),
    "permission_error": (403, "PERMISSION_DENIED"), "not_found_error": (404, "NOT_FOUND"),
    "rate_limit_error": (429, "RESOURCE_EXHAUSTED"), "api_error": (500, "INTERNAL"),
    "overloaded_error": (503, "UNAVAILABLE"),
}  # fmt: skip
"""Type of an error at Anthropic and OpenAI → Google's code and status (docs.anthropic.com, ai.google.dev; 2026-11)."""


def read_error(document: dict[str, Any], rest: dict[str, Any], reply: str, name: str) -> Answer | None:
    """Read a body with only an error as an answer without candidates; None if it has content.

    Args:
        reply: member with the content of an answer.
    """
    error = document.get("error")
    if document.get(reply) is not None or not ("error" in document or document.get("object") == "error"):
        return None
    inner: dict[str, Any] = error if type(error) is dict else {}
    words = (inner.get("message") if type(error) is dict else error) or document.get("message")
    kinds = (
        kind
        for kind, (_, status) in ERROR_TYPES.items()
        if inner.get("status" if "status" in inner else "type") in (kind, status)
    )
    return Answer(
        dialect=name, candidates=(), error=words if type(words) is str else "unknown error",
        error_type=next(kinds, None), ext={name: rest},
    )  # fmt: skip


def type_name(chunk: Json) -> str | None:
    """Return the event name of a chunk, which is its type; `error` for a chunk without a type."""
    return str(chunk.get("type", "error"))


def outside(
    messages: tuple[Message, ...], ledger: LossLedger, stays: Callable[[Message], bool]
) -> tuple[Message | None, list[Message]]:
    """Separate system text from the messages, for vendors that have a member of its own for it.

    Several system messages become one; members of another vendor beside their text are lost. In messages from another
    dialect, a user's message that follows results is joined to them.

    Args:
        stays: returns True for a system message that stays among the messages, as in its own dialect.
    """
    system: list[Message] = []
    others: list[Message] = []
    for message in messages:
        if message.role == "system" and not (ledger.is_home and stays(message)):
            if others:
                ledger.degrade(message.at, "order", "system text in the middle became part of the head")
            system.append(message)
        elif others and others[-1].role == "tool" and message.role in ("tool", "user") and not ledger.is_home:
            parts = (*others[-1].parts, *message.parts)
            others[-1] = msgspec.structs.replace(message, parts=parts)
        else:
            others.append(message)
    if not system or (len(system) == 1 and ledger.is_home):
        return (system[0] if system else None), others
    parts = tuple(part for message in system for part in message.parts)
    return msgspec.structs.replace(system[0], parts=parts, ext={}), others
