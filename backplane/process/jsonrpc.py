"""Runs a JSON-RPC connection over two descriptors: sends our calls, and answers the requests of the peer.

The caller starts and ends the peer.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.abc

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.aio import ending_signals
from backplane.process.pipes import Pair
from backplane.protocol.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    Id,
    Malformed,
    Notification,
    Peer,
    Received,
    Request,
    Response,
    RpcError,
)
from backplane.protocol.lines import LINE_BYTES_MAX

ASKED_MAX: Final = 256
"""Limit of the peer's open requests; further ones are refused."""

ASKED_BYTES_MAX: Final = 8 * 1024 * 1024
"""Limit of the total bytes of open requests; a longer request is accepted if no other is open."""

WITHDRAW_S: Final = 1.0
"""Seconds to write that a call is withdrawn, to a peer that may read nothing."""

END_POLL_S: Final = 1.0
"""Seconds between two checks for the end of the input."""

AnswerRequest = Callable[[Request], Awaitable[Json | RpcError]]
"""Answers a request of the peer. An `RpcError` refuses the request; with `gone`, no answer is sent."""
Hear = Callable[[Notification], Awaitable[None]]
"""Handles a notification; no other message is read until this returns."""
Watch = Callable[[bytes, Received], Awaitable[None]]
"""Receives every line and its message."""


class Pipe:
    """A JSON-RPC connection over two descriptors, which the caller closes.

    Attributes:
        ended: set at the end of the input.
        signal: number of the first signal that ended `serve`.

    Args:
        answer: answers requests, each in a task of its own.
        hear: handles notifications.
        strict: answer an invalid message with an error, as the protocol requires of a server.
        watch: called with every line and its message, before the message is handled.
        rest_s: seconds left to answer open requests once the input has ended.
        peer: encodes and decodes the messages (default: JSON-RPC 2.0, one message per line).
    """

    def __init__(
        self,
        write_fd: int,
        read_fd: int,
        *,
        answer: AnswerRequest,
        hear: Hear,
        strict: bool = False,
        watch: Watch | None = None,
        rest_s: float = 0.0,
        peer: Peer | None = None,
    ) -> None:
        self._watch, self._rest_s = watch, rest_s
        self._peer = peer or Peer(LINE_BYTES_MAX)
        self._read_fd = read_fd
        self._ends = Pair(write_fd, read_fd)
        self._answer, self._hear = answer, hear
        self._waiting: dict[Id, tuple[anyio.Event, list[Response]]] = {}
        self._strict = strict
        self._asked: dict[Id, anyio.CancelScope] = {}
        self._asked_bytes = 0
        self.ended = anyio.Event()
        self.signal: int | None = None

    async def serve(self, *, again: Callable[[], None] | None = None) -> int | None:
        """Run as the whole work of this process: until the input ends, or a signal cancels all open requests.

        Args:
            again: called at each further signal.

        Returns:
            The number of the signal; None at the end of the input.
        """
        async with anyio.create_task_group() as tasks:
            work = anyio.CancelScope()
            tasks.start_soon(self._watch_signals, work, again)
            with work:
                await self.run()
            tasks.cancel_scope.cancel()
        return self.signal

    async def _watch_signals(self, work: anyio.CancelScope, again: Callable[[], None] | None) -> None:
        with anyio.open_signal_receiver(*ending_signals()) as received:
            async for number in received:
                if self.signal is not None and again is not None:
                    again()
                self.signal = self.signal or int(number)
                work.cancel()

    async def run(self) -> None:
        """Read until the input ends; then fail our open calls, and cancel the peer's open requests after `rest_s`."""
        async with anyio.create_task_group() as whole:
            if self._rest_s:
                whole.start_soon(self._watch_end, whole.cancel_scope)
            async with anyio.create_task_group() as tasks:
                await self._read(tasks)
                self.ended.set()
                for arrived, _ in self._waiting.values():
                    arrived.set()
                tasks.cancel_scope.deadline = anyio.current_time() + self._rest_s
            whole.cancel_scope.cancel()

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        while data := await self._ends.more():
            for line in self._peer.lines(data):
                await self._take(line, tasks)

    async def _watch_end(self, whole: anyio.CancelScope) -> None:
        """Poll for the end of the input, because `_read` cannot reach it while the peer reads no answers."""
        poll = select.poll()
        poll.register(self._read_fd, 0)
        while not poll.poll(0):
            await anyio.sleep(END_POLL_S)
        whole.deadline = anyio.current_time() + self._rest_s

    async def _take(self, line: bytes, tasks: anyio.abc.TaskGroup) -> None:
        received = self._peer.read(line)
        if self._watch is not None:
            await self._watch(line, received)
        if isinstance(received, Notification):
            await self._hear(received)
        elif isinstance(received, Request):
            await self._begin(received, len(line), tasks)
        elif isinstance(received, Malformed):
            if self._strict:
                await self._ends.write(self._peer.refuse(received.id, received.code, received.why))
        elif (waiting := self._waiting.get(received.id)) is not None and not waiting[1]:
            waiting[1].append(received)
            waiting[0].set()

    async def _begin(self, asked: Request, size: int, tasks: anyio.abc.TaskGroup) -> None:
        code, why = INTERNAL_ERROR, ""
        if len(self._asked) >= ASKED_MAX:
            why = f"{ASKED_MAX} questions are open"
        elif asked.id in self._asked:
            code, why = INVALID_REQUEST, "another question with this id is open"
        elif self._asked and self._asked_bytes + size > ASKED_BYTES_MAX:
            why = f"questions of {ASKED_BYTES_MAX} bytes are open; ask again when one is answered"
        if why:
            await self._ends.write(self._peer.refuse(asked.id, code, why))
            return
        scope = self._asked[asked.id] = anyio.CancelScope()
        self._asked_bytes += size
        tasks.start_soon(self._reply, asked, size, scope)

    async def _reply(self, asked: Request, size: int, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                answer = await self._answer(asked)
        finally:
            del self._asked[asked.id]
            self._asked_bytes -= size
        if scope.cancelled_caught or (isinstance(answer, RpcError) and answer.gone):
            return
        if isinstance(answer, RpcError):
            await self._ends.write(self._peer.refuse(asked.id, answer.code, answer.message))
        else:
            await self._ends.write(self._peer.answer(asked.id, answer))

    def drop(self, id: Id) -> None:
        """Cancel an open request of the peer without an answer."""
        scope = self._asked.get(id)
        if scope is not None:
            scope.cancel()

    async def call(
        self, method: str, params: Json, *, timeout_s: float | None, withdraw: str | None = None
    ) -> Response:
        """Send a call and return its answer; the answer has a `fault` if the peer has ended.

        Args:
            withdraw: notification with `requestId` that is sent if the task is cancelled while it waits.

        Raises:
            BackendError: `backend_timeout`, no answer came in time.
        """
        id, line = self._peer.call(method, params)
        waiting = self._waiting[id] = (anyio.Event(), [])
        try:
            with anyio.move_on_after(timeout_s):
                await self._ends.write(line)
                if not self.ended.is_set():
                    await waiting[0].wait()
                return waiting[1][0] if waiting[1] else Response(id, fault=RpcError(0, "the program ended", gone=True))
        except anyio.get_cancelled_exc_class():
            if withdraw is not None:
                with anyio.move_on_after(WITHDRAW_S, shield=True):
                    await self.notify(withdraw, {"requestId": id})
            raise
        finally:
            del self._waiting[id]
        raise BackendError("backend_timeout", f"no answer to {method} within {timeout_s:g} s")

    async def notify(self, method: str, params: Json) -> None:
        await self._ends.write(self._peer.notify(method, params))
