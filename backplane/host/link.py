"""Runs a host over two file descriptors: every run ends exactly once, whatever the host's own code does.

A slow reader slows the host down. A signal or the end of the control plane ends all runs within a time limit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Literal

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
from msgspec import UNSET

from backplane.contract import envelope as wire
from backplane.contract.events import RunCompleted, RunStarted
from backplane.contract.receipt import read_receipt
from backplane.errors import BackplaneError
from backplane.host.run import GRACE_S, Done, Host, HostRun, Work, Written
from backplane.policy.rules import compile_policy
from backplane.process.aio import ending_signals, in_time
from backplane.protocol.host import HostEnd
from backplane.protocol.lines import LINE_BYTES_MAX
from backplane.protocol.messages import Broken, Received

GRACE_MARGIN_S: Final = 0.3
"""Seconds subtracted from a grace period, so that an inner run ends before the outer run."""

PEER_GONE_S: Final = 3.5
"""Seconds for all runs to end after the peer has gone; with polling and exit, the host ends within 5 s."""

WRITE_STUCK_S: Final = 0.5
"""Seconds that an ending host waits for a peer that does not read."""

PEER_GONE_POLL_S: Final = 1.0
"""Seconds between checks that stdout has a reader: a host ends within 5 s after its peer, and idles almost for free."""

RUNS_END_POLL_S: Final = 0.01
"""Seconds between checks of an ending host whether its last run has ended."""

SENT_PER_YIELD: Final = 64
"""Messages written between two yields to the event loop, so that a cancel reaches a host that only emits."""

ERROR_CHARS_MAX: Final = 8192
"""Maximum length of an error's text, and of its next step: more than a person reads, and far below a line's limit."""


class HostLink:
    """Connects a host to its control plane over two file descriptors."""

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
        """Open asks by the ids of run and ask; the event is set after the answer, or if no answer can come."""
        self._tasks: anyio.abc.TaskGroup | None = None
        """The task group of the runs and their callbacks."""
        self._stdin_open = True
        self._sent = 0
        self._writing = 0
        self._waiting_since: float | None = None
        """Monotonic time at which a write began to wait for the reader; None if no write waits."""
        self._gave_up_reader = False
        self._in_line = False
        """True if a line was written only in part; the next message then begins with a newline."""
        self._write_lock = anyio.Lock()
        self._parent = os.getppid()
        self.signal: int | None = None
        """Number of the first signal that the process received; None before a signal."""

    def can_ask(self, run: HostRun) -> bool:
        return self._stdin_open and "ask/1" in run.extensions and "ask/1" in self.host.extensions

    async def ask(self, ask: wire.Ask, within_s: float) -> wire.AnswerMessage | None:
        """Send an ask; return its answer, or None if no answer comes in time."""
        arrived, answers = self._asks[ask.ref_id, ask.id] = anyio.Event(), list[wire.AnswerMessage]()
        try:
            await self.send(ask)
            await in_time(arrived.wait, within_s)
        finally:
            del self._asks[ask.ref_id, ask.id]
        return answers[0] if answers else None

    async def send(
        self, message: wire.Hello | wire.EventMessage | wire.Final | wire.Fatal | wire.Ask | wire.Pong
    ) -> None:
        self._sent += 1
        await self.write(self._end.send(message))
        if self._sent % SENT_PER_YIELD == 0:
            await anyio.lowlevel.checkpoint()

    async def write(self, line: bytes) -> None:
        if not self._writing and not self._gave_up_reader and not self._in_line:
            line = line[self._write_some(line) :]
        if line:
            await self.write_pieces((line,))

    async def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Write one line in pieces, at the reader's pace; the whole line may be too long for memory."""
        self._writing += 1
        try:
            # Finish every line that was begun: half a line would corrupt the next message.
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
            raise self._unread()
        if written := self._write_some(piece):
            self._waiting_since, self._in_line = None, True
            return written
        self._waiting_since = self._waiting_since or time.monotonic()
        try:
            await anyio.wait_writable(self._stdout)
        except (anyio.ClosedResourceError, OSError) as error:
            raise self._unread() from error
        return 0

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self._stdout, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._unread() from error

    def _unread(self) -> BackplaneError:
        self._cancel_all("nobody reads this host's output", GRACE_S)
        return BackplaneError("stream_closed", "nobody reads this host's output")

    def _give_up_reader(self) -> None:
        """Stop all writes: writes that wait for the reader fail, and later writes fail, too."""
        self._gave_up_reader = True
        anyio.notify_closing(self._stdout)

    async def serve(self) -> None:
        """Run orders until stdin and the last run have ended; the hello has already been sent."""
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
            except PermissionError:  # A regular file or /dev/null is always readable.
                await anyio.lowlevel.checkpoint()
            data = os.read(self._stdin, 65536)
            try:
                for received in self._end.receive(data) if data else self._end.end():
                    await self._take(received)
            except BackplaneError:
                raise
            except Exception as error:  # The outermost handler: open runs continue.
                await self.write(self._end.refuse(Broken("internal", _text(error), b"")))
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
            run = self._runs.get(received.ref_id)  # Without a callback the message is dropped.
            if isinstance(received, wire.Input) and run is not None and run.on_input is not None:
                self._call_soon(run, run.on_input, received.text)
            elif isinstance(received, wire.Interrupt) and run is not None and run.on_interrupt is not None:
                self._call_soon(run, run.on_interrupt)
        elif isinstance(received, wire.Ping):
            await self.send(wire.Pong(seq=received.seq))
        elif isinstance(received, wire.AnswerMessage):
            waiting = self._asks.get((received.ref_id, received.id))
            if waiting is not None and not waiting[1]:
                waiting[1].append(received)
                waiting[0].set()
        elif isinstance(received, Broken):  # One error answers a bad message; open runs continue.
            await self.write(self._end.refuse(received))

    def _call_soon(self, run: HostRun, callback: Callable[..., Awaitable[None]], *arguments: str) -> None:
        """Start a run's callback; an exception in the callback ends only this run."""

        async def call() -> None:
            try:
                await callback(*arguments)
            except Exception as error:
                run.fault = error
                run.scope.cancel()

        if self._tasks is not None:
            self._tasks.start_soon(call)

    async def _begin(self, message: wire.RunMessage) -> None:
        try:
            run = HostRun(self, message, compile_policy(message.work_order.policy), anyio.CancelScope())
        except Exception as error:  # The outermost handler: this run gets a `fatal`, and the others continue.
            await self.send(_failure(message.id, error))
            return
        self._runs[run.id] = run
        assert self._tasks is not None
        self._tasks.start_soon(self._run, run)
        if not self._stdin_open:
            self._stdin_ended(run)

    def _stdin_ended(self, run: HostRun) -> None:
        """End a run's asks at the end of stdin; cancel the run if its peer can cancel, as such a peer has then gone."""
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
            else:
                self._call_soon(run, run.on_cancel)

    def _cancel_all(self, reason: str, grace_s: float) -> None:
        for run in self._runs.values():
            self._cancel(run, reason, grace_s)

    async def _run(self, run: HostRun) -> None:
        try:
            ending = await self._do(run)
            with anyio.CancelScope(shield=True):
                await self._send_end(run, ending)
        except BackplaneError as error:
            if error.code != "stream_closed":
                raise
        except Exception as error:  # The outermost handler: this run ends, and the others continue.
            await self.write(self._end.refuse(Broken("internal", _text(error), b"", run.id)))
        finally:
            self._runs.pop(run.id, None)

    async def _send_end(self, run: HostRun, ending: Done | Written | wire.Fatal) -> None:
        if isinstance(ending, Written):
            self._end.close_run(run.id)
            await self.write_pieces(ending.line)
            return
        try:
            message: wire.Final | wire.Fatal
            if isinstance(ending, Done):
                receipt = msgspec.to_builtins(run.receipt(ending))
                read_receipt(receipt)  # A struct is not checked when it is built.
                message = wire.Final(ref_id=run.id, receipt=receipt)
            else:
                message = ending
            line = self._end.send(message)
        except Exception as error:  # The host's own code returned a value that no message can represent.
            line = self._end.send(_failure(run.id, error))
        await self.write(line)

    async def _do(self, run: HostRun) -> Done | Written | wire.Fatal:
        """Run the host's own code; return one ending for the run, whatever the code does."""
        done: Done | Written | None = None
        with run.scope:
            try:
                done = await self._narrated(run)
            except Exception as error:  # A bug in a host becomes a `fatal`.
                run.fault = error
        if run.fault is not None and not isinstance(run.fault, BackplaneError):
            sys.stderr.write("".join(traceback.format_exception(run.fault)))
        if run.fault is not None and run.cancelled_because is None:
            return _failure(run.id, run.fault)
        if done is None:
            outcome: Literal["partial", "failed"] = "partial" if run.emitted else "failed"
            return Done(outcome=outcome, usage_raw={"cancelled": run.cancelled_because})
        return done

    async def _narrated(self, run: HostRun) -> Done | Written:
        """Call the host's `work`, between `run_started` and `run_completed` unless the host is a control plane."""
        if self.host.backends is not UNSET:
            # A control plane forwards a run's own events; events added here would be missing in the run's receipt.
            return await self._work(run)
        await run.emit(RunStarted(ts=run.now(), message=f"{self.host.id} starts"))
        done = await self._work(run)
        if not isinstance(done, Done):
            raise TypeError(f"`work` returned {type(done).__name__}: end it with `return Done()`")
        await run.emit(RunCompleted(ts=run.now(), message=f"{self.host.id} ends: {done.outcome}"))
        return done

    async def _heed_signals(self, whole: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            async for number in received:
                self.signal = self.signal or int(number)
                await self._end_all(f"the host got {signal.Signals(number).name}", whole, GRACE_S)

    async def _watch_peer(self, whole: anyio.CancelScope) -> None:
        """End all runs once the peer has gone, whether stdin has ended or not."""
        poll = select.poll()
        poll.register(self._stdout, 0)
        while not self._peer_is_gone(poll):
            await anyio.sleep(PEER_GONE_POLL_S)
        await self._end_all("the control plane is gone", whole, PEER_GONE_S)

    def _peer_is_gone(self, poll: select.poll) -> bool:
        orphaned = self._owns_process and os.getppid() != self._parent
        return orphaned or any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))

    async def _end_all(self, reason: str, whole: anyio.CancelScope, within_s: float) -> None:
        """Cancel all runs, wait at most `within_s` for their ends, and stop the host."""
        self._cancel_all(reason, within_s)
        with anyio.move_on_after(within_s - GRACE_MARGIN_S):
            while self._runs or self._writing:
                if self._waiting_since is not None and time.monotonic() - self._waiting_since > WRITE_STUCK_S:
                    self._give_up_reader()
                await anyio.sleep(RUNS_END_POLL_S)
        if self._runs and self._owns_process:
            # The host's own code ignores its cancel, and no run may outlive its grace period.
            os._exit(1)
        whole.cancel()


async def serve(host: Host, work: Work, stdin: int, stdout: int, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
    """Speak the protocol as `host` over two descriptors of this process, which the caller closes."""
    link = HostLink(host, work, stdin, stdout, HostEnd(line_bytes_max=line_bytes_max), owns_process=False)
    await link.send(host.hello())
    await link.serve()


def take_runs(host: Host, work: Work, stdout: int, line_bytes_max: int | None) -> int | None:
    """Run orders until stdin ends, after the hello was written; return the terminating signal or None."""
    end = HostEnd(line_bytes_max=LINE_BYTES_MAX if line_bytes_max is None else line_bytes_max)
    end.send(host.hello())
    link = HostLink(host, work, 0, stdout, end, owns_process=True)
    anyio.run(link.serve)
    return link.signal


def _text(error: Exception) -> str:
    """Return an error's text for a `fatal`, with the next step."""
    if not isinstance(error, BackplaneError):
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
    else:
        hint = f"; {error.hint}" if error.hint and not error.message.endswith(error.hint) else ""
        text = error.message[:ERROR_CHARS_MAX] + hint[:ERROR_CHARS_MAX]
    return text.encode("utf-8", "backslashreplace").decode()  # A file's name may contain bytes that are not UTF-8.


def _failure(run_id: str, error: Exception) -> wire.Fatal:
    code = error.code if isinstance(error, BackplaneError) else "internal"
    return wire.Fatal(ref_id=run_id, error=_text(error), error_code=code)
