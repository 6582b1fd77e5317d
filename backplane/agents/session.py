"""Runs one order with any vendor's agent, as one state machine: open, turn after turn, outcome.

It owns cancellation, added input, interruption, the silence timeout, budget and turn limits, repairs of an answer that
must match a schema, open questions, raw messages (passthrough), and the outcome. A vendor provides a `start` and an
`Agent` (`spec`, `open`, `say`, `add`, `stop`, `reply`) with its `reader.EventReader`; it asks `gate` about each call.

To add an agent, write `NAME/start.py`, `NAME/agent.py` and `NAME/reader.py`. `AgentRun.pipe` connects to a program that
speaks JSON-RPC; for another framing of lines, write another `protocol.jsonrpc.Peer`; pass messages from REST or a
WebSocket to `hear`. A row of `hosts/agents.toml` has the rest.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import anyio
import anyio.abc
import msgspec

from backplane.agents.gate import Gate, ToolRequest, ToolVerdict
from backplane.agents.limits import GO_ON, LIMITED, LimitWait, time_in
from backplane.agents.order import RunSpec, spec_in_words
from backplane.agents.program import CANCEL_SHARE, BegunProgram
from backplane.agents.reader import EventReader
from backplane.agents.rows import AgentRow
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carry
from backplane.errors import BackendError, ContractError
from backplane.host import Done, HostRun
from backplane.process.aio import SECOND_LOOK_S
from backplane.process.jsonrpc import Hear, Pipe
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Malformed, Notification, Peer, Received, Request, RpcError
from backplane.upstream.cost import MICROS
from backplane.upstream.failure import code_of

if TYPE_CHECKING:
    from backplane.process.child import Child

TOOL_S_MAX: Final = 3600.0
"""Seconds that one tool may take before the run times out: a test suite, or a sub-agent, may run an hour."""
SIGN_OF_LIFE_S: Final = 60.0
"""Seconds between two events for a tool without output: a control plane ends a silent run after five minutes."""
HALT_S: Final = 2.0
"""Seconds for a turn to stop at a limit; then its program is ended. An abort takes milliseconds."""
REPAIRS_MAX: Final = 2
"""Requests to correct an answer that does not match its schema; then the run fails, as a third rarely helps."""
WORDS_CHARS_MAX: Final = 2000
"""Maximum characters of an agent's error text, the rest is cut: a service's answer may be a whole page."""
MALFORMED_MAX: Final = 20
"""Maximum malformed lines that are reported: an agent that writes more uses its output as a log."""
WORDLESS: Final = "the agent ended without a word"
UNCOUNTED: Final = "what this costs is not known any more, so the budget cannot be held (max_budget_usd)"

T = TypeVar("T")


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a turn, computed from the agent's events; its own success flag alone does not count."""

    outcome: Literal["complete", "partial", "failed"] = "complete"
    words: str = ""
    """Text of the error; empty without one."""
    code: str | None = None
    """Code of that error."""
    note: str = ""
    """Text of a warning; empty without one."""
    limit: str = ""
    """Contract's name of the limit that ended the turn; empty without one."""
    stopped: bool = False
    """True if an interruption may be the reason for this outcome."""
    text: str | None = None
    """The answer, which is checked against the order's schema; None without one."""


STOPPED: Final = Ending(outcome="partial", stopped=True)


def failed(code: str, words: str, *, stopped: bool = False) -> Ending:
    return Ending(outcome="failed", code=code, words=words, stopped=stopped)


def limited(limit: str, words: str) -> Ending:
    return Ending(outcome="partial", code="policy_denied", words=words, limit=limit)


def silent(code: str | None) -> Ending:
    """Return the outcome of a turn without text: failed if there is an error code, else partial with a warning."""
    return failed(code, WORDLESS) if code is not None else Ending(outcome="partial", note=WORDLESS)


class Agent:
    """One vendor's agent in one run, made from the run, the agent's row, its process and how that was started."""

    keeps_calls = True
    """True if passthrough also keeps the agent's JSON-RPC requests and responses."""
    is_ours = False
    """True for our own agent: an answer that does not match its schema is then an error of the run itself."""
    withdrawn: Json | RpcError = RpcError(0, "the question was withdrawn")
    """Answer to a question whose turn was stopped."""
    answer_s = 60.0
    """Seconds for an answer to a call: half a second is usual, a cold disk under load needs more."""
    login_code: int | None = None
    """JSON-RPC error code that means "log in first"; None if the protocol has none."""
    pipe: Pipe

    def __init__(self, session: AgentRun, reader: EventReader) -> None:
        self.session, self.reader = session, reader
        reader.price, reader.calls.verdicts = session.spec.price, session.verdicts

    # What a vendor gives ----------------------------------------------------------------------------------------------

    @classmethod
    def spec(cls, row: AgentRow, run: HostRun) -> RunSpec:
        """Return the order in the form for this agent. Raises ConfigError, BackendError."""
        return spec_in_words(run, row, cls.image)

    @classmethod
    def speak(cls, row: AgentRow, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
        """Return the run of this agent's program. Raises ConfigError, BackendError."""
        make: Callable[..., Agent] = cls
        return AgentRun(run, cls.spec(row, run), lambda session: make(session, row, child, begun))

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        """Return an image, given in Base64, as a block of a message."""
        raise NotImplementedError

    async def open(self) -> None:
        """Agree on the protocol, and open the conversation. Raises BackendError, ConfigError."""

    async def say(self, words: Json) -> Ending:
        """Send this message, and wait for the end of its turn. Raises BackendError: `backend_crashed`."""
        raise NotImplementedError

    async def add(self, text: str) -> bool:
        """Add the user's text to the current turn; return False if it has to wait for the turn's end."""
        return False

    async def stop(self) -> bool:
        """Stop the current turn; return False if the agent cannot stop one."""
        return False

    async def reply(self, request: Request) -> Json | RpcError:
        """Answer a request of the agent."""
        return RpcError(METHOD_NOT_FOUND, f"this host answers no {request.method}")

    def raw(self) -> dict[str, Json]:
        """Return the agent's own members for the receipt's raw usage."""
        return {}

    # What all have ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the agent's messages until its output ends."""
        await self.pipe.run()

    async def again(self, words: Json, *, acted: bool) -> Ending:
        """Repeat a turn that a limit of the service ended, in the agent's own conversation.

        Args:
            acted: True if the agent has called a tool; the message is then not repeated, as its effect could be double.
        """
        return await self.say(GO_ON if acted else words)

    def reset_s(self, error: BackendError | None) -> float | None:
        """Return the seconds until the service takes requests again; None if it named no time.

        Args:
            error: the failure that ended the turn; None if the agent reported it.
        """
        at = self.reader.resets_at
        return None if at is None else at - time.time()

    async def answer(self, request: Request) -> Json | RpcError:
        """Answer a request; if its turn is stopped, return `withdrawn`."""
        return await self.session.attend(self.reply(request), self.withdrawn)

    async def decide(self, events: Iterable[AgentEvent], request: ToolRequest) -> ToolVerdict:
        """Report a call that the agent asks about, if it is new, and decide whether it may run."""
        await self.session.emit(events)
        self.session.hold_limits()
        return await self.session.gate.decide(request)

    async def must(self, method: str, params: Json) -> dict[str, Any]:
        """Call a method that must succeed; return its result. Raises BackendError."""
        reply = await self.pipe.call(method, params, timeout_s=self.answer_s)
        if (fault := reply.fault) is not None:
            if fault.gone:
                raise BackendError("backend_crashed", f"the agent's program ended before it answered {method}")
            # Some error messages list every method there is.
            fact = f"the agent refused {method}: {fault.message[:WORDS_CHARS_MAX]}"
            if fault.code == self.login_code:
                fix = "log in with the agent's own program, or give its key"
                raise BackendError("backend_auth_failed", fact, hint=fix)
            raise BackendError("backend_unavailable", fact)
        if not isinstance(reply.result, dict):
            raise BackendError("contract_schema_violation", f"the agent's answer to {method} is no object")
        return reply.result

    async def until(self, is_over: Callable[[], object]) -> None:
        """Wait until `is_over` returns true, checked after each message. Raises BackendError: `backend_crashed`."""
        while not is_over():
            if self.session.ended:
                raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
            await self.session.change()

    def judge(self) -> Ending:
        """Return the outcome of a turn that has ended, computed from what the reader saw."""
        reader, failure = self.reader, self.reader.failure
        if failure is not None:
            code = self.session.code_of(failure.words, failure.label, status=failure.status)
            return failed(code, failure.words)
        if not reader.spoke:
            return silent(None if reader.acted else "backend_unavailable")
        return Ending(text=reader.text)


def id_of(said: Json, method: str, what: str) -> str:
    """Return the id in an agent's answer. Raises BackendError: `contract_schema_violation`, it is no text."""
    if not isinstance(said, str):
        raise BackendError("contract_schema_violation", f"the agent's answer to {method} names no {what}")
    return said


class AgentRun:
    """One run of one agent: its input, its turns, and its outcome.

    Args:
        make: returns the agent for this run.
    """

    def __init__(self, run: HostRun, spec: RunSpec, make: Callable[[AgentRun], Agent]) -> None:
        self.run, self.spec = run, spec
        self.root = run.order.workspace.root
        self.cancelled = self.interrupted = self.ended = False
        self._raw = run.order.abp("mode") == "passthrough"
        self._line, self._malformed = b"", 0
        self._opened = self._in_turn = self._skip_turn = self._is_stopping = False
        self._waiting: list[str] = []
        self._questions: set[anyio.CancelScope] = set()
        self._cut: Ending | None = None
        self._limits, self._acted = LimitWait(float(run.order.abp("wait_for_limit_s") or 0)), False
        """`_limits`: the waits that the order allows; `_acted`: True if the agent has called a tool."""
        self._limited = anyio.Event()
        self._structured: list[Json] = []
        self._changed, self._over = anyio.Event(), anyio.Event()
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

    # What the agent says and asks -------------------------------------------------------------------------------------

    def pipe(self, child: Child, agent: Agent, *, hear: Hear | None = None, peer: Peer | None = None) -> Pipe:
        """Return a connection to the agent's program: notifications go to `hear`, requests to `agent.answer`."""
        hear, peer = hear or self.hear, peer or Peer()
        return Pipe(child.stdin, child.stdout, answer=agent.answer, hear=hear, watch=self.watch, peer=peer)

    async def emit(self, events: Iterable[AgentEvent]) -> None:
        for event in events:
            await self.run.emit(event)

    async def hear(self, message: Notification, *, is_sign: bool = True) -> None:
        """Emit the events of one message of the agent.

        Args:
            is_sign: True if it is a sign of life; a request that is repeated without success is none.
        """
        if is_sign:
            self.silence.heard()
        events = self.agent.reader.read(message)
        await self.emit(self._with_line(events, message.method) if self._raw else events)
        self.hold_limits()
        self._tell_change()

    def hold_limits(self) -> None:
        """End the run if a limit of the order is reached."""
        self.cut(self.limit())

    def cut(self, ending: Ending | None) -> None:
        """End the run within a turn, with the first ending given; None does nothing."""
        if self._cut is None and ending is not None:
            self._cut = ending
            self._limited.set()

    async def watch(self, line: bytes, received: Received) -> None:
        """Store a line for passthrough; report it if it is malformed, or in passthrough if it is no notification."""
        self._line = line
        if isinstance(received, Malformed):
            self._malformed += 1
            if self._malformed <= MALFORMED_MAX:
                await self.run.warn(f"the agent wrote a line that is no message: {received.evidence!r}")
        elif self._raw and self.agent.keeps_calls and not isinstance(received, Notification):
            await self.emit(self._with_line([], received.method if isinstance(received, Request) else "an answer"))

    def _with_line(self, events: list[AgentEvent], kind: str) -> list[AgentEvent]:
        """Add the raw message to the first event, and the line itself if JSON of the message does not give it back."""
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

    async def ask_person(self, question: str, options: tuple[Any, ...]) -> tuple[bool, str]:
        """Ask the user the agent's question; return whether there was an answer, and the text to give to the agent."""
        verdict = await self.run.ask_user(question, options=options)
        if verdict.decision == "deny" and not verdict.text:
            return False, f"no answer: {verdict.reason or 'nobody is there'}; decide by yourself"
        return True, verdict.text or verdict.decision

    # What is said to it meanwhile -------------------------------------------------------------------------------------

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
        """Stop the current turn, else skip the next one; input that waits is sent afterwards."""
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
            tasks = self.tasks
            tasks.start_soon(self._listen)
            await self.agent.open()
            self._opened = True
            self.silence.heard()
            tasks.start_soon(self.silence.watch)
            tasks.start_soon(self._halt)
            ending: Ending | None = None
            with self.silence.scope:
                ending = await self._work()
            done = await self._end(self._held(ending))
            tasks.cancel_scope.cancel()
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
                self._structured = [value]
                return ending
            if repair < REPAIRS_MAX:
                await self.run.warn(f"the answer does not match the output schema, repair {repair + 1}: {fault}")
                words = self.spec.again.format(fault=fault)
        fact = f"the answer still does not match the output schema after {REPAIRS_MAX} repairs: {fault}"
        if self.agent.is_ours:
            raise ContractError("validation_failed", fact, hint="loosen the schema or take another model")
        return failed("validation_failed", fact)

    async def _say(self, words: Json) -> Ending:
        """Run a turn, then one for each input of the user that waits."""
        ending = await self._turn(words)
        while self._waiting and not self.is_ending and (ending.outcome != "failed" or ending.stopped):
            ending = await self._turn(self._waiting.pop(0))
        return ending

    async def _turn(self, words: Json) -> Ending:
        """Run a turn; if a limit of the service ends it, wait as long as the order allows, and repeat it."""
        ending, error = await self._once(words, is_repeat=False)
        while self._limits.allowed_s and ending.code == LIMITED and not self.is_ending:
            reset_s = self.agent.reset_s(error)
            is_gone = self.ended and not self.agent.is_ours
            wait_s = None if is_gone else self._limits.next_s(reset_s)
            if wait_s is None:
                why = f"{ending.words}; {self._limits.refusal(reset_s, is_gone=is_gone)}"
                if error is not None:
                    raise BackendError(LIMITED, why) from error
                return msgspec.structs.replace(ending, words=why)
            await self._wait(wait_s, ending.words)
            ending, error = await self._once(words, is_repeat=True)
        if error is not None:
            raise error
        return ending

    async def _once(self, words: Json, *, is_repeat: bool) -> tuple[Ending, BackendError | None]:
        """Run a turn once; return its ending, and the error that caused it (None without one)."""
        if self._skip_turn or self.is_ending:
            self._skip_turn = False
            return STOPPED, None
        self._in_turn = True
        try:
            if is_repeat:
                return await self.agent.again(words, acted=self._acted), None
            return await self.agent.say(words), None
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
        """Return the ending for the order's limit that is reached now; None if none is."""
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
        """Return the run's ending: a timeout after silence, the limit that cut it, or else this one."""
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
        words = ending.words[:WORDS_CHARS_MAX]
        if ending.note:
            await self.run.warn(ending.note)
        if words:
            await self.run.error(words, ending.code)
        raw = self.agent.raw()
        if self._structured:
            raw["structured_output"] = self._structured[0]
        if ending.outcome == "failed":
            raw["error"] = words
        return Done(outcome=ending.outcome, usage=self.agent.reader.used(), usage_raw=raw)


class Silence:
    """Cancel scope of the work, cancelled after too long a silence: a stream with only keep-alives hangs an agent."""

    def __init__(self, session: AgentRun) -> None:
        self._session, self._silence_s = session, session.spec.silence_s
        self.scope = anyio.CancelScope()
        self.broken = False
        """True if the silence ended the scope."""
        self.heard_s = time.monotonic()
        """Time of the last sign of life, by the monotonic clock."""

    def heard(self) -> None:
        """Record a sign of life from the agent."""
        self.heard_s = time.monotonic()

    @property
    def words(self) -> str:
        return f"nothing was heard of the agent for {self._silence_s} s"

    async def watch(self) -> None:
        """Cancel the scope after too long a silence; once a minute, report a tool that works without output."""
        session, reported_s, passed, due_s = self._session, 0.0, False, self.heard_s
        while self._silence_s:
            now_s = time.monotonic()
            silent_s, at_work = now_s - self.heard_s, session.agent.reader.at_work
            left_s = (TOOL_S_MAX if at_work or session.is_asking else self._silence_s) - silent_s
            if left_s <= 0 and passed:
                self.broken = True
                self.scope.cancel()
                return
            passed = left_s <= 0
            if passed:  # If this process was suspended, messages that came in time may still be unread: look twice.
                await anyio.sleep(max(SECOND_LOOK_S, now_s - due_s))
                continue
            reported_s = 0.0 if silent_s < SIGN_OF_LIFE_S else reported_s
            if at_work and silent_s - reported_s >= SIGN_OF_LIFE_S:
                reported_s = silent_s
                await session.run.carry("output", {"stream": "stdout", "text": ""}, "a tool is still at work")
            wait_s = min(max(left_s, 0.1), SIGN_OF_LIFE_S / 4)
            due_s = time.monotonic() + wait_s
            await anyio.sleep(wait_s)
