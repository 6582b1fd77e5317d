"""One exchange: a client's request goes to a service, and its answer comes back in the client's dialect.

If both speak the same dialect, bytes pass untouched but for the model's name and the counters that we ask for. Else
the request is translated, and the answer piece by piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import httpx
import msgspec

from backplane.dialects import StreamTranslation, check_losses, dialect, framing, unnamed_losses
from backplane.dialects.ir import (
    Loss,
    Message,
    PartDelta,
    PartStarted,
    Stopped,
    StreamEnded,
    StreamFailed,
    Text,
    TokenCounts,
    UsageSeen,
)
from backplane.dialects.pairing import paired
from backplane.errors import BackplaneError, TranslationError
from backplane.gateway.customs import CustomCalls, functions_only, lifted
from backplane.gateway.frames import Frames, encode
from backplane.gateway.fronts import RESPONSES, ClientCall, stream_of
from backplane.gateway.proofs import Proofs
from backplane.gateway.routes import Answering, ModelTarget
from backplane.gateway.service import Services
from backplane.upstream.arguments import sendable
from backplane.upstream.client import RefusedAnswer
from backplane.upstream.endpoint import PROTOCOLS, address, body_of, headers_of
from backplane.upstream.failure import UpstreamError, UpstreamFailure, stream_failure
from backplane.upstream.ladder import next_step, prepare

MOVABLE: Final = frozenset(
    {"backend_unavailable", "backend_timeout", "backend_rate_limited", "backend_auth_failed",
     "backend_model_not_found", "stream_closed", "dialect_mapping_failed"}
)  # fmt: skip
"""Codes of failures after which the next service is asked; a refusal of the request itself would be repeated there."""

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of an answer that is not streamed; images in base64 have some 30 MB."""

_PASSED_HEADERS: Final = (
    "content-type", "retry-after", "retry-after-ms", "x-should-retry", "request-id", "x-request-id",
    "openai-processing-ms", "openai-model",
)  # fmt: skip
_PASSED_PREFIXES: Final = ("anthropic-ratelimit-", "x-ratelimit-", "openai-ratelimit-")

OURS: Final = frozenset({"/model", "/stream", "/stream_options"})
"""Members of a request that the gateway sets itself, so that a change there is no loss."""

FAILED_END: Final = "response.failed"
"""The end that clients of Responses wait for after a failure."""

BILLING: Final = "x-anthropic-billing-header:"
"""Beginning of a system text that Claude Code changes with each request, for its own service."""

FOREIGN_MEMBERS: Final = ("api_base", "api_key", "base_url")
"""Members that some gateways let a client name the service with; none is ever heeded here."""

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
Headers = list[tuple[str, str]]


class ReplySink(Protocol):
    """The way back to the client."""

    has_content: bool
    """True once a piece of the answer was sent."""

    async def begin(self, status: int, headers: Headers) -> None: ...
    async def piece(self, data: bytes) -> None: ...
    async def whole(self, status: int, headers: Headers, body: bytes) -> None: ...


class ExchangeReport(msgspec.Struct, kw_only=True):
    """The result of an exchange."""

    target: Answering | None = None
    cost: int | None = None
    """Cost in millionths of a dollar, if it is known otherwise than by tokens."""
    tried: tuple[str, ...] = ()
    paid_attempts: int = 0
    """Attempts before the last one that a service may bill, though their answers failed."""
    tokens: TokenCounts | None = None
    losses: tuple[Loss, ...] = ()
    failure: str | None = None
    """Why the answer failed after its begin."""
    was_asked: bool = False
    """True once a service may bill the exchange."""


def allowed(headers: Mapping[str, str]) -> Headers:
    """Return the headers of a service's answer that a client gets."""
    found = [(name.lower(), value) for name, value in headers.items()]
    return [(name, value) for name, value in found if name in _PASSED_HEADERS or name.startswith(_PASSED_PREFIXES)]


class Exchange:
    """One request of a client and its answer.

    Args:
        document: the request; `body` is the same in bytes.
        headers: the client's, by names in lower case.
        is_strict: refuse a translation that loses something.
        owner: name of the client, whose proofs are its own.
    """

    def __init__(
        self, call: ClientCall, document: dict[str, Any], body: bytes, headers: Mapping[str, str], *,
        services: Services, proofs: Proofs, is_strict: bool, owner: str = "",
    ) -> None:  # fmt: skip
        self.call, self.document, self.body = call, document, body
        self.stream = stream_of(call, document)
        self.report = ExchangeReport()
        self._headers = {
            name: value for name, value in headers.items() if name.startswith(call.front.own_headers or ("\0",))
        }
        self._services, self._proofs, self._is_strict = services, proofs, is_strict
        self._customs: frozenset[str] = frozenset()
        self._owner = owner

    async def run(self, targets: Sequence[ModelTarget], reply: ReplySink) -> None:
        """Ask the services in order until one answers.

        Raises:
            UpstreamError: all of them failed before the first piece of an answer.
            TranslationError: the request has no meaning in a service's dialect.
        """
        check_members(self.document)
        for place, target in enumerate(targets):
            is_last = place == len(targets) - 1
            self.report.target = target
            try:
                await self._ask(target, reply)
                return
            except TranslationError:
                # Another service may speak a dialect that can say it.
                if reply.has_content or is_last:
                    raise
                self.report.tried += (f"{target.backend}: not translated",)
            except UpstreamError as error:
                if reply.has_content or is_last or error.failure.code not in MOVABLE:
                    if isinstance(error, RefusedAnswer) and target.dialect != self.call.front.dialect:
                        raise UpstreamError(error.failure, error.hint) from error
                    raise
                self.report.tried += (f"{target.backend}: {error.failure.code}",)
                self.report.paid_attempts += error.failure.may_cost

    async def _ask(self, target: ModelTarget, reply: ReplySink) -> None:
        """Ask one service; leave out what it refuses if we had added it, or if it is a rung of its ladder."""
        is_own = target.dialect == self.call.front.dialect
        request, losses = (self._own(target), ()) if is_own else self._translated(target)
        taken: tuple[str, ...] = ()
        first: UpstreamError | None = None
        while True:
            try:
                await self._once(target, request, losses, reply, is_own=is_own)
                return
            except UpstreamError as error:
                first, step = first or error, None
                if not reply.has_content and (not is_own or request is not self.document):
                    protocol = target.endpoint.protocol
                    step = next_step(protocol, request, error.failure, taken, tries_max=1)
                if step is None or step.rung is None:
                    # The first refusal is about the whole request, so it says more than one about the rest.
                    raise (first if first.code == error.code else error) from None
                request, taken, losses = step.request, (*taken, step.rung), (*losses, *step.losses)

    def _own(self, target: ModelTarget) -> dict[str, Any]:
        """Return the request for a service of the same dialect: the document itself if nothing has to change."""
        request = self.document
        if "model" in request and request["model"] != target.model:
            request = {**request, "model": target.model}
        if self._asks_usage(target):
            options = request.get("stream_options")
            options = options if isinstance(options, dict) else {}
            request = {**request, "stream_options": {**options, "include_usage": True}}
        return request

    def _asks_usage(self, target: ModelTarget) -> bool:
        """Return True if a stream has its counters only because we ask for them."""
        if not self.stream or target.endpoint.protocol != "openai_compatible" or self.call.front.name != "chat":
            return False
        options = self.document.get("stream_options")
        return not (isinstance(options, dict) and options.get("include_usage"))

    def _account(self, target: ModelTarget) -> str:
        """Return what proofs are bound to: a client, a service and the key that asks it."""
        return f"{self._owner} {target.endpoint.base_url} {hash(target.endpoint.key)}"

    def _translated(self, target: ModelTarget) -> tuple[dict[str, Any], tuple[Loss, ...]]:
        """Write the request in the dialect of a service, and name what that loses.

        Raises:
            TranslationError: its meaning would break, or something is lost and the gateway is strict.
        """
        source, writer = dialect(self.call.front.dialect), dialect(target.dialect)
        read = source.to_ir(lifted(self.document) if self.call.front is RESPONSES else self.document)
        plain, self._customs = functions_only(read.value)
        conversation, mended = sendable(plain, writer.limits.tool_name)
        protocol = target.endpoint.protocol
        repaired = paired(conversation, ids_optional=PROTOCOLS[protocol].ids_optional)
        options = {name: value for name, value in repaired.value.options.items() if name != "stream"}
        if self.stream and PROTOCOLS[protocol].path:
            options["stream"] = True
        changed = msgspec.structs.replace(
            repaired.value, model=target.model, options=options,
            messages=tuple(filter(None, map(without_billing, repaired.value.messages))),
        )  # fmt: skip
        written = writer.from_ir(changed)
        request, added = prepare(protocol, written.value, parallel=True)
        named = (*read.losses, *mended, *repaired.losses, *written.losses, *added)
        rest = unnamed_losses(self.document, request, source, writer, named)
        losses = tuple(loss for loss in (*named, *rest) if loss.is_material and loss.path not in OURS)
        if self._is_strict:
            check_losses(losses, "fail")
        return self._proofs.restore(self._account(target), target.dialect, request), losses

    async def _once(
        self, target: ModelTarget, request: dict[str, Any], losses: tuple[Loss, ...], reply: ReplySink, *, is_own: bool
    ) -> None:
        endpoint = target.endpoint
        url = address(endpoint, target.model, stream=self.stream)
        headers = headers_of(endpoint, stream=self.stream)
        if is_own:
            url, headers = with_query(url, self.call.query), {**headers, **self._headers}
            body = self.body if request is self.document else encode(body_of(endpoint, request, stream=self.stream))
        else:
            body = encode(body_of(endpoint, request, stream=self.stream))
        self.report.was_asked, self.report.losses = True, losses
        self.report.tokens, self.report.failure = None, None  # Of an attempt before.
        async with self._services.post(endpoint, url, headers, body) as response:
            reader = (
                Passing(target, response, hides_usage=self._asks_usage(target))
                if is_own
                else Translating(target, response, self.call, stream=self.stream, customs=self._customs)
            )
            try:
                await self._read(reader, response, reply)
            finally:
                self.report.tokens = reader.tokens
                self.report.losses = (*losses, *reader.losses)
        if isinstance(reader, Translating) and reader.answer is not None:
            self._proofs.keep(self._account(target), target.dialect, reader.answer)

    async def _read(self, reader: Passing | Translating, response: httpx.Response, reply: ReplySink) -> None:
        """Hand an answer on, from its first content; before that, a failure leaves room for the next service.

        Raises:
            UpstreamError: it failed before its first content, or passed bytes broke off.
        """
        head = [*reader.headers, ("x-backplane-losses", str(len(self.report.losses)))]
        held: list[bytes] = []
        try:
            async for data in response.aiter_bytes():
                held += reader.feed(data)
                self._check(reader, reply)
                if reader.has_content and self.stream:
                    held = await self._hand_on(held, head, reply)
        except httpx.HTTPError as error:
            if isinstance(reader, Passing) or not reply.has_content:
                raise
            held += reader.break_off(str(error) or type(error).__name__)
        held += reader.finish()
        self._check(reader, reply)
        if not reader.has_content:
            text = "the service ended its answer before it said anything"
            raise UpstreamError(UpstreamFailure(code="stream_closed", message=text, status=200, may_pass=True))
        if self.stream:
            await self._hand_on(held, head, reply)
        else:
            await reply.whole(200, head, b"".join(held))

    async def _hand_on(self, held: list[bytes], head: Headers, reply: ReplySink) -> list[bytes]:
        """Send what is held; return the empty rest."""
        if held:
            await reply.begin(200, head)
            await reply.piece(b"".join(held))
        return []

    def _check(self, reader: Passing | Translating, reply: ReplySink) -> None:
        """Note a failure inside the stream. Raises UpstreamError before the first content."""
        if reader.failure is None:
            return
        failed = stream_failure(reader.failure.raw or reader.failure.code, reader.failure.message, reader.secret)
        self.report.failure = failed.message
        if not reply.has_content:
            raise UpstreamError(failed)


def check_members(document: Mapping[str, Any]) -> None:
    """Refuse members that would name another service. Raises TranslationError `dialect_mapping_failed`."""
    found = [name for name in FOREIGN_MEMBERS if name in document]
    if found:
        raise TranslationError(
            "dialect_mapping_failed", f"the request has {found[0]!r}; only the gateway's configuration names services"
        )


def without_billing(message: Message) -> Message | None:
    """Return a message without the text that is only for its own vendor's books; None if nothing else is in it."""
    if message.role != "system":
        return message
    parts = tuple(part for part in message.parts if not (isinstance(part, Text) and part.text.startswith(BILLING)))
    if len(parts) == len(message.parts):
        return message
    return msgspec.structs.replace(message, parts=parts) if parts else None


def asked_tokens(document: Mapping[str, Any]) -> int | None:
    """Return the most tokens of the answer that a request asks for; None if it says none."""
    config = document.get("generationConfig")
    inner = config if isinstance(config, dict) else {}
    limits = [*map(document.get, _LIMITS), inner.get("maxOutputTokens")]
    counts = [document.get("n"), inner.get("candidateCount"), 1]
    most = max((one for one in limits if type(one) is int and one > 0), default=None)
    return None if most is None else most * max(one for one in counts if type(one) is int)


def with_query(url: str, query: str) -> str:
    """Return an address with `beta=true` of the client's query; nothing else of it goes to a service."""
    if "beta=true" not in query.split("&"):
        return url
    return f"{url}{'&' if '?' in url else '?'}beta=true"


class AnswerReader:
    """Reads a service's answer.

    Attributes:
        has_content: True once something of the answer itself has come.
        failure: the failure that the stream reports; None if there is none.
        tokens: the counters; None is unknown.
    """

    def __init__(self, target: ModelTarget, response: httpx.Response) -> None:
        self.secret = target.endpoint.key
        self.framing = framing.Detecting(is_named=target.dialect == "copilot")
        self.has_content = False
        self.failure: StreamFailed | None = None
        self.tokens: TokenCounts | None = None
        self.losses: tuple[Loss, ...] = ()
        self.size = 0

    def count(self, data: bytes) -> None:
        """Raise UpstreamError if the answer is too long."""
        self.size += len(data)
        if self.size > ANSWER_BYTES_MAX:
            text = f"the answer is over {ANSWER_BYTES_MAX} bytes"
            raise UpstreamError(UpstreamFailure(code="dialect_mapping_failed", message=text, status=200))

    def look(self, events: Sequence[Any]) -> None:
        for event in events:
            kind = type(event)
            if kind is UsageSeen:
                self.tokens = event.usage
            elif kind is StreamFailed:
                self.failure = self.failure or event
            elif kind is StreamEnded and event.answer is not None:
                self.tokens = event.answer.usage or self.tokens
                self.has_content = True
            elif kind in (PartStarted, PartDelta, Stopped):
                self.has_content = True


class Passing(AnswerReader):
    """Hands the bytes of an answer on, and reads its counters.

    Args:
        hides_usage: leave out the counters that only we asked for.
    """

    def __init__(self, target: ModelTarget, response: httpx.Response, *, hides_usage: bool) -> None:
        super().__init__(target, response)
        self.headers = allowed(response.headers)
        self._reader: Any = dialect(target.dialect).StreamReader()
        self._hides_usage = hides_usage and "event-stream" in response.headers.get("content-type", "")
        self._is_readable = True

    def feed(self, data: bytes) -> list[bytes]:
        self.count(data)
        documents = self._read(lambda: self.framing.feed(data))
        return self._shown(documents) if self._hides_usage else [data]

    def finish(self) -> list[bytes]:
        documents = self._read(self.framing.finish)
        self._guarded(lambda: self.look(self._reader.finish(done=self.framing.is_done)))
        if self.size and not self._is_readable:
            self.has_content = True  # What we cannot read is for the client to judge.
        out = self._shown(documents) if self._hides_usage else []
        return [*out, framing.done_bytes()] if self._hides_usage and self.framing.is_done else out

    def break_off(self, _why: str) -> list[bytes]:
        return []

    def _read(self, step: Any) -> list[Any]:
        found: list[Any] = []

        def work() -> None:
            found.extend(step())
            for document in found:
                self.look(self._reader.read(document))

        self._guarded(work)
        return found

    def _guarded(self, step: Any) -> None:
        try:
            step()
        except BackplaneError:  # A wrong answer is passed on, too; its counters stay unknown.
            self._is_readable, self.tokens = False, None

    def _shown(self, documents: list[Any]) -> list[bytes]:
        out = []
        for document in documents:
            if isinstance(document, dict) and "usage" in document:
                if document.get("choices") == []:
                    continue
                document = {name: value for name, value in document.items() if name != "usage"}
            out.append(framing.sse_bytes(document))
        return out


class Translating(AnswerReader):
    """Translates an answer.

    Args:
        stream: write pieces; else the whole answer at its end.
    """

    def __init__(
        self, target: ModelTarget, response: httpx.Response, call: ClientCall, *, stream: bool, customs: frozenset[str]
    ) -> None:
        super().__init__(target, response)
        self._stream = stream
        self._source, self._target = dialect(target.dialect), dialect(call.front.dialect)
        self._translation = StreamTranslation(target.dialect, call.front.dialect)
        self._translation.reader.mends = True  # The service may be a gateway that writes its dialect wrongly.
        if customs:
            self._translation.reader = CustomCalls(self._translation.reader, customs)
        self._frames = Frames(self._target, as_array=call.as_array)
        self.answer: Any = None
        """The whole answer in the service's dialect; None until it is complete."""
        kind = self._frames.kind if stream else "application/json"
        self.headers: Headers = [("content-type", kind), *_without_type(allowed(response.headers))]

    def feed(self, data: bytes) -> list[bytes]:
        self.count(data)
        return self._written([chunk for document in self.framing.feed(data) for chunk in self._fed(document)])

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
        chunks = [chunk for document in self.framing.finish() for chunk in self._fed(document)]
        has_failed = self.failure is not None
        rest = self._translation.finish(done=self.framing.is_done)
        # Behind a failure, an end would look like a whole answer; only one interface has a failed end of its own.
        chunks += [chunk for chunk in rest if not has_failed or chunk.get("type") == FAILED_END]
        self._watch()
        total = self._translation.writer.sum
        self.losses = self._translation.losses
        if self.failure is None and (total.stops or total.whole is not None):
            self.answer = self._source.response_from_ir(total.answer()).value
        elif self.failure is None and not self._stream:
            self.failure = StreamFailed("the stream was cut", "stream_cut")
        if not self._stream:
            return [] if self.failure is not None else [encode(self._whole(total))]
        end = self._frames.end(has_failed=self.failure is not None)
        return [*self._written(chunks), *([end] if end else [])]

    def _whole(self, total: Any) -> Any:
        written = self._target.response_from_ir(total.answer())
        self.losses = (*self.losses, *(loss for loss in written.losses if loss.is_material))
        return written.value

    def break_off(self, why: str) -> list[bytes]:
        self.failure = StreamFailed(f"the service's answer broke off: {why}", "stream_cut")
        return self._written(self._translation.writer.write(self.failure))

    def _written(self, chunks: Sequence[Any]) -> list[bytes]:
        return [self._frames.write(chunks)] if self._stream and chunks else []


def _without_type(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name != "content-type"]
