"""One exchange: a client's request goes to a service, and its answer comes back in the client's dialect.

If both speak the same dialect, the bytes pass unchanged, except for the model's name, the counters that the gateway
asks for, and a conversation that the service does not know. Else request and answer are translated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import httpx
import msgspec

from backplane.dialects import check_losses, framing
from backplane.dialects.ir import Loss, TokenCounts
from backplane.errors import TranslationError
from backplane.gateway.answers import (
    COUNTERS,
    Headers,
    Passing,
    Translating,
    allowed,
    count_of,
    counted_body,
    usage_of,
)
from backplane.gateway.choice import estimated_tokens, now_ms
from backplane.gateway.frames import encode
from backplane.gateway.fronts import GEMINI, RESPONSES, ClientCall, stream_of
from backplane.gateway.kept import KeptResponse, Responses, items_of, keep_response
from backplane.gateway.proofs import Proofs
from backplane.gateway.routes import Answering, ModelTarget
from backplane.gateway.service import Services
from backplane.gateway.translation import Route, Translations
from backplane.sandbox.http import Refused
from backplane.upstream.client import RefusedAnswer
from backplane.upstream.endpoint import address, body_of, headers_of
from backplane.upstream.failure import UpstreamError, UpstreamFailure, stream_failure
from backplane.upstream.ladder import next_step
from backplane.upstream.meter import asked_tokens

MOVABLE: Final = frozenset(
    {"backend_unavailable", "backend_timeout", "backend_rate_limited", "backend_auth_failed",
     "backend_model_not_found", "stream_closed", "dialect_mapping_failed"}
)  # fmt: skip
"""Codes of failures after which the next service is asked; with any other code, the next one would fail, too."""

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of an answer, streamed or not; a longer one fails. One with images in base64 has about 30 MB."""

SHARED_MEMBERS: Final = ("conversation", "cachedContent", "cached_content")
"""Members that name something which the service keeps for its key; with several clients, it may be another's."""

_HIDDEN_NAMES: Final = re.compile(rb"\\u00[4-7]")
"""Letters that are escaped without need: a member's name may be hidden in them."""

FOREIGN_MEMBERS: Final = ("api_base", "api_key", "base_url")
"""Members by which clients of some gateways name the service; a request with one of them is refused."""

ACCOUNT_HEADERS: Final = frozenset({"openai-organization", "openai-project"})
"""Headers that name an account to be billed; they are not sent on, as only the gateway's configuration names one."""

PASSED: Final[Mapping[str, tuple[str, ...]]] = {
    "/embeddings": ("openai_compatible", "openai_responses"),
    "/responses/compact": ("openai_responses",),
    "embedContent": ("gemini_ai_studio",),
    "batchEmbedContents": ("gemini_ai_studio",),
}
"""Path (or word after the colon) of a request that cannot be translated → protocols of services that answer it."""

NO_COUNTER: Final = frozenset({404, 405, 501})
"""Statuses by which a service says that it cannot count tokens."""


_WRAPPED: Final = "generateContentRequest"
"""Member of a request to Gemini's token counter that may contain the request to count."""


class ReplySink(Protocol):
    """Takes the answer for the client."""

    has_content: bool
    """True once a piece of the answer was sent."""

    def expect(self, headers: Headers) -> None:
        """Set the headers of a stream, so that a keep-alive can send them before the first piece."""
        ...

    async def begin(self, status: int, headers: Headers) -> None: ...
    async def piece(self, data: bytes) -> None: ...
    async def whole(self, status: int, headers: Headers, body: bytes) -> None: ...


class ExchangeReport(msgspec.Struct, kw_only=True):
    """The result of an exchange; it is filled while the exchange goes on."""

    target: Answering | None = None
    cost: int | None = None
    """Cost in millionths of a dollar, if an agent's run has measured it; None computes it from the tokens."""
    considered: tuple[str, ...] = ()
    """The route's services in the order of the choice, each with the facts that decided; empty without a choice."""
    asked_ns: int | None = None
    """Time at which `target` was asked, in nanoseconds of the monotonic clock; None if none was asked."""
    first_ns: int | None = None
    """Time of the answer's first piece, by the same clock; None if none has come."""
    tried: tuple[str, ...] = ()
    """Services that failed before the target, each with the code of its failure."""
    paid_attempts: int = 0
    """Failed attempts before the last one that their services may bill all the same."""
    tokens: TokenCounts | None = None
    """Counters of the answer; None is unknown."""
    losses: tuple[Loss, ...] = ()
    failure: str | None = None
    """Message of a failure inside the answer; None if it has none."""
    was_asked: bool = False
    """True once a service may bill the exchange."""


class Work(Protocol):
    """A request that a service or an agent answers."""

    call: ClientCall
    stream: bool
    size: int
    """Bytes of the request and of the conversation that it continues."""
    longest: int | None
    """Maximum tokens of the answer; None if the request does not limit them."""
    report: ExchangeReport

    async def run(self, targets: Sequence[Any], reply: ReplySink) -> None: ...


class Shared(NamedTuple):
    """The state that all exchanges of one server share."""

    services: Services
    proofs: Proofs
    responses: Responses
    translations: Translations
    is_strict: bool
    """True if a request is refused when its translation loses something; one that only counts tokens is not."""


class Exchange:
    """One request of a client and its answer.

    Args:
        document: the decoded request; `body` has its bytes.
        headers: the request's headers, by names in lower case.
        owner: name of the client; kept proofs and answers are found only by their own client.
        id: id of the exchange.

    Raises:
        Refused: the request continues an answer that is not kept for this client.
        TranslationError: the request has a member that names a service (`FOREIGN_MEMBERS`).
    """

    def __init__(
        self, call: ClientCall, document: dict[str, Any], body: bytes, headers: Mapping[str, str], *,
        shared: Shared, owner: str, id: str,
    ) -> None:  # fmt: skip
        check_members(document, is_shared=bool(owner))
        self.call, self.document = call, document
        self.stream = stream_of(call, document)
        self.report = ExchangeReport()
        self._body = body if names_one_model(body) else encode(document)
        self._shared, self._owner, self._id = shared, owner, id
        self._headers = {
            name: value
            for name, value in headers.items()
            if name.startswith(call.front.own_headers or ("\0",)) and name not in ACCOUNT_HEADERS
        }
        self._customs: frozenset[str] = frozenset()
        self._previous = self._found_previous()
        self.size = len(body) + (len(self._previous.items) if self._previous is not None else 0)
        is_embedding = call.action == "pass" and "mbed" in call.other
        self.longest = 0 if is_embedding else asked_tokens(document)

    def _found_previous(self) -> KeptResponse | None:
        id = self.document.get("previous_response_id") if self.call.front is RESPONSES else None
        if id is None:
            return None
        found = self._shared.responses.find((self._owner, str(id)))
        if found is None:
            raise unknown_response(str(id))
        return found

    async def run(self, targets: Sequence[ModelTarget], reply: ReplySink) -> None:
        """Ask the services in order until one answers.

        Raises:
            UpstreamError: the last one that was asked failed; part of its answer may have been sent.
            TranslationError: the request cannot be written in the dialect of the last service.
        """
        ask = {"count": self._count, "pass": self._pass}.get(self.call.action, self._ask)
        for place, target in enumerate(targets):
            is_last = place == len(targets) - 1
            self.report.target, self.report.asked_ns = target, time.monotonic_ns()
            try:
                await ask(target, reply)
            except TranslationError:
                # The next service may speak a dialect in which the request can be written.
                if reply.has_content or is_last:
                    raise
                self.report.tried += (f"{target.backend}: not translated",)
            except UpstreamError as error:
                self._note(target, error.failure)
                if reply.has_content or is_last or error.failure.code not in MOVABLE:
                    if isinstance(error, RefusedAnswer) and not self._is_own(target):
                        raise UpstreamError(error.failure, error.hint) from error
                    raise
                self.report.tried += (f"{target.backend}: {error.failure.code}",)
                self.report.paid_attempts += error.failure.may_cost
            else:
                broken = UpstreamFailure(code="stream_closed", message="") if self.report.failure is not None else None
                self._note(target, broken)
                return

    def _note(self, target: ModelTarget, failure: UpstreamFailure | None) -> None:
        """Record for later choices the time that a service took, and its failure."""
        if self.call.action == "count":
            return
        has_failed, asked_ns = target.standing.note(failure, now_ms()), self.report.asked_ns
        if self.call.action == "generate" and asked_ns is not None and (failure is None or has_failed):
            ms = ((self.report.first_ns or time.monotonic_ns()) - asked_ns) // 1_000_000
            target.standing.times(stream=self.stream).add(now_ms(), ms, is_complete=not has_failed)

    # The request for a service

    def _is_own(self, target: ModelTarget) -> bool:
        return target.dialect == self.call.front.dialect

    def _account(self, target: ModelTarget) -> str:
        """Return the key of kept proofs and answers: the client, the service, and a hash of the key sent to it."""
        return f"{self._owner} {target.endpoint.base_url} {hash(target.endpoint.key)}"

    def _own(self, target: ModelTarget) -> dict[str, Any]:
        """Return the request for a service of the client's dialect: the document itself if nothing has to change."""
        previous = self._previous
        is_known = previous is None or (previous.endpoint is not None and previous.account == self._account(target))
        request = self.document if is_known else self._continued(target)
        if "model" in request and request["model"] != target.model:
            request = {**request, "model": target.model}
        if self._asks_usage(target):
            options = request.get("stream_options")
            options = options if isinstance(options, dict) else {}
            request = {**request, "stream_options": {**options, "include_usage": True}}
        return request

    def _continued(self, target: ModelTarget) -> dict[str, Any]:
        """Return the request with the conversation that it continues put before its input."""
        if self._previous is None:
            return self.document
        rest = {name: value for name, value in self.document.items() if name != "previous_response_id"}
        before = self._previous.conversation(self._account(target), is_own=self._is_own(target))
        return {**rest, "input": [*before, *items_of(self.document.get("input"))]}

    def _asks_usage(self, target: ModelTarget) -> bool:
        """Return True if the gateway has to ask for the counters of a stream, because the client does not."""
        if not self.stream or target.endpoint.protocol != "openai_compatible" or self.call.front.name != "chat":
            return False
        options = self.document.get("stream_options")
        return not (isinstance(options, dict) and options.get("include_usage"))

    def _translated(self, target: ModelTarget) -> tuple[dict[str, Any], tuple[Loss, ...]]:
        """Return the request in the dialect of a service, and the losses of the translation.

        Raises:
            TranslationError: the translation would change the request's meaning, or the gateway is strict and
                something is lost.
        """
        document = self._continued(target)
        route = Route(
            front=self.call.front, dialect=target.dialect, protocol=target.endpoint.protocol, model=target.model,
            stream=self.stream,
        )  # fmt: skip
        account = self._account(target)
        written = self._shared.translations.write(route, account, document.get(_WRAPPED, document))
        self._customs = written.customs
        if self._shared.is_strict and self.call.action == "generate":
            check_losses(written.losses, "fail")
        return self._shared.proofs.restore(account, target.dialect, written.request), written.losses

    # The three ways to ask

    async def _ask(self, target: ModelTarget, reply: ReplySink) -> None:
        """Ask one service; if it refuses, ask again with the changes that the ladder of its protocol allows.

        A request that passes unchanged is sent once only.
        """
        is_own = self._is_own(target)
        request, losses = (self._own(target), ()) if is_own else self._translated(target)
        taken: tuple[str, ...] = ()
        first: UpstreamError | None = None
        while True:
            try:
                await self._once(target, request, losses, reply)
                return
            except UpstreamError as error:
                first, step = first or error, None
                if not reply.has_content and (not is_own or request is not self.document):
                    protocol = target.endpoint.protocol
                    step = next_step(protocol, request, error.failure, taken, tries_max=1)
                if step is None or step.rung is None:
                    # The first refusal is about the whole request, so it says more than one of a changed request.
                    raise (first if first.code == error.code else error) from None
                request, taken, losses = step.request, (*taken, step.rung), (*losses, *step.losses)

    async def _pass(self, target: ModelTarget, reply: ReplySink) -> None:
        """Ask one service for something that cannot be translated, such as embeddings; its answer is sent whole."""
        other, backend = self.call.other, target.backend
        if target.endpoint.protocol not in PASSED[other]:
            raise TranslationError(
                "dialect_mapping_failed", f"{other} cannot be translated, and {backend!r} speaks "
                f"{target.endpoint.protocol}",
                hint=f"route the model to a backend with protocol = {' or '.join(map(repr, PASSED[other]))}",
            )  # fmt: skip
        self.report.was_asked, self.report.tokens = True, None
        body, headers = await self._fetch(target, self._renamed(target))
        self.report.tokens = usage_of(body)
        await reply.whole(200, [*headers, ("x-backplane-losses", "0")], body)

    def _renamed(self, target: ModelTarget) -> bytes:
        """Return the body with the service's name of the model; the same bytes if the client's name is equal."""
        if self.call.front is not GEMINI:
            request = self._own(target)
            return self._body if request is self.document else encode(request)
        name, rows = f"models/{target.model}", self.document.get("requests")
        renamed = {**self.document, **({"model": name} if "model" in self.document else {})}
        if isinstance(rows, list):
            renamed["requests"] = [{**row, "model": name} if isinstance(row, dict) else row for row in rows]
        if isinstance(inner := self.document.get(_WRAPPED), dict):
            renamed[_WRAPPED] = {**inner, "model": name}
        return self._body if renamed == self.document else encode(renamed)

    async def _count(self, target: ModelTarget, reply: ReplySink) -> None:
        """Ask the service how many tokens the request has; if it cannot count, estimate them by its size."""
        protocol, is_own = target.endpoint.protocol, self._is_own(target)
        headers: Headers = []
        tokens: int | None = None
        if protocol in COUNTERS:
            try:
                if is_own:
                    body = self._renamed(target)
                else:
                    body = counted_body(protocol, self._translated(target)[0], target.model)
                answer, headers = await self._fetch(target, body, COUNTERS[protocol])
                if is_own:
                    await reply.whole(200, headers, answer)
                    return
                tokens = count_of(msgspec.json.decode(answer))
            except RefusedAnswer as error:
                if error.failure.status not in NO_COUNTER:
                    raise
            except framing.UNREADABLE:
                tokens = None
        if tokens is None:
            tokens, headers = estimated_tokens(self.size), [("x-backplane-estimate", "1")]
        name = "totalTokens" if self.call.front is GEMINI else "input_tokens"
        kind = {"object": "response.input_tokens"} if self.call.front is RESPONSES else {}
        rest = [(key, value) for key, value in headers if key != "content-type"]
        await reply.whole(200, rest, encode({name: tokens, **kind}))

    async def _fetch(self, target: ModelTarget, body: bytes, other: str = "") -> tuple[bytes, Headers]:
        """Send a body and return the whole answer and the headers for the client. Raises UpstreamError."""
        endpoint = target.endpoint
        url = address(endpoint, target.model, stream=False, other=other or self.call.other)
        headers = headers_of(endpoint, stream=False)
        if self._is_own(target) or self.call.action == "pass":
            url, headers = with_query(url, self.call.query), {**headers, **self._headers}
        async with self._shared.services.send(endpoint, url, headers, body) as response:
            return await whole_of(response), allowed(response.headers)

    async def _once(
        self, target: ModelTarget, request: dict[str, Any], losses: tuple[Loss, ...], reply: ReplySink
    ) -> None:
        endpoint, is_own = target.endpoint, self._is_own(target)
        url = address(endpoint, target.model, stream=self.stream)
        headers = headers_of(endpoint, stream=self.stream)
        if is_own:
            url, headers = with_query(url, self.call.query), {**headers, **self._headers}
        is_same = is_own and request is self.document
        body = self._body if is_same else encode(body_of(endpoint, request, stream=self.stream))
        self.report.was_asked, self.report.losses = True, losses
        self.report.tokens, self.report.failure = None, None  # They may be of an earlier attempt.
        reply.expect([("content-type", self.call.kind), ("x-backplane-losses", str(len(losses)))])
        async with self._shared.services.send(endpoint, url, headers, body) as response:
            reader = (
                Passing(target, response, self.call, hides_usage=self._asks_usage(target))
                if is_own
                else Translating(
                    target, response, self.call, self.document, stream=self.stream, customs=self._customs, id=self._id
                )
            )
            try:
                await self._read(target, reader, response, reply)
            finally:
                self.report.tokens = reader.tokens
                self.report.losses = (*losses, *reader.losses)
        if isinstance(reader, Translating) and reader.answer is not None:
            self._shared.proofs.keep(self._account(target), target.dialect, reader.answer)

    def _keep(self, target: ModelTarget, reader: Passing | Translating) -> None:
        """Keep a Responses answer, so that a later request can continue it, unless the client set `store` to false."""
        answer = reader.response
        if answer is None or reader.failure is not None or self.document.get("store") is False:
            return
        if isinstance(answer.get("id"), str):  # Without one, no request can name it.
            endpoint = target.endpoint if self._is_own(target) else None
            asked = self._continued(target).get("input")
            keep_response(self._shared.responses, self._owner, asked, answer, self._account(target), endpoint)

    # The answer

    async def _read(
        self, target: ModelTarget, reader: Passing | Translating, response: httpx.Response, reply: ReplySink
    ) -> None:
        """Read an answer and send it to the client, a stream from its first content on.

        Raises:
            UpstreamError: the answer failed before its first content, so the next service can be asked.
            httpx.HTTPError: the connection broke, and the answer was not translated or nothing of it was sent.
        """
        head = [*reader.headers, ("x-backplane-losses", str(len(self.report.losses)))]
        held: list[bytes] = []
        size = 0
        try:
            async for data in response.aiter_bytes():
                size += len(data)
                check_size(size)
                held += reader.feed(data)
                self._check(target, reader, reply)
                if reader.has_content and self.stream:
                    held = await self._hand_on(held, head, reply)
        except httpx.HTTPError as error:
            if isinstance(reader, Passing) or not reply.has_content:
                raise
            held += reader.break_off(str(error) or type(error).__name__)
        held += reader.finish()
        self._check(target, reader, reply)
        if not reader.has_content:
            text = "the service ended its answer before it said anything"
            raise UpstreamError(UpstreamFailure(code="stream_closed", message=text, status=200, may_pass=True))
        self._keep(target, reader)  # Before the last piece: the client may continue at once.
        if self.stream:
            await self._hand_on(held, head, reply)
        else:
            await reply.whole(200, head, b"".join(held))

    async def _hand_on(self, held: list[bytes], head: Headers, reply: ReplySink) -> list[bytes]:
        """Send the collected pieces, if there are any; return an empty list for the next ones."""
        if held:
            self.report.first_ns = self.report.first_ns or time.monotonic_ns()
            await reply.begin(200, head)
            await reply.piece(b"".join(held))
        return []

    def _check(self, target: ModelTarget, reader: Passing | Translating, reply: ReplySink) -> None:
        """Report a failure inside the answer; if nothing was sent yet, raise it as UpstreamError."""
        if reader.failure is None:
            return
        failed = stream_failure(reader.failure.raw or reader.failure.code, reader.failure.message, target.endpoint.key)
        self.report.failure = failed.message
        if not reply.has_content:
            raise UpstreamError(failed)


async def whole_of(response: httpx.Response) -> bytes:
    """Return the whole body of an answer. Raises UpstreamError if it is too long."""
    parts: list[bytes] = []
    size = 0
    async for data in response.aiter_bytes():
        parts.append(data)
        size += len(data)
        check_size(size)
    return b"".join(parts)


def check_size(size: int) -> None:
    """Raise UpstreamError if an answer is longer than `ANSWER_BYTES_MAX`."""
    if size > ANSWER_BYTES_MAX:
        text = f"the answer is over {ANSWER_BYTES_MAX} bytes"
        raise UpstreamError(UpstreamFailure(code="dialect_mapping_failed", message=text, status=200))


def unknown_response(id: str) -> Refused:
    """Return the error for an answer that is not kept for this client."""
    why = "it was never this key's, was not stored, or is older than what the gateway keeps in memory"
    return Refused(404, f"Response with id {id[:100]!r} not found: {why}; send the whole conversation as input")


def names_one_model(body: bytes) -> bool:
    """Return True if no reader of a request's bytes can find another model in them than we did.

    Of two members with one name some services take the first, and we take the last.
    """
    return body.count(b'"model"') < 2 and _HIDDEN_NAMES.search(body) is None


def check_members(document: Mapping[str, Any], *, is_shared: bool) -> None:
    """Raise TranslationError (`dialect_mapping_failed`) if a request names a service, or what others may keep there.

    Args:
        is_shared: several clients may use one key of a service.
    """
    kept = [name for name in SHARED_MEMBERS if is_shared and document.get(name) is not None]
    if kept:
        fact = f"the request has {kept[0]!r}, which the service keeps for all clients of this gateway together"
        raise TranslationError("dialect_mapping_failed", f"{fact}; send the whole conversation")
    spelt = [name for name in document if name != "model" and name.lower() == "model"]
    if spelt:
        raise TranslationError(
            "dialect_mapping_failed",
            f"the request has {spelt[0]!r}, which some services read as its model; write 'model'",
        )
    found = [name for name in FOREIGN_MEMBERS if name in document]
    if found:
        raise TranslationError(
            "dialect_mapping_failed", f"the request has {found[0]!r}; only the gateway's configuration names services"
        )


def with_query(url: str, query: str) -> str:
    """Return an address, with `beta=true` if the client's query has it; nothing else of the query goes to a service."""
    if "beta=true" not in query.split("&"):
        return url
    return f"{url}{'&' if '?' in url else '?'}beta=true"
