"""JSON-RPC 2.0, one object a line: `Peer` turns bytes into calls and back, `Pipe` speaks it over two descriptors.

Both ends are alike: each may ask, answer and notify. What the methods mean, who starts the other program and when it
has to end is not known here.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.pipes import Pair
from backplane.protocol import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bounded, strict

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

ASKED_MAX: Final = 256
"""Questions of the other end that are worked on at once; a peer with more of them open is out of order."""

END_POLL_S: Final = 1.0
"""How often a server looks whether its client has said all: an idle one costs nothing."""

Id = str | int | None


class Fault(msgspec.Struct, frozen=True):
    """Why a call failed, as the other end said it; `gone` when it could not say anything any more."""

    code: int
    message: str
    data: Json = None
    gone: bool = False


class Reply(msgspec.Struct, frozen=True):
    """The answer to a call of ours."""

    id: Id
    result: Json = None
    fault: Fault | None = None


class Asked(msgspec.Struct, frozen=True):
    """A call of the other end, which wants an answer."""

    id: Id
    method: str
    params: dict[str, Any]


class Told(msgspec.Struct, frozen=True):
    """A notification."""

    method: str
    params: dict[str, Any]


class Unread(msgspec.Struct, frozen=True):
    """A line that is no message: what is wrong with it, and how it begins."""

    why: str
    evidence: bytes
    code: int = PARSE_ERROR
    id: Id = None


Received = Reply | Asked | Told | Unread


class Peer:
    """One end of the conversation, without any I/O."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._lines = Lines(line_bytes_max)
        self._next = 0

    def call(self, method: str, params: Json) -> tuple[int, bytes]:
        """A question with an id of its own; the answer carries it."""
        self._next += 1
        return self._next, _line({"id": self._next, "method": method, "params": params})

    def tell(self, method: str, params: Json) -> bytes:
        return _line({"method": method, "params": params})

    def answer(self, id: Id, result: Json) -> bytes:
        return _line({"id": id, "result": result})

    def refuse(self, id: Id, code: int, message: str) -> bytes:
        return _line({"id": id, "error": {"code": code, "message": message}})

    def receive(self, data: bytes) -> list[Received]:
        """Take bytes, give the messages they complete; blank lines are nothing."""
        return [_read(line) for line in self.lines(data)]

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, as they came; `read` says what each is."""
        return [line for line in self._lines.feed(data) if line.strip()]

    def read(self, line: bytes) -> Received:
        return _read(line)


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n"


def _read(line: bytes) -> Received:
    if isinstance(line, Overlong):
        return Unread("a line over the limit", bytes(line), INVALID_REQUEST)
    try:
        bounded(line)
        value = strict(line)
    except (ValueError, RecursionError) as error:
        return Unread(f"not JSON: {error}", line[:EVIDENCE_BYTES])
    if not isinstance(value, dict):
        return Unread("a line that is no object", line[:EVIDENCE_BYTES], INVALID_REQUEST)
    return _message(value, line)


def _message(value: dict[str, Any], line: bytes) -> Received:
    id, method = value.get("id"), value.get("method")
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        return Unread("an id that is neither a string nor an integer", line[:EVIDENCE_BYTES], INVALID_REQUEST)
    if isinstance(method, str):
        params = value.get("params")
        if params is not None and not isinstance(params, dict):
            return Unread(f"params of {method[:80]} that are no object", line[:EVIDENCE_BYTES], INVALID_PARAMS, id)
        return Asked(id, method, params or {}) if "id" in value else Told(method, params or {})
    if "id" in value and ("result" in value or isinstance(value.get("error"), dict)):
        return Reply(id, value.get("result"), _fault(value.get("error")))
    return Unread("an object that is no message", line[:EVIDENCE_BYTES], INVALID_REQUEST, id)


def _fault(error: Json) -> Fault | None:
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    code = code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR
    return Fault(code, str(error.get("message") or "no reason was given"), error.get("data"))


Answer = Callable[[Asked], Awaitable[Json | Fault]]
"""Answers a question of the other end; a `Fault` refuses it."""
Hear = Callable[[Told], Awaitable[None]]
"""Takes a notification. They come in order; while it works nothing more is read."""
Watch = Callable[[bytes, Received], Awaitable[None]]
"""Told of every line and what it is, before anything is done with it."""


class Pipe:
    """The conversation over two descriptors; they stay the caller's to close.

    Args:
        answer: answers questions, each in a task of its own.
        hear: takes notifications.
        unread: told of a line that is no message.
        strict: answer such a line with an error, as the protocol asks of a server.
        watch: told of every line.
        rest_s: for answering what was asked before the other end was done.
    """

    def __init__(
        self,
        write_fd: int,
        read_fd: int,
        *,
        answer: Answer,
        hear: Hear,
        unread: Callable[[Unread], None] = lambda line: None,
        strict: bool = False,
        watch: Watch | None = None,
        rest_s: float = 0.0,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        self._watch, self._rest_s = watch, rest_s
        self._peer = Peer(line_bytes_max)
        self._read_fd = read_fd
        self._ends = Pair(write_fd, read_fd)
        self._answer, self._hear, self._unread = answer, hear, unread
        self._waiting: dict[int, tuple[anyio.Event, list[Reply]]] = {}
        self._strict = strict
        self._asked: dict[Id, anyio.CancelScope] = {}
        self._ended = anyio.Event()

    @property
    def ended(self) -> bool:
        """The other end says nothing more."""
        return self._ended.is_set()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def run(self) -> None:
        """Read until the other end is done; then every open call fails, and its questions have `rest_s` left."""
        async with anyio.create_task_group() as whole:
            if self._rest_s:
                whole.start_soon(self._watch_end, whole.cancel_scope)
            async with anyio.create_task_group() as tasks:
                await self._read(tasks)
                self._ended.set()
                for arrived, _ in self._waiting.values():
                    arrived.set()
                tasks.cancel_scope.deadline = anyio.current_time() + self._rest_s
            whole.cancel_scope.cancel()

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        while data := await self._ends.more():
            for line in self._peer.lines(data):
                received = self._peer.read(line)
                if self._watch is not None:
                    await self._watch(line, received)
                await self._take(received, tasks)

    async def _watch_end(self, whole: anyio.CancelScope) -> None:
        """Who has said all, and takes no answer, keeps us from reading to his end: so it is looked for, too."""
        poll = select.poll()
        poll.register(self._read_fd, 0)
        while not poll.poll(0):
            await anyio.sleep(END_POLL_S)
        whole.deadline = anyio.current_time() + self._rest_s

    async def _take(self, received: Received, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(received, Told):
            await self._hear(received)
        elif isinstance(received, Asked):
            await self._begin(received, tasks)
        elif isinstance(received, Unread):
            self._unread(received)
            if self._strict:
                await self._ends.write(self._peer.refuse(received.id, received.code, received.why))
        elif isinstance(received.id, int) and (waiting := self._waiting.get(received.id)) is not None:
            waiting[1].append(received)
            waiting[0].set()

    async def _begin(self, asked: Asked, tasks: anyio.abc.TaskGroup) -> None:
        if len(self._asked) >= ASKED_MAX:
            await self._ends.write(self._peer.refuse(asked.id, INTERNAL_ERROR, f"{ASKED_MAX} questions are open"))
        elif asked.id in self._asked:
            await self._ends.write(
                self._peer.refuse(asked.id, INVALID_REQUEST, "another question with this id is open")
            )
        else:
            scope = self._asked[asked.id] = anyio.CancelScope()
            tasks.start_soon(self._reply, asked, scope)

    async def _reply(self, asked: Asked, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                answer = await self._answer(asked)
        finally:
            del self._asked[asked.id]
        if scope.cancelled_caught:
            return
        if isinstance(answer, Fault):
            await self._ends.write(self._peer.refuse(asked.id, answer.code, answer.message))
        else:
            await self._ends.write(self._peer.answer(asked.id, answer))

    def drop(self, id: Id) -> None:
        """Give up a question of the other end that is being worked on; it gets no answer."""
        scope = self._asked.get(id)
        if scope is not None:
            scope.cancel()

    async def call(self, method: str, params: Json, *, timeout_s: float | None) -> Reply:
        """Ask and wait for the answer; a peer that is gone is a fault, too.

        Raises:
            BackendError: `backend_timeout`, no answer in time.
        """
        id, line = self._peer.call(method, params)
        waiting: tuple[anyio.Event, list[Reply]] = (anyio.Event(), [])
        self._waiting[id] = waiting
        try:
            with anyio.move_on_after(timeout_s):
                await self._ends.write(line)
                if not self.ended:
                    await waiting[0].wait()
                return waiting[1][0] if waiting[1] else Reply(id, fault=Fault(0, "the program ended", gone=True))
        finally:
            del self._waiting[id]
        raise BackendError("backend_timeout", f"no answer to {method} within {timeout_s:g} s")

    async def tell(self, method: str, params: Json) -> None:
        await self._ends.write(self._peer.tell(method, params))
