"""Runs one order with any vendor's agent, as one state machine: open, turn after turn, outcome.

It owns cancellation, added input, interruption, budget and turn limits, waits for a limit of the service, repairs of an
answer that must match a schema, open questions, raw messages (passthrough), and the outcome. `agent.Agent` has the
functions that a vendor gives; `silence` ends an agent that hangs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import anyio
import anyio.abc
import msgspec

from backplane.agents.agent import STOPPED, WORDS_CHARS_MAX, Agent, Ending, failed, limited
from backplane.agents.gate import Gate, ToolVerdict
from backplane.agents.limits import LIMITED, LimitWait, time_in
from backplane.agents.order import RunSpec
from backplane.agents.program import CANCEL_SHARE
from backplane.agents.silence import SIGN_OF_LIFE_S, Silence
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carry
from backplane.errors import BackendError, ContractError
from backplane.host import Done, HostRun
from backplane.protocol.jsonrpc import Malformed, Notification, Received, Request
from backplane.upstream.cost import MICROS
from backplane.upstream.failure import code_of

HALT_S: Final = 2.0
"""Seconds for a turn to stop at a limit; then its program is ended. An abort takes milliseconds."""
REPAIRS_MAX: Final = 2
"""Requests to correct an answer that does not match its schema; then the run fails, as a third rarely helps."""
MALFORMED_MAX: Final = 20
"""Maximum malformed lines that are reported: an agent that writes more uses its output as a log."""
UNCOUNTED: Final = "what this costs is not known any more, so the budget cannot be held (max_budget_usd)"

T = TypeVar("T")


class AgentRun:
    """One run of one agent: its input, its turns, and its outcome.

    Args:
        run: the run on the host.
        spec: the order, in the form for an agent.
        make: returns the agent for this run.
    """

    def __init__(self, run: HostRun, spec: RunSpec, make: Callable[[AgentRun], Agent]) -> None:
        self.run, self.spec, self.root = run, spec, run.order.workspace.root
        self.cancelled = self.interrupted = self.ended = False
        self._raw = run.order.abp("mode") == "passthrough"
        self._line, self._malformed = b"", 0
        self._opened = self._in_turn = self._skip_turn = self._is_stopping = False
        self._waiting: list[str] = []
        self._questions: set[anyio.CancelScope] = set()
        self._cut: Ending | None = None
        self._limits, self._acted = LimitWait(float(run.order.abp("wait_for_limit_s") or 0)), False
        """`_limits`: the waits that the order allows; `_acted`: True if the agent has called a tool."""
        self._limited, self._changed, self._over = anyio.Event(), anyio.Event(), anyio.Event()
        self._structured: Json | msgspec.UnsetType = msgspec.UNSET
        self.verdicts: dict[str, ToolVerdict] = {}
        self.gate = Gate(run, self.verdicts, lambda: self._cut is not None)
        self.agent = make(self)
        self.silence = Silence(self)

    @property
    def is_asking(self) -> bool:
        """True if a question of the agent is open."""
        return bool(self._questions)

    @property
    def is_ending(self) -> bool:
        """True if the run is cancelled or a limit is reached: no further turn begins."""
        return self.cancelled or self._cut is not None

    def code_of(self, words: str, *labels: object, status: int | None = None) -> str:
        """Return the contract's code of a failure: by the row's labels, by an HTTP status, else by its text."""
        return code_of(words, *labels, status=status, own=self.spec.labels)

    # Messages and questions of the agent ------------------------------------------------------------------------------

    async def emit(self, events: Iterable[AgentEvent]) -> None:
        for event in events:
            await self.run.emit(event)

    async def hear(self, message: Notification) -> None:
        """Emit the events of one message of the agent; only a request that failed is no sign of life."""
        reader = self.agent.reader
        reader.is_retry = False
        events = reader.read(message)
        if not reader.is_retry:
            self.silence.heard()
        await self.emit(self._with_line(events, message.method) if self._raw else events)
        self.hold_limits()
        self._tell_change()

    def hold_limits(self) -> None:
        """End the run if a limit of the order is reached."""
        self.cut(self.limit())

    def cut(self, ending: Ending | None) -> None:
        """End the run in the middle of a turn; the first ending counts, and None does nothing."""
        if self._cut is None and ending is not None:
            self._cut = ending
            self._limited.set()

    async def watch(self, line: bytes, received: Received) -> None:
        """Store a line for passthrough. Warn if it is malformed; in passthrough, also report requests and answers."""
        self._line = line
        if isinstance(received, Malformed):
            self._malformed += 1
            if self._malformed <= MALFORMED_MAX:
                await self.run.warn(f"the agent wrote a line that is no message: {received.evidence!r}")
        elif self._raw and self.agent.keeps_calls and not isinstance(received, Notification):
            await self.emit(self._with_line([], received.method if isinstance(received, Request) else "an answer"))

    def _with_line(self, events: list[AgentEvent], kind: str) -> list[AgentEvent]:
        """Add the raw message to the first event, and also the line if encoding the message does not reproduce it."""
        self.run.mode = "passthrough"
        line, message = self._line.strip(), msgspec.json.decode(self._line)
        raw: dict[str, Any] = {"raw_message": message}
        if msgspec.json.encode(message) != line:
            raw["raw_line"] = line.decode("utf-8", "replace")
        kept = carry("raw_message", message, ts=self.run.now(), message=f"a message of the kind {kind[:80]}")
        first, *rest = events or [kept]
        ext = first.ext if isinstance(first.ext, dict) else {}
        return [msgspec.structs.replace(first, ext={**ext, **raw}), *rest]

    async def attend(self, work: Awaitable[T], withdrawn: T) -> T:
        """Wait for `work`, the answer to a request of the agent; if the turn is stopped, return `withdrawn`."""
        with anyio.CancelScope() as scope:
            self._questions.add(scope)
            try:
                if self._is_stopping:
                    scope.cancel()
                return await work
            finally:
                self._questions.discard(scope)
                self.silence.heard()
        return withdrawn

    async def announce(self, id: str, **more: Json) -> None:
        """Report the id of the agent's conversation."""
        asked = self.spec.conversation
        names = {"resumed": asked.resume, "forked": asked.fork}
        body = {"id": id, **more, **{name: one for name, one in names.items() if one is not None}}
        await self.run.carry("session", body, f"session {id}")

    async def ask_person(self, question: object, options: Iterable[object]) -> tuple[bool, str]:
        """Ask the user the agent's question; return True if it was answered, and the text for the agent."""
        verdict = await self.run.ask_user(str(question), options=tuple(map(str, options)))
        if verdict.decision == "deny" and not verdict.text:
            return False, f"no answer: {verdict.reason or 'nobody is there'}; decide by yourself"
        return True, verdict.text or verdict.decision

    # Input during the run ---------------------------------------------------------------------------------------------

    async def cancel(self) -> None:
        """Cancel the run: ask the agent to stop its turn; if it does not stop in time, end its program."""
        self.cancelled = True
        with anyio.move_on_after(self.run.grace_s * CANCEL_SHARE):
            if self._opened and await self._stop():
                await self._over.wait()
                return
        self.run.scope.cancel()

    async def more(self, text: str) -> None:
        """Send the user's text: in the current turn if the agent allows that, else in a turn after it."""
        if not self._over.is_set() and not (self._in_turn and await self.agent.add(text)):
            self._waiting.append(text)

    async def interrupt(self) -> None:
        """Stop the current turn, or skip the next one if none runs; waiting input is sent afterwards."""
        self.interrupted = True
        await self._stop()

    async def _stop(self) -> bool:
        for scope in list(self._questions):
            scope.cancel()
        self._is_stopping, self._skip_turn = self._in_turn, not self._in_turn
        return self._skip_turn or await self.agent.stop()

    # The run ----------------------------------------------------------------------------------------------------------

    async def go(self) -> Done:
        """Run the order, from opening the agent to the outcome."""
        async with anyio.create_task_group() as self.tasks:
            self.tasks.start_soon(self._listen)
            await self.agent.open()
            self._opened = True
            self.silence.heard()
            self.tasks.start_soon(self.silence.watch)
            self.tasks.start_soon(self._halt)
            ending: Ending | None = None
            with self.silence.scope:
                ending = await self._work()
            done = await self._end(self._held(ending))
            self.tasks.cancel_scope.cancel()
        self._over.set()
        return done

    async def _halt(self) -> None:
        """Stop the turn that reaches a limit; model requests made until then are still counted."""
        await self._limited.wait()
        with anyio.move_on_after(HALT_S):
            if await self.agent.stop():
                await anyio.sleep_forever()
        self.silence.scope.cancel()

    async def _listen(self) -> None:
        await self.agent.run()
        self.ended = True
        self._tell_change()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def change(self) -> None:
        """Wait for the agent's next message, or the end of its output."""
        await self._changed.wait()

    async def _work(self) -> Ending:
        """Send the order; if the answer does not match the schema, send the fault, up to `REPAIRS_MAX` times."""
        words, shape = self.spec.prompt, self.spec.shape
        for repair in range(REPAIRS_MAX + 1):
            ending = await self._say(words)
            if shape is None or ending.text is None or self.is_ending:
                return ending
            value, fault = shape.read(ending.text)
            if fault is None:
                self._structured = value
                return ending
            if repair < REPAIRS_MAX:
                await self.run.warn(f"the answer does not match the output schema, repair {repair + 1}: {fault}")
                words = self.spec.again.format(fault=fault)
        fact = f"the answer still does not match the output schema after {REPAIRS_MAX} repairs: {fault}"
        if self.agent.is_ours:
            raise ContractError("validation_failed", fact, hint="loosen the schema or take another model")
        return failed("validation_failed", fact)

    async def _say(self, words: Json) -> Ending:
        """Run a turn, then another one for each waiting input of the user."""
        ending = await self._turn(words)
        while self._waiting and not self.is_ending and (ending.outcome != "failed" or ending.stopped):
            ending = await self._turn(self._waiting.pop(0))
        return ending

    async def _turn(self, words: Json) -> Ending:
        """Run a turn; if a limit of the service ends it, wait as long as the order allows, and repeat it."""
        ending, error = await self._once(self.agent.say, words)
        while self._limits.allowed_s and ending.code == LIMITED and not self.is_ending:
            reset_s, is_gone = self.agent.reset_s(error), self.ended and not self.agent.is_ours
            wait_s = None if is_gone else self._limits.next_s(reset_s)
            if wait_s is None:
                why = f"{ending.words}; {self._limits.refusal(reset_s, is_gone=is_gone)}"
                error = error and BackendError(LIMITED, why)
                ending = msgspec.structs.replace(ending, words=why)
                break
            await self._wait(wait_s, ending.words)
            ending, error = await self._once(functools.partial(self.agent.again, acted=self._acted), words)
        if error is not None:
            raise error
        return ending

    async def _once(self, step: Callable[[Json], Awaitable[Ending]], words: Json) -> tuple[Ending, BackendError | None]:
        """Run a turn once; return its ending, and the error that caused it (None without one)."""
        if self._skip_turn or self.is_ending:
            self._skip_turn = False
            return STOPPED, None
        self._in_turn = True
        try:
            return await step(words), None
        except BackendError as error:
            return failed(error.code, error.message), error
        finally:
            self._in_turn = self._is_stopping = False
            self._acted = self._acted or self.agent.reader.acted

    async def _wait(self, wait_s: float, words: str) -> None:
        """Wait until a limit of the service is over, or the turn is stopped."""
        until, end_s = time_in(wait_s), time.monotonic() + wait_s
        body = {"code": LIMITED, "retry_after_ms": int(wait_s * 1000), "until": until}
        await self.run.carry("retry", body, f"waiting until {until}: {words[:WORDS_CHARS_MAX]}")

        async def passes() -> None:
            while (left_s := end_s - time.monotonic()) > 0:
                self.silence.heard()
                await anyio.sleep(min(left_s, SIGN_OF_LIFE_S))

        await self.attend(passes(), None)

    # Its end ----------------------------------------------------------------------------------------------------------

    def limit(self) -> Ending | None:
        """Return the ending for a limit of the order that is reached; None if none is."""
        spent, budget, turns_max = self.agent.reader.spent, self.spec.budget_micros, self.spec.turns_max
        if not spent.requests:
            return None
        if budget is not None and spent.micros is None:
            return limited("budget", UNCOUNTED)
        if budget is not None and (spent.micros or 0) > budget:
            words = f"{(spent.micros or 0) / MICROS:g} USD spent of {budget / MICROS:g} (max_budget_usd)"
            return limited("budget", words)
        if turns_max is not None and spent.requests >= turns_max and self.agent.reader.goes_on:
            return limited("max_turns", f"the limit of {turns_max} turns (max_turns)")
        return None

    def _held(self, ending: Ending | None) -> Ending:
        """Return the run's ending: a timeout after silence, the limit that ended it, or the given one.

        A complete run with a budget but no counted request ends at its budget, because its cost is unknown.
        """
        if self.silence.broken:
            return failed("backend_timeout", self.silence.words)
        if self._cut is not None or ending is None:
            return self._cut or Ending(outcome="partial")
        is_counted = self.spec.budget_micros is None or self.agent.reader.spent.requests
        return ending if is_counted or ending.outcome != "complete" else limited("budget", UNCOUNTED)

    async def _end(self, ending: Ending) -> Done:
        """Report the ending; return the run's result."""
        await self.emit(self.agent.reader.close())
        if self.cancelled or (self.interrupted and ending.stopped):
            ending = Ending(outcome="partial")
        if ending.limit:  # The control plane reads the limit's name from this event.
            await self.run.carry("turn", {"stop_reason": ending.limit}, ending.words)
        words, raw = ending.words[:WORDS_CHARS_MAX], self.agent.raw()
        if ending.note:
            await self.run.warn(ending.note)
        if words:
            await self.run.error(words, ending.code)
        if self._structured is not msgspec.UNSET:
            raw["structured_output"] = self._structured
        if ending.outcome == "failed":
            raw["error"] = words
        return Done(outcome=ending.outcome, usage=self.agent.reader.used(), usage_raw=raw)
