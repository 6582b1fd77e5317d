"""What our event loops lack: descriptors that stay registered, deadlines judged twice, and work that ends in order.

asyncio's own cancellation (`Task.cancel`, `wait_for`, `asyncio.timeout`) goes through anyio's shields, and leaves
threads behind that somebody should wait for. So the work has a task of its own there, in a scope of anyio's; whoever
awaits it passes a cancellation on to that scope and waits for the end.
On trio nothing of this is needed, and nothing is done.

Where the loop itself calls us, outside of any task, anyio has to know which loop it is on (`register`). It asks
`sniffio` where that is installed (trio brings it), and that looks at the present task, unless it was told: `anyio.run`
tells it, `asyncio.run` does not.
"""

from __future__ import annotations

import contextvars
import errno
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
"""After a deadline, for what came in time to be read: a process that was stopped finds its timers run out first."""


ACCEPT_AGAIN_S: Final = 0.05
"""Before the next try where no descriptor is left, or the visitor has gone already."""

_ENDING: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end a program of ours in order, by names that not every system knows."""


def ending_signals() -> list[signal.Signals]:
    """Those to be heeded: who started us with one ignored (nohup, a shell's background job) wants it so."""
    known = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that this is called on; None on trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    return loop if hasattr(loop, "create_task") else None


def asyncio_task() -> asyncio.Task[Any] | None:
    """Return the current task; None on trio."""
    if asyncio_loop() is None:
        return None
    import asyncio

    return asyncio.current_task()


class TaskRef:
    """Remembers the task that made it."""

    def __init__(self) -> None:
        self._id = anyio.get_current_task().id
        self._task = asyncio_task()

    def is_another(self) -> bool:
        """Return True if this is not the current task and has not ended; on trio the end of a task is unknown."""
        ended = self._task is not None and self._task.done()
        return not ended and self._id != anyio.get_current_task().id


def register(how: Callable[..., T], *given: Any) -> T:
    """Have the loop call something later: `how` is one of its methods, as `call_later` and `add_reader`.

    What is called then, and every task that it begins, can use all of anyio.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None and context.get(sniffio.current_async_library_cvar) is None:
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
    return context.run(how, *given)


async def in_time(wait: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
    """Wait at most this long, and look once more then; whether it came."""
    for seconds in (timeout_s, SECOND_LOOK_S):
        with anyio.move_on_after(seconds):
            await wait()
            return True
    return False


class Readable:
    """One descriptor that one task at a time waits for again and again; `close` it before the descriptor is closed.

    On asyncio it stays registered with the loop, and what is there is taken in the loop's own call: the waiting task is
    woken once it has something to do. On trio each wait is trio's own.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio_loop()
        self._registered = False
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[], bool] = bool

    async def until(self, take: Callable[[], bool]) -> None:
        """Wait until `take`, called each time there is something to read, says that this was enough; or for `wake`.

        What `take` raises is raised here. It must not block, and it may be called outside of any task.
        """
        if self._loop is None:
            await self._in_turns(take)
            return
        waiter = self._waiter = self._loop.create_future()
        self._take = take
        if not self._registered:
            register(self._loop.add_reader, self._fd, self._on_readable)
            self._registered = True
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._loop is None:
            if self._fd >= 0:
                anyio.notify_closing(self._fd)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Let go of the descriptor; nobody waits for it any more."""
        self.wake()
        self._unregister()
        self._fd = -1

    async def _in_turns(self, take: Callable[[], bool]) -> None:
        try:
            await anyio.wait_readable(self._fd)
            while not take():
                await anyio.wait_readable(self._fd)
        except anyio.ClosedResourceError:
            return

    def _on_readable(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            # Nobody wants more now: the loop shall not look at it again and again.
            self._unregister()
            return
        try:
            enough = self._take()
        except Exception as error:  # Raised where it is waited for.
            waiter.set_exception(error)
            return
        if enough and not waiter.done():
            waiter.set_result(None)

    def _unregister(self) -> None:
        if self._registered and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._registered = False


class beside:
    """Run functions in tasks beside a block, until that is left; what the block raises comes out in no group."""

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
    """Run a function in a task beside a block; one that does not end within `end_s` of the block's end is left behind.

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
    """Return a socket as `visited` takes it, on a port of this address that was free. Raises OSError."""
    listener = socket.socket()
    try:
        listener.bind((host, 0))
        listener.listen(VISITORS_WAITING_MAX)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def visited(listener: socket.socket, visit: Callable[[socket.socket], Awaitable[object]], most: int) -> None:
    """Accept connections until cancelled, and have `visit` attend to each in a task, so many at once; the next wait.

    Args:
        listener: listens already, and does not block.
        visit: the connection is closed when it comes back; what it raises ends all.
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
    """Take what a socket that does not block has, once there is something; nothing where its end has come."""
    while True:
        await anyio.wait_readable(source)
        with suppress(BlockingIOError):
            return source.recv(bytes_max)


async def send(sink: socket.socket, data: bytes) -> None:
    """Hand all of this to a socket that does not block."""
    view = memoryview(data)
    while view:
        await anyio.wait_writable(sink)
        with suppress(BlockingIOError):
            view = view[sink.send(view) :]


async def in_daemon(work: Callable[[], T], places: anyio.CapacityLimiter | None = None) -> T:
    """Call a blocking function in a thread that neither a cancelled caller nor the end of Python waits for.

    It has the caller's context variables.

    Args:
        places: how many such threads there may be at once; one that nobody waits for any more keeps its place. None
            where the caller bounds them.

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


async def in_order(work: Callable[[], Awaitable[T]]) -> T:
    """Await this work. Where we are cancelled it is cancelled as anyio does it, and we go on when it has ended."""
    loop = asyncio_loop()
    if loop is None:
        return await work()
    scope = anyio.CancelScope()
    made: list[T] = []

    async def scoped() -> None:
        with scope:
            made.append(await work())

    task = loop.create_task(scoped())
    try:
        await _end_of(task, scope)
    except Exception:
        await _break_off(task, scope)
        raise
    await task
    return made[0]


class OwnTask(Generic[T]):
    """A block that is entered and left in one task of its own, as a task group asks for.

    Who is handed one that lives already enters it again, which gives its value.
    """

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None
        self._entered: asyncio.Future[T] | None = None
        self._over = anyio.Event()

    async def __aenter__(self) -> T:
        loop = asyncio_loop()
        if loop is None:
            return await self._block.__aenter__()
        if self._entered is not None:
            return self._entered.result()
        entered = self._entered = loop.create_future()
        self._task = loop.create_task(self._live(entered))
        try:
            await _end_of(self._task, self._scope, entered)
        except Exception:
            await _break_off(self._task, self._scope)
            raise
        if not entered.done():
            await self._task
        value: T = entered.result()
        return value

    async def __aexit__(self, *how: Any) -> None:
        if self._task is None:
            await self._block.__aexit__(*how)
            return
        self._over.set()
        await _end_of(self._task, self._scope)
        await self._task

    async def _live(self, entered: asyncio.Future[T]) -> None:
        with self._scope:
            async with self._block as value:
                entered.set_result(value)
                await self._over.wait()


async def _break_off(task: asyncio.Task[None], scope: anyio.CancelScope) -> None:
    """End work that nobody can wait for in order, after an exception that nobody foresaw: it must not go on alone."""
    import asyncio

    scope.cancel()
    await asyncio.wait([task])


async def _end_of(
    task: asyncio.Task[None], scope: anyio.CancelScope, sooner: asyncio.Future[Any] | None = None
) -> None:
    """Wait for the end of a task, or for what comes sooner; a cancellation of ours comes out after that end."""
    import asyncio

    try:
        await asyncio.wait([task] if sooner is None else [task, sooner], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
        _ = task.cancelled() or task.exception()  # The cancellation tells more than what became of the work.
        raise
