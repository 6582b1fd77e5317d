"""What a host says, taken in one message at a time.

Messages of the line come in, batches of events to hand on come out; what a message means for
the run's end is told to whoever decides it. Nothing here reads from the child.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.config import Limits
from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.approval import Decision, misfit
from backplane.contract.canonical import Json, timestamp_at
from backplane.contract.events import (
    AgentEvent,
    Approval,
    AssistantDelta,
    AssistantMessage,
    Carried,
    RunCompleted,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnEnded,
    Warned,
    carried,
    carry,
    is_passed_through,
    read_event,
)
from backplane.contract.receipt import read_receipt
from backplane.errors import BackplaneError, ContractError, PolicyError, ProtocolError, from_code
from backplane.policy import approvals
from backplane.policy.capabilities import supplied
from backplane.policy.remembered import remembered_by
from backplane.protocol.control import ControlEnd
from backplane.protocol.lines import strict
from backplane.protocol.messages import NOISE_SHOWN, Broken, Dropped, Events, Noise, Unknown, describe_noise
from backplane.receipts.build import RunState
from backplane.redact.cuts import Splits
from backplane.runtime.checkpoints import RunCheckpoints
from backplane.runtime.hook_calls import call_function, log_raised
from backplane.runtime.hooks import Hook, Hooks
from backplane.runtime.writer import LineWriter

if TYPE_CHECKING:
    from backplane.workspace import Workspace

ASKS_OPEN_MAX: Final = 64
"""Asks that wait for a person at once; a host with more of them does not wait for answers."""

ASKS_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of all these asks, far more than agents write at once; a longer one waits where no other does."""

CALLS_OPEN_MAX: Final = 1000
"""Most open calls that are remembered; agents make dozens at once. Further ones do not get the longer limit."""

CALL_CHARS_MAX: Final = 256
"""Remembered of such a call's id, and of its tool's name; usual ones are shorter."""

REMEMBERED_MAX: Final = 1000
"""Tools and kinds of command for which an answer is remembered in a run; the others are asked about again."""

REMEMBERED_CHARS_MAX: Final = 4000
"""Characters of a remembered tool's name, command and reason together; longer ones are asked about again."""

HOOKS_SLOW_S: Final = 1.0
"""Hooks that take longer are noted in the journal, so that `why` can name them; most answer in milliseconds."""

OnAsk = Callable[[Approval], Awaitable[Decision] | Decision]


def now() -> str:
    """The present time in the contract's print form."""
    return timestamp_at(time.time_ns())


class Inbound:
    """Takes in the messages of one run.

    Args:
        decide: told how the run ends, `(reason, error)`, when a message says so.
        fail: ends the run for an exception that nobody foresaw.
        hand_on: given events that come by themselves: the answers to asks.
    """

    def __init__(
        self,
        run_id: str,
        facts: RunState,
        limits: Limits,
        line: ControlEnd,
        *,
        on_ask: OnAsk | None,
        decide: Callable[[str, BackplaneError], None],
        fail: Callable[[Exception], None],
        hand_on: Callable[[list[Events]], None],
    ) -> None:
        self.over = anyio.Event()
        """The host's word is in, or none will come: nothing after it is accepted."""
        self.progressed = False
        """Something that counts as progress came since this was last put to False."""
        self._first_noise = b""
        self._first_foreign = ""
        """What the first message with another run's id was, in words."""
        self.asks_open: dict[str, wire.Ask] = {}
        self._calls_open: dict[str, str] = {}
        """Calls without a result: id, or the tool's name where it has none → that name. A turn that ends otherwise than
        for its tools drops them."""
        self._asks_bytes = 0
        self._run_id = run_id
        self._facts = facts
        self._limits = limits
        self._line = line
        self._on_ask = on_ask
        self.put_above = self._put_above if on_ask is not None else None
        """Puts a hook's question to the caller; None where nobody answers."""
        self._decide = decide
        self._fail = fail
        self._hand_on = hand_on
        self._writer: LineWriter | None = None
        self._start_soon: Callable[..., object] | None = None
        self._remembered: dict[tuple[str, ...], Decision] = {}
        """Tool → what was decided about it for the rest of the run."""
        self._expects_raw = facts.settings.get("mode") == "passthrough"
        """The order asks for the vendor's own messages, and none has come yet."""
        self.hooks: Hooks | None = None
        """Who is asked after the policy and before anybody else; None for nobody."""
        self.note_hooks: Callable[[str, Sequence[str]], None] | None = None
        """Notes that hooks take long over an ask, by its id; None where there are none."""
        self.checkpoints: RunCheckpoints | None = None
        """Checkpoints before tools that may write; None if the order wants none."""
        self._splits = Splits(facts.redactor) if facts.redactor.forms else None
        self.holding = False
        """A text is held back that may be the beginning of a secret."""

    def connect(self, writer: LineWriter, start_soon: Callable[..., object]) -> None:
        """Take where answers go, and what starts the task in which an ask waits for its answer."""
        self._writer, self._start_soon = writer, start_soon

    def close(self) -> None:
        """The host's last word is in: what comes after it is late."""
        self._line.close_run(self._run_id)
        self.over.set()

    def take(self, received: list[Any]) -> list[Events]:
        """Take in what one read brought; give the events to hand on, in order, up to an error that ends the run."""
        ready: list[Events] = []
        try:
            for item in received:
                if isinstance(item, Exception):
                    raise item
                if type(item) is not Events:
                    ready.extend(_TAKE[type(item)](self, item) or ())
                elif self.over.is_set():
                    self._facts.counts["late"] += len(item.events)
                else:
                    ready.append(item if self._splits is None else self._whole(item, self._splits))
                    self._accept(item.events)
        except Exception as error:  # What was ready before it is handed on all the same.
            self._fail(error)
        return ready

    def let_go(self) -> list[Events]:
        """What was held back for long enough, as events."""
        late = self._splits.flush() if self._splits is not None else []
        self.holding = False
        return [Events.of(self._run_id, late)] if late else []

    def _whole(self, batch: Events, splits: Splits) -> Events:
        before = splits.redacted
        events, records = splits.take(batch.events, batch.records)
        self._facts.counts["redacted"] += splits.redacted - before
        self.holding = splits.holding
        return Events(batch.ref_id, events, b"".join([record + b"\n" for record in records]))

    def _accept(self, events: list[AgentEvent]) -> None:
        self._facts.accepted += len(events)
        if self._expects_raw and any(map(is_passed_through, events)):
            self._facts.mode, self._expects_raw = "passthrough", False
        if not _QUIET.issuperset(map(type, events)):
            for event in events:
                if type(event) not in _QUIET:
                    self._note_call(event)
                    call = self._facts.look(event)
                    # Which tools are at work, and which ran without the question that was due.
                    passed_over = self.hooks.look(event, call) if self.hooks is not None else None
                    if passed_over is not None:
                        self._decide("failed", passed_over)
            self.keep_limit()
        self.progressed = self.progressed or any(map(_carries_something, events))

    def _note_call(self, event: AgentEvent) -> None:
        if isinstance(event, ToolCall) and len(self._calls_open) < CALLS_OPEN_MAX:
            self._calls_open[_call_key(event)] = event.tool_name[:CALL_CHARS_MAX]
        elif isinstance(event, ToolResult):
            self._calls_open.pop(_call_key(event), None)
        elif isinstance(event, TurnEnded) and "tool" not in str(event.body.get("stop_reason")):
            self._calls_open.clear()  # `tool_use` is ours; other hosts write `tool_calls`.

    def open_call(self) -> str:
        """Return the tool of the last call without a result; empty if there is none."""
        return next(reversed(self._calls_open.values()), "")

    def keep_limit(self) -> None:
        """End the run where a limit of the order was reached."""
        if self._facts.limit is not None:
            reason, text = self._facts.limit
            self._decide(reason, PolicyError("policy_denied", text, hint="raise the limit in the order"))

    def report(self, name: str, body: Json, message: str) -> None:
        """Put a warning of our own, with `body` in `ext[name]`, into the run's events."""
        if not self.over.is_set():
            self._hand_on([self._add(name, body, message)])

    def open_checkpoints(self, workspace: Workspace, run_dir: Path) -> None:
        """Make a checkpoint before every tool that may write."""
        say = functools.partial(self.report, "checkpoint")
        self.checkpoints = RunCheckpoints(workspace, run_dir, now=now, say=say, keep=self._keep_checkpoints)

    def _keep_checkpoints(self, told: dict[str, Json]) -> None:
        self._facts.added["checkpoints"] = self._facts.clean_json(told)
        self._facts.manifest = supplied(self._facts.manifest, ("checkpointing",))

    def _add(self, name: str, body: Json, message: str) -> Events:
        """An event of our own, in the trace like any other: without secrets, whoever put the words into it."""
        event = carried(carry(name, body, ts=now(), message=message))
        made = Events.of(self._run_id, [event], ours=True)
        if self._facts.redactor.found(made.lines):
            event, count = self._facts.redactor.event(event)
            self._facts.counts["redacted"] += count
            made = Events.of(self._run_id, [event], ours=True)
        return made

    def _noise(self, noise: Noise) -> None:
        self._first_noise = self._first_noise or noise.line[:NOISE_SHOWN]
        self._facts.noise(noise.line)

    def _dropped(self, dropped: Dropped) -> None:
        self._facts.counts[dropped.why] += 1
        if dropped.why == "foreign_ref_id":
            self._first_foreign = self._first_foreign or dropped.message

    def passed_over(self) -> str:
        """Return a clause for an error that says what the host wrote in vain; empty where that was nothing."""
        counts = self._facts.counts
        clause = describe_noise(counts["noise_lines"], self._first_noise)
        if self._first_foreign:
            named = f"; messages with another ref_id than the run's: {counts['foreign_ref_id']}"
            clause += f"{named}, the first: {self._first_foreign}"
        return clause

    def _unknown(self, unknown: Unknown) -> list[Events]:
        self._facts.counts["unknown_messages"] += 1
        if self.over.is_set():
            return []
        return [self._add("raw_envelope", unknown.value, f"a message this version does not know: {unknown.t[:60]!r}")]

    def _broken(self, broken: Broken) -> None:
        if not self.over.is_set():
            evidence = broken.evidence.decode("utf-8", "replace")
            self._decide("protocol", from_code(broken.code, broken.message, evidence=evidence))
            self.close()

    def _hello(self, hello: wire.Hello) -> None:
        """Kept by the line, where the run looks for it."""

    def _pong(self, pong: wire.Pong) -> None:
        self._facts.counts["unasked_answer"] += 1

    def _final(self, final: wire.Final) -> list[Events]:
        if self.over.is_set():
            self._facts.counts["late"] += 1
            return []
        try:
            last = self._receipt(final.receipt)
        except ValueError as error:
            text = f"the final's receipt is not valid: {error}"
            self._decide("protocol", ContractError("contract_invalid_receipt", text))
            last = []
        self.close()
        return last

    def _receipt(self, value: Json) -> list[Events]:
        """Take in what a host says of its run as a whole; a ValueError says why it cannot be read."""
        raw = dict(value) if isinstance(value, dict) else {}
        trace = raw.pop("trace", None)
        claim = read_receipt({**raw, "trace": [] if isinstance(trace, list) else trace})
        self._facts.final(claim, raw)
        self.keep_limit()
        return [*self.let_go(), *self._adopt_trace(trace if isinstance(trace, list) else [])]

    def _adopt_trace(self, trace: list[Json]) -> list[Events]:
        """A trace inside the final: taken, and marked, when nothing was streamed; else kept as a claim."""
        if not trace:
            return []
        if self._facts.accepted:
            self._facts.claimed_trace(trace)
            return []
        instead = now()
        events = [carried(read_event(value, now=lambda: instead)) for value in trace]
        self._accept(events)
        # They were not seen as they happened: a question may have been due, and their times are the host's word.
        fact = f"nothing came while the host worked; its receipt tells the rest afterwards (events: {len(events)})"
        return [self._add("trace_of_final", {"events": len(events)}, fact), Events.of(self._run_id, events)]

    def _fatal(self, fatal: wire.Fatal) -> list[Events]:
        if self.over.is_set():
            self._facts.counts["late"] += 1
            return []
        code = fatal.error_code if isinstance(fatal.error_code, str) else "internal"
        self._facts.fatal(fatal)
        last = self.let_go()
        with suppress(ValueError):  # Only of a control plane below; what cannot be read is kept by its hash alone.
            last += self._receipt(fatal.receipt)
        self._decide("failed", from_code(code, fatal.error))
        self.close()
        return last

    def _ask(self, ask: wire.Ask) -> list[Events]:
        if self.over.is_set() or ask.id in self.asks_open:
            self._facts.counts["late" if self.over.is_set() else "unasked_answer"] += 1
            return []
        assert self._facts.policy is not None
        raised = self._add("ask", approvals.body(ask), approvals.describe(ask))
        self._facts.asked(ask)
        self.progressed = True
        decision, by = approvals.judge(self._facts.policy, ask, root=self._facts.root), "policy"
        hooks = self._hooks_of(ask, decision)
        keeps = self.checkpoints is not None
        may_wait = decision is None or bool(hooks) or keeps
        size = len(raised.lines) if may_wait else 0
        full = self._full(size)
        if not hooks and decision is None:
            decision, by = self._without_caller(ask, full)
        elif hooks and full:
            decision, by, hooks = Decision(decision="deny", reason=full), "default", ()
        waits = bool(hooks) or (keeps and not full and (decision is None or decision.decision != "deny"))
        if decision is not None and not waits:
            return [raised, *self._answer(ask, decision, by=by)]
        assert self._start_soon is not None
        self.asks_open[ask.id] = ask
        self._asks_bytes += size
        self._start_soon(self._ask_others, ask, size, raised.events[0], hooks, decision)
        return [raised]

    def _hooks_of(self, ask: wire.Ask, decision: Decision | None) -> tuple[Hook, ...]:
        if self.hooks is None:
            return ()
        return () if decision is not None and decision.decision == "deny" else self.hooks.of(ask, decision)

    def _full(self, size: int) -> str:
        """Why one more ask of so many bytes may not wait; empty when it may."""
        if self._start_soon is None or len(self.asks_open) >= ASKS_OPEN_MAX:
            return f"{ASKS_OPEN_MAX} asks are open already"
        if self.asks_open and self._asks_bytes + size > ASKS_BYTES_MAX:
            return f"asks of {ASKS_BYTES_MAX} bytes are open already"
        return ""

    def _without_caller(self, ask: wire.Ask, full: str = "") -> tuple[Decision | None, str]:
        """What is decided without asking the caller again; None where he has to be.

        Args:
            full: why the ask may not wait; empty when it may, or does.
        """
        key = remembered_by(ask) if self._remembered else None
        if key is not None and (decision := self._remembered.get(key)) is not None:
            return decision, "caller"
        if self._on_ask is None or self._start_soon is None:
            return approvals.by_default(ask, "nobody is there to answer"), "default"
        if full:
            return approvals.by_default(ask, full), "default"
        return None, "caller"

    async def _ask_others(
        self, ask: wire.Ask, size: int, event: AgentEvent, hooks: tuple[Hook, ...], decided: Decision | None
    ) -> None:
        """Keep the state, put the ask to its hooks, then to the caller if it is still open."""
        if self.checkpoints is not None:
            await self.checkpoints.before(ask)
        changed, by = "", "policy"
        if hooks:
            ask, decided, by, changed = await self._ask_hooks(ask, hooks)
            event = self._add("ask", approvals.body(ask), approvals.describe(ask)).events[0] if changed else event
        if decided is None:
            decided, by = self._without_caller(ask)
        if decided is None:
            decided, by = await self._ask_caller(ask, event)
        if changed and decided.decision == "allow":
            decided = approvals.changed(ask, decided, f"hook {changed!r} changed it")
            by = "hook" if by == "policy" else by
        del self.asks_open[ask.id]
        self._asks_bytes -= size
        self.progressed = True
        if not self.over.is_set():
            self._hand_on(self._answer(ask, decided, by=by))

    async def _ask_hooks(self, ask: wire.Ask, hooks: tuple[Hook, ...]) -> tuple[wire.Ask, Decision | None, str, str]:
        """The ask as its hooks left it, and what they or the policy say to it then."""
        assert self.hooks is not None
        assert self._facts.policy is not None
        with anyio.move_on_after(self._limits.ask_s), self._noted_if_slow(ask, hooks):
            heard = await self.hooks.hear(ask, hooks, self._facts.root, self._reread)
            if heard.decision is not None:
                return heard.ask, heard.decision, "hook", heard.changed_by
            verdict = approvals.judge(self._facts.policy, heard.ask, root=self._facts.root)
            return heard.ask, verdict, "policy", heard.changed_by
        reason = f"no answer of the hooks within {self._limits.ask_s:g} s"
        return ask, Decision(decision="deny", reason=reason), "default", ""

    @contextmanager
    def _noted_if_slow(self, ask: wire.Ask, hooks: tuple[Hook, ...]) -> Iterator[None]:
        """Have it noted, once these hooks have taken long, and when they have answered then."""
        assert self._start_soon is not None
        at_work, noted = True, False

        async def note() -> None:
            nonlocal noted
            await anyio.sleep(HOOKS_SLOW_S)
            if at_work and self.note_hooks is not None:
                noted = True
                self.note_hooks(ask.id, [hook.name for hook in hooks])

        self._start_soon(note)
        try:
            yield
        finally:
            at_work = False
            if noted and self.note_hooks is not None:
                self.note_hooks(ask.id, ())

    async def _put_above(self, ask: wire.Ask) -> Decision:
        """A hook that lies with the caller: he is asked as for what the policy leaves open."""
        assert self._on_ask is not None
        event = self._add("ask", approvals.body(ask), approvals.describe(ask)).events[0]
        decision, _ = await self._ask_caller(ask, event)
        return decision

    async def _ask_caller(self, ask: wire.Ask, event: AgentEvent) -> tuple[Decision, str]:
        """Let the caller answer, within the time an ask may take."""
        assert self._on_ask is not None
        assert isinstance(event, Approval)
        decision, by = approvals.by_default(ask, f"no answer within {self._limits.ask_s:g} s"), "default"
        with anyio.move_on_after(self._limits.ask_s):
            why = ""
            try:
                given = await call_function(self._on_ask, event)
            except ProtocolError as error:  # A door above us that passes the question on.
                why = error.message
            except Exception as error:  # The caller's own code: its bug must not let a tool through.
                why = log_raised("callback on_ask", self._on_ask, error, self._facts.redactor)
            else:
                try:
                    decision, by = self._reread(ask, given), "caller"
                except ProtocolError as error:  # An answer that cannot be written is the caller's bug, too.
                    why = error.message
            if why:
                decision = Decision(decision="deny", reason=f"the answering callback failed: {why}")
        if by == "caller" and decision.remember == "run" and decision.decision != "modify":
            self._remember(ask, decision)
        return decision, by

    def _remember(self, ask: wire.Ask, decision: Decision) -> None:
        key = remembered_by(ask)
        if key is None or len(self._remembered) >= REMEMBERED_MAX:
            return
        if sum(map(len, key)) + len(decision.reason) <= REMEMBERED_CHARS_MAX:
            reason = f"{decision.decision} for this run" + (f": {decision.reason}" if decision.reason else "")
            self._remembered[key] = Decision(decision=decision.decision, reason=reason)

    def _reread(self, ask: wire.Ask, given: Decision) -> Decision:
        """What somebody decided, as the host will read it: so it is judged, changed and kept.

        Raises:
            ProtocolError: no line can hold it, or the host would refuse it.
        """
        try:
            data = canonical.encode(approvals.answer(ask, approvals.checked(given)))
            decision = approvals.answered(msgspec.convert(strict(data), wire.AnswerMessage))
        except (ValueError, TypeError, RecursionError) as error:
            fact = f"{type(error).__name__}: {self._facts.redactor.text(str(error))[0][:200]}"
            raise ProtocolError("protocol_invalid_envelope", f"the decision cannot be sent: {fact}") from error
        if why := misfit(decision, ask.kind, ask.input):
            raise ProtocolError("contract_schema_violation", why)
        self._line_of(ask, decision)
        return decision

    def _line_of(self, ask: wire.Ask, decision: Decision) -> bytes:
        """The answer as it is sent. Raises ProtocolError, when no line can hold it."""
        return self._line.send(approvals.answer(ask, decision))

    def _answer(self, ask: wire.Ask, decision: Decision, *, by: str) -> list[Events]:
        """Send the answer, or a bare denial where a line is too short for it; without room for that the run ends."""
        assert self._writer is not None
        try:
            line = self._line_of(ask, decision)
        except ProtocolError as too_long:
            try:
                line = self._line_of(ask, Decision(decision="deny"))
            except ProtocolError as error:
                self._decide("protocol", error)
                self.close()
                return []
            decision, by = Decision(decision="deny", reason=f"the answer was not sent: {too_long.message}"), "default"
        self._writer.write(line)
        self._facts.answered(ask, decision)
        body = {"id": ask.id, "decision": decision.decision, "by": by, "reason": decision.reason}
        return [self._add("answer", body, f"{decision.decision} by {by}: {decision.reason}")]


_TAKE: Final[dict[type[Any], Callable[[Inbound, Any], list[Events] | None]]] = {
    wire.Hello: Inbound._hello,
    wire.Final: Inbound._final,
    wire.Fatal: Inbound._fatal,
    wire.Ask: Inbound._ask,
    wire.Pong: Inbound._pong,
    Noise: Inbound._noise,
    Dropped: Inbound._dropped,
    Unknown: Inbound._unknown,
    Broken: Inbound._broken,
}

_QUIET: Final[frozenset[object]] = frozenset((AssistantDelta, AssistantMessage, Warned, RunStarted, RunCompleted))
"""Event types that say nothing about files, tools, usage or errors."""


def _call_key(event: ToolCall | ToolResult) -> str:
    return (event.tool_use_id or event.tool_name)[:CALL_CHARS_MAX]


def _carries_something(event: AgentEvent) -> bool:
    """Whether an event is progress: text without words and nothing beside it is not."""
    if isinstance(event, AssistantDelta | AssistantMessage):
        return bool(event.text) or bool(event.ext)
    if isinstance(event, Warned | Carried):
        return bool(event.message) or bool(event.ext)
    return True
