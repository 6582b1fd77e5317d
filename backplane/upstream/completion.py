"""Runs one turn of a model: sends a neutral conversation, emits events while the answer comes, returns its message.

Calls are paired with results, the dialect writes the request, the ladder changes it if the service refuses it, and the
dialect reads the stream. Running tools and asking again is the host's part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
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
    Message,
    Part,
    Stop,
    Text,
    TokenCounts,
    ToolSpec,
    ToolUse,
)
from backplane.dialects.limits import ServerLimits
from backplane.dialects.pairing import paired
from backplane.dialects.schemas import accepted_tool
from backplane.errors import provider_code
from backplane.upstream.arguments import mended, sendable
from backplane.upstream.client import ReplyStream, Upstream
from backplane.upstream.endpoint import PROTOCOLS
from backplane.upstream.failure import UpstreamError, UpstreamFailure, stream_failure
from backplane.upstream.ladder import WITHOUT_TOOLS, LadderStep, climb, next_step, prepare

Hear = Callable[[AgentEvent], Awaitable[None]]
Now = Callable[[], str]

INPUT_DEPTH_MAX: Final = 100
"""Most levels of a call's input that stays an object; a line may have 128, some of them around the input."""

LISTS: Final = ("/messages", "/contents", "/input", "/tools")
"""Lists of a request in which equal losses are reported once."""

OUTPUT: Final = (events.AssistantDelta, events.AssistantMessage, events.ToolCall)
"""Events that a reader may have acted on; after one of them the request is not sent again."""

INNER: Final = (events.RunStarted, events.RunCompleted, events.Failed)
"""Events of a reader that are not passed on, as they are about a whole run; a failure is raised instead."""

UNLIMITED: Final = frozenset({"no-defaults"})
"""Rungs that remove the limit of the answer's length from a request."""

MENDED: Final = "arguments of a call were no JSON object and were read as the one that they say"
TWICE: Final = "pieces of a call's arguments came twice and were read once"
NO_END: Final = "the service ended its answer without saying why"


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A model's answer to one conversation."""

    message: Message
    """The model's message, to be added to the conversation unchanged, with the members that only its vendor reads."""
    stop: Stop
    stop_raw: str | None = None
    usage: TokenCounts | None = None
    """Tokens of the turn; None if the service did not report them."""
    model: str | None = None
    """The service's name of the model; None if it did not report one."""
    losses: tuple[Loss, ...] = ()
    """All losses of this turn, reported or not."""
    tries: int = 1

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.message.parts if isinstance(part, Text))

    @property
    def proof(self) -> str | None:
        """The vendor's last signature of text, which covers all text before it; None if there is none."""
        proofs = [part.signature for part in self.message.parts if isinstance(part, Text) and part.signature]
        return proofs[-1] if proofs else None

    @property
    def calls(self) -> tuple[ToolUse, ...]:
        """The tool calls to run, in order; a call's input is a str if the model did not write a JSON object."""
        return tuple(part for part in self.message.parts if isinstance(part, ToolUse))


class ModelClient:
    """An endpoint that answers conversations, one turn at a time.

    Later turns leave out what the service refused in earlier ones. Each loss is reported once.

    Args:
        parallel: let the model call several tools in one turn.
        stream: ask for streams; an answer in one document is read, too.
        dialect: dialect of the service's documents; by default the protocol's own.
    """

    def __init__(self, upstream: Upstream, *, parallel: bool = False, stream: bool = True,
                 dialect: str | None = None) -> None:  # fmt: skip
        self.upstream = upstream
        self.parallel = parallel
        self.stream = stream
        self.protocol = upstream.endpoint.protocol
        self.dialect = dialect or PROTOCOLS[self.protocol].dialect
        self.keeps_limit = False
        """True to never remove the limit of the answer's length, because the budget was reserved for that length."""
        self.taken: tuple[str, ...] = ()
        """Rungs that earlier turns needed."""
        self.on_lost: Callable[[dict[str, Any]], Awaitable[bool]] | None = None
        """Callback that takes each lost, perhaps billed request; returns False to allow no further one. None: allow."""
        self._named: set[tuple[str, str, str]] = set()

    @property
    def has_lost_tools(self) -> bool:
        """Return True if the service took no tools, so none is offered to the model any more."""
        return WITHOUT_TOOLS in self.taken

    async def ask(self, conversation: Conversation, hear: Hear, now: Now) -> ModelTurn:
        """Send one conversation to the model and return its answer.

        Args:
            hear: takes each event as it comes; a slow one slows the stream.
            now: returns the time of an event.

        Raises:
            UpstreamError: the service failed and nothing is left to try; `turn` has the part that had come.
            TranslationError: the conversation cannot be written in this dialect.
        """
        request, losses = self._request(conversation)
        await self._report(losses, hear, now)
        taken, tries, total = self.taken, 1, 1
        first: UpstreamError | None = None
        while True:
            attempt = _Attempt(self.dialect, conversation, hear, now)
            try:
                stream = self.stream or request.get("stream") is True
                async with self.upstream.stream(request, stream=stream) as reply:
                    await attempt.read(reply, self.upstream.endpoint.key)
            except UpstreamError as error:
                first, failure = first or error, error.failure
                may_repeat = self.on_lost is None or not failure.may_cost or await self.on_lost(request)
                step = self._step(request, failure, taken, tries) if may_repeat and not attempt.handed_on else None
                if step is None:
                    if failure.retry_after_s is not None:
                        await hear(retry_event(failure, now(), total))
                    if attempt.handed_on:
                        error.turn = attempt.turn(losses, total)
                        raise
                    # The first refusal is about the whole request, so it says more than one about the rest.
                    raise (first if first.code == error.code else error) from None
            else:
                self.taken = taken
                await self._report(attempt.losses(), hear, now)
                return attempt.turn(losses, total)
            await self._report(step.losses, hear, now)
            await hear(retry_event(failure, now(), total, step))
            await anyio.sleep(step.wait_s)
            request, losses, total = step.request, losses + step.losses, total + 1
            taken, tries = ((*taken, step.rung), 1) if step.rung is not None else (taken, tries + 1)

    def request_bytes(self, conversation: Conversation) -> int:
        """Return the size of a conversation's request. Raises TranslationError."""
        return len(msgspec.json.encode(self._request(conversation)[0]))

    def _request(self, conversation: Conversation) -> tuple[dict[str, Any], tuple[Loss, ...]]:
        limits = getattr(dialect(self.dialect), "limits", ServerLimits())
        conversation, losses = sendable(conversation, limits.tool_name)
        tools: tuple[ToolSpec, ...] = ()
        for place, tool in enumerate(conversation.tools):
            accepted, changed = accepted_tool(tool, self.dialect, self.dialect, f"/tools/{place}")
            tools, losses = (*tools, accepted), (*losses, *changed)
        conversation = msgspec.structs.replace(conversation, tools=tools)
        repaired = paired(conversation, ids_optional=PROTOCOLS[self.protocol].ids_optional)
        options = dict(repaired.value.options)
        if self.stream and PROTOCOLS[self.protocol].path:
            options["stream"] = True
        written = dialect(self.dialect).from_ir(msgspec.structs.replace(repaired.value, options=options))
        request, added = prepare(self.protocol, written.value, parallel=self.parallel)
        losses = (*losses, *repaired.losses, *written.losses, *added)
        return climb(self.protocol, request, self.taken), tuple(loss for loss in losses if loss.is_material)

    def _step(
        self, request: dict[str, Any], failure: UpstreamFailure, taken: tuple[str, ...], tries: int
    ) -> LadderStep | None:
        endpoint = self.upstream.endpoint
        step = next_step(
            self.protocol, request, failure, taken,
            tries=tries, tries_max=endpoint.tries_max, backoff_ms=endpoint.backoff_ms,
        )  # fmt: skip
        return None if step is not None and self.keeps_limit and step.rung in UNLIMITED else step

    async def _report(self, losses: Iterable[Loss], hear: Hear, now: Now) -> None:
        """Report losses, each of them once."""
        for loss in losses:
            key = (loss.code, loss.reason, "" if loss.path.startswith(LISTS) else loss.path)
            if key not in self._named:
                self._named.add(key)
                await hear(loss_event(loss, now()))


def retry_event(failure: UpstreamFailure, ts: str, number: int, step: LadderStep | None = None) -> AgentEvent:
    """Return the event of an attempt that failed.

    Args:
        number: number of the attempt.
        step: the next attempt; None if the service asks for a longer pause than this client waits.
    """
    body: dict[str, Any] = {"code": failure.code, "status": failure.status}
    if step is None:
        wait_s = failure.retry_after_s or 0.0
        body["retry_after_ms"] = round(wait_s * 1000)
        return events.carry("retry", body, ts=ts, message=f"the service wants no request for {wait_s:g} s")
    how = f"again with {step.rung}" if step.rung is not None else f"again in {step.wait_s:g} s"
    body |= {
        "attempt": number, "provider_code": provider_code(failure.code), "step": step.rung,
        "wait_ms": round(step.wait_s * 1000),
    }  # fmt: skip
    return events.carry("retry", body, ts=ts, message=f"{failure.message}; {how}")


class _Attempt:
    """Reads one answer while it comes in.

    Args:
        name: the dialect of the answer's documents.
        conversation: the conversation that is answered; the ids of its calls are not used again.
    """

    def __init__(self, name: str, conversation: Conversation, hear: Hear, now: Now) -> None:
        self.module = dialect(name)
        self.state = self.module.StreamState(now())
        self.state.reader.mends = True  # The service may be a gateway that writes the dialect wrongly.
        self.handed_on = False
        """True once output was passed on; then the request must not be sent again."""
        self.ended_silently = False
        self._hear, self._now = hear, now
        self._known = {
            part.id for message in conversation.messages for part in message.parts if isinstance(part, ToolUse)
        }
        self._texts = {tool.name for tool in conversation.tools if tool.kind == "custom"}
        """Names of the tools that take a text in place of an object."""
        self._held: list[AgentEvent] = []
        """Events before the first output, not passed on yet, as the counters of a failed attempt are not the run's."""
        self._mended: list[str] = []
        """Ids of the calls whose arguments were repaired."""
        self._calls: dict[str, list[events.ToolCall]] = {}
        """The vendor's id of a call → the calls with this id as they were passed on, in order."""

    async def read(self, reply: ReplyStream, secret: str | None) -> None:
        """Read an answer to its end.

        Raises:
            UpstreamError: the answer failed, broke off, or is empty.
        """
        state, map_event, number = self.state, self.module.map_stream_event, None
        async for chunk in reply:
            if isinstance(chunk, dict) and "sequence_number" in chunk:
                if chunk["sequence_number"] == number:
                    continue  # A proxy may send an event twice.
                number = chunk["sequence_number"]
            state.now = self._now()
            await self._pass(map_event(chunk, state))
            if (failed := state.sum.failure) is not None:
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

    async def _pass(self, found: list[AgentEvent]) -> None:
        for event in found:
            if type(event) in INNER:
                continue
            self._held.append(self._own(event) if isinstance(event, events.ToolCall) else event)
            self.handed_on = self.handed_on or isinstance(event, OUTPUT)
            while self.handed_on and self._held:
                await self._hear(self._held.pop(0))

    def _own(self, call: events.ToolCall) -> events.ToolCall:
        """Return a call with a readable input, and with a new id if an earlier call has it.

        Some services count ids from the start in every answer. An input that is nested too deep becomes a text.
        """
        wanted = call.tool_use_id or ""
        earlier = self._calls.setdefault(wanted, [])
        call_id, number = wanted, len(earlier) + 1
        while call_id in self._known:
            call_id, number = f"{wanted}-{number}", number + 1
        self._known.add(call_id)
        found = call.input
        if call.tool_name not in self._texts:
            found = found if isinstance(found, dict) else mended(found)
            if is_deep(found):
                found = call.input if isinstance(call.input, str) else msgspec.json.encode(found).decode()
            if found is not call.input and isinstance(found, dict):
                self._mended.append(wanted)
        if call_id != wanted or found is not call.input:
            call = msgspec.structs.replace(call, tool_use_id=call_id, input=found)
        earlier.append(call)
        return call

    def _check(self, reply: ReplyStream) -> None:
        """Refuse an answer whose end is missing. Raises UpstreamError."""
        candidate = _first(self.state.sum.answer())
        parts = candidate.message.parts
        if candidate.stop is not None:
            return
        self.ended_silently = True
        is_cut = any(
            isinstance(part, ToolUse) and part.kind == "function" and isinstance(part.input, str) for part in parts
        )
        if not parts and reply.media_type == "application/json":
            raise UpstreamError(reply.nothing())
        # Every protocol marks the end of an answer. If the mark is missing, part of the answer may be missing.
        if is_cut or not parts or not reply.is_whole:
            where = (
                "before it said anything"
                if not parts
                else "in the middle of a call"
                if is_cut
                else "before its last word"
            )
            text = f"the service ended its answer {where}"
            raise UpstreamError(UpstreamFailure(code="stream_closed", message=text, status=reply.status, may_pass=True))

    def turn(self, losses: tuple[Loss, ...], tries: int) -> ModelTurn:
        """Return the answer as far as it has come."""
        answer: Answer = self.state.sum.answer()
        candidate = _first(answer)
        calls = {wanted: iter(own) for wanted, own in self._calls.items()}
        parts = tuple(_as_passed_on(part, calls) for part in candidate.message.parts)
        message = msgspec.structs.replace(candidate.message, role="assistant", parts=parts)
        has_calls = any(isinstance(part, ToolUse) for part in parts)
        stop = candidate.stop
        if stop is None or (stop == "end" and has_calls):
            stop = "tool_use" if has_calls else "end"
        return ModelTurn(
            message=message, stop=stop, stop_raw=candidate.stop_raw, usage=answer.usage, model=answer.model,
            losses=(*losses, *self.losses()), tries=tries,
        )  # fmt: skip

    def losses(self) -> tuple[Loss, ...]:
        """Return what was repaired or missing in the answer."""
        repeated = [("/calls/" + one, "fallback", TWICE) for one in self.state.sum.repeated_calls()]
        repaired = [("/calls/" + one, "arguments", MENDED) for one in self._mended]
        end = [("/stop", "fallback", NO_END)] if self.ended_silently else []
        name = self.state.sum.dialect
        return (*self.state.reader.losses, *(
            Loss(path=path, dialect=name, target=name, kind="synthesised" if reason is NO_END else "degraded",
                 code=code, reason=reason)
            for path, code, reason in (*repeated, *repaired, *end)
        ))  # fmt: skip


def _as_passed_on(part: Part, calls: dict[str, Iterator[events.ToolCall]]) -> Part:
    """Return a part of the message; a call gets the id and the input of its event."""
    event = next(calls.get(part.id, iter(())), None) if isinstance(part, ToolUse) else None
    if event is None or not isinstance(part, ToolUse):
        return part
    if event.input != part.input:
        part = msgspec.structs.replace(part, input=event.input, text=None)
    return part if event.tool_use_id == part.id else msgspec.structs.replace(part, id=event.tool_use_id)


def is_deep(value: Json, levels: int = INPUT_DEPTH_MAX) -> bool:
    """Return True if a call's input is nested deeper than `INPUT_DEPTH_MAX`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(is_deep(one, levels - 1) for one in inner)


def _first(answer: Answer) -> Candidate:
    return answer.candidates[0] if answer.candidates else Candidate(message=Message(role="assistant", parts=()))
