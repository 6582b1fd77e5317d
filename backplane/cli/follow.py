"""A run from the command line while it lives: its events on a terminal or as JSON lines, and an orderly end.

Signals and a reader who left become cancellations. The loop ends with the run; the rest (copies, summary, exit code) is
plain writing.
"""

from __future__ import annotations

import math
import select
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from backplane.cli import FAILED, READER_GONE, asking, code_of, ended, streams, terminal
from backplane.cli.command import Args
from backplane.cli.result_file import ResultFile
from backplane.config import Settings
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.events import Approval
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, unforeseen
from backplane.process.aio import ending_signals, in_daemon
from backplane.protocol.messages import Events
from backplane.receipts import signatures
from backplane.receipts.outcomes import failure_of
from backplane.runtime.backends import Backend
from backplane.runtime.door import Desk, of_run, open_door
from backplane.runtime.hooks import Hook
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.serve import messages
from backplane.view.findings import remarks

if TYPE_CHECKING:
    from backplane.routing.driver import Attempts
    from backplane.telemetry.sender import Sender

LOOK_S: Final = 0.5
"""Seconds between two checks that an idle pipe still has its reader."""

PATIENCE_S: Final = 1.0
"""Seconds that a reader who does not read has for the last words, once the run was interrupted."""


@dataclass(kw_only=True)
class Live:
    """One run as the command line asked for it, from its start to the last line about it.

    Attributes:
        attempts: the router's choices, the first of which is `backend`; None for a named backend.
        on_ask: one of `asking.WORDS`, or the words of a command.
        files: option → the file for the receipt, the patch or the run's id.
    """

    args: Args
    order: WorkOrder
    hooks: tuple[Hook, ...]
    backend: Backend
    attempts: Attempts | None
    settings: Settings
    home: Path
    environ: Mapping[str, str]
    on_ask: str | tuple[str, ...]
    files: Mapping[str, ResultFile]

    def __post_init__(self) -> None:
        self._run: Run | None = None
        self._signal: int | None = None
        self._notes: list[str] = []
        """Lines about runs that were cut off before this one."""
        self._has_last_message = False
        self._sender: Sender | None = None
        """Sends telemetry; the command waits for it after its last line."""
        self._outlet = _Outlet()
        is_plain = self.args.json or self.args.quiet
        look = terminal.look(plain=is_plain, sessions=self.order.abp("session") is not None)
        picture = terminal.picture(self.backend.id, self.order.config.model, self.order.task)
        self._terminal = terminal.Terminal(look, picture if look.terminal else None)
        self._desk = Desk(asking.callback(self.on_ask, self._terminal.clear, self.environ))

    def run(self) -> int:
        """Do the run, print how it ended, and return the exit code."""
        fault = None
        try:
            anyio.run(self._drive)
        except Exception as error:
            if self._run is None:
                raise
            fault = unforeseen(error)
        try:
            return self._end(fault)
        except Exception as error:
            if not self._has_last_message or isinstance(error, streams.ReaderGone):
                raise
            streams.error(unforeseen(error))  # A `fatal` must not follow the last message.
            return FAILED
        finally:
            lost = self._sender.leave() if self._sender is not None else ""
            for line in filter(None, (*self._notes, lost)):
                streams.note(line)

    async def _drive(self) -> None:
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            await tasks.start(self._watch_signals)
            tasks.start_soon(self._watch_reader)
            if self._terminal.picture is not None:
                tasks.start_soon(self._paint)
            async with ControlPlane(self.settings, self.home, self.environ) as plane:
                try:
                    await self._follow(plane)
                finally:
                    self._notes += plane.state_folder.problems
                    self._sender, plane.sender = plane.sender, None
            tasks.cancel_scope.cancel()

    async def _follow(self, plane: ControlPlane) -> None:
        """Run the order on the backend that was named, or on one choice of the router after the other."""
        attempts = self.attempts
        if attempts is None:
            await self._attempt(plane, self.order, self.backend, None)
            return
        from backplane.cli.dry_run import summary

        goes_on = True
        while goes_on:
            failed = "".join(f"{one.backend} failed: {one.code}; " for one in attempts.tried[-1:])
            streams.note(f"backend {attempts.backend} ({failed}{summary(attempts.decision)})")
            run = await self._attempt(plane, attempts.order, attempts.backend, attempts.route)
            goes_on = run.is_sealed and not self._is_left and await attempts.after(plane, run)
        if attempts.stopped is not None:
            streams.note(f"the order was not tried on another backend: {attempts.stopped.message}")

    async def _attempt(
        self, plane: ControlPlane, order: WorkOrder, backend: Backend | str, route: dict[str, Json] | None
    ) -> Run:
        start = plane.start(order, backend, on_ask=self._on_ask, hooks=self.hooks, route=route)
        async with start as run, anyio.create_task_group() as beside:
            self._run = run
            if self._terminal.picture is not None:
                self._terminal.picture = terminal.picture(run.backend_id, order.config.model, order.task, run.id)
            if "run_id_file" in self.files:
                self.files["run_id_file"].write([f"{run.id}\n".encode()])
            if self.args.verbose:
                streams.note(f"run {run.id} on {run.backend_id}, stored in {run.folder}")
            # Other terminals may answer and cancel; a run goes on without that.
            beside.start_soon(partial(open_door, self.home, run.id, of_run(run, self._desk), self._notes.append))
            if self._is_left:
                await self._cancel()
            async for batch in run.batches():
                await self._write(batch)
            beside.cancel_scope.cancel()
        return run

    async def _write(self, batch: Events) -> None:
        if self.args.json:
            await self._outlet.write(messages.events(batch.ref_id, batch.records))
        elif not self.args.quiet:
            look = self._terminal.look
            self._terminal.add("".join([look.event(event) for event in batch.events]), batch.events)
            if self._terminal.is_full:
                await self._frame()

    async def _frame(self) -> None:
        if text := self._terminal.frame():
            await self._outlet.write(text.encode("utf-8", "backslashreplace"))

    async def _paint(self) -> None:
        while True:
            await anyio.sleep(terminal.FRAME_S)
            if self._terminal.is_due:
                await self._frame()

    async def _on_ask(self, ask: Approval) -> Decision:
        with self._terminal.away() if self.on_ask == "prompt" else nullcontext():
            return await self._desk.answer(ask)

    @property
    def _is_left(self) -> bool:
        """True after a signal, or without a reader."""
        return self._signal is not None or self._outlet.gone

    async def _cancel(self) -> None:
        if self._run is None:
            self._scope.cancel()
        elif self._signal is not None:
            await self._run.cancel(f"interrupted by {signal.Signals(self._signal).name}")
        elif not self._run.is_ending:  # Finished work is not lost.
            await self._run.cancel("the reader of the output closed the pipe")

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*ending_signals(), signal.SIGCONT) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGCONT:
                    self._terminal.continued()
                elif self._signal is None:
                    self._signal = int(number)
                    self._outlet.hurry()
                    await self._cancel()
                elif self._run is not None:  # A second one only hurries the end, which leaves nothing behind.
                    self._run.hurry()

    async def _watch_reader(self) -> None:
        watch = select.poll()
        watch.register(streams.STDOUT, 0)
        while not self._outlet.gone:
            await anyio.sleep(LOOK_S)
            self._outlet.gone |= bool(watch.poll(0))
        await self._cancel()

    def _end(self, fault: BackplaneError | None) -> int:
        """Print the end of the run, and the exception after it, and return the exit code."""
        run, interrupted = self._run, 128 + self._signal if self._signal is not None else None
        if run is not None and not run.is_sealed and (error := fault or run.end_error) is not None:
            self._write_end(run)  # Its journal could not be sealed either: the next start does that.
            streams.error(error)
            return FAILED
        if run is None or not run.is_sealed:  # Stopped before there was a run.
            return interrupted or READER_GONE
        try:
            self._copy(run)
        except BackplaneError as error:  # The end is printed nevertheless.
            fault = run.facts.redactor.error(error)
        self._write_end(run)
        if self._outlet.gone and interrupted is None and fault is None:
            return READER_GONE
        why = run.end_error if run.end_error is not None or interrupted else failure_of(run.stored)
        for told in filter(None, (why, fault)):
            streams.error(told)
        if why is None and self.args.quiet and run.stored.outcome != "complete" and run.end is not None:
            streams.note(f"{run.stored.outcome} ({run.end.reason}); `backplane why {run.id}` explains it")
        # Below the error, whose first word is the reason of the exit code.
        for line in remarks(run.id, run.stored.outcome, run.stored.backplane):
            streams.note(line)
        return fault.facts.exit_code if fault is not None else interrupted or code_of(run.stored, run.end_error)

    def _copy(self, run: Run) -> None:
        """Write the copies that were asked for; a run without changes has an empty patch."""
        patch, receipt = self.files.get("patch"), self.files.get("receipt")
        if patch is not None:
            patch.write([run.patch.read_bytes()] if run.patch is not None and run.patch.is_file() else [])
        if receipt is not None:
            receipt.write(run.receipt_chunks())
            if receipt.path is not None and (envelope := signatures.read(signatures.path_of(self.home, run.id))):
                ResultFile(str(receipt.path.with_suffix(signatures.SUFFIX))).write([envelope])

    def _write_end(self, run: Run) -> None:
        """Write to stdout what comes last there."""
        shown = self._terminal
        is_stuck = self._signal is not None and not select.select([], [streams.STDOUT], [], PATIENCE_S)[1]
        if self._outlet.gone or is_stuck:  # After a signal, a reader that does not read is not waited for.
            return
        if self.args.json:
            for chunk in messages.ending(run, ref_id=run.id, line_bytes_max=self.settings.limits.line_bytes_max):
                streams.write_bytes(chunk)
            self._has_last_message = True
        elif self.args.quiet:
            streams.write(f"{streams.printable(run.text)}\n" if run.text else "")
        elif run.is_sealed:
            streams.write(shown.clear() + shown.look.end_line())
            if shown.picture is not None and run.patch is not None and run.patch.is_file():
                for line in ended.diff(run.patch, shown.look):
                    streams.write(line)
            streams.write(ended.summary(run.stored, shown.look, run.patch))
            if run.end is not None and run.end.reason == "store":
                # The store could not keep the receipt: this is its only copy.
                for chunk in run.receipt_chunks():
                    streams.write_bytes(chunk)
                streams.write("\n")


class _Outlet:
    """Stdout, written from the event loop: it waits for a slow reader without stopping the loop."""

    def __init__(self) -> None:
        self.gone = False
        """True if its reader has left; nothing is written then."""
        self._patience_s = math.inf
        self._scope: anyio.CancelScope | None = None
        self._lock = anyio.Lock()

    async def write(self, data: bytes) -> None:
        """Write all of it, as fast as the reader takes it. Raises BackendError `stream_closed`, as on a full disk."""
        async with self._lock:
            if self.gone:
                return
            try:
                if len(data) <= streams.WRITE_BYTES and select.select([], [streams.STDOUT], [], 0)[1]:
                    streams.write_bytes(data)
                    return
                with anyio.move_on_after(self._patience_s) as self._scope:
                    await in_daemon(partial(streams.write_bytes, data))
                self.gone = self._scope.cancelled_caught
            except streams.ReaderGone:
                self.gone = True

    def hurry(self) -> None:
        """Give a reader who does not read `PATIENCE_S` from now on."""
        self._patience_s = PATIENCE_S
        if self._scope is not None:
            self._scope.deadline = anyio.current_time() + PATIENCE_S
