"""The caller's handle on one run: its events, its end, and its receipt. `drive` runs it."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from backplane.config import Limits
from backplane.contract import envelope as wire
from backplane.contract.events import AgentEvent, AssistantMessage, Failed
from backplane.contract.receipt import BackendIdentity, Receipt
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, ProtocolError, RunCancelledError, from_code, unforeseen
from backplane.protocol.control import Sent
from backplane.protocol.messages import Events
from backplane.receipts.build import End, RunState, failure_of
from backplane.receipts.pieces import canonical_chunks, unheard_facts
from backplane.receipts.trace import listed
from backplane.redact.secrets import NO_SECRETS, Redactor
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.drive import Drive
from backplane.runtime.events import RunBatches, RunEvents
from backplane.runtime.memory import ReplayBackend
from backplane.runtime.orders import answer_of

if TYPE_CHECKING:
    import typing_extensions

    from backplane.runtime.plane import ControlPlane

EventT = TypeVar("EventT", AssistantMessage, Failed)

if TYPE_CHECKING:
    ValueT = typing_extensions.TypeVar("ValueT", default=Any)
else:
    ValueT = TypeVar("ValueT")


class Run(Generic[ValueT]):
    """One execution of an order. Iterate over it for its events, or `await run.wait()`; then it has its receipt.

    Only one task at a time may iterate over it; any number may wait for its end meanwhile.

    Attributes:
        id: the run's id, also its `ref_id` on the wire.
        order: the work order.
        facts: what is known of the run so far.
        drive: the task that runs it.
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
        if isinstance(backend, ReplayBackend):
            facts.replays(backend.replays)
        if isinstance(backend, ProcessBackend) and backend.plugin is not None:
            facts.added["plugin"] = dict(backend.plugin)
        secrets = (*order.config.env.values(), *backend.secrets)
        facts.redactor = Redactor(secrets) if secrets else NO_SECRETS
        facts.added.update(facts.clean_json(unheard_facts(order.config.vendor)))
        self.drive = Drive(plane, facts, backend, limits, on_ask)

    def __repr__(self) -> str:
        sealed = self.drive.sealed
        state = sealed.receipt.outcome if sealed is not None else "ending" if self.is_ending else "running"
        return f"<Run {self.id} on {self.backend_id!r}: {state}>"

    # How it ended.

    @property
    def is_sealed(self) -> bool:
        """True once the run has ended and its receipt is stored."""
        return self.drive.sealed is not None

    @property
    def is_ending(self) -> bool:
        """True once there is nothing more to be stopped: the run is about to be sealed, or is."""
        return self.drive.ending.is_sealing

    @property
    def was_sent(self) -> bool:
        """True once the order was sent to the host."""
        return self.drive.ending.was_sent

    @property
    def is_remote(self) -> bool:
        """True if the agent works on another machine."""
        return self.drive.backend.remote

    @property
    def backend_id(self) -> str:
        """The name of the backend."""
        return self.drive.backend.id

    @property
    def end(self) -> End | None:
        """How the run ended; None until that is decided."""
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
        """The sealed receipt, with a trace that stays on disk. Raises as `receipt`."""
        if self.drive.sealed is None:
            raise RuntimeError(f"run {self.id} has not ended: iterate over it to its end, or `await run.wait()`")
        return self.drive.sealed.receipt

    @property
    def text(self) -> str:
        """The last message of the agent, its answer; empty if there is none. Raises as `receipt`."""
        last = self._last(AssistantMessage)
        return last.text if last is not None else ""

    def _last(self, kind: type[EventT]) -> EventT | None:
        last = None
        for event in self.receipt.trace:
            if isinstance(event, kind):
                last = event
        return last

    @property
    def value(self) -> ValueT:
        """The structured answer, as the `output` type that was asked for; None when none was given.

        Raises:
            RuntimeError: as `receipt`.
            ConfigError: `validation_failed`, the answer is none of that type.
        """
        value: ValueT = answer_of(self.stored, self._output)
        return value

    @property
    def error(self) -> BackplaneError | None:
        """Why the run did not complete, with a code and a next step; None while it goes on, and if it completed."""
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
            BackplaneError: `run.error`.
            RuntimeError: as `receipt`.
        """
        if self.error is not None:
            raise self.error
        _ = self.stored
        return self

    def _repr_html_(self) -> str | None:
        """Return the table that a notebook shows of an ended run; None, which means `repr`, while it goes on."""
        if self.drive.sealed is None:
            return None
        from backplane.runtime.notebook import table  # Loads `html`, which no other run needs.

        return table(self.receipt, self.error, self.patch)

    def receipt_chunks(self) -> Iterator[bytes]:
        """Return the sealed receipt in canonical bytes, in pieces. Raises as `receipt`."""
        return canonical_chunks(self.stored)

    # Its events.

    # Iterators and not generators: one that is left half-way would be finalized by the collector, with a warning.

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Iterate over the events. Raises ConfigError: `config_invalid`, another task does so already."""
        return RunEvents(self.drive.stream, self.id)

    def batches(self) -> AsyncIterator[Events]:
        """Iterate over the events in groups as they arrived, each with its canonical bytes. Raises as `__aiter__`."""
        return RunBatches(self.drive.stream, self.id)

    async def wait(self) -> Receipt:
        """Wait until the run has ended and return its receipt; without a reader in another task, drop its events."""
        await self.drive.stream.drained()
        return self.receipt

    # What its caller may do meanwhile.

    async def cancel(self, reason: str = "cancelled by the caller", *, grace_s: float | None = None) -> None:
        """End the run in order; go on iterating for its last events, or leave the block.

        If its end has begun already, that is hurried.

        Args:
            grace_s: in place of the limit `cancel_grace_s`, for a caller that has to end in time itself.
        """
        if grace_s is not None:
            self.drive.grace_s = grace_s
        if self.is_ending:
            self.hurry()
        self.drive.ending.decide("cancelled", note=reason)

    def hurry(self) -> None:
        """Wait only a second more for the final diff; without it the run is partial."""
        self.drive.ending.hurry()

    def fail(self, error: Exception) -> None:
        """End the run as failed for an exception that nobody foresaw, whatever else was decided.

        After the receipt is stored nothing changes it any more: the error is then a problem of the control plane.
        """
        if self.is_sealed:
            self.drive.note_problem(unforeseen(error))
        else:
            self.drive.ending.fail(error)

    def input(self, text: str) -> None:
        """Give the agent more words of the user while it works.

        Raises:
            ProtocolError: `protocol_unexpected_message`, the host did not announce `input/1`.
        """
        self._send(wire.Input(ref_id=self.id, text=text))

    def interrupt(self) -> None:
        """Stop the agent's turn: unless words of the user wait, the run ends, and its conversation can be continued.

        Raises:
            CapabilityError: `capability_unsupported`, the host did not announce `interrupt/1`.
            ProtocolError: `protocol_unexpected_message`, the host has not said its hello yet.
        """
        self._send(wire.Interrupt(ref_id=self.id))

    def _send(self, message: Sent) -> None:
        if self.drive.host is None:
            raise ProtocolError("protocol_unexpected_message", "the host of this run is not started")
        self.drive.host.send(message)
