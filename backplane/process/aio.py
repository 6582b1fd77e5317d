"""Adds to event loops: deadlines that are checked twice, tasks that end in order, blocking calls that can be left.

asyncio's own cancellation (`Task.cancel`, `wait_for`, `asyncio.timeout`) goes through anyio's shields. So work that has
to end in order has a task of its own (`LoopTask`), and its caller waits for the end of that.

A callback of the loop runs outside of any task; `register` makes anyio work there. Where `sniffio` is installed (trio
brings it), anyio asks that for the loop, and without a task it only knows what `anyio.run` has set; `asyncio.run` sets
nothing.
"""

from __future__ import annotations

import contextvars
import errno
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

SECOND_LOOK_S: Final = 0.05
"""Seconds after a deadline to read data that arrived in time: after SIGSTOP, a process sees its timers expire first."""


ACCEPT_AGAIN_S: Final = 0.05
"""Seconds to the next try if no descriptor is left, or the client has gone already."""

_ENDING: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end a program of ours in order; not every system has all of them."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals to handle; one that was ignored at our start (nohup, a job in the background) stays so."""
    known = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the current event loop; None on trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    return loop if hasattr(loop, "create_task") else None


class TaskRef:
    """Remembers the task that made it."""

    def __init__(self) -> None:
        self._id = anyio.get_current_task().id
        self._task: asyncio.Task[Any] | None = None
        if asyncio_loop() is not None:
            import asyncio

            self._task = asyncio.current_task()

    def is_another(self) -> bool:
        """Return True if this is not the current task and has not ended; on trio the end of a task is unknown."""
        ended = self._task is not None and self._task.done()
        return not ended and self._id != anyio.get_current_task().id


def register(how: Callable[..., T], *given: Any) -> T:
    """Call a method of the loop that takes a callback, such as `add_reader`; the callback can use all of anyio."""
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None and context.get(sniffio.current_async_library_cvar) is None:
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
    return context.run(how, *given)


async def in_time(wait: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
    """Wait at most this long, and once more for a moment; return True if the wait ended."""
    for seconds in (timeout_s, SECOND_LOOK_S):
        with anyio.move_on_after(seconds):
            await wait()
            return True
    return False


class Readable:
    """A descriptor that one task waits for again and again; on asyncio it stays registered with the loop meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio_loop()
        self._registered = self._was_in_vain = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._scope: anyio.CancelScope | None = None

    async def wait(self, timeout_s: float) -> None:
        """Wait until the descriptor can be read, for `wake`, or for this time."""
        loop = self._loop
        if loop is None:
            with anyio.move_on_after(timeout_s) as self._scope:
                await anyio.wait_readable(self._fd)
            return
        self._waiter, self._was_in_vain = loop.create_future(), False
        if not self._registered:
            register(loop.add_reader, self._fd, self._on_readable)
            self._registered = True
        if timeout_s < math.inf:
            self._due = loop.time() + timeout_s
            if self._timer is None or self._timer.when() > self._due:
                self._set_timer()
        else:
            self._due = math.inf
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._scope is not None:
            self._scope.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Leave the descriptor to be closed; it cannot be waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._unregister()

    def _on_readable(self) -> None:
        if self._waiter is not None:
            self.wake()
        elif self._was_in_vain:
            self._unregister()  # Otherwise the loop would look at it again and again.
        self._was_in_vain = self._waiter is None

    def _set_timer(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._on_time)

    def _on_time(self) -> None:
        """End the wait if its time is up. One timer serves many waits, each of which only moves `_due`."""
        assert self._loop is not None
        self._timer = None
        if self._loop.time() >= self._due:
            self.wake()
        elif self._due < math.inf:
            self._set_timer()

    def _unregister(self) -> None:
        if self._registered and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._registered = False


class beside:
    """Runs functions in tasks beside a block, until that ends; the block's exception comes out in no group."""

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


@asynccontextmanager
async def alone(work: Callable[[], Coroutine[Any, Any, object]], end_s: float) -> AsyncIterator[None]:
    """Run a function in a task beside a block; a task that does not end within `end_s` of the block's end is left.

    On trio the block waits for it: there every task has an end.
    """
    loop = asyncio_loop()
    if loop is None:
        async with beside(work):
            yield
        return
    task, ended = loop.create_task(work()), anyio.Event()
    task.add_done_callback(lambda _: ended.set())
    await anyio.lowlevel.cancel_shielded_checkpoint()  # A task that is cancelled before it begins cleans nothing up.
    try:
        yield
    finally:
        task.cancel()
        with anyio.move_on_after(end_s, shield=True):
            await ended.wait()


VISITORS_WAITING_MAX: Final = 64
"""Connections not yet accepted."""


def listening(host: str) -> socket.socket:
    """Return a listening socket for `visited`, on a free port of this address. Raises OSError."""
    listener = socket.create_server((host, 0), backlog=VISITORS_WAITING_MAX)
    listener.setblocking(False)
    return listener


async def visited(listener: socket.socket, visit: Callable[[socket.socket], Awaitable[object]], most: int) -> None:
    """Accept connections until cancelled, and call `visit` for each in a task; at most `most` at once, the next wait.

    Args:
        listener: listens already, and does not block.
        visit: the connection is closed when it returns; its exception ends all.
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
    """Return the next bytes of a non-blocking socket; none at its end."""
    while True:
        await anyio.wait_readable(source)
        with suppress(BlockingIOError):
            return source.recv(bytes_max)


async def send(sink: socket.socket, data: bytes) -> None:
    """Write all of this to a non-blocking socket."""
    view = memoryview(data)
    while view:
        await anyio.wait_writable(sink)
        with suppress(BlockingIOError):
            view = view[sink.send(view) :]


async def in_daemon(work: Callable[[], T], places: anyio.CapacityLimiter | None = None) -> T:
    """Call a blocking function in a thread that neither a cancelled caller nor the end of Python waits for.

    It has the caller's context variables.

    Args:
        places: limits such threads; an abandoned one keeps its place. None if the caller limits them.

    Raises:
        OSError: no thread can be had.
    """
    over, token, results = anyio.Event(), anyio.lowlevel.current_token(), list[T]()
    faults = list[BaseException]()
    context, sniffio = contextvars.copy_context(), sys.modules.get("sniffio")
    if sniffio is not None:  # No loop is on that thread: the function may run one of its own.
        context.run(sniffio.current_async_library_cvar.set, None)

    def end() -> None:
        if places is not None:
            places.release_on_behalf_of(over)
        over.set()

    def run() -> None:
        # This frame lasts for ever where the function does. Without a reference Python takes stdin away at its end,
        # and aborts ("could not acquire lock for <_io.BufferedReader name='<stdin>'>") where `input` reads a pipe.
        held = sys.stdin
        try:
            results.append(context.run(work))
        except BaseException as error:  # Raised again where it is awaited.
            faults.append(error)
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            anyio.from_thread.run_sync(end, token=token)
        del held

    if places is not None:
        await places.acquire_on_behalf_of(over)
    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:
        if places is not None:
            places.release_on_behalf_of(over)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    await over.wait()
    if faults:
        raise faults[0]
    return results[0]


class LoopTask:
    """A task that belongs to the event loop and to no other task; `wait` waits for its end.

    Args:
        work: is called in the task.

    Attributes:
        scope: the task runs in it.
    """

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        self.scope = anyio.CancelScope()
        self._work = work
        self._over = anyio.Event()
        self._fault: Exception | None = None
        loop = asyncio_loop()
        if loop is None:
            trio = sys.modules["trio"]
            trio.lowlevel.spawn_system_task(self._run, context=contextvars.copy_context())
        else:
            self._task = register(loop.create_task, self._run())
            self._task.add_done_callback(lambda _: self._over.set())  # It may be cancelled before it begins.

    async def _run(self) -> None:
        try:
            with self.scope:
                await self._work()
        except Exception as error:
            self._fault = error
        finally:
            self._over.set()

    async def wait(self) -> None:
        """Wait until the task has ended, and raise what it raised.

        If the caller is cancelled meanwhile, that is raised instead, but not before the end either.
        """
        cancelled: BaseException | None = None
        while not self._over.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await self._over.wait()
            except anyio.get_cancelled_exc_class() as error:  # asyncio's own cancellation goes through shields.
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self._fault is not None:
            raise self._fault

    async def wait_or_cancel(self, sooner: anyio.Event | None = None) -> None:
        """Wait until the task has ended, or for another event; if the caller is cancelled, the task is, too."""
        try:
            await (sooner or self._over).wait()
        except anyio.get_cancelled_exc_class():
            self.scope.cancel()
            with suppress(Exception):  # The cancellation says more than what became of the task.
                await self.wait()
            raise


class OwnTask(Generic[T]):
    """A block that is entered and left in one task of its own, as a task group requires."""

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block
        self._entered, self._over = anyio.Event(), anyio.Event()
        self._values = list[T]()

    async def __aenter__(self) -> T:
        self._task = LoopTask(self._live)
        await self._task.wait_or_cancel(self._entered)
        if not self._values:
            await self._task.wait()
        return self._values[0]

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._task.wait_or_cancel()
        await self._task.wait()

    async def _live(self) -> None:
        try:
            async with self._block as value:
                self._values.append(value)
                self._entered.set()
                await self._over.wait()
        finally:
            self._entered.set()
