"""The neutral conversation between dialects: what was asked, what was answered, what was lost.

A dialect reads its vendor's JSON into these values and writes it from them. What the portable part
cannot say waits in `ext`, by dialect, and goes back only to the dialect it came from.
Never on the wire, so free to change; no vendor is known here and nothing is translated here.
"""

from __future__ import annotations

from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from backplane.contract.canonical import Json

Ext = dict[str, dict[str, Any]]
"""Dialect → native member → value.

A key with `/` is a path below the node; one that begins with `#` is shape memory: how the vendor wrote
something the portable part already says (text or list, null or absent, spelling). With `##` it is nothing that
another vendor could miss.
"""

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
    """What everything in a conversation has."""

    at: str = ""
    """JSON pointer to where it was read; empty for the whole document or for what was made here."""
    ext: Ext = {}
    raw: Any = None
    """The native object that it was read from; its own dialect writes it again while reading it yields this node."""


# Parts ----------------------------------------------------------------------------------------------------------------


class Citation(Node, frozen=True, kw_only=True, gc=False):
    """Where a text says it is from; `start` and `end` count characters of the text it stands on."""

    kind: str
    url: str | None = None
    title: str | None = None
    quote: str | None = None
    start: int | None = None
    end: int | None = None


class Part(Node, frozen=True, kw_only=True, gc=False):
    """One block of a message."""

    signature: str | None = None
    """The vendor's proof that it made this block; worthless to any other vendor."""
    signature_at: str = ""
    """Where it was read, if not in the block itself."""
    cache: dict[str, Any] | None = None
    """A breakpoint of the prompt cache after this block; `{"ttl": …}` or empty for the vendor's own."""


class Text(Part, frozen=True, kw_only=True, gc=False):
    """What is said."""

    text: str
    citations: tuple[Citation, ...] = ()


class Thinking(Part, frozen=True, kw_only=True, gc=False):
    """What the model thought on its way."""

    text: str
    redacted: str | None = None
    """Thinking that only its vendor can read; `text` is then empty."""
    field: str | None = None
    """The member it came from, where vendors differ."""


class Refusal(Part, frozen=True, kw_only=True, gc=False):
    """The words with which the model will not."""

    text: str


class Media(Part, frozen=True, kw_only=True, gc=False):
    """An image, a sound, a film or a document; exactly one of data, url, file_id and text is set."""

    kind: Literal["image", "audio", "video", "document"]
    media_type: str | None = None
    data: str | None = None
    """Base64."""
    url: str | None = None
    file_id: str | None = None
    text: str | None = None
    """A document that is plain text."""
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
    """The arguments as the vendor wrote them; stands only while it says the same as `input`."""
    kind: Literal["function", "custom"] = "function"
    id_made: bool = False
    """The vendor gave no id, this one was made here and never goes back to that vendor."""

    @property
    def is_cut(self) -> bool:
        """Whether its arguments are no JSON, as those are that a limit cut: it must not be run."""
        return self.kind == "function" and isinstance(self.input, str)


class ToolOutput(Part, frozen=True, kw_only=True, gc=False):
    """What a tool gave back; `id` is that of its call."""

    id: str
    content: tuple[Part, ...] = ()
    name: str | None = None
    is_error: bool | None = None
    flat: bool | None = None
    """The content was one plain string (True) or a list (False); None where the vendor knows no difference."""
    value: Json = None
    """A structured result; `content` says the same as text."""
    kind: Literal["function", "custom"] = "function"
    id_made: bool = False


class ServerTool(Part, frozen=True, kw_only=True, gc=False):
    """A call of a tool that the vendor runs itself, or its result; `payload` is the native block."""

    dialect: str
    name: str
    payload: Json


class Opaque(Part, frozen=True, kw_only=True, gc=False):
    """A block of a kind that the portable part has no word for; `payload` is the native block."""

    dialect: str
    label: str
    payload: Json
    bound: bool = False
    """It points to state that its vendor keeps: without it the conversation means something else."""


# Conversations and answers --------------------------------------------------------------------------------------------


class Message(Node, frozen=True, kw_only=True, gc=False):
    """One turn of one side."""

    role: Role
    parts: tuple[Part, ...]
    native_role: str | None = None
    name: str | None = None
    flat: bool | None = None
    """See `ToolOutput.flat`."""


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
"""Portable request options and what they mean; a dialect says which of them it can write."""


class Conversation(Node, frozen=True, kw_only=True, gc=False):
    """One request."""

    dialect: str
    messages: tuple[Message, ...]
    model: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    options: dict[str, Any] = {}
    """By the names of `OPTIONS`."""
    options_at: dict[str, str] = {}
    """Where each option was read."""


class TokenCounts(Node, frozen=True, kw_only=True, gc=False):
    """Tokens of one answer; None is unknown.

    The one rule: `input` is everything that was sent, `cache_read` and `cache_write` are parts of it;
    `output` is everything that was made, `reasoning` is part of it.
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
    """None while the answer is not complete."""
    stop_raw: str | None = None
    """The vendor's word; written back while it means the same as `stop`."""
    stop_sequence: str | None = None
    stop_at: str = ""
    """Where the reason was read."""


class Answer(Node, frozen=True, kw_only=True, gc=False):
    """One response: usually one candidate."""

    dialect: str
    candidates: tuple[Candidate, ...]
    id: str | None = None
    model: str | None = None
    created: int | float | None = None
    """Seconds since 1970."""
    usage: TokenCounts | None = None
    error: str | None = None
    """Why the vendor failed, in its words."""


# Streams --------------------------------------------------------------------------------------------------------------


class Began(Node, frozen=True, kw_only=True, gc=False):
    """A stream began, or more of its head is known."""

    id: str | None = None
    model: str | None = None
    created: int | float | None = None


class PartStarted(msgspec.Struct, frozen=True, gc=False):
    index: int
    """Place of the block in its message, counted from 0."""
    part: Part
    choice: int = 0


class PartDelta(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    field: Literal["text", "arguments", "signature", "citation"] = "text"
    choice: int = 0
    value: Any = None
    """For a citation, the citation."""


class PartStopped(msgspec.Struct, frozen=True, gc=False):
    index: int
    part: Part | None = None
    """The whole block, where the vendor repeats it at its end: the better truth."""
    choice: int = 0


class UsageSeen(msgspec.Struct, frozen=True, gc=False):
    """Tokens so far; replaces what was said before."""

    usage: TokenCounts


class Stopped(Node, frozen=True, kw_only=True, gc=False):
    """The answer of one choice is over; counters may still come."""

    stop: Stop
    raw: str | None = None
    sequence: str | None = None
    choice: int = 0


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A member that a chunk had beside its content; `choice` None when it is the answer's."""

    key: str
    value: Any
    choice: int | None = None
    joins: bool = False
    """A later one of the same key continues it instead of replacing it."""
    at_message: bool = False


class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """Nothing follows; `answer` is the whole, where the vendor repeats it."""

    answer: Answer | None = None


class StreamFailed(msgspec.Struct, frozen=True, gc=False):
    message: str
    code: str | None = None
    raw: Any = None


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A chunk that says nothing portable: keep-alives, padding, events of a later version."""

    raw: Any
    ignorable: bool = True


StreamEvent = (
    Began | PartStarted | PartDelta | PartStopped | UsageSeen | Stopped | Noted | StreamEnded | StreamFailed | Kept
)


# Losses ---------------------------------------------------------------------------------------------------------------

LOSS_CODES: Final[dict[str, str]] = {
    "shape": "the same thing is written in another form: null or absent, text or list, a spelling",
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
    "transport": "something the target says outside of the document",
    "unaccounted": "found missing by comparing both documents",
    "fallback": "a gateway's fault that was worked around",
    "cut": "a stream that was over before it said how",
}
"""Stable; append-only."""


class Loss(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something a translation could not carry as it was. Values are not copied: they may be secret."""

    path: str
    """JSON pointer into the source; for something made here, to where it would have stood."""
    dialect: str
    """The source's dialect."""
    target: str
    kind: LossKind
    code: str
    """One of `LOSS_CODES`."""
    reason: str
    size_chars: int | None = None
    """Length of the value as JSON."""
    chunk: int | None = None
    """Of a stream: the chunk that was lost or that said it, counted from 0.

    `path` points into the answer that the chunks add up to, or to the chunk where it is of no part of the answer.
    """
    chunk_type: str | None = None
    """The type of that chunk, where its vendor gives chunks one."""

    @property
    def is_material(self) -> bool:
        """Whether meaning changed, not only the form in which it is written."""
        return self.code != "shape"


T = TypeVar("T")


class Translated(msgspec.Struct, Generic[T], frozen=True):
    """A value and what was lost on the way to it."""

    value: T
    losses: tuple[Loss, ...] = ()
