"""Converts histories between a session's messages, the dialects' messages, and vendors' records.

`neutral` writes a session's messages for the dialects; `Talk` collects messages while events or records are read. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from backplane.contract import conversation as said
from backplane.contract.canonical import Json
from backplane.contract.conversation import (
    AgentMessage,
    Image,
    Message,
    MessageToolCall,
    ThinkingBlock,
    ToolResultMessage,
    UserMessage,
)
from backplane.dialects import dialect, ir
from backplane.errors import TranslationError

NO_RESULT: Final = "No result of this call was recorded: whether it ran is unknown. Look before you repeat it."


def neutral(messages: Sequence[said.Message]) -> tuple[ir.Message, ...]:
    """Return messages in the neutral form; a call without a result gets a result that reports this."""
    unknown = {call.id for call in said.unresolved(tuple(messages))}
    made: list[ir.Message] = []
    for message in messages:
        if isinstance(message, said.UserMessage):
            made.append(user_message(message.content, message.images))
        elif isinstance(message, said.ToolResultMessage):
            made.append(_results((message.tool_call_id, message.content, message.is_error)))
        else:
            made.append(_assistant(message))
            lost = [(call.id, NO_RESULT, True) for call in message.tool_calls if call.id in unknown]
            made += [_results(*lost)] if lost else []
    return tuple(_joined(made))


def user_message(text: str, images: Sequence[said.Image]) -> ir.Message:
    """Return a message of the user with its images."""
    shown = [ir.Media(kind="image", media_type=one.media_type, data=one.data, url=one.url) for one in images]
    words = [ir.Text(text=text)] if text or not shown else []
    return ir.Message(role="user", parts=(*words, *shown))


def _assistant(message: said.AgentMessage) -> ir.Message:
    thinking = [
        ir.Thinking(text=part.text, signature=part.signature, redacted=part.redacted)
        for part in message.thinking
        if part.is_proven
    ]
    says = message.content or message.signature or not message.tool_calls
    text = [ir.Text(text=message.content, signature=message.signature)] if says else []
    calls = [
        ir.ToolUse(id=call.id, name=call.name, input=call.arguments, signature=call.signature)
        for call in message.tool_calls
    ]
    return ir.Message(role="assistant", parts=(*thinking, *text, *calls))


def _results(*rows: tuple[str, str, bool]) -> ir.Message:
    parts = [ir.ToolOutput(id=id, content=(ir.Text(text=text),), is_error=bad) for id, text, bad in rows]
    return ir.Message(role="tool", parts=tuple(parts))


def _joined(messages: list[ir.Message]) -> list[ir.Message]:
    """Join adjacent messages of results, so that the calls of a turn have their results in one message."""
    made: list[ir.Message] = []
    for message in messages:
        if made and message.role == "tool" == made[-1].role:
            message = msgspec.structs.replace(message, parts=(*made.pop().parts, *message.parts))
        made.append(message)
    return made


class StoredHead(msgspec.Struct, frozen=True):
    """The head of a vendor's record of a conversation."""

    id: str
    root: str | None
    """Folder in which the conversation worked; None if unknown."""
    model: str | None
    version: object
    """Version of the program that wrote it, in the vendor's own form."""


class Talk:
    """Collects messages; blocks of the agent become one message, which a result or the user's text ends."""

    def __init__(self) -> None:
        self._made: list[Message] = []
        self._text: list[str] = []
        self._thinking: list[ThinkingBlock] = []
        self._calls: list[MessageToolCall] = []
        self._proof: str | None = None
        self._known: dict[str, str | None] = {}
        """Id of a call → its result's text; None until it has one."""
        self._dropped: Counter[str] = Counter()

    def user(self, text: str, images: Sequence[Image] = ()) -> None:
        """Add a message of the user."""
        self._flush()
        self._made.append(UserMessage(content=text, images=tuple(images)))

    def think(self, text: str, signature: str | None = None, redacted: str | None = None) -> None:
        """Add thinking of the model."""
        if text or signature or redacted:
            self._thinking.append(ThinkingBlock(text=text, signature=signature, redacted=redacted))

    def say(self, text: str, proof: str | None = None) -> None:
        """Add text of the agent, with its signature if it has one."""
        self._text += [text] if text else []
        self._proof = proof or self._proof

    def call(self, id: str, name: str, arguments: Json, signature: str | None = None) -> None:
        """Add a call of the agent; a repeated call is ignored."""
        if id not in self._known:
            self._calls.append(MessageToolCall(id=id, name=name, arguments=arguments, signature=signature))
            self._known[id] = None

    def result(self, id: str, text: str, *, is_error: bool = False) -> None:
        """Add the result of a call; a repeated result is ignored."""
        if id not in self._known or self._known[id] is not None:
            if self._known.get(id) != text:
                self.drop("results without their call" if id not in self._known else "further results of a call")
            return
        self._known[id] = text
        self._flush()
        self._made.append(ToolResultMessage(tool_call_id=id, content=text, is_error=is_error))

    def take(self, name: str, member: str, message: Mapping[str, Any]) -> None:
        """Add a message or item of a request in a dialect.

        Args:
            name: name of the dialect.
            member: member of a request that has such messages.
        """
        try:
            read = dialect(name).to_ir({member: [message]}).value.messages
        except TranslationError:
            self.drop(unknown(message.get("type", message.get("role"))))
            return
        for one in read:
            words, images = [], []
            for part in one.parts:
                if isinstance(part, ir.Text) and one.role == "assistant":
                    self.say(part.text)
                elif isinstance(part, ir.Text):
                    words.append(part.text)
                elif isinstance(part, ir.Thinking):
                    self.think(part.text, part.signature, part.redacted)
                elif isinstance(part, ir.ToolUse):
                    self.call(part.id, part.name, part.input, part.signature)
                elif isinstance(part, ir.ToolOutput):
                    texts = [inner.text for inner in part.content if isinstance(inner, ir.Text)]
                    self.drop("pictures in what tools gave", len(part.content) - len(texts))
                    self.result(part.id, "\n".join(texts), is_error=part.is_error is True)
                elif isinstance(part, ir.Media) and part.kind == "image" and (part.data or part.url):
                    images.append(Image(media_type=part.media_type, data=part.data, url=part.url))
                else:
                    self.drop(unknown(getattr(part, "label", getattr(part, "kind", type(part).__name__))))
            if words or images:
                self.user("\n\n".join(words), images)

    def drop(self, what: str, count: int = 1) -> None:
        """Count messages or blocks that were omitted; `what` is their name in the report."""
        if count:
            self._dropped[what] += count

    def mark(self) -> int:
        """Return the number of messages so far."""
        self._flush()
        return len(self._made)

    def cut(self, mark: int, what: str) -> None:
        """Remove the messages after a mark, and count them as omitted under the name `what`."""
        self._flush()
        if len(self._made) > mark:
            self.drop(what, len(self._made) - mark)
        del self._made[mark:]

    def undo(self, prompts: int) -> None:
        """Remove the last `prompts` messages of the user, and all messages after them."""
        self._flush()
        users = [place for place, message in enumerate(self._made) if isinstance(message, UserMessage)]
        if prompts > 0 and users:
            self.cut(users[-min(prompts, len(users))], UNDONE)

    def _flush(self) -> None:
        if self._has_said:
            self._made.append(self._last())
        self._text, self._thinking, self._calls, self._proof = [], [], [], None

    @property
    def _has_said(self) -> bool:
        return bool(self._text or self._thinking or self._calls or self._proof)

    def _last(self) -> AgentMessage:
        text, thinking, calls = "\n\n".join(self._text), tuple(self._thinking), tuple(self._calls)
        return AgentMessage(content=text, thinking=thinking, tool_calls=calls, signature=self._proof)

    def last(self) -> AgentMessage:
        """Return the latest message of the agent, to which blocks may still be added."""
        if self._has_said:
            return self._last()
        return next((one for one in reversed(self._made) if isinstance(one, AgentMessage)), AgentMessage())

    @property
    def messages(self) -> tuple[Message, ...]:
        self._flush()
        return tuple(self._made)

    @property
    def losses(self) -> tuple[str, ...]:
        return tuple(f"dropped: {count} {what}" for what, count in sorted(self._dropped.items()))


UNDONE: Final = "messages that were taken back in the program itself"
NOTES: Final = "notes of the program to its model"
BELOW: Final = "messages of agents below this one"
SUMMED: Final = "messages before the program's own summary of them"


def unknown(kind: object) -> str:
    """Return the name under which records of an unknown kind are counted."""
    return f"records of the kind {str(kind)[:60]!r}"


def text_or_none(value: object) -> str | None:
    """Return a value if it is a text, else None."""
    return value if isinstance(value, str) else None
