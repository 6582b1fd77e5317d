"""Gives the caller a handle on one run: its events, its end and its receipt. `drive` executes the run."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from backplane.config import Limits
from backplane.contract import envelope as wire
from backplane.contract.events import AgentEvent, AssistantMessage
from backplane.contract.receipt import BackendIdentity, Receipt
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, ProtocolError, RunCancelledError, from_code, unforeseen
from backplane.protocol.control import Sent
from backplane.protocol.messages import Events
from backplane.receipts.outcomes import End, failure_of
from backplane.receipts.pieces import canonical_chunks, unheard_facts
from backplane.receipts.state import RunState
from backplane.receipts.trace import listed
from backplane.redact.secrets import NO_SECRETS, Redactor
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend
from backplane.runtime.drive import Drive
from backplane.runtime.events import RunBatches, RunEvents
from backplane.runtime.orders import answer_of

if TYPE_CHECKING:
    import typing_extensions

    from backplane.runtime.plane import ControlPlane

    ValueT = typing_extensions.TypeVar("ValueT", default=Any)
else:
    ValueT = TypeVar("ValueT")


class Run(Generic[ValueT]):
    """One execution of an order: iterate over it for its events, or `await run.wait()`; then read `run.receipt`.

    Only one task at a time may iterate over a run; any number of tasks may wait for its end meanwhile.

    Attributes:
        id: the run's id, also its `ref_id` on the wire.
        order: the work order.
        facts: the facts known about the run so far.
        drive: executes the run.
    """

    def __init__(
        self,
        plane: ControlPlane,
        order: WorkOrder,
        backend: Backend,
        on_ask: OnAsk | None,
        limits: Limits,
        run_id: str,
        output: Any = None,
    ) -> None:
        self.id, self.order, self._output = run_id, order, output
        identity = BackendIdentity(backend.id)
        facts = self.facts = RunState(run_id=run_id, order=order, backend=identity, started_ns=time.time_ns())
        if backend.replays is not None:
            facts.replays(backend.replays)
        if backend.plugin is not None:
            facts.added["plugin"] = dict(backend.plugin)
        secrets = (*order.config.env.values(), *backend.secrets)
        facts.redactor = Redactor(secrets) if secrets else NO_SECRETS
        facts.added.update(facts.clean_json(unheard_facts(order.config.vendor)))
        self.drive = Drive(plane, facts, backend, limits, on_ask)

    def __repr__(self) -> str:
        sealed = self.drive.sealed
        state = sealed.receipt.outcome if sealed is not None else "ending" if self.is_ending else "running"
        return f"<Run {self.id} on {self.backend_id!r}: {state}>"

    # The run's end.

    @property
    def is_sealed(self) -> bool:
        """True once the run has ended and its receipt is stored."""
        return self.drive.sealed is not None

    @property
    def is_ending(self) -> bool:
        """True once it is too late to stop the run: it is about to be sealed, or is sealed."""
        return self.drive.ending.is_sealing

    @property
    def was_sent(self) -> bool:
        """True once the order was sent to the host."""
        return self.drive.ending.was_sent

    @property
    def backend_id(self) -> str:
        """The name of the backend."""
        return self.drive.backend.id

    @property
    def end(self) -> End | None:
        """The run's end: its reason, error code, exit code and signal; None until it is decided."""
        return self.drive.ending.end

    @property
    def end_error(self) -> BackplaneError | None:
        """The error with which this control plane ended the run; None if its host or its caller ended it."""
        return self.drive.ending.error

    @property
    def patch(self) -> Path | None:
        """The file with the run's patch; None if there is none."""
        return self.drive.sealed.patch if self.drive.sealed is not None else None

    @property
    def folder(self) -> Path | None:
        """The run's own folder in the state folder; None until something of it is kept there."""
        journal = self.drive.place.journal
        return journal.folder if journal is not None else None

    @functools.cached_property
    def receipt(self) -> Receipt:
        """The sealed receipt. Raises RuntimeError until the run has ended."""
        stored = self.stored
        return msgspec.structs.replace(stored, trace=listed(stored.trace))

    @property
    def stored(self) -> Receipt:
        """The sealed receipt, whose trace is read from disk. Raises as `receipt`."""
        if self.drive.sealed is None:
            raise RuntimeError(f"run {self.id} has not ended: iterate over it to its end, or `await run.wait()`")
        return self.drive.sealed.receipt

    @property
    def text(self) -> str:
        """The agent's last message, which is its answer; empty if there is none. Raises as `receipt`."""
        said = ""
        for event in self.receipt.trace:  # A long trace is read from disk, forward only.
            said = event.text if isinstance(event, AssistantMessage) else said
        return said

    @property
    def value(self) -> ValueT:
        """The structured answer, as the `output` type of the order; None if no type was given.

        Raises:
            RuntimeError: as `receipt`.
            ConfigError: `validation_failed`, the answer is not of that type.
        """
        value: ValueT = answer_of(self.stored, self._output)
        return value

    @property
    def error(self) -> BackplaneError | None:
        """The error that kept the run from completing, with code and next step; None if there is none, or none yet."""
        sealed = self.drive.sealed
        if self.end_error is not None or sealed is None:
            return self.end_error
        outcome = sealed.receipt.outcome
        if (failure := failure_of(sealed.receipt)) is not None or outcome == "complete":
            return failure
        fact, hint = f"the run ended as {outcome}", f"backplane why {self.id}"
        if sealed.end.reason == "cancelled":
            reason = self.facts.added.get("cancel_reason")
            return RunCancelledError("run_cancelled", f"{fact}: {reason or 'cancelled'}", hint=hint)
        return from_code("execution_tool_failed", f"{fact}, and its host did not say why", hint=hint)

    def check(self) -> Run[ValueT]:
        """Return this run if it ended as complete.

        Raises:
            BackplaneError: the run did not complete; the error is `run.error`.
            RuntimeError: as `receipt`.
        """
        if self.error is not None:
            raise self.error
        _ = self.stored
        return self

    def _repr_html_(self) -> str | None:
        """Return the table that a notebook shows for an ended run; None for a live run, shown by its `repr`."""
        if self.drive.sealed is None:
            return None
        from html import escape  # Only notebooks need it.

        receipt, usage = self.stored, self.stored.usage
        counts = ("?" if count is None else f"{count:,}" for count in (usage.input_tokens, usage.output_tokens))
        cost = usage.estimated_cost_usd
        rows = {
            "outcome": receipt.outcome, "error": self.error, "backend": receipt.backend.id,
            "took": f"{receipt.meta.duration_ms / 1000:.1f} s", "tokens in / out": " / ".join(counts),
            "cost": "?" if cost is None else f"${cost:.4f}", "patch": self.patch, "run": self.id,
        }  # fmt: skip
        left = ' style="text-align:left"'
        cells = (
            f"<tr><th{left}>{name}</th><td{left}>{escape(str(value))}</td></tr>"
            for name, value in rows.items()
            if value is not None
        )
        return f"<table>{''.join(cells)}</table>"

    def receipt_chunks(self) -> Iterator[bytes]:
        """Return the sealed receipt in canonical bytes, in pieces. Raises as `receipt`."""
        return canonical_chunks(self.stored)

    # The run's events.

    # Iterators, because the garbage collector would finalize an unfinished generator with a warning.

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Iterate over the events. Raises ConfigError: `config_invalid`, another task is iterating."""
        return RunEvents(self.drive.stream, self.id)

    def batches(self) -> AsyncIterator[Events]:
        """Iterate over the events in groups as they arrived, each with its canonical bytes. Raises as `__aiter__`."""
        return RunBatches(self.drive.stream, self.id)

    async def wait(self) -> Receipt:
        """Wait until the run has ended and return its receipt; events that no other task reads are dropped."""
        await self.drive.stream.drained()
        return self.receipt

    # The caller's actions during the run.

    async def cancel(self, reason: str = "cancelled by the caller", *, grace_s: float | None = None) -> None:
        """Cancel the run so that it ends cleanly; continue to iterate for its last events, or leave the block.

        A run that is already ending then ends sooner, as by `hurry`.

        Args:
            grace_s: replaces the limit `cancel_grace_s`, for a caller that must itself end in time.
        """
        if grace_s is not None:
            self.drive.grace_s = grace_s
        if self.is_ending or self.drive.ending.is_decided:
            self.hurry()
        self.drive.ending.decide("cancelled", note=reason)

    def hurry(self) -> None:
        """Wait only one more second for the final diff; without the diff, the run ends as partial."""
        self.drive.ending.hurry()

    def fail(self, error: Exception) -> None:
        """End the run as failed because of an unforeseen exception, whatever end was decided before.

        A stored receipt does not change: after that, the error is added to the control plane's problems.
        """
        if self.is_sealed:
            self.drive.note_problem(unforeseen(error))
        else:
            self.drive.ending.fail(error)

    def input(self, text: str) -> None:
        """Send the agent another message of the user while it works.

        Raises:
            ProtocolError: `protocol_unexpected_message`, the host did not announce `input/1`.
        """
        self._send(wire.Input(ref_id=self.id, text=text))

    def interrupt(self) -> None:
        """Stop the agent's turn; unless a message of the user waits, the run ends, and its session can be resumed.

        Raises:
            CapabilityError: `capability_unsupported`, the host did not announce `interrupt/1`.
            ProtocolError: `protocol_unexpected_message`, the host has not sent its hello yet.
        """
        self._send(wire.Interrupt(ref_id=self.id))

    def _send(self, message: Sent) -> None:
        if self.drive.host is None:
            raise ProtocolError("protocol_unexpected_message", "the host of this run is not started")
        self.drive.host.send(message)
