"""A run from the command line while it lives: its events on a terminal or as JSON lines, and an orderly end.

Signals and a reader who left become cancellations. The loop ends with the run; the rest (copies, summary, exit code) is
plain writing.
"""

from __future__ import annotations

import os
import select
import signal
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import msgspec

from backplane.cli import FAILED, READER_GONE, asking, code_of, ended, streams, terminal
from backplane.cli.result_file import ResultFile
from backplane.config import Settings
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.events import Approval
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, ConfigError, StoreError, leaves, unforeseen
from backplane.process.aio import ending_signals
from backplane.protocol import Events
from backplane.receipts.build import failure_of
from backplane.runtime.backends import Backend
from backplane.runtime.door import Desk, of_run, open_door
from backplane.runtime.hooks import Hook
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.serve import messages
from backplane.view.ended import decided
from backplane.view.findings import remarks

if TYPE_CHECKING:
    from backplane.routing.driver import Attempts
    from backplane.telemetry.sender import Sender

LOOK_S: Final = 0.5
"""Seconds between two checks that an idle pipe still has its reader."""

PATIENCE_S: Final = 1.0
"""Seconds that a reader who does not read has for the last words, once the run was interrupted."""

_FILE_BYTES: Final = 64 * 1024
"""Most bytes written at once to a file, which makes nobody wait."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run as the command line asked for it."""

    order: WorkOrder
    hooks: tuple[Hook, ...] = ()
    backend: Backend
    attempts: Attempts | None = None
    """The router's choices, the first of which is `backend`; None for a named backend."""
    settings: Settings
    home: Path
    environ: Mapping[str, str]
    on_ask: str | tuple[str, ...]
    """One of `asking.WORDS`, or the words of a command."""
    json: bool
    quiet: bool = False
    """Print only the answer."""
    verbose: bool = False
    receipt: ResultFile | None
    """Takes a copy of the receipt; None for no copy."""
    patch: ResultFile | None
    """Takes a copy of the patch; None for no copy."""
    run_id: ResultFile | None = None
    """Takes the run's id as it begins; of an order that is handed over, its last run's."""


def run(plan: Plan) -> int:
    """Do the run, print how it ended, and return the exit code."""
    live, fault = _Live(plan), None
    try:
        try:
            anyio.run(live.drive)
        except Exception as error:
            left = live.outlet.gone or any(isinstance(leaf, streams.ReaderGone) for leaf in leaves(error))
            if left or not live.has_ended:
                raise
            fault = unforeseen(error)
        return _end(plan, live, fault)
    finally:
        for line in live.notes:
            streams.note(line)
        if live.sender is not None:
            live.sender.leave()


class _Live:
    """The run while it lives.

    Attributes:
        notes: lines about runs that were cut off before this one.
        sender: sends telemetry, if that is wanted; waited for after the last line.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run: Run | None = None
        self.signal: int | None = None
        self.notes: list[str] = []
        self.sender: Sender | None = None
        self.outlet = _Outlet()
        look = terminal.look(plain=plan.json or plan.quiet, sessions=plan.order.abp("session") is not None)
        picture = terminal.picture(plan.backend.id, plan.order.config.model, plan.order.task)
        self.terminal = terminal.Terminal(look, picture if look.terminal else None)
        self._desk = Desk(asking.callback(plan.on_ask, self.terminal.clear, plan.environ))
        self._scope: anyio.CancelScope | None = None

    @property
    def has_ended(self) -> bool:
        """True if there is a run with an end to print."""
        return self.run is not None and (self.run.is_sealed or self.run.end_error is not None)

    async def drive(self) -> None:
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._watch_signals)
                tasks.start_soon(self._guarded, self._watch_reader)
                if self.terminal.picture is not None:
                    tasks.start_soon(self._guarded, self._paint)
                    tasks.start_soon(self._watch_continue)
                await self._follow()
                tasks.cancel_scope.cancel()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have an unforeseen exception end the run as failed."""
        try:
            await work()
        except Exception as error:
            if self.run is None:
                raise
            self.run.fail(error)

    async def _follow(self) -> None:
        plan, attempts = self.plan, self.plan.attempts
        async with ControlPlane(plan.settings, plan.home, plan.environ) as plane:
            try:
                if attempts is None:
                    await self._attempt(plane, plan.order, plan.backend, None)
                    return
                backend: Backend | str = plan.backend
                while True:
                    streams.note(_choice(attempts))
                    await self._attempt(plane, attempts.order, backend, attempts.route)
                    if not await self._goes_on(plane, attempts):
                        return
                    backend = attempts.backend
            finally:
                self.sender, plane.sender = plane.sender, None
                self.notes += plane.state_folder.notes + plane.state_folder.problems

    async def _attempt(
        self, plane: ControlPlane, order: WorkOrder, backend: Backend | str, route: dict[str, Json] | None
    ) -> None:
        plan = self.plan
        start = plane.start(order, backend, on_ask=self._on_ask, hooks=plan.hooks, route=route)
        async with start as self.run, anyio.create_task_group() as beside:
            run = self.run
            try:
                if self.terminal.picture is not None:
                    self.terminal.picture = terminal.picture(run.backend_id, order.config.model, order.task, run.id)
                if plan.run_id is not None:
                    plan.run_id.write(iter((f"{run.id}\n".encode(),)))
                if plan.verbose:
                    streams.note(f"run {run.id} on {run.backend_id}, kept in {run.folder}")
                # Other terminals may answer and cancel; a run goes on without that.
                door = partial(open_door, plan.home, run.id, of_run(run, self._desk), self.notes.append)
                beside.start_soon(self._guarded, door)
                if self.signal is not None or self.outlet.gone:
                    await self._cancel()
                async for batch in run.batches():
                    await self._write(batch)
                    if self.outlet.gone:
                        await self._cancel()
            except BackplaneError:  # About the output: nobody reads it any more.
                raise
            except Exception as error:
                run.fail(error)
            beside.cancel_scope.cancel()

    async def _goes_on(self, plane: ControlPlane, attempts: Attempts) -> bool:
        """Return True if another backend gets the order; never after a signal or without a reader."""
        run = self.run
        if run is None or not run.is_sealed or self.signal is not None or self.outlet.gone:
            return False
        goes_on = await attempts.after(plane, run)
        if attempts.stopped is not None:
            streams.note(f"not tried on another backend: {attempts.stopped.message}")
        return goes_on

    async def _write(self, batch: Events) -> None:
        if self.plan.json:
            await self.outlet.write(messages.events(batch.ref_id, batch.records))
        elif not self.plan.quiet:
            look = self.terminal.look
            self.terminal.add("".join([look.event(event) for event in batch.events]), batch.events)
            if self.terminal.is_full:
                await self._frame()

    async def _frame(self) -> None:
        if text := self.terminal.frame():
            await self.outlet.write(text.encode("utf-8", "backslashreplace"))

    async def _paint(self) -> None:
        while True:
            await anyio.sleep(terminal.FRAME_S)
            if self.terminal.is_due:
                await self._frame()

    async def _on_ask(self, ask: Approval) -> Decision:
        with self.terminal.away() if self.plan.on_ask == "prompt" else nullcontext():
            return await self._desk.answer(ask)

    # What ends the run from here --------------------------------------------------------------------------------------

    async def _cancel(self) -> None:
        if self.run is not None:
            name = signal.Signals(self.signal).name if self.signal else None
            await self.run.cancel(f"interrupted by {name}" if name else "nobody reads the output")
        elif self._scope is not None:
            self._scope.cancel()

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            task_status.started()
            async for number in received:
                if self.signal is None:
                    self.signal = int(number)
                    self.outlet.hurry()
                    await self._cancel()
                elif self.run is not None:  # A second one only hurries the end, which leaves nothing behind.
                    self.run.hurry()

    async def _watch_reader(self) -> None:
        await self.outlet.reader_left()
        if self.run is None or not self.run.is_ending:  # Finished work is not lost.
            await self._cancel()

    async def _watch_continue(self) -> None:
        with anyio.open_signal_receiver(signal.SIGCONT) as continued:
            async for _ in continued:
                self.terminal.continued()


class _Outlet:
    """Stdout, written from the event loop: it waits for a slow reader without stopping the loop.

    Attributes:
        gone: nobody reads it any more; what is written then goes nowhere.
    """

    def __init__(self) -> None:
        mode = os.fstat(streams.STDOUT).st_mode
        self.gone = False
        self._waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(streams.STDOUT)
        self._is_hurried = False
        self._waiting: anyio.CancelScope | None = None

    async def write(self, data: bytes) -> None:
        """Write all of it, as fast as the reader takes it.

        Raises:
            BackendError: `stream_closed`, as on a full disk.
        """
        view = memoryview(data)
        with anyio.CancelScope() as self._waiting:
            if self._is_hurried:
                self.hurry()
            while view and not self.gone:
                view = view[await self._some(view) :]
        self.gone |= self._waiting.cancelled_caught

    def hurry(self) -> None:
        """Give a reader who does not read `PATIENCE_S` from now on."""
        self._is_hurried = True
        if self._waiting is not None:
            self._waiting.deadline = anyio.current_time() + PATIENCE_S

    async def reader_left(self) -> None:
        """Return when the reader of a pipe or terminal has gone; for anything else never."""
        if not self._waits:
            await anyio.sleep_forever()
        watch = select.poll()
        watch.register(streams.STDOUT, 0)
        while not self.gone:
            self.gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0))
            if not self.gone:
                await anyio.sleep(LOOK_S)

    async def _some(self, view: memoryview) -> int:
        if self._waits and not select.select([], [streams.STDOUT], [], 0)[1]:
            await anyio.wait_writable(streams.STDOUT)
        try:
            return os.write(streams.STDOUT, view[: streams.WRITE_BYTES if self._waits else _FILE_BYTES])
        except BlockingIOError:
            await anyio.wait_writable(streams.STDOUT)
        except OSError as error:
            failure = streams.gone(error)
            if not isinstance(failure, streams.ReaderGone):
                raise failure from error
            self.gone = True
        return 0


def _choice(attempts: Attempts) -> str:
    """Return the backend that was chosen, and the reason."""
    from backplane.cli.choice import summary

    why = summary(attempts.decision)
    if attempts.tried:
        failed = attempts.tried[-1]
        when = "before it changed anything" if failed.effect is None else f"after {failed.effect}, and hands over"
        why = f"{failed.backend} failed {when}: {failed.code}; {why}"
    return f"backend {attempts.backend} ({why})"


# After the end --------------------------------------------------------------------------------------------------------


def _end(plan: Plan, live: _Live, fault: BackplaneError | None) -> int:
    """Print the end of a run and return the exit code.

    Args:
        fault: raised after the run had ended.
    """
    run, interrupted = live.run, 128 + live.signal if live.signal is not None else None
    if run is None or not live.has_ended:  # Stopped before there was a run.
        return interrupted or READER_GONE
    if not run.is_sealed:  # Its journal could not be sealed either: the next start does that.
        fault = fault or run.end_error
    if fault is not None:
        if plan.json:
            _write_last_message(plan, run)
        streams.error(fault)
        return fault.facts.exit_code if run.is_sealed else FAILED
    receipt = run.receipt
    if plan.verbose:
        for line in decided(receipt):
            streams.note(line)
    try:
        _copy(plan, run)
    except StoreError as error:  # The end is printed nevertheless.
        fault = run.facts.redactor.error(error)
    if not live.outlet.gone:
        _write_end(plan, run, live.terminal, is_copied=plan.receipt is not None and fault is None)
    left = live.outlet.gone and interrupted is None
    why = run.end_error if run.end_error is not None or interrupted else failure_of(receipt)
    if why is not None and (fault is not None or not left):
        streams.error(why)
    elif plan.quiet and receipt.outcome != "complete" and run.end is not None:
        streams.note(f"{receipt.outcome} ({run.end.reason}): backplane why {run.id}")
    if fault is not None:
        streams.error(fault)
    # Below the error, whose first word is the reason of the exit code.
    for line in remarks(run.id, receipt.outcome, receipt.backplane):
        streams.note(line)
    if fault is not None:
        return fault.facts.exit_code
    return READER_GONE if left else interrupted or code_of(receipt, run.end_error)


def _copy(plan: Plan, run: Run) -> None:
    """Write the copies that were asked for; a run without changes has an empty patch."""
    if plan.patch is not None and (run.patch is None or not run.patch.is_file()):
        plan.patch.write(iter(()))
    elif plan.patch is not None and run.patch is not None:
        with run.patch.open("rb") as file:
            plan.patch.write(iter(lambda: file.read(1 << 20), b""))
    if plan.receipt is not None:
        plan.receipt.write(run.receipt_chunks())
        if plan.settings.signing_key is not None and plan.receipt.path is not None:
            _copy_signature(plan.home, run.id, plan.receipt.path)


def _copy_signature(home: Path, run_id: str, receipt: Path) -> None:
    """Write the receipt's signature, if it has one, beside the copy of the receipt."""
    from backplane.receipts import signatures

    envelope = signatures.read(signatures.path_of(home, run_id))
    if envelope is None:
        return
    try:
        with closing(ResultFile(str(receipt.with_suffix(signatures.SUFFIX)))) as beside:
            beside.write(iter((envelope,)))
    except ConfigError as error:
        raise StoreError("receipt_store_failed", error.message, hint=error.hint) from error


def _write_last_message(plan: Plan, run: Run) -> None:
    for chunk in messages.ending(run, ref_id=run.id, line_bytes_max=plan.settings.limits.line_bytes_max):
        streams.write_bytes(chunk)


def _write_end(plan: Plan, run: Run, shown: terminal.Terminal, *, is_copied: bool) -> None:
    if plan.json:
        _write_last_message(plan, run)
        return
    if plan.quiet:
        streams.write(f"{streams.printable(run.text)}\n" if run.text else "")
        return
    streams.write(shown.clear() + shown.look.end_line())
    if shown.picture is not None and run.patch is not None and run.patch.is_file():
        for line in ended.diff(run.patch, shown.look):
            streams.write(line)
    streams.write(ended.summary(run.receipt, shown.look, run.patch))
    if not is_copied and run.end is not None and run.end.reason == "store":
        # The store could not keep the receipt: this is its only copy.
        for chunk in run.receipt_chunks():
            streams.write_bytes(chunk)
        streams.write("\n")
