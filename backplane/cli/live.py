"""A run from the command line: events shown as they come, signals and lost readers turned into an orderly end.

The loop ends with the run; what is left then (receipt, patch, summary, exit code) is plain writing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from backplane.cli import FAILED, READER_GONE, asking, code_of, streams
from backplane.cli import console as show
from backplane.cli.outlet import Outlet
from backplane.cli.result_file import ResultFile
from backplane.config import Settings
from backplane.contract import canonical
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

if TYPE_CHECKING:
    from backplane.cli.foot import Foot
    from backplane.routing.driver import Attempts
    from backplane.telemetry.sender import Sender
    from backplane.view.picture import Picture

FRAME_S: Final = 0.1
"""Between two frames on a terminal, at least: nobody reads faster."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run as the command line asked for it."""

    order: WorkOrder
    hooks: tuple[Hook, ...] = ()
    backend: Backend
    attempts: Attempts | None = None
    """The router's choices, the first of which is `backend`; None where that was named."""
    settings: Settings
    home: Path
    environ: Mapping[str, str]
    on_ask: str | tuple[str, ...]
    """One of `asking.WORDS`, or the words of a command."""
    json: bool
    plain: bool
    """Nothing is painted over, whatever stdout is."""
    quiet: bool = False
    """Only the answer is printed."""
    verbose: bool = False
    receipt: ResultFile | None
    """Takes a copy of the receipt, None for no copy; `patch` likewise."""
    patch: ResultFile | None
    run_id: ResultFile | None = None
    """Takes the run's id as it begins; of an order that is handed over, its last run's."""


def run(plan: Plan) -> int:
    """Do the run and say how it ended; gives the exit code. Raises only where it has said no last message."""
    live = _Live(plan)
    try:
        anyio.run(live.drive)
        return _end(plan, live)
    except Exception as error:
        return _end_after(plan, live, error)
    finally:
        for line in live.left_behind:
            streams.note(line)
        if live.sender is not None:
            live.sender.leave()


def _end(plan: Plan, live: _Live) -> int:
    ended = live.run
    if ended is None or not (ended.is_sealed or ended.end_error):
        # Stopped before there was a run to end: nothing was sent, and what was started is gone.
        return 128 + live.signal if live.signal is not None else READER_GONE
    if not ended.is_sealed and ended.end_error is not None:
        # Not even its journal could be sealed: the next start does it.
        if plan.json:
            _say_last_message(plan, ended, live)
        streams.error(ended.end_error)
        return FAILED
    if plan.verbose:
        for line in show.decided(ended.receipt):
            streams.note(line)
    saved = False
    failure: BackplaneError | None = None
    try:
        saved = _save(plan, ended)
    except StoreError as error:  # The end is told all the same.
        failure = ended.facts.redactor.error(error)
    if not live.outlet.gone:
        streams.write(live.clear())
        _say_the_end(plan, ended, live, saved)
    left = live.outlet.gone and live.signal is None
    why = ended.end_error if ended.end_error is not None or live.signal is not None else failure_of(ended.receipt)
    if why is not None and (failure is not None or not left):
        streams.error(why)
    elif plan.quiet and ended.receipt.outcome != "complete" and ended.end is not None:
        streams.note(f"{ended.receipt.outcome} ({ended.end.reason}): backplane why {ended.id}")
    if failure is not None:
        streams.error(failure)
    # Below the error: its code, at the beginning of the first line, says why the exit code is what it is.
    for line in show.remarks_on(ended.receipt):
        streams.note(line)
    if failure is not None:
        return failure.facts.exit_code
    if left:
        return READER_GONE
    return 128 + live.signal if live.signal is not None else code_of(ended.receipt, ended.end_error)


def _end_after(plan: Plan, live: _Live, error: Exception) -> int:
    """Say the last message of a run that had ended before something raised; without one the error goes on."""
    ended = live.run
    has_left = live.outlet.gone or any(isinstance(leaf, streams.ReaderGone) for leaf in leaves(error))
    if has_left or live.has_said_last or ended is None or not (ended.is_sealed or ended.end_error):
        raise error
    if plan.json:
        _say_last_message(plan, ended, live)
    known = unforeseen(error)
    streams.error(known)
    return known.facts.exit_code


class _Live:
    """The run while it lives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run: Run | None = None
        self.signal: int | None = None
        sessions = plan.order.abp("session") is not None
        self.look = show.Look(False) if plan.json else show.Look.here(plain=plan.plain, sessions=sessions)
        self._foot = _foot(plan, self.look)
        self.outlet = Outlet()
        self.has_said_last = False
        """The run's `final` or `fatal`, or its first piece, is written."""
        self.left_behind: list[str] = []
        """What was found of runs that were cut off, a line each."""
        self.sender: Sender | None = None
        """Sends telemetry, where that is wanted; waited for once all is said."""
        self._desk = Desk(asking.callback(plan.on_ask, self.clear, plan.environ))
        self._scope: anyio.CancelScope | None = None

    async def drive(self) -> None:
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._watch_signals)
                tasks.start_soon(self._guarded, self._watch_reader)
                if self._foot is not None:
                    tasks.start_soon(self._guarded, partial(self._paint, self._foot))
                    tasks.start_soon(self._heed_continue, self._foot)
                await self._follow()
                tasks.cancel_scope.cancel()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have an exception that nobody foresaw end the run as failed, and not as left."""
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
                self._say_choice(attempts)
                await self._attempt(plane, attempts.order, plan.backend, attempts.route)
                while await self._goes_on(plane, attempts):
                    self._say_choice(attempts)
                    await self._attempt(plane, attempts.order, attempts.backend, attempts.route)
            finally:
                self.sender, plane.sender = plane.sender, None
                self.left_behind += plane.state_folder.notes + plane.state_folder.problems

    async def _attempt(
        self, plane: ControlPlane, order: WorkOrder, backend: Backend | str, route: dict[str, Json] | None
    ) -> None:
        start = plane.start(order, backend, on_ask=self._on_ask, hooks=self.plan.hooks, route=route)
        async with start as self.run, anyio.create_task_group() as beside:
            try:
                if self._foot is not None:
                    self._foot.picture = _picture(order, self.run.backend_id, self.run.id)
                self._say_begin(self.run)
                # Let other terminals answer, cancel and interrupt; a run goes on without that.
                obey = of_run(self.run, self._desk)
                door = partial(open_door, self.plan.home, self.run.id, obey, self.left_behind.append)
                beside.start_soon(self._guarded, door)
                await self._tell(self.run)
            except BackplaneError:  # Of the output: the caller has left.
                raise
            except Exception as error:
                self.run.fail(error)
            beside.cancel_scope.cancel()

    def _say_begin(self, run: Run) -> None:
        if self.plan.run_id is not None:
            self.plan.run_id.write(iter((f"{run.id}\n".encode(),)))
        if self.plan.verbose:
            streams.note(f"run {run.id} on {run.backend_id}, kept in {run.folder}")

    async def _goes_on(self, plane: ControlPlane, attempts: Attempts) -> bool:
        """Whether the run that has ended goes on elsewhere; nobody who stopped it or left wants that."""
        run = self.run
        if run is None or not run.is_sealed or self.signal is not None or self.outlet.gone:
            return False
        goes_on = await attempts.after(plane, run)
        if attempts.stopped is not None:
            streams.note(f"not tried on another backend: {attempts.stopped.message}")
        return goes_on

    def _say_choice(self, attempts: Attempts) -> None:
        """Name the backend that was chosen, and what sent the order there, on stderr: stdout is the run's."""
        from backplane.cli.choice import summary

        why = summary(attempts.decision)
        if attempts.tried:
            failed = attempts.tried[-1]
            when = "before it changed anything" if failed.effect is None else f"after {failed.effect}, and hands over"
            why = f"{failed.backend} failed {when}: {failed.code}; {why}"
        streams.note(f"backend {attempts.backend} ({why})")

    async def _tell(self, run: Run) -> None:
        if self.signal is not None or self.outlet.gone:
            await self._cancel()
        async for batch in run.batches():
            await self._write(batch)
            if self.outlet.gone:
                await self._cancel()

    async def _write(self, batch: Events) -> None:
        if self.plan.json:
            await self.outlet.write(messages.events(batch.ref_id, batch.records))
            return
        if self.plan.quiet:
            return
        text = "".join([self.look.event(event) for event in batch.events])
        if self._foot is not None:
            self._foot.add(text, batch.events)
            text = self._foot.frame() if self._foot.is_full else ""
        await self._put(text)

    async def _put(self, text: str) -> None:
        if text:
            await self.outlet.write(text.encode("utf-8", "backslashreplace"))

    async def _cancel(self) -> None:
        if self.run is not None:
            await self.run.cancel(self._why())
        elif self._scope is not None:
            self._scope.cancel()

    def _why(self) -> str:
        return f"interrupted by {signal.Signals(self.signal).name}" if self.signal else "nobody reads the output"

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            task_status.started()
            async for number in received:
                # A second one only hurries the end that is under way, which leaves nothing behind.
                if self.signal is not None and self.run is not None:
                    self.run.hurry()
                elif self.signal is None:
                    self.signal = int(number)
                    self.outlet.hurry()
                    await self._cancel()

    async def _watch_reader(self) -> None:
        await self.outlet.reader_left()
        if self.run is None or not self.run.is_ending:  # Whose work is done shall not lose it.
            await self._cancel()

    async def _on_ask(self, ask: Approval) -> Decision:
        if self._foot is None or self.plan.on_ask != "prompt":
            return await self._desk.answer(ask)
        with self._foot.away():
            return await self._desk.answer(ask)

    async def _paint(self, foot: Foot) -> None:
        while True:
            await anyio.sleep(FRAME_S)
            if foot.is_due:
                await self._put(foot.frame())

    async def _heed_continue(self, foot: Foot) -> None:
        with anyio.open_signal_receiver(signal.SIGCONT) as continued:
            async for _ in continued:
                foot.continued()

    def clear(self) -> str:
        """What removes the foot of a terminal, where one is painted."""
        return self._foot.clear() if self._foot is not None else ""


def _foot(plan: Plan, look: show.Look) -> Foot | None:
    if not look.terminal or plan.quiet:
        return None
    from backplane.cli.foot import Foot

    return Foot(look, _picture(plan.order, plan.backend.id, ""))


def _picture(order: WorkOrder, backend: str, run_id: str) -> Picture:
    from backplane.view.picture import Picture

    now = canonical.timestamp_at(time.time_ns())
    return Picture(run_id=run_id, backend=backend, task=order.task, model=order.config.model, started_at=now)


# After the end --------------------------------------------------------------------------------------------------------


def _save(plan: Plan, ended: Run) -> bool:
    """Write the copies that were asked for; whether the receipt is in one of them."""
    if plan.patch is not None:
        _copy_patch(ended, plan.patch)
    if plan.receipt is not None:
        plan.receipt.write(ended.receipt_chunks())
        if plan.settings.signing_key is not None:
            _copy_signature(plan.home, ended.id, plan.receipt)
    return plan.receipt is not None


def _copy_signature(home: Path, run_id: str, receipt: ResultFile) -> None:
    """Write the receipt's signature, where it has one, beside its copy, where that is a file."""
    from backplane.receipts import signatures

    envelope = signatures.read(signatures.path_of(home, run_id))
    if envelope is None or (path := receipt.path) is None:
        return
    try:
        with closing(ResultFile(str(path.with_suffix(signatures.SUFFIX)))) as beside:
            beside.write(iter((envelope,)))
    except ConfigError as error:
        raise StoreError("receipt_store_failed", error.message, hint=error.hint) from error


def _copy_patch(ended: Run, copy: ResultFile) -> None:
    # No change is an empty patch: whoever asked for the file finds one.
    if ended.patch is None or not ended.patch.is_file():
        copy.write(iter(()))
        return
    with ended.patch.open("rb") as file:
        copy.write(iter(lambda: file.read(1 << 20), b""))


def _say_last_message(plan: Plan, ended: Run, live: _Live) -> None:
    for chunk in messages.ending(ended, ref_id=ended.id, line_bytes_max=plan.settings.limits.line_bytes_max):
        streams.write_bytes(chunk)
        live.has_said_last = True


def _say_the_end(plan: Plan, ended: Run, live: _Live, saved: bool) -> None:
    if plan.json:
        _say_last_message(plan, ended, live)
        return
    if plan.quiet:
        streams.write(f"{streams.printable(ended.text)}\n" if ended.text else "")
        return
    look = live.look
    streams.write(look.end_line())
    if look.terminal and ended.patch is not None and ended.patch.is_file():
        for line in show.diff(ended.patch, look):
            streams.write(line)
    streams.write(show.summary(ended.receipt, look, ended.patch))
    if not saved and ended.end is not None and ended.end.reason == "store":
        # The store could not keep it: this is the only copy there will be.
        for chunk in ended.receipt_chunks():
            streams.write_bytes(chunk)
        streams.write("\n")
