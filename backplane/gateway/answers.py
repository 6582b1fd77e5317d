"""Readers of a service's answer: `Passing` hands its bytes on and reads the counters, `Translating` translates it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from backplane.dialects import dialect, framing
from backplane.dialects.ir import Began, Loss, StreamFailed, TokenCounts
from backplane.gateway.customs import CustomCalls
from backplane.gateway.frames import encode
from backplane.gateway.fronts import AUGMENT, RESPONSES, ClientCall
from backplane.gateway.routes import ModelTarget
from backplane.upstream.meter import AnswerMeter

_PASSED_HEADERS: Final = (
    "content-type", "retry-after", "retry-after-ms", "x-should-retry", "request-id", "x-request-id",
    "openai-processing-ms", "openai-model",
)  # fmt: skip
_PASSED_PREFIXES: Final = ("anthropic-ratelimit-", "x-ratelimit-", "openai-ratelimit-")

FAILED_END: Final = "response.failed"
"""Type of the event that ends a failed stream of the Responses interface; its clients wait for it."""

Headers = list[tuple[str, str]]


def allowed(headers: Mapping[str, str]) -> Headers:
    """Return those headers of a service's answer that a client gets, with names in lower case."""
    found = [(name.lower(), value) for name, value in headers.items()]
    return [(name, value) for name, value in found if name in _PASSED_HEADERS or name.startswith(_PASSED_PREFIXES)]


def response_of(document: Any) -> dict[str, Any] | None:
    """Return the response in a document or last event of the Responses interface; None if there is none."""
    if not isinstance(document, dict):
        return None
    if document.get("object") == "response":
        return document
    inner = document.get("response")
    is_end = document.get("type") in ("response.completed", "response.incomplete")
    return inner if is_end and isinstance(inner, dict) else None


def date(chunk: dict[str, Any], now_s: int) -> None:
    """Write the present time into an answer or a piece of one, if its dialect has a time and the service gave none."""
    inner = chunk.get("response")
    for whole in (chunk, inner if isinstance(inner, dict) else {}):
        for name in ("created", "created_at"):
            if whole.get(name) == 0:
                whole[name] = now_s


class Passing:
    """Hands an answer on without translation, and reads its counters.

    Args:
        hides_usage: leave the counters out of a stream, because the gateway asked for them and the client did not.
    """

    losses: tuple[Loss, ...] = ()

    def __init__(self, target: ModelTarget, response: httpx.Response, call: ClientCall, *, hides_usage: bool) -> None:
        self.headers = allowed(response.headers)
        self._meter = AnswerMeter(target.dialect)
        self._hides_usage = hides_usage and "event-stream" in response.headers.get("content-type", "")
        self._is_kept = call.front is RESPONSES
        self._size = 0
        self.response: dict[str, Any] | None = None
        """The whole answer, if the interface is Responses; None until it is complete."""

    @property
    def tokens(self) -> TokenCounts | None:
        """The counters; None is unknown."""
        return self._meter.counts

    @property
    def failure(self) -> StreamFailed | None:
        """The failure that the stream reports; None if there is none."""
        return self._meter.failure

    @property
    def has_content(self) -> bool:
        """True once a part of the answer itself has come; any byte counts if the answer cannot be read."""
        return self._meter.has_content or (self._size > 0 and not self._meter.is_readable)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bytes for the client."""
        self._size += len(data)
        shown = self._shown(self._meter.feed(data))
        return shown if self._hides_usage else [data]

    def finish(self) -> list[bytes]:
        """Return the last bytes for the client."""
        shown = self._shown(self._meter.finish())
        return [*shown, framing.done_bytes()] if self._hides_usage and self._meter.framing.is_done else shown

    def _shown(self, documents: list[Any]) -> list[bytes]:
        out = []
        for document in documents:
            if self._is_kept:
                self.response = response_of(document) or self.response
            if not self._hides_usage:
                continue
            if isinstance(document, dict) and "usage" in document:
                if document.get("choices") == []:
                    continue
                document = {name: value for name, value in document.items() if name != "usage"}
            out.append(framing.sse_bytes(document))
        return out


class Translating:
    """Translates an answer; it has the methods and attributes of `Passing`.

    Args:
        document: the client's request.
        stream: return pieces as they come; False returns the whole answer at its end.
        customs: names of the custom tools that were sent as functions; their calls become custom calls again.
        id: id of the exchange; an answer's id is made from it if the service gives none.
    """

    def __init__(
        self, target: ModelTarget, response: httpx.Response, call: ClientCall, document: dict[str, Any], *,
        stream: bool, customs: frozenset[str], id: str,
    ) -> None:  # fmt: skip
        self._stream, self._front = stream, call.front
        self._source = dialect(target.dialect)
        self._translation = call.front.translation(target.dialect, document)
        self._framing = framing.Detecting(is_named=target.dialect == "copilot")
        if customs:
            self._translation.reader = CustomCalls(self._translation.reader, customs)
        self._frames = call.frames()
        self._now_s = int(time.time())
        self._answer_id = f"{call.front.answer_id}{id.replace('-', '')}"
        self._translation.writer.sum.began = Began(id=self._answer_id)
        self.answer: Any = None
        """The whole answer in the service's dialect; None until it is complete."""
        self.response: dict[str, Any] | None = None
        self.has_content = False
        self.failure: StreamFailed | None = None
        self.tokens: TokenCounts | None = None
        self.losses: tuple[Loss, ...] = ()
        kind = call.kind if stream else "application/json"
        rest = [(name, value) for name, value in allowed(response.headers) if name != "content-type"]
        self.headers: Headers = [("content-type", kind), *rest]

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bytes for the client."""
        return self._written([chunk for document in self._framing.feed(data) for chunk in self._fed(document)])

    def _fed(self, document: Any) -> list[Any]:
        made = self._translation.feed(document)
        self._watch()
        return made

    def _watch(self) -> None:
        total = self._translation.writer.sum
        self.failure = self.failure or total.failure
        self.has_content = bool(total.blocks or total.stops or total.whole)
        self.tokens = total.usage or (total.whole.usage if total.whole is not None else None) or self.tokens

    def finish(self) -> list[bytes]:
        """Return the last bytes for the client."""
        chunks = [chunk for document in self._framing.finish() for chunk in self._fed(document)]
        has_failed = self.failure is not None
        rest = self._translation.finish(done=self._framing.is_done)
        # After a failure, a usual end would look like a whole answer; two interfaces have an end for a failed one.
        chunks += [chunk for chunk in rest if not has_failed or self._is_failed_end(chunk)]
        self._watch()
        total = self._translation.writer.sum
        self.losses = self._translation.losses
        if self.failure is None and (total.stops or total.whole is not None):
            self.answer = self._source.response_from_ir(total.answer()).value
        elif self.failure is None and not self._stream:
            self.failure = StreamFailed("the stream was cut", "stream_cut")
        if not self._stream:
            return [] if self.failure is not None else [encode(self._whole(total))]
        written = self._written(chunks)
        end = self._frames.end(has_failed=self.failure is not None)
        return [*written, *([end] if end else [])]

    def _is_failed_end(self, chunk: Any) -> bool:
        return self._front is AUGMENT or chunk.get("type") == FAILED_END

    def _whole(self, total: Any) -> Any:
        answer = total.answer()
        if not answer.id:
            answer = msgspec.structs.replace(answer, id=self._answer_id)
        written = dialect(self._front.dialect).response_from_ir(answer)
        self.losses = (*self.losses, *(loss for loss in written.losses if loss.is_material))
        self._name([written.value])
        return written.value

    def break_off(self, why: str) -> list[bytes]:
        """Return the end of an answer whose connection broke."""
        self.failure = StreamFailed(f"the service's answer broke off: {why}", "stream_cut")
        return self._written(self._translation.writer.write(self.failure))

    def _written(self, chunks: Sequence[Any]) -> list[bytes]:
        self._name(chunks)
        return [self._frames.write(chunks)] if self._stream and chunks else []

    def _name(self, chunks: Sequence[Any]) -> None:
        """Write the time into chunks, and for Responses our own id, as a service's id may be one of another client."""
        for chunk in chunks:
            date(chunk, self._now_s)
        if self._front is not RESPONSES:
            return
        for chunk in chunks:
            whole = chunk if chunk.get("object") == "response" else chunk.get("response")
            if isinstance(whole, dict):
                whole["id"] = self._answer_id
            self.response = response_of(chunk) or self.response


COUNTERS: Final[Mapping[str, str]] = {
    "openai_responses": "/responses/input_tokens", "anthropic": "/messages/count_tokens",
    "gemini_ai_studio": "countTokens",
}  # fmt: skip
"""Protocol of a service → path of its token counter, or the word after the colon (Gemini)."""

_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "openai_responses": ("model", "input", "instructions", "tools", "tool_choice", "reasoning", "text"),
    "anthropic": ("model", "messages", "system", "tools", "tool_choice", "thinking"),
}
"""Protocol → members that its token counter accepts; it refuses a request with any other."""


def counted_body(protocol: str, request: dict[str, Any], model: str) -> bytes:
    """Return the body that asks a service's token counter to count a translated request."""
    if protocol == "gemini_ai_studio":
        inner = {name: value for name, value in request.items() if name not in ("model", "stream")}
        return encode({"generateContentRequest": {"model": f"models/{model}", **inner}})
    return encode({name: request[name] for name in _COUNTED[protocol] if name in request})


def count_of(document: Any) -> int | None:
    """Return the number in a token counter's answer; None if it has none."""
    found = [document.get(name) for name in ("input_tokens", "totalTokens")] if isinstance(document, dict) else []
    return next((one for one in found if type(one) is int), None)


def usage_of(body: bytes) -> TokenCounts | None:
    """Return the counters of an answer with embeddings or a compacted conversation; None if it has none."""
    try:
        document = msgspec.json.decode(body)
    except framing.UNREADABLE:
        return None
    usage = document.get("usage") or document.get("usageMetadata") if isinstance(document, dict) else None
    if not isinstance(usage, dict):
        return None
    sent = [usage.get(name) for name in ("input_tokens", "prompt_tokens", "promptTokenCount")]
    made = [usage.get(name) for name in ("output_tokens", "completion_tokens", "candidatesTokenCount")]
    read, write = ([one for one in counts if type(one) is int and one >= 0] for counts in (sent, made))
    return TokenCounts(input=read[0], output=write[0] if write else 0) if read else None
