"""Processes the messages of a run's host, one read at a time, and returns the events to pass on. Nothing here waits."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    Carried,
    RetryReported,
    RunCompleted,
    RunStarted,
    TaskReported,
    ToolCall,
    ToolResult,
    TurnEnded,
    Warned,
    carried,
    is_passed_through,
    read_event,
)
from backplane.contract.receipt import read_receipt
from backplane.errors import ContractError, PolicyError, from_code
from backplane.protocol.messages import NOISE_SHOWN, Broken, Dropped, Events, Noise, Unknown, describe_noise
from backplane.receipts.state import RunState
from backplane.redact.cuts import Splits
from backplane.runtime.approvals import Approvals
from backplane.runtime.ending import RunEnding
from backplane.runtime.events import RunRecord, now

CALLS_OPEN_MAX: Final = 1000
"""Limit of open calls that are remembered; agents make dozens. Further ones do not extend the limit of silence."""

CALL_CHARS_MAX: Final = 256
"""Limit of characters that are remembered of a call's id and of its tool's name; usual ones are shorter."""


class Inbound:
    """Processes the host's messages in one run.

    Attributes:
        progressed: True if a message that counts as progress has come since this was last set to False.
        holding: True while a text that may be the beginning of a secret is not passed on yet.
    """

    def __init__(self, facts: RunState, ending: RunEnding, record: RunRecord, approvals: Approvals) -> None:
        self.progressed = self.holding = False
        self._facts = facts
        self._ending = ending
        self._record = record
        self._approvals = approvals
        self._first_noise = b""
        self._first_foreign = ""
        """A description of the first message with another run's id; empty if there was none."""
        self._calls_open: dict[str, str] = {}
        """Tool names of the calls without a result, by the call's id or, without one, by the tool's name; cleared if a
        turn ends for another reason than its tools."""
        self.wait_s = 0.0
        """Seconds that the host may be silent in addition, while it waits for a limit of its model's service."""
        self._expects_raw = facts.settings.get("mode") == "passthrough"
        """True if the order asks for the vendor's own messages, and none has come yet."""
        self._splits = Splits(facts.redactor) if facts.redactor.forms else None

    def take(self, received: list[Any]) -> list[Events]:
        """Process the messages of one read; return the events to pass on, up to an error that ends the run."""
        ready: list[Events] = []
        try:
            for item in received:
                self._take(item, ready)
        except Exception as error:  # The events before it are passed on all the same.
            self._ending.fail(error)
        return ready

    def _take(self, item: Any, ready: list[Events]) -> None:
        facts = self._facts
        if self._ending.over.is_set() and not isinstance(item, Noise | Dropped | Exception):
            facts.counts["late"] += len(item.events) if isinstance(item, Events) else 1
            return
        match item:
            case Events():
                ready.append(item if self._splits is None else self._whole(item, self._splits))
                self._accept(item.events)
            case wire.Final():
                ready += self._final(item)
            case wire.Fatal():
                ready += self._fatal(item)
            case wire.Ask():
                ready += self._ask(item)
            case Noise():
                self._first_noise = self._first_noise or item.line[:NOISE_SHOWN]
                facts.add_noise(item.line)
            case Dropped():
                facts.counts[item.why] += 1
                if item.why == "foreign_ref_id":
                    self._first_foreign = self._first_foreign or item.message
            case Unknown():
                facts.counts["unknown_messages"] += 1
                text = f"a message this version does not know: {item.t[:60]!r}"
                ready.append(self._record.own("raw_envelope", item.value, text))
            case Broken():
                evidence = item.evidence.decode("utf-8", "replace")
                self._ending.decide("protocol", from_code(item.code, item.message, evidence=evidence))
                self._ending.close()
            case wire.Pong():
                facts.counts["unasked_answer"] += 1
            case Exception():
                raise item

    def flush(self) -> list[Events]:
        """Return text that was not passed on yet, as events."""
        late = self._splits.flush() if self._splits is not None else []
        self.holding = False
        return [Events.of(self._facts.run_id, late)] if late else []

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
                    self.wait_s = self._granted_wait_s(event) if isinstance(event, RetryReported) else 0.0
                    if isinstance(event, TaskReported) and "subagent_end" in event.body:
                        self._approvals.observe_subagent(event.body["subagent_end"])
                    call = self._facts.look(event)
                    # A tool that ran without the question for its hook ends the run.
                    not_asked = self._approvals.hooks.look(event, call) if self._approvals.hooks is not None else None
                    if not_asked is not None:
                        self._ending.decide("failed", not_asked)
            self.keep_limit()
        self.progressed = self.progressed or any(map(_carries_something, events))

    def _granted_wait_s(self, event: RetryReported) -> float:
        """Return how long a host may be silent while it waits for a limit of its model's service."""
        after_ms, allowed_s = event.body.get("retry_after_ms"), self._facts.settings.get("wait_for_limit_s")
        is_wait = "until" in event.body and isinstance(after_ms, int) and isinstance(allowed_s, int)
        return min(after_ms / 1000, float(allowed_s)) if is_wait else 0.0  # type: ignore[arg-type, operator]

    def _note_call(self, event: AgentEvent) -> None:
        if isinstance(event, ToolCall) and len(self._calls_open) < CALLS_OPEN_MAX:
            self._calls_open[_call_key(event)] = event.tool_name[:CALL_CHARS_MAX]
        elif isinstance(event, ToolResult):
            self._calls_open.pop(_call_key(event), None)
        elif isinstance(event, TurnEnded) and "tool" not in str(event.body.get("stop_reason")):
            self._calls_open.clear()  # `tool_use` is ours; other hosts write `tool_calls`.

    def open_call(self) -> str:
        """Return the tool's name of the last call without a result; empty if there is no such call."""
        return next(reversed(self._calls_open.values()), "")

    def keep_limit(self) -> None:
        """End the run if a limit of the order was reached."""
        if self._facts.limit is not None:
            reason, text = self._facts.limit
            self._ending.decide(reason, PolicyError("policy_denied", text, hint="raise the limit in the order"))

    def passed_over(self) -> str:
        """Return a clause for an error that describes ignored output of the host; empty if none was ignored."""
        counts = self._facts.counts
        clause = describe_noise(counts["noise_lines"], self._first_noise)
        if self._first_foreign:
            named = f"; messages with another ref_id than the run's: {counts['foreign_ref_id']}"
            clause += f"{named}, the first: {self._first_foreign}"
        return clause

    def _final(self, final: wire.Final) -> list[Events]:
        try:
            last = self._receipt(final.receipt)
        except ValueError as error:
            text = f"the final's receipt is not valid: {error}"
            self._ending.decide("protocol", ContractError("contract_invalid_receipt", text))
            last = []
        self._ending.close()
        return last

    def _receipt(self, value: Json) -> list[Events]:
        """Process the receipt that a host sends for its run. Raises ValueError if the receipt cannot be read."""
        raw = dict(value) if isinstance(value, dict) else {}
        trace = raw.pop("trace", None)
        claim = read_receipt({**raw, "trace": [] if isinstance(trace, list) else trace})
        self._facts.final(claim, raw)
        self.keep_limit()
        return [*self.flush(), *self._adopt_trace(trace if isinstance(trace, list) else [])]

    def _adopt_trace(self, trace: list[Json]) -> list[Events]:
        """Use the trace of a `final` as events, after a note about it, if none were streamed; else as a claim."""
        if not trace:
            return []
        if self._facts.accepted:
            self._facts.claimed_trace(trace)
            return []
        instead = now()
        events = [carried(read_event(value, now=lambda: instead)) for value in trace]
        self._accept(events)
        # These events were not seen live: questions may be missing, and the times are only claimed.
        fact = f"nothing came while the host worked; its receipt tells the rest afterwards (events: {len(events)})"
        return [
            self._record.own("trace_of_final", {"events": len(events)}, fact),
            Events.of(self._facts.run_id, events),
        ]

    def _fatal(self, fatal: wire.Fatal) -> list[Events]:
        code = fatal.error_code if isinstance(fatal.error_code, str) else "internal"
        self._facts.fatal(fatal)
        last = self.flush()
        with suppress(ValueError):  # Only an inner control plane sends a receipt, whose hash is kept in any case.
            last += self._receipt(fatal.receipt)
        self._ending.decide("failed", from_code(code, fatal.error))
        self._ending.close()
        return last

    def _ask(self, ask: wire.Ask) -> list[Events]:
        if ask.id in self._approvals.open:
            self._facts.counts["unasked_answer"] += 1
            return []
        self.progressed = True
        return self._approvals.take(ask)


_QUIET: Final[frozenset[object]] = frozenset((AssistantDelta, AssistantMessage, Warned, RunStarted, RunCompleted))
"""Types of events that have no facts about files, tools, usage or errors."""


def _call_key(event: ToolCall | ToolResult) -> str:
    return (event.tool_use_id or event.tool_name)[:CALL_CHARS_MAX]


def _carries_something(event: AgentEvent) -> bool:
    """Return True if an event counts as progress; one with an empty text and no `ext` does not."""
    if isinstance(event, AssistantDelta | AssistantMessage):
        return bool(event.text) or bool(event.ext)
    if isinstance(event, Warned | Carried):
        return bool(event.message) or bool(event.ext)
    return True
