"""One turn of a model: a neutral conversation goes to an endpoint, events come while it answers, a message at the end.

The way: calls paired with results, the dialect's request, the ladder where the service refuses it, the dialect's
stream. Running tools and asking again is a host's affair.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import anyio
import msgspec

from backplane.contract import events
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.dialects import dialect, end_events, loss_event
from backplane.dialects.ir import (
    Answer,
    Candidate,
    Conversation,
    Loss,
    LossKind,
    Message,
    Part,
    Stop,
    Text,
    TokenCounts,
    ToolUse,
)
from backplane.dialects.limits import ServerLimits
from backplane.dialects.pairing import paired
from backplane.dialects.schemas import accepted_tool
from backplane.upstream.arguments import mended, sendable
from backplane.upstream.client import ReplyStream, Upstream
from backplane.upstream.endpoint import PROTOCOLS
from backplane.upstream.failure import UpstreamError, UpstreamFailure, stream_failure
from backplane.upstream.ladder import WITHOUT_TOOLS, LadderStep, climb, next_step, prepare

Hear = Callable[[AgentEvent], Awaitable[None]]
Now = Callable[[], str]

PAUSE_MS_MAX: Final = 7 * 86_400_000
"""Longest pause of a service that is believed: quotas are counted by the week at most."""

LOSSES_NAMED_MAX: Final = 1_000
"""Different losses that one model's turns may name; a conversation of ten thousand messages repeats a few kinds."""

INPUT_DEPTH_MAX: Final = 100
"""Levels of a call's input that is handed on as it is; a line has 128, and ours lie around it."""

LISTS: Final = ("/messages", "/contents", "/input", "/tools")
"""Where the same thing is lost many times, it is said once."""

OUTPUT: Final = (events.AssistantDelta, events.AssistantMessage, events.ToolCall)
"""What a reader may have acted on: after one of these nothing is tried again."""

INNER: Final = (events.RunStarted, events.RunCompleted, events.Failed)
"""What a dialect says of a whole stream; here it is one turn of a run, and a failure is raised."""

UNLIMITED: Final = frozenset({"no-defaults"})
"""Rungs that take the limit of the answer's length out of a request."""

MENDED: Final = "arguments of a call were no JSON object and were read as the one that they say"
TWICE: Final = "pieces of a call's arguments came twice and were read once"
NO_END: Final = "the service ended its answer without saying why"


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answered."""

    message: Message
    """Goes back into the conversation as it is: it keeps what only its vendor can read."""
    stop: Stop
    stop_raw: str | None = None
    usage: TokenCounts | None = None
    """None when the service did not say."""
    model: str | None = None
    """As the service named it."""
    losses: tuple[Loss, ...] = ()
    """All of this turn, also those that were named before."""
    tries: int = 1

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.message.parts if isinstance(part, Text))

    @property
    def proof(self) -> str | None:
        """The vendor's proof on the words; the last one, as it stands for all before it."""
        proofs = [part.signature for part in self.message.parts if isinstance(part, Text) and part.signature]
        return proofs[-1] if proofs else None

    @property
    def calls(self) -> tuple[ToolUse, ...]:
        """The tools to run, in order; the input is a str where the model wrote no JSON object."""
        return tuple(part for part in self.message.parts if isinstance(part, ToolUse))


class ModelClient:
    """An endpoint that answers conversations, one turn at a time.

    It remembers over the turns what the service refused, and says each loss once.

    Args:
        parallel: let the model call several tools in one turn.
        stream: ask for streams; whatever comes is read.
        dialect: of the service's documents; None is the protocol's own.
    """

    def __init__(self, upstream: Upstream, *, parallel: bool = False, stream: bool = True,
                 dialect: str | None = None) -> None:  # fmt: skip
        self.upstream = upstream
        self.parallel = parallel
        self.stream = stream
        self.protocol = upstream.endpoint.protocol
        self.dialect = dialect or PROTOCOLS[self.protocol].dialect
        self.keeps_limit = False
        """The limit of the answer's length is never taken out of a request: a budget was reserved by it."""
        self.taken: tuple[str, ...] = ()
        """Rungs that were needed, for all turns that follow."""
        self._named: set[tuple[str, str, str]] = set()

    @property
    def has_lost_tools(self) -> bool:
        """Return True if the service took no tools, so none is offered to the model any more."""
        return WITHOUT_TOOLS in self.taken

    async def ask(self, conversation: Conversation, hear: Hear, now: Now) -> ModelTurn:
        """Put one conversation to the model and give its answer.

        Args:
            hear: is given each event as it comes; a slow one slows the stream.
            now: the time of an event.

        Raises:
            UpstreamError: the service failed and nothing is left to try; `turn` has what had come until then.
            TranslationError: the conversation cannot be said in this dialect.
        """
        request, losses = self._request(conversation)
        for loss in losses:
            await self._tell(loss, hear, now)
        known = {part.id for message in conversation.messages for part in message.parts if isinstance(part, ToolUse)}
        texts = frozenset(tool.name for tool in conversation.tools if tool.kind == "custom")
        return await self._climb(request, losses, lambda: _Attempt(self.dialect, known, texts, hear, now), hear, now)

    def request_bytes(self, conversation: Conversation) -> int:
        """The size of the request that a conversation makes. Raises TranslationError."""
        return len(msgspec.json.encode(self._request(conversation)[0]))

    def _request(self, conversation: Conversation) -> tuple[dict[str, Any], tuple[Loss, ...]]:
        limits = getattr(dialect(self.dialect), "limits", ServerLimits())
        conversation, mended_losses = sendable(conversation, limits.tool_name)
        tools = [
            accepted_tool(tool, self.dialect, self.dialect, f"/tools/{place}")
            for place, tool in enumerate(conversation.tools)
        ]
        mended_losses += tuple(loss for _, losses in tools for loss in losses)
        conversation = msgspec.structs.replace(conversation, tools=tuple(tool for tool, _ in tools))
        repaired = paired(conversation, ids_optional=PROTOCOLS[self.protocol].ids_optional)
        options = dict(repaired.value.options)
        if self.stream and PROTOCOLS[self.protocol].path:
            options["stream"] = True
        written = dialect(self.dialect).from_ir(msgspec.structs.replace(repaired.value, options=options))
        request, added = prepare(self.protocol, written.value, parallel=self.parallel)
        losses = (*mended_losses, *repaired.losses, *written.losses, *added)
        return climb(self.protocol, request, self.taken), tuple(loss for loss in losses if loss.is_material)

    async def _climb(
        self, request: dict[str, Any], losses: tuple[Loss, ...], begin: Callable[[], _Attempt], hear: Hear, now: Now
    ) -> ModelTurn:
        """Try, and go down the ladder while there are rungs; each is taken once, and repeats are counted."""
        endpoint = self.upstream.endpoint
        taken, tries, total = self.taken, 1, 1
        first: UpstreamError | None = None
        while True:
            attempt = begin()
            try:
                await self._once(request, attempt)
            except UpstreamError as error:
                first, failure = first or error, error.failure
                if attempt.handed_on:
                    await self._tell_pause(failure, hear, now)
                    error.turn = attempt.turn(losses, total)
                    raise
                step = next_step(
                    self.protocol, request, failure, taken,
                    tries=tries, tries_max=endpoint.tries_max, backoff_ms=endpoint.backoff_ms,
                )  # fmt: skip
                if step is None or (self.keeps_limit and step.rung in UNLIMITED):
                    await self._tell_pause(failure, hear, now)
                    # What the service said of the whole request tells more than what it said of the rest of it.
                    raise (first if first.code == error.code else error) from None
            else:
                self.taken = taken
                for loss in attempt.losses():
                    await self._tell(loss, hear, now)
                return attempt.turn(losses, total)
            await self._say(step, failure, total, hear, now)
            losses += step.losses
            request, total = step.request, total + 1
            taken, tries = ((*taken, step.rung), 1) if step.rung is not None else (taken, tries + 1)

    async def _once(self, request: dict[str, Any], attempt: _Attempt) -> None:
        stream = self.stream or request.get("stream") is True
        async with self.upstream.stream(request, stream=stream) as reply:
            await attempt.read(reply, self.upstream.endpoint.key)

    async def _say(self, step: LadderStep, failure: UpstreamFailure, number: int, hear: Hear, now: Now) -> None:
        for loss in step.losses:
            await self._tell(loss, hear, now)
        how = f"again with {step.rung}" if step.rung is not None else f"again in {step.wait_s:g} s"
        body = {
            "attempt": number, "code": failure.code, "provider_code": failure.provider_code,
            "status": failure.status, "step": step.rung, "wait_ms": round(step.wait_s * 1000),
        }  # fmt: skip
        await hear(events.carry("retry", body, ts=now(), message=f"{failure.message}; {how}"))
        if step.wait_s:
            await anyio.sleep(step.wait_s)

    async def _tell_pause(self, failure: UpstreamFailure, hear: Hear, now: Now) -> None:
        """Tell what a service asked for that is not asked again here: the router reads it in the receipt."""
        if failure.retry_after_s is None:
            return
        pause_ms = min(max(round(failure.retry_after_s * 1000), 0), PAUSE_MS_MAX)
        body = {"code": failure.code, "status": failure.status, "retry_after_ms": pause_ms}
        text = f"the service wants no request for {pause_ms / 1000:g} s"
        await hear(events.carry("retry", body, ts=now(), message=text))

    async def _tell(self, loss: Loss, hear: Hear, now: Now) -> None:
        key = (loss.code, loss.reason, "" if loss.path.startswith(LISTS) else loss.path)
        if key not in self._named and len(self._named) < LOSSES_NAMED_MAX:
            self._named.add(key)
            await hear(loss_event(loss, now()))


class _Attempt:
    """One answer while it comes in.

    Args:
        known: ids of the calls in the conversation.
        texts: names of the tools that take a text in place of an object.
    """

    def __init__(self, name: str, known: set[str], texts: frozenset[str], hear: Hear, now: Now) -> None:
        self.module = dialect(name)
        self.state = self.module.StreamState(now())
        # What answers here may be a gateway; a reader that has nothing to mend does not look.
        self.state.reader.mends = True
        self.handed_on = False
        """Whether something was said that must not be said twice."""
        self.ended_silently = False
        self._hear = hear
        self._now = now
        self._held: list[AgentEvent] = []
        self._known = known
        self._texts = texts
        self._mended: list[str] = []
        """Ids of the calls whose arguments were read in another way than they were written."""
        self._next: dict[str, int] = {}
        """The vendor's id → the number to try next; from 2 each time would take for ever with thousands of calls."""
        self._ids: dict[str, list[str]] = {}
        """The vendor's id → what its calls are called here, in order."""

    async def read(self, reply: ReplyStream, secret: str | None) -> None:
        """Read an answer to its end.

        Raises:
            UpstreamError: it failed, broke, or holds nothing.
        """
        state, map_event, number = self.state, self.module.map_stream_event, None
        async for chunk in reply:
            if isinstance(chunk, dict) and "sequence_number" in chunk:
                if chunk["sequence_number"] == number:
                    continue  # a proxy that sends an event twice
                number = chunk["sequence_number"]
            state.now = self._now()
            await self._pass(map_event(chunk, state))
            if state.sum.failure is not None:
                failed = state.sum.failure
                raise UpstreamError(stream_failure(failed.raw or failed.code, failed.message, secret))
            if state.reader.ended or state.sum.stops:
                reply.expect_end()
            if state.reader.ended:
                break
        state.now = self._now()
        await self._pass(end_events(state))
        self._check(reply)
        for event in self._held:
            await self._hear(event)
        self._held = []

    async def _pass(self, found: list[AgentEvent]) -> None:
        for event in found:
            kind = type(event)
            if kind in INNER:
                continue
            if kind is events.ToolCall:
                event = self._own_id(self._readable(event))  # type: ignore[arg-type]
            if not self.handed_on:
                if not isinstance(event, OUTPUT):
                    # Counters of an attempt that comes to nothing are not the run's.
                    self._held.append(event)
                    continue
                self.handed_on = True
                held, self._held = self._held, []
                for before in held:
                    await self._hear(before)
            await self._hear(event)

    def _readable(self, call: events.ToolCall) -> events.ToolCall:
        """Return a call with its input as an object where it says one, and as a text where it is nested too deep."""
        if call.tool_name in self._texts:
            return call
        found = self._input(call.input)
        if found is call.input:
            return call
        if isinstance(found, dict):
            self._mended.append(call.tool_use_id or "")
        return msgspec.structs.replace(call, input=found)

    def _input(self, input: Json) -> Json:
        found = input if isinstance(input, dict) else mended(input)
        if not is_deep(found):
            return found
        return input if isinstance(input, str) else _json(input)

    def _own_id(self, call: events.ToolCall) -> events.ToolCall:
        """Give a call whose id an earlier one has a new one: some services count anew in every answer."""
        wanted = call.tool_use_id or ""
        call_id, number = wanted, self._next.get(wanted, 2)
        while call_id in self._known:
            call_id, number = f"{wanted}-{number}", number + 1
        self._next[wanted] = number
        self._known.add(call_id)
        self._ids.setdefault(wanted, []).append(call_id)
        return call if call_id == wanted else msgspec.structs.replace(call, tool_use_id=call_id)

    def _check(self, reply: ReplyStream) -> None:
        candidate = _first(self.state.sum.answer())
        if candidate.stop is not None:
            return
        self.ended_silently = True
        is_cut = any(isinstance(part, ToolUse) and part.kind == "function" and isinstance(part.input, str)
                     for part in candidate.message.parts)  # fmt: skip
        if not candidate.message.parts and reply.media_type == "application/json":
            raise UpstreamError(reply.nothing())
        # Every protocol has a last word. Without it, and with nothing else to show an end, the rest may be missing.
        if is_cut or not candidate.message.parts or not reply.is_whole:
            what = "in the middle of a call" if is_cut else "before its last word"
            text = f"the service ended its answer {what if candidate.message.parts else 'before it said anything'}"
            raise UpstreamError(UpstreamFailure(code="stream_closed", message=text, status=reply.status, may_pass=True))

    def turn(self, losses: tuple[Loss, ...], tries: int) -> ModelTurn:
        """Return what has come so far."""
        answer: Answer = self.state.sum.answer()
        candidate = _first(answer)
        ids = {wanted: iter(own) for wanted, own in self._ids.items()}
        parts = tuple(self._named(part, ids) for part in candidate.message.parts)
        message = msgspec.structs.replace(candidate.message, role="assistant", parts=parts)
        has_calls = any(isinstance(part, ToolUse) for part in parts)
        stop = candidate.stop
        if stop is None or (stop == "end" and has_calls):
            stop = "tool_use" if has_calls else "end"
        return ModelTurn(
            message=message, stop=stop, stop_raw=candidate.stop_raw, usage=answer.usage, model=answer.model,
            losses=(*losses, *self.losses()), tries=tries,
        )  # fmt: skip

    def _named(self, part: Part, ids: dict[str, Iterator[str]]) -> Part:
        """Return a part of the message; a call has the id and the input with which it was handed on."""
        if not isinstance(part, ToolUse):
            return part
        if part.name not in self._texts and (found := self._input(part.input)) is not part.input:
            part = msgspec.structs.replace(part, input=found, text=None)
        own = next(ids.get(part.id, iter(())), part.id)
        return part if own == part.id else msgspec.structs.replace(part, id=own)

    def losses(self) -> tuple[Loss, ...]:
        """Return what had to be worked around while reading."""
        found = list(self.state.reader.losses)
        name = self.state.sum.dialect
        for call_id in self.state.sum.repeated_calls():
            found.append(_worked_around(name, f"/calls/{call_id}", "degraded", TWICE))
        found += [
            Loss(path=f"/calls/{one}", dialect=name, target=name, kind="degraded", code="arguments", reason=MENDED)
            for one in self._mended
        ]
        if self.ended_silently:
            found.append(_worked_around(name, "/stop", "synthesised", NO_END))
        return tuple(found)


def _worked_around(name: str, path: str, kind: LossKind, reason: str) -> Loss:
    return Loss(path=path, dialect=name, target=name, kind=kind, code="fallback", reason=reason)


def _json(value: Json) -> str:
    return msgspec.json.encode(value).decode()


def is_deep(value: Json) -> bool:
    """Whether a call's input is nested deeper than a message may be; it is then told as a text."""
    level: list[Json] = [value]
    for _ in range(INPUT_DEPTH_MAX):
        level = [
            inner for one in level if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]  # fmt: skip
        if not level:
            return False
    return True


def _first(answer: Answer) -> Candidate:
    return answer.candidates[0] if answer.candidates else Candidate(message=Message(role="assistant", parts=()))
