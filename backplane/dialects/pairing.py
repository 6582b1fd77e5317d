"""Repairs conversations so that every call has its result, as models' services require.

Pure. A result without a call becomes text of the user; a call without a result gets one that reports this; results
follow directly after their calls, in one message, in the calls' order. Each repair is reported as a loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from backplane.dialects.common import LossLedger
from backplane.dialects.ir import Conversation, Message, Part, Text, ToolOutput, ToolUse, Translated

MISSING: Final = "no result: the tool did not run to its end"
"""The text of a missing result."""


def paired(conversation: Conversation, *, ids_optional: bool = False) -> Translated[Conversation]:
    """Return the conversation with one result for each call, and no result without a call.

    A well-formed conversation is returned unchanged, without losses.

    Args:
        ids_optional: True if ids that we made need not be sent: the service matches results by name and order.
    """
    if not ids_optional:
        conversation = _with_ids(conversation)
    if is_paired(conversation.messages):
        return Translated(conversation)
    work = _Pairing(conversation)
    return Translated(msgspec.structs.replace(conversation, messages=tuple(work.run())), work.ledger.done())


def is_paired(messages: Iterable[Message]) -> bool:
    """Return whether each message with calls is followed by exactly their results, in order."""
    due: list[tuple[str, bool]] = []
    seen: set[str] = set()
    for message in messages:
        results = [part for part in message.parts if isinstance(part, ToolOutput)]
        if [(result.id, result.id_made) for result in results] != due:
            return False
        if message.role == "tool" and (not results or len(results) != len(message.parts)):
            return False
        if results and (message.role not in ("tool", "user") or message.parts[: len(results)] != tuple(results)):
            return False
        due = [(part.id, part.id_made) for part in message.parts if isinstance(part, ToolUse)]
        ids = {call_id for call_id, _ in due}
        if len(ids) != len(due) or seen & ids or (due and message.role != "assistant"):
            return False
        seen |= ids
    return not due


def _with_ids(conversation: Conversation) -> Conversation:
    """Treat the ids that we made as the vendor's own, so that they are sent."""
    made = (part for message in conversation.messages for part in message.parts if getattr(part, "id_made", False))
    if next(made, None) is None:
        return conversation
    messages = tuple(
        msgspec.structs.replace(message, parts=tuple(
            msgspec.structs.replace(part, id_made=False) if isinstance(part, ToolUse | ToolOutput) else part
            for part in message.parts
        )) for message in conversation.messages
    )  # fmt: skip
    return msgspec.structs.replace(conversation, messages=messages)


class _Pairing:
    """The state of the repair of one conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.ledger = LossLedger(conversation.dialect, conversation.dialect)
        self.results: dict[str, list[tuple[int, int, ToolOutput]]] = {}
        """Id → results not yet matched to a call, in order, each with the indices of its message and part."""
        self.used: set[tuple[int, int]] = set()
        """Indices of message and part of the matched results."""
        self.ids: set[str] = set()
        self.others = list(itertools.accumulate(message.role != "tool" for message in conversation.messages))
        """Index of a message → number of messages up to it whose role is not `tool`."""

    def run(self) -> list[Message]:
        messages = self.conversation.messages
        for place, message in enumerate(messages):
            for spot, part in enumerate(message.parts):
                if isinstance(part, ToolOutput):
                    self.results.setdefault(part.id, []).append((place, spot, part))
        kept = [(place, *self._calls(place, message)) for place, message in enumerate(messages)]
        out: list[Message] = []
        for place, message, answers in kept:
            rest = self._rest(place, message)
            if rest.parts or not message.parts:
                out.append(rest)
            if answers is not None:
                out.append(answers)
        return out

    def _calls(self, place: int, message: Message) -> tuple[Message, Message | None]:
        """Find the results of a message's calls; a call whose id was used before gets a new one."""
        parts: list[Part] = []
        answers: list[Part] = []
        for spot, part in enumerate(message.parts):
            if not isinstance(part, ToolUse):
                parts.append(part)
                continue
            if message.role != "assistant":
                parts.append(Text(text=f"[a call of the tool {part.name}, not made by the model]"))
                self.ledger.degrade(part.at or f"/messages/{place}/parts/{spot}", "role", "only a model calls tools")
                continue
            call_id = self._own_id(part.id)
            parts.append(part if call_id == part.id else msgspec.structs.replace(part, id=call_id))
            answers.append(self._answer(place, spot, part, call_id))
        answered = Message(role="tool", parts=tuple(answers)) if answers else None
        if parts == list(message.parts):
            return message, answered
        return msgspec.structs.replace(message, parts=tuple(parts)), answered

    def _own_id(self, wanted: str) -> str:
        call_id, number = wanted, 2
        while call_id in self.ids:
            call_id, number = f"{wanted}-{number}", number + 1
        self.ids.add(call_id)
        return call_id

    def _answer(self, place: int, spot: int, call: ToolUse, call_id: str) -> ToolOutput:
        waiting = self.results.get(call.id, [])
        for number, (where, spot_there, result) in enumerate(waiting):
            if where > place:
                del waiting[number]
                self.used.add((where, spot_there))
                if self.others[where - 1] > self.others[place]:
                    self.ledger.degrade(result.at or f"/messages/{where}", "order", "a result was moved to its call")
                return msgspec.structs.replace(result, id=call_id, id_made=call.id_made)
        at = call.at or f"/messages/{place}/parts/{spot}"
        self.ledger.synthesise(at, "result_missing", f"the call of {call.name} has no result")
        return ToolOutput(
            id=call_id, id_made=call.id_made, content=(Text(text=MISSING),), is_error=True, kind=call.kind
        )  # fmt: skip

    def _rest(self, place: int, message: Message) -> Message:
        """Return a message without the results that moved to their calls; results without a call become text."""
        if message.role != "tool" and not any(isinstance(part, ToolOutput) for part in message.parts):
            return message
        parts: list[Part] = []
        for spot, part in enumerate(message.parts):
            if not isinstance(part, ToolOutput):
                parts.append(part)
            elif (place, spot) not in self.used:
                at = part.at or f"/messages/{place}/parts/{spot}"
                self.ledger.degrade(at, "call_missing", f"the result {part.id} has no call and became words")
                parts += [Text(text=f"[result of the earlier tool call {part.id}]"), *part.content]
        role = "user" if message.role == "tool" else message.role
        return msgspec.structs.replace(message, role=role, parts=tuple(parts))
