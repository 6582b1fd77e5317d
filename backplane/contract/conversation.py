"""Defines conversations that do not depend on a vendor: the messages, and the file of a session.

The same messages are in an order (`config.vendor.abp.history`), in the session's file, and in the result of
`get_history`.
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
"""Why a turn ended; `contracts/sessions.md` describes the six reasons."""


class _ConversationValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of a conversation's values; an unknown member is an error, because it would be lost."""


class MessageToolCall(_ConversationValue, frozen=True):
    """A call that the agent made."""

    id: str
    name: str
    arguments: Json = None
    signature: str | None = None
    """The vendor's proof that its model made the call, if any; sent back like the proof of a `ThinkingBlock`."""


class Image(_ConversationValue, frozen=True):
    """A picture that the user showed; exactly one of `data` and `url` is set."""

    media_type: str | None = None
    data: str | None = None
    """The picture in Base64."""
    url: str | None = None


class ThinkingBlock(_ConversationValue, frozen=True):
    """Thinking of the model."""

    text: str = ""
    signature: str | None = None
    """The vendor's proof that its model made the block, if any; sent back only to the same provider and model."""
    redacted: str | None = None
    """Thinking that only the vendor can read, sent back like a proof; `text` is empty then. None: readable thinking."""

    @property
    def is_proven(self) -> bool:
        """True if the vendor can verify the block."""
        return bool(self.signature or self.redacted)


class UserMessage(_ConversationValue, frozen=True, tag_field="role", tag="user"):
    """A message of the user, with the order's context as text, and with pictures."""

    content: str
    images: tuple[Image, ...] = ()


class AgentMessage(_ConversationValue, frozen=True, tag_field="role", tag="assistant"):
    """A message of the agent, and the calls that follow it."""

    content: str = ""
    tool_calls: tuple[MessageToolCall, ...] = ()
    thinking: tuple[ThinkingBlock, ...] = ()
    signature: str | None = None
    """The vendor's proof that its model wrote the text, if any; sent back like the proof of a `ThinkingBlock`."""


class ToolResultMessage(_ConversationValue, frozen=True, tag_field="role", tag="tool"):
    """The result of a call."""

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
    """True for a sum without some turns, whose usage is unknown because a service refused them, for example."""

    @property
    def total_tokens(self) -> int | None:
        """All tokens, cached ones counted once; None if a part is unknown."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens


_COUNTERS: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cost_usd_micros")


def usage_together(usages: Sequence[TokenUsage]) -> TokenUsage:
    """Sum the usage of turns; `is_at_least` is True if a counter is unknown in some turns.

    A counter that is unknown in every turn stays unknown. Without turns, all counters are zero.
    """
    sums: dict[str, Any] = {}
    partly = False
    for name in _COUNTERS:
        known = [count for usage in usages if (count := getattr(usage, name)) is not None]
        sums[name] = sum(known) if known or not usages else None
        partly = partly or 0 < len(known) < len(usages)
    return TokenUsage(**sums, is_at_least=partly or any(usage.is_at_least for usage in usages))


class SessionTurn(_ConversationValue, frozen=True):
    """One turn of a session: its run and its messages."""

    run_id: str | None
    """None for an imported turn, which was not a run here."""
    provider: str
    model: str | None = None
    """Requested model; None if the backend chose it."""
    receipt_sha256: str | None = None
    """None while the turn runs, or if its run was cut off before it was sealed."""
    stop_reason: StopReason | None = None
    """None while the turn runs, or if its run was cut off."""
    messages: tuple[Message, ...] = ()
    usage: TokenUsage = TokenUsage()
    conversation: str | None = None
    """Id after this turn of the conversation that the provider itself keeps; None if it keeps none."""
    carried: bool = True
    """False if the folder of the next turn does not have the changes of this turn."""


class SessionFile(_ConversationValue, frozen=True, omit_defaults=False):
    """A session as it is stored: without secrets and vendors' formats; reading it runs no code."""

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
    """US dollars that each turn may spend; None for no limit."""
    root: str | None = None
    """Folder that the session works on; None for a folder of its own, which is empty at the start of each turn."""
    mode: Literal["staged", "pass_through"] = "staged"
    lane: Literal["patch_first", "workspace_first"] = "workspace_first"
    policy: PolicyProfile | None = None
    """Policy for every agent that continues the session; None for the configured one."""
    cleared: Count = 0
    """Number of turns at the start that are no longer part of the conversation; their receipts stay."""
    parent: str | None = None
    """Id of the session from which this one was forked; None if it was not forked."""
    turns: tuple[SessionTurn, ...] = ()
    losses: tuple[str, ...] = ()
    """Descriptions of content that could not be converted, each once."""

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
