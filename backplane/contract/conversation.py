"""A conversation in neutral words: the provider interface's messages, and the file that a session is kept in.

The same shapes travel in an order (`config.vendor.abp.history`), lie in a session's file, and are what a program
gets from `get_history`. They name no vendor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile

FORMAT: Final = "backplane.session"
VERSION: Final = 1

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "user_interrupt", "error"]
"""Why a turn ended: the six of `contracts/sessions.md`."""


class _ConversationValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An unknown member is refused, as it would be lost."""


class MessageToolCall(_ConversationValue, frozen=True):
    """A call that the agent made."""

    id: str
    name: str
    arguments: Json = None
    signature: str | None = None
    """The vendor's proof on the call itself; it goes back as that of `ThinkingBlock` does."""


class Image(_ConversationValue, frozen=True):
    """A picture that the user showed; exactly one of `data` and `url` is set."""

    media_type: str | None = None
    data: str | None = None
    """Base64."""
    url: str | None = None


class ThinkingBlock(_ConversationValue, frozen=True):
    """Thinking of the model."""

    text: str = ""
    signature: str | None = None
    """The vendor's proof; it goes back only to the provider and model that made it."""
    redacted: str | None = None
    """Thinking that only its vendor can read; `text` is empty then, and it goes back as a proof does."""

    @property
    def is_proven(self) -> bool:
        """True if its vendor can verify it."""
        return bool(self.signature or self.redacted)


class UserMessage(_ConversationValue, frozen=True, tag_field="role", tag="user"):
    """A message of the user, with the context in words and the pictures."""

    content: str
    images: tuple[Image, ...] = ()


class AgentMessage(_ConversationValue, frozen=True, tag_field="role", tag="assistant"):
    """A message of the agent, and the calls after it."""

    content: str = ""
    tool_calls: tuple[MessageToolCall, ...] = ()
    thinking: tuple[ThinkingBlock, ...] = ()
    signature: str | None = None
    """The vendor's proof on the words; it goes back as that of `ThinkingBlock` does."""


class ToolResultMessage(_ConversationValue, frozen=True, tag_field="role", tag="tool"):
    """Result of a call."""

    tool_call_id: str
    content: str
    is_error: bool = False


Message = UserMessage | AgentMessage | ToolResultMessage

Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenUsage(_ConversationValue, frozen=True):
    """Tokens and money of one turn or of several; None is unknown, never zero."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    cost_usd_micros: Count | None = None
    """Millionths of a US dollar."""
    cache_in_input: bool = True
    """True if `input_tokens` includes the cached tokens."""
    is_at_least: bool = False
    """True for a sum that leaves out turns whose usage is unknown, as when their service refused them."""

    @property
    def total_tokens(self) -> int | None:
        """All tokens, cached ones once; None where a part is unknown."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens


_COUNTERS: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cost_usd_micros")


def usage_together(usages: Sequence[TokenUsage]) -> TokenUsage:
    """Sum the usage of turns; unknown counters are left out, and `is_at_least` says so.

    A counter that is unknown in every turn stays unknown; without turns all are zero.
    """
    sums: dict[str, Any] = {}
    partly = False
    for name in _COUNTERS:
        known = [count for usage in usages if (count := getattr(usage, name)) is not None]
        sums[name] = sum(known) if known or not usages else None
        partly = partly or 0 < len(known) < len(usages)
    return TokenUsage(**sums, is_at_least=partly or any(usage.is_at_least for usage in usages))


class SessionTurn(_ConversationValue, frozen=True):
    """One turn of a session: the run that it was, and what was said in it."""

    run_id: str | None
    """None of a turn that was no run here: it was imported."""
    provider: str
    model: str | None = None
    """Model that was asked for; None for the backend's own choice."""
    receipt_sha256: str | None = None
    """None while the turn is under way, or where its run was cut off before it was sealed."""
    stop_reason: StopReason | None = None
    """None likewise."""
    messages: tuple[Message, ...] = ()
    usage: TokenUsage = TokenUsage()
    conversation: str | None = None
    """Id of the conversation that the provider itself keeps, after this turn."""
    carried: bool = True
    """False if the folder of the next turn lacks what this one changed."""


class SessionFile(_ConversationValue, frozen=True, omit_defaults=False):
    """A session as it lies on disk: no secret, no vendor's form, nothing that is run when it is read."""

    format: Literal["backplane.session"]
    version: Literal[1]
    id: str
    created_at: str
    provider: str
    model: str | None = None
    system_prompt: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_turns: Count | None = None
    max_budget_usd: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """US dollars that each turn may spend."""
    root: str | None = None
    """Folder that it works on; None is a folder of its own, empty at the start of each turn."""
    mode: Literal["staged", "pass_through"] = "staged"
    lane: Literal["patch_first", "workspace_first"] = "workspace_first"
    policy: PolicyProfile | None = None
    """Policy for every agent that continues it; None for the configured one."""
    cleared: Count = 0
    """Turns before this one are no part of the conversation any more; their receipts stay."""
    parent: str | None = None
    """The session that this one was forked from."""
    turns: tuple[SessionTurn, ...] = ()
    losses: tuple[str, ...] = ()
    """Parts that could not be carried over, each once."""

    @property
    def first_words(self) -> str | None:
        """The user's first message; None if none was sent."""
        messages = (message for turn in self.turns for message in turn.messages)
        return next((message.content for message in messages if isinstance(message, UserMessage)), None)


def calls_of(messages: Sequence[Message]) -> list[MessageToolCall]:
    """Return the agent's calls, oldest first."""
    return [call for message in messages if isinstance(message, AgentMessage) for call in message.tool_calls]


def unresolved(messages: Sequence[Message]) -> tuple[MessageToolCall, ...]:
    """Return the calls without a recorded result: whether they ran is unknown."""
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolResultMessage)}
    return tuple(call for call in calls_of(messages) if call.id not in answered)
