"""Extends anyio with deadlines with a second look, tasks that end in order, and blocking calls that can be abandoned.

asyncio's own cancellation (`Task.cancel`, `wait_for`, `asyncio.timeout`) ignores anyio's shields. Work that must end in
order therefore runs in a task of its own (`LoopTask`), and its caller waits for the end of that task.
"""

from __future__ import annotations

import contextvars
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

SECOND_LOOK_S: Final = 0.05
"""Seconds to wait again after a deadline: a process that continues after SIGSTOP sees its timers before its data."""

ACCEPT_AGAIN_S: Final = 0.05
"""Seconds until the next `accept` after one that failed because no descriptor was free or the client had gone."""

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which our programs end in order."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals to handle, except those ignored at our start (by nohup, or in a background job)."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running asyncio loop; None on trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    return loop if hasattr(loop, "create_task") else None


def asyncio_task() -> asyncio.Task[Any] | None:
    """Return the current asyncio task; None on trio."""
    if asyncio_loop() is None:
        return None
    import asyncio

    return asyncio.current_task()


class Flag:
    """A flag that is set once, and that tasks can wait for.

    A run has a dozen, and most have no waiter; an `anyio.Event` takes 900 bytes, with or without one.
    """

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self) -> None:
        """Wait until the flag is set."""
        if self._is_set:
            await anyio.lowlevel.checkpoint()
            return
        self._event = self._event or anyio.Event()
        await self._event.wait()


async def in_time(wait: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
    """Wait up to `timeout_s`, then up to `SECOND_LOOK_S`; return True if `wait` has returned."""
    for seconds in (timeout_s, SECOND_LOOK_S):
        with anyio.move_on_after(seconds):
            await wait()
            return True
    return False


class PipeReader:
    """Reads a non-blocking descriptor repeatedly, in one task.

    asyncio keeps the descriptor registered between the reads, which makes a wait three times as fast as anyio's.

    Args:
        fd: the descriptor.
        bytes_max: limit of bytes of one read.
    """

    def __init__(self, fd: int, bytes_max: int) -> None:
        self._fd, self._bytes_max = fd, bytes_max
        self._loop = asyncio_loop()
        self._data: bytes | None = None
        """Data that was read as soon as the descriptor was readable; None if there is none."""
        self._is_registered = self._was_in_vain = False
        self._waiter: asyncio.Future[None] | None = None
        self._scope: anyio.CancelScope | None = None

    def read(self) -> bytes | None:
        """Read without a wait; return no bytes at the end, and None if there is no data yet."""
        data, self._data = self._data, None
        if data is not None:
            return data
        try:
            return os.read(self._fd, self._bytes_max)
        except BlockingIOError:
            return None

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is data, `wake` is called, or `timeout_s` has passed."""
        if self._loop is None:
            with anyio.move_on_after(timeout_s) as self._scope:
                await anyio.wait_readable(self._fd)
            return
        self._waiter, self._was_in_vain = self._loop.create_future(), False
        timer = self._loop.call_later(timeout_s, self.wake)
        if not self._is_registered:
            self._loop.add_reader(self._fd, self._on_readable)
            self._is_registered = True
        try:
            await self._waiter
        finally:
            self._waiter = None
            timer.cancel()

    def wake(self) -> None:
        """End the current wait, if any."""
        if self._scope is not None:
            self._scope.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Unregister the descriptor before its owner closes it; no wait may follow."""
        if self._is_registered and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._is_registered = False

    def _on_readable(self) -> None:
        if self._waiter is not None and self._data is None:
            with suppress(OSError):  # The task's own read raises it.
                self._data = self.read()  # Now: otherwise the loop would call this again before the task goes on.
            self.wake()
        elif self._was_in_vain:
            self.close()  # Otherwise the loop would call this again and again.
        self._was_in_vain = self._waiter is None


class beside:
    """Runs functions in background tasks until its block ends; the block's exception is raised without a group."""

    def __init__(self, *works: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._works = works
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> None:
        await self._tasks.__aenter__()
        for work in self._works:
            self._tasks.start_soon(work)

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


async def visited(listener: socket.socket, visit: Callable[[socket.socket], Awaitable[object]], most: int) -> None:
    """Accept connections until cancelled, and call `visit` for each in a task of its own.

    Args:
        listener: a listening, non-blocking socket.
        visit: handles a connection, which is closed when this returns; an exception ends all connections.
        most: limit of open connections; further ones wait.
    """
    places = anyio.Semaphore(most)

    async def attend(visitor: socket.socket) -> None:
        try:
            with visitor:
                visitor.setblocking(False)
                await visit(visitor)
        finally:
            places.release()

    async with anyio.create_task_group() as tasks:
        while True:
            await places.acquire()
            tasks.start_soon(attend, await _next_visitor(listener))


async def _next_visitor(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            return listener.accept()[0]
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EPROTO):
                raise
            await anyio.sleep(ACCEPT_AGAIN_S)


async def receive(source: socket.socket, bytes_max: int) -> bytes:
    """Return the next bytes of a non-blocking socket; empty at its end."""
    while True:
        await anyio.wait_readable(source)
        with suppress(BlockingIOError):
            return source.recv(bytes_max)


async def send(sink: socket.socket, data: bytes) -> None:
    """Write all of `data` to a non-blocking socket."""
    view = memoryview(data)
    while view:
        await anyio.wait_writable(sink)
        with suppress(BlockingIOError):
            view = view[sink.send(view) :]


async def in_daemon(work: Callable[[], T]) -> T:
    """Call a blocking function in a daemon thread; a cancelled caller and Python's exit do not wait for the thread.

    The function sees the caller's context variables. The caller limits the number of such threads.

    Raises:
        OSError: the thread cannot be started.
    """
    over, token, result = anyio.Event(), anyio.lowlevel.current_token(), Future[T]()
    context, sniffio = contextvars.copy_context(), sys.modules.get("sniffio")
    if sniffio is not None:  # The thread has no loop: the function may run its own.
        context.run(sniffio.current_async_library_cvar.set, None)

    def run() -> None:
        # The function may never return. Without this reference, Python would destroy stdin at its exit, and abort
        # ("could not acquire lock for <_io.BufferedReader name='<stdin>'>") while `input` reads a pipe.
        stdin = sys.stdin
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # The caller's task raises it again.
            result.set_exception(error)
        with suppress(RuntimeError):  # The loop has already ended.
            anyio.from_thread.run_sync(over.set, token=token)
        del stdin

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    await over.wait()
    return result.result()


class LoopTask:
    """Runs a function in a task of the event loop, independent of the caller's task; `wait` waits for its end.

    Args:
        work: the function to run.

    Attributes:
        scope: the cancel scope around the function.
    """

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        self.scope = anyio.CancelScope()
        self._work = work
        self._over = Flag()
        self._fault: Exception | None = None
        loop = asyncio_loop()
        if loop is None:
            trio = sys.modules["trio"]
            trio.lowlevel.spawn_system_task(self._run, context=contextvars.copy_context())
        else:
            self._task = loop.create_task(self._run())
            self._task.add_done_callback(lambda _: self._over.set())  # The task may be cancelled before it begins.

    async def _run(self) -> None:
        try:
            with self.scope:
                await self._work()
        except Exception as error:
            self._fault = error
        finally:
            self._over.set()

    async def wait(self) -> None:
        """Wait until the task has ended, and raise its exception, if any.

        A cancellation of the caller is raised instead, and also only after the task has ended.
        """
        cancelled: BaseException | None = None
        while not self._over.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await self._over.wait()
            except anyio.get_cancelled_exc_class() as error:  # asyncio's own cancellation ignores shields.
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self._fault is not None:
            raise self._fault
