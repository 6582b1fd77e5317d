"""Defines the neutral form between dialects: requests, answers, streams, and the losses of a translation.

A dialect reads its vendor's JSON into these values, and writes JSON from them. Members without a portable form stay in
`ext`, by dialect, and are written only to the dialect that they came from. The values are never sent, so their types
are free to change. This module knows no vendor and translates nothing.
"""

from __future__ import annotations

from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from backplane.contract.canonical import Json

Ext = dict[str, dict[str, Any]]
"""Dialect → native member → value; the member `..` has the members of the item that contains the block."""

Role = Literal["system", "user", "assistant", "tool"]
Stop = Literal[
    "end",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "refusal",
    "content_filter",
    "pause",
    "error",
    "cancelled",
    "other",
]
LossKind = Literal["dropped", "degraded", "synthesised", "refused"]


class Node(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The base of most values: has the source of a value, and its members without a portable form."""

    at: str = ""
    """JSON pointer to the node's source; empty for the whole document, or if backplane made the node."""
    ext: Ext = {}


# Parts ----------------------------------------------------------------------------------------------------------------


class Citation(Node, frozen=True, kw_only=True, gc=False):
    """A text's reference to a source; `start` and `end` are positions in the text, in characters."""

    kind: str
    url: str | None = None
    title: str | None = None
    quote: str | None = None
    start: int | None = None
    end: int | None = None


class Part(Node, frozen=True, kw_only=True, gc=False):
    """One block of a message."""

    signature: str | None = None
    """The vendor's proof that it made this block, if any; other vendors cannot use it."""
    cache: dict[str, Any] | None = None
    """A breakpoint of the prompt cache after this block, if any: `{"ttl": …}`, or `{}` for the vendor's lifetime."""


class Text(Part, frozen=True, kw_only=True, gc=False):
    """A block of text."""

    text: str
    citations: tuple[Citation, ...] = ()


class Thinking(Part, frozen=True, kw_only=True, gc=False):
    """A block of the model's thinking before its answer."""

    text: str
    redacted: str | None = None
    """Thinking that only the vendor can read, if any; `text` is then empty."""
    field: str | None = None
    """Name of the native member that had the thinking; None if the dialect has only one."""


class Refusal(Part, frozen=True, kw_only=True, gc=False):
    """The model's text that refuses the request."""

    text: str


class Media(Part, frozen=True, kw_only=True, gc=False):
    """An image, an audio, a video or a document; exactly one of data, url, file_id and text is set."""

    kind: Literal["image", "audio", "video", "document"]
    media_type: str | None = None
    data: str | None = None
    """The content in base64."""
    url: str | None = None
    file_id: str | None = None
    text: str | None = None
    """The content of a document in plain text."""
    detail: str | None = None
    name: str | None = None
    title: str | None = None
    transcript: str | None = None


class ToolUse(Part, frozen=True, kw_only=True, gc=False):
    """A call of a tool that the caller must run."""

    id: str
    name: str
    input: Json
    text: str | None = None
    """The arguments as the vendor wrote them, valid only while they decode to `input`; None if only `input` exists."""
    kind: Literal["function", "custom"] = "function"
    id_made: bool = False
    """True if backplane made the id because the vendor gave none; it is never sent back to that vendor."""

    @property
    def is_cut(self) -> bool:
        """True if the arguments are no JSON, for example because a limit cut them; the call must not be run."""
        return self.kind == "function" and isinstance(self.input, str)


class ToolOutput(Part, frozen=True, kw_only=True, gc=False):
    """The output of a tool; `id` is the id of the tool's call."""

    id: str
    content: tuple[Part, ...] = ()
    name: str | None = None
    is_error: bool | None = None
    value: Json = None
    """The structured result; `content` has the same result as text."""
    kind: Literal["function", "custom"] = "function"
    id_made: bool = False


class NativePart(Part, frozen=True, kw_only=True, gc=False):
    """A block that has no portable form, with its native form in `payload`."""

    dialect: str
    label: str
    payload: Json
    is_tool: bool = False
    """True if it is a call of a tool that the vendor runs itself, or its result."""
    is_bound: bool = False
    """True if it refers to state at its vendor, without which the conversation has another meaning."""


# Conversations and answers --------------------------------------------------------------------------------------------


class Message(Node, frozen=True, kw_only=True, gc=False):
    """One message of a conversation, with its author's role and its blocks."""

    role: Role
    parts: tuple[Part, ...]
    native_role: str | None = None
    """The vendor's own name of the role; None if it was missing or not kept."""
    name: str | None = None


class ToolSpec(Node, frozen=True, kw_only=True, gc=False):
    """A tool that the model may call; for kind `server`, `payload` is the native definition."""

    name: str
    description: str | None = None
    schema: Json = None
    strict: bool | None = None
    kind: Literal["function", "custom", "server"] = "function"
    cache: dict[str, Any] | None = None
    payload: Json = None


OPTIONS: Final[dict[str, str]] = {
    "max_tokens": "most tokens of the answer",
    "temperature": "randomness",
    "top_p": "nucleus sampling",
    "top_k": "candidates a token",
    "stop": "list of strings that end the answer",
    "seed": "for repeatable answers",
    "frequency_penalty": "against repetition",
    "presence_penalty": "for new subjects",
    "n": "number of answers",
    "logprobs": "whether probabilities are wanted",
    "top_logprobs": "how many alternatives a token",
    "stream": "whether the answer comes in pieces",
    "parallel_tool_calls": "whether one turn may hold several calls",
    "tool_choice": "mode (auto, none, required, tool), name",
    "response_format": "type (text, json, schema), schema, name, description, strict",
    "reasoning_effort": "how hard to think, in words",
    "reasoning_budget": "how long to think, in tokens; 0 not at all, -1 as the model likes",
    "reasoning_shown": "whether thinking is part of the answer",
    "verbosity": "how long the answer should be, in words",
    "user": "the end user, as an opaque name",
    "metadata": "the caller's own labels",
    "service_tier": "the vendor's class of service",
}
"""Portable request options → their meanings; each dialect lists the options that it can write."""


class Conversation(Node, frozen=True, kw_only=True, gc=False):
    """One request to a model: its messages, tools and options."""

    dialect: str
    messages: tuple[Message, ...]
    model: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    options: dict[str, Any] = {}
    """Values of options, by the names in `OPTIONS`."""
    options_at: dict[str, str] = {}
    """Option → JSON pointer to its source."""
    raw: Json = None
    """The document that was read; its dialect writes it again, with the edits of this conversation."""


class TokenCounts(Node, frozen=True, kw_only=True, gc=False):
    """Token counts of one answer; None is an unknown count.

    `input` counts everything that was sent, including `cache_read` and `cache_write`; `output` counts everything that
    the model generated, including `reasoning`.
    """

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None


class Candidate(Node, frozen=True, kw_only=True, gc=False):
    """One of the answers to a request."""

    message: Message
    stop: Stop | None = None
    """The reason for which the answer ended; None while it is not complete."""
    stop_raw: str | None = None
    """The vendor's own stop reason; it is written again while it means the same as `stop`."""
    stop_sequence: str | None = None
    stop_at: str = ""
    """JSON pointer to the source of the stop reason."""


class Answer(Node, frozen=True, kw_only=True, gc=False):
    """One response to a request, usually with one candidate."""

    dialect: str
    candidates: tuple[Candidate, ...]
    id: str | None = None
    model: str | None = None
    created: int | float | None = None
    """Time of the response in seconds since 1970; None if unknown."""
    usage: TokenCounts | None = None
    error: str | None = None
    """The vendor's message if the request failed; None without an error."""
    error_type: str | None = None
    """A key of `vendor.ERROR_TYPES`; None for any other error, or without an error."""
    raw: Json = None
    """The document that was read; see `Conversation.raw`."""


# Streams --------------------------------------------------------------------------------------------------------------


class Began(Node, frozen=True, kw_only=True, gc=False):
    """A stream began, or further members of its answer's head are known."""

    id: str | None = None
    model: str | None = None
    created: int | float | None = None


class PartStarted(msgspec.Struct, frozen=True, gc=False):
    index: int
    """Position of the block in its message, counted from 0."""
    part: Part
    choice: int = 0


class PartDelta(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    field: Literal["text", "arguments", "signature", "citation"] = "text"
    choice: int = 0
    value: Any = None
    """The citation, if `field` is `citation`."""


class PartStopped(msgspec.Struct, frozen=True, gc=False):
    index: int
    part: Part | None = None
    """The whole block, if the vendor repeats it at the block's end; it is preferred to the collected pieces."""
    choice: int = 0


class UsageSeen(msgspec.Struct, frozen=True, gc=False):
    """Token counts so far, which replace all earlier counts."""

    usage: TokenCounts


class Stopped(Node, frozen=True, kw_only=True, gc=False):
    """The answer of one choice has ended; token counts may still follow."""

    stop: Stop
    raw: str | None = None
    sequence: str | None = None
    choice: int = 0


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A member beside a chunk's content; `choice` is None if the member belongs to the whole answer."""

    key: str
    value: Any
    choice: int | None = None
    joins: bool = False
    """True if a later value of the same key continues this value instead of replacing it."""
    at_message: bool = False


class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """The stream has ended; `answer` is the whole answer, if the vendor repeats it."""

    answer: Answer | None = None


class StreamFailed(msgspec.Struct, frozen=True, gc=False):
    message: str
    code: str | None = None
    raw: Any = None


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A chunk without portable content: a keep-alive, padding, or an event of a later version."""

    raw: Any
    ignorable: bool = True


StreamEvent = (
    Began | PartStarted | PartDelta | PartStopped | UsageSeen | Stopped | Noted | StreamEnded | StreamFailed | Kept
)


# Losses ---------------------------------------------------------------------------------------------------------------

LOSS_CODES: Final[dict[str, str]] = {
    "extension": "a member that only its own dialect knows",
    "option": "a request option that the target does not have",
    "option_value": "an option whose value the target says in another way",
    "part": "a kind of block that the target does not have",
    "part_bound": "a block that points to state kept by its own vendor",
    "state": "state kept by the vendor, which the target does not have",
    "signature": "a proof that only its own vendor can read",
    "cache": "a breakpoint of the prompt cache",
    "citation": "where a text says it is from",
    "thinking": "thinking that the target cannot take or takes in another field",
    "media": "an image, sound or document in a form the target does not take",
    "tool": "a tool that only its own vendor runs",
    "tool_field": "a property of a tool or of a result that the target does not have",
    "tool_choice": "a forced tool that the target cannot force",
    "call_missing": "a result without its call",
    "result_missing": "a call without its result",
    "arguments": "arguments that are no JSON object",
    "role": "a role or name that the target does not have",
    "order": "blocks or messages in an order that the target does not have",
    "candidates": "more than one answer where the target has one",
    "stop": "a reason to stop that the target says in another word",
    "usage": "a counter that the target does not have",
    "identity": "an id, time, model or version that the target does not have or has to have",
    "required": "a member that the target requires and the source did not say",
    "fallback": "a gateway's fault that was worked around",
    "cut": "a stream that was over before it said how",
}
"""Codes of losses → their meanings; the codes are stable, and new ones are only appended."""


class Loss(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One loss or change in a translation, without a copy of the value, which may be secret."""

    path: str
    """JSON pointer into the source; for a value that backplane added, to the position that it would have there."""
    dialect: str
    """The source's dialect."""
    target: str
    kind: LossKind
    code: str
    """One of `LOSS_CODES`."""
    reason: str
    size_chars: int | None = None
    """Length of the value as JSON; None if there is no value."""
    chunk: int | None = None
    """Index of the stream's chunk that was lost, or that contained the loss.

    `path` points into the answer that the chunks form, or to the chunk if the loss is in no part of the answer.
    """
    chunk_type: str | None = None
    """The chunk's type, if its vendor's chunks have types."""

    @property
    def is_material(self) -> bool:
        """False only for a value that was added because the target, or the translation back, requires it."""
        return self.kind != "synthesised" or self.code != "required"


T = TypeVar("T")


class Translated(msgspec.Struct, Generic[T], frozen=True):
    """A translated value, and the losses of its translation."""

    value: T
    losses: tuple[Loss, ...] = ()
