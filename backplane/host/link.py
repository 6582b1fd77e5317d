"""A host's end over two descriptors: runs begin, are cancelled and end exactly once, whatever their own code does.

A slow reader slows who writes; a peer that is gone, or a signal, ends everything in time.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
from msgspec import UNSET

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.events import RunCompleted, RunStarted
from backplane.contract.receipt import Receipt, read_receipt
from backplane.errors import BackplaneError
from backplane.host.run import GRACE_S, Done, Host, HostRun, Told, Work
from backplane.policy.rules import compile_policy
from backplane.process.aio import ending_signals, in_time
from backplane.protocol import LINE_BYTES_MAX, Broken, HostEnd, Received

GRACE_MARGIN_S: Final = 0.3
"""Kept back from a named grace, so that nested ends finish inside one another."""

PEER_GONE_S: Final = 3.5
"""For all runs to end once the peer is gone: with the look before it, and the exit after, within 5 s."""

WRITE_STUCK_S: Final = 0.5
"""Once everything has to end: how long a reader may take nothing before nobody waits for it any more."""

PEER_GONE_POLL_S: Final = 1.0
"""How often a host looks whether anybody still reads: a dead peer ends it within 5 s, an idle host costs nothing."""

RUNS_END_POLL_S: Final = 0.01
"""How often an ending host looks whether its last run is over."""

ERROR_CHARS_MAX: Final = 8192
"""Longest text of an error on the line: more than anybody reads, far below what a line takes."""

HINT_CHARS_MAX: Final = 1024
"""Of that for the next step: a sentence, and a list of names where there is one."""


class HostLink:
    """The host's end over two file descriptors."""

    def __init__(
        self,
        host: Host,
        work: Work,
        stdin: int,
        stdout: int,
        end: HostEnd,
        *,
        owns_process: bool,
    ) -> None:
        self.host = host
        self._work = work
        self._stdin = stdin
        self._stdout = stdout
        self._owns_process = owns_process
        self._end = end
        self._runs: dict[str, HostRun] = {}
        self._asks: dict[tuple[str, str], tuple[anyio.Event, list[wire.AnswerMessage]]] = {}
        """Open asks, by their run's id and their own: set once answered, or once nobody can answer any more."""
        self._tasks: anyio.abc.TaskGroup | None = None
        """Where runs and what belongs to them live."""
        self._stdin_open = True
        self._writing = 0
        self._waiting_since: float | None = None
        """When the reader last took something while a write waits; None while none does."""
        self._gave_up_reader = False
        self._in_line = False
        """A line was begun that an exception broke off: the next one begins on a line of its own."""
        self._write_lock = anyio.Lock()
        self._parent = os.getppid()
        self.signal: int | None = None
        """The first one that came."""

    def can_ask(self, run: HostRun) -> bool:
        return self._stdin_open and "ask/1" in run.extensions and "ask/1" in self.host.extensions

    async def ask(self, ask: wire.Ask, within_s: float) -> wire.AnswerMessage | None:
        """Send an ask and return its answer, None where there is none in time."""
        arrived, answers = self._asks[ask.ref_id, ask.id] = anyio.Event(), list[wire.AnswerMessage]()
        try:
            await self.send(ask)
            await in_time(arrived.wait, within_s)
        finally:
            del self._asks[ask.ref_id, ask.id]
        return answers[0] if answers else None

    async def pause(self) -> None:
        """Let other tasks run, and a cancel arrive."""
        await anyio.lowlevel.checkpoint()

    async def send(
        self, message: wire.Hello | wire.EventMessage | wire.Final | wire.Fatal | wire.Ask | wire.Pong
    ) -> None:
        await self.write(self._end.send(message))

    async def write(self, line: bytes) -> None:
        try:
            if not self._writing and not self._gave_up_reader and not self._in_line:
                line = line[_write_some(self._stdout, line) :]
            if line:
                await self._write_pieces((line,))
        except OSError as error:
            raise self._unread() from error

    async def write_pieces(self, line: Iterable[bytes]) -> None:
        """One line that is too long to be held whole, piece by piece as the reader takes it."""
        try:
            await self._write_pieces(line)
        except OSError as error:
            raise self._unread() from error

    def _unread(self) -> BackplaneError:
        self._cancel_all("nobody reads this host's output", GRACE_S)
        return BackplaneError("stream_closed", "nobody reads this host's output")

    async def _write_pieces(self, pieces: Iterable[bytes]) -> None:
        self._writing += 1
        try:
            # A line once begun is finished: half a line would corrupt the next message.
            with anyio.CancelScope(shield=True):
                async with self._write_lock:
                    if self._in_line:
                        pieces = (b"\n", *pieces)
                    for piece in pieces:
                        while piece:
                            piece = piece[await self._write_when_taken(piece) :]
                    self._in_line = False
        finally:
            self._writing -= 1

    async def _write_when_taken(self, piece: bytes) -> int:
        if self._gave_up_reader:
            raise BrokenPipeError
        written = _write_some(self._stdout, piece)
        if not written:
            self._waiting_since = self._waiting_since or time.monotonic()
            try:
                await anyio.wait_writable(self._stdout)
            except anyio.ClosedResourceError as error:
                raise BrokenPipeError from error
            return 0
        self._waiting_since, self._in_line = None, True
        return written

    def _give_up_reader(self) -> None:
        """Whoever waits to be read waits no more, and what is said from now on is not said."""
        self._gave_up_reader = True
        anyio.notify_closing(self._stdout)

    async def serve(self) -> None:
        """Take runs until stdin ends and the last run is over; the hello was said before."""
        async with anyio.create_task_group() as tasks:
            if self._owns_process:
                tasks.start_soon(self._heed_signals, tasks.cancel_scope)
            tasks.start_soon(self._watch_peer, tasks.cancel_scope)
            async with anyio.create_task_group() as runs:
                self._tasks = runs
                try:
                    await self._read()
                except BackplaneError as error:
                    if error.code != "stream_closed":
                        raise
                self._stdin_open = False
                for run in list(self._runs.values()):
                    self._stdin_ended(run)
                if self._runs and all("cancel/1" in run.extensions for run in self._runs.values()):
                    await self._end_all("the control plane went away", tasks.cancel_scope, PEER_GONE_S)
            tasks.cancel_scope.cancel()

    async def _read(self) -> None:
        while True:
            try:
                await anyio.wait_readable(self._stdin)
            except PermissionError:  # A regular file or /dev/null cannot be waited for, and never keeps us waiting.
                await anyio.lowlevel.checkpoint()
            data = os.read(self._stdin, 65536)
            try:
                for received in self._end.receive(data) if data else self._end.end():
                    await self._take(received)
            except BackplaneError:
                raise
            except Exception as error:  # The outermost edge: the runs that are open go on.
                await self._complain(Broken("internal", _text(error), b""))
            if not data:
                return

    async def _take(self, received: Received) -> None:
        if isinstance(received, wire.RunMessage):
            await self._begin(received)
        elif isinstance(received, wire.Cancel):
            grace_s = received.grace_ms / 1000 if isinstance(received.grace_ms, int) else GRACE_S
            if received.ref_id in self._runs:
                reason = received.reason or "cancelled by the control plane"
                self._cancel(self._runs[received.ref_id], reason, grace_s)
        elif isinstance(received, wire.Input | wire.Interrupt):
            self._steer(received)
        elif isinstance(received, wire.Ping):
            await self.send(wire.Pong(seq=received.seq))
        elif isinstance(received, wire.AnswerMessage):
            waiting = self._asks.get((received.ref_id, received.id))
            if waiting is not None and not waiting[1]:
                waiting[1].append(received)
                waiting[0].set()
        elif isinstance(received, Broken):
            await self._complain(received)

    def _steer(self, received: wire.Input | wire.Interrupt) -> None:
        """Words for a run that takes none, or not yet, are dropped: a control plane knows who takes some."""
        run = self._runs.get(received.ref_id)
        if run is None or self._tasks is None:
            return
        if isinstance(received, wire.Input) and run.on_input is not None:
            self._tasks.start_soon(self._call, run, run.on_input, received.text)
        elif isinstance(received, wire.Interrupt) and run.on_interrupt is not None:
            self._tasks.start_soon(self._call, run, run.on_interrupt)

    async def _call(self, run: HostRun, callback: Callable[..., Awaitable[None]], *arguments: str) -> None:
        """Call a callback of a run; what it raises ends this run, and no other."""
        try:
            await callback(*arguments)
        except Exception as error:
            run.fault = error
            run.scope.cancel()

    async def _complain(self, broken: Broken) -> None:
        """One bad message is one error; the runs that are open go on."""
        await self.write(self._end.refuse(broken))

    async def _begin(self, message: wire.RunMessage) -> None:
        try:
            run = HostRun(self, message, compile_policy(message.work_order.policy), anyio.CancelScope())
        except Exception as error:  # The outermost edge: this run is answered, the others go on.
            await self.send(_failure(message.id, error))
            return
        self._runs[run.id] = run
        assert self._tasks is not None
        self._tasks.start_soon(self._run, run)
        if not self._stdin_open:
            self._stdin_ended(run)

    def _stdin_ended(self, run: HostRun) -> None:
        """A peer that can cancel keeps stdin open, so its end means that the peer is gone."""
        if "cancel/1" in run.extensions:
            self._cancel(run, "the control plane went away", GRACE_S)
        for (owner, _), (arrived, _) in self._asks.items():
            if owner == run.id:
                arrived.set()

    def _cancel(self, run: HostRun, reason: str, grace_s: float) -> None:
        if run.cancelled_because is None:
            run.cancelled_because = reason
            run.grace_s = max(grace_s - GRACE_MARGIN_S, GRACE_MARGIN_S)
            if run.on_cancel is None:
                run.scope.cancel()
            elif self._tasks is not None:
                self._tasks.start_soon(self._call, run, run.on_cancel)

    def _cancel_all(self, reason: str, grace_s: float) -> None:
        for run in self._runs.values():
            self._cancel(run, reason, grace_s)

    async def _run(self, run: HostRun) -> None:
        try:
            ending = await self._do(run)
            with anyio.CancelScope(shield=True):
                await self._tell_end(run, ending)
        except BackplaneError as error:
            if error.code != "stream_closed":
                raise
        except Exception as error:  # The outermost edge: a run has an end, and the others go on.
            await self.write(self._end.refuse(Broken("internal", _text(error), b"", run.id)))
        finally:
            self._runs.pop(run.id, None)

    async def _tell_end(self, run: HostRun, ending: Done | Told | wire.Fatal) -> None:
        if isinstance(ending, Told):
            self._end.close_run(run.id)
            await self.write_pieces(ending.line)
            return
        try:
            message: wire.Final | wire.Fatal = (
                wire.Final(ref_id=run.id, receipt=_checked(run.receipt(ending))) if isinstance(ending, Done) else ending
            )
            line = self._end.send(message)
        except Exception as error:  # What the host's own code gave back cannot be said: that is said instead.
            line = self._end.send(_failure(run.id, error))
        await self.write(line)

    async def _do(self, run: HostRun) -> Done | Told | wire.Fatal:
        """Run the host's own code; whatever it does, exactly one ending comes back."""
        done: Done | Told | None = None
        with run.scope:
            try:
                done = await self._narrated(run)
            except Exception as error:  # The kit is the outermost edge: a bug in a host is a fatal, not a silence.
                run.fault = error
        if run.fault is not None and not isinstance(run.fault, BackplaneError):
            sys.stderr.write("".join(traceback.format_exception(run.fault)))
        if run.fault is not None and run.cancelled_because is None:
            return _failure(run.id, run.fault)
        if done is None:
            outcome: Literal["partial", "failed"] = "partial" if run.emitted else "failed"
            return Done(outcome=outcome, usage_raw={"cancelled": run.cancelled_because})
        return done

    async def _narrated(self, run: HostRun) -> Done | Told:
        """The host's work between the events that say when it began and ended."""
        if self.host.backends is not UNSET:
            # A control plane tells another run's events: one more would not be in that run's receipt.
            return await self._work(run)
        await run.emit(RunStarted(ts=run.now(), message=f"{self.host.id} starts"))
        done = await _awaited(self._work(run))
        await run.emit(RunCompleted(ts=run.now(), message=f"{self.host.id} ends: {done.outcome}"))
        return done

    async def _heed_signals(self, whole: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            async for number in received:
                self.signal = self.signal or int(number)
                await self._end_all(f"the host got {signal.Signals(number).name}", whole, GRACE_S)

    async def _watch_peer(self, whole: anyio.CancelScope) -> None:
        """Whatever becomes of stdin, the peer may still read, or be gone; gone ends everything."""
        poll = select.poll()
        poll.register(self._stdout, 0)
        while not self._peer_is_gone(poll):
            await anyio.sleep(PEER_GONE_POLL_S)
        await self._end_all("the control plane is gone", whole, PEER_GONE_S)

    def _peer_is_gone(self, poll: select.poll) -> bool:
        orphaned = self._owns_process and os.getppid() != self._parent
        return orphaned or any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))

    async def _end_all(self, reason: str, whole: anyio.CancelScope, within_s: float) -> None:
        """Cancel every run, give them the time there is, and end."""
        self._cancel_all(reason, within_s)
        with anyio.move_on_after(within_s - GRACE_MARGIN_S):
            while self._runs or self._writing:
                if self._waiting_since is not None and time.monotonic() - self._waiting_since > WRITE_STUCK_S:
                    self._give_up_reader()
                await anyio.sleep(RUNS_END_POLL_S)
        if self._runs and self._owns_process:
            # The host's own code does not let itself be cancelled, and nothing may outlive the grace.
            os._exit(1)
        whole.cancel()


async def serve(host: Host, work: Work, stdin: int, stdout: int, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
    """Speak the protocol as `host` over two descriptors of this process; they stay the caller's to close."""
    link = HostLink(host, work, stdin, stdout, HostEnd(line_bytes_max=line_bytes_max), owns_process=False)
    await link.send(host.hello())
    await link.serve()


def take_runs(host: Host, work: Work, stdout: int, line_bytes_max: int | None) -> int | None:
    """Take the runs of this process, whose hello was said, until its stdin ends; return the signal that ended it."""
    end = HostEnd(line_bytes_max=LINE_BYTES_MAX if line_bytes_max is None else line_bytes_max)
    end.send(host.hello())
    link = HostLink(host, work, 0, stdout, end, owns_process=True)
    anyio.run(link.serve)
    return link.signal


def _checked(receipt: Receipt) -> Json:
    """The receipt in plain JSON. Types are checked when something is read, not when it is built."""
    plain = msgspec.to_builtins(receipt)
    read_receipt(plain)
    return plain


def _text(error: Exception) -> str:
    """What a `fatal` says: it has one text, so the next step travels in it, and is not what is cut."""
    text, hint = f"{type(error).__name__}: {error}", ""
    if isinstance(error, BackplaneError):
        text = error.message
        hint = f"; {error.hint}"[:HINT_CHARS_MAX] if error.hint and not text.endswith(error.hint) else ""
    text = text[: ERROR_CHARS_MAX - len(hint)] + hint
    # A name of a file may hold bytes that are no text, and they are no reason to say nothing.
    return text.encode("utf-8", "backslashreplace").decode()


async def _awaited(work: Any) -> Done:
    """Await a host's work, and say what is wrong with one that is none. Raises TypeError."""
    if not isinstance(work, Awaitable):
        raise TypeError(f"`work` gave {type(work).__name__} and no coroutine: write it as `async def work(run)`")
    done = await work
    if isinstance(done, Awaitable):
        getattr(done, "close", lambda: None)()  # Or Python warns of it a second time.
        raise TypeError("`work` returned a coroutine that nobody awaited: an `await` is missing before it")
    if not isinstance(done, Done):
        raise TypeError(f"`work` returned {type(done).__name__}: end it with `return Done()`")
    return done


def _failure(run_id: str, error: Exception) -> wire.Fatal:
    code = error.code if isinstance(error, BackplaneError) else "internal"
    return wire.Fatal(ref_id=run_id, error=_text(error), error_code=code)


def _write_some(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
