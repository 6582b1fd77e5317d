"""The pipe to such an agent: user messages and control requests out, its messages and questions in.

Lines of the agent are heard in order; its questions are answered in tasks of their own, and may be withdrawn. What a
message means is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.pipes import Pair
from backplane.protocol import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bounded, strict

ANSWER_S: Final = 60.0
"""For an answer to a control request: a third of a second is usual, a cold disk under load needs more."""

ASKED_MAX: Final = 256
"""Questions that are worked on at once; an agent with more of them open is out of order."""

Message = dict[str, Any]


class Refused(msgspec.Struct, frozen=True):
    """A question's answer that is an error."""

    message: str


Answer = Callable[[Message], Awaitable[Json | Refused]]
"""Answers a control request of the agent."""
Hear = Callable[[Message, bytes], Awaitable[None]]
"""Takes a message and its line; while it works nothing more is read."""


class Client:
    """One agent behind a pipe; `run` must be running while it is used. The descriptors stay the caller's to close.

    Args:
        unread: told of a line that is no message.
    """

    def __init__(
        self, write_fd: int, read_fd: int, *, hear: Hear, answer: Answer, unread: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._ends = Pair(write_fd, read_fd)
        self._hear, self._answer, self._unread = hear, answer, unread
        self._lines = Lines(LINE_BYTES_MAX)
        self._waiting: dict[str, tuple[anyio.Event, list[Message]]] = {}
        self._asked: dict[str, anyio.CancelScope] = {}
        self._next = 0
        self.ended = anyio.Event()
        """The agent says nothing more."""

    async def run(self) -> None:
        """Read until the agent closes its output; then every open call is over."""
        async with anyio.create_task_group() as tasks:
            while data := await self._ends.more():
                for line in self._lines.feed(data):
                    if line.strip():
                        await self._take(line, tasks)
            self.ended.set()
            for arrived, _ in self._waiting.values():
                arrived.set()
            tasks.cancel_scope.cancel()

    async def say(self, content: Json) -> None:
        """Give the agent a message of the user; during a turn it waits, or is taken into the turn."""
        message = {"role": "user", "content": content}
        await self._write({"type": "user", "session_id": "", "message": message, "parent_tool_use_id": None})

    async def call(
        self, subtype: str, *, timeout_s: float = ANSWER_S, written: anyio.Event | None = None, **members: Json
    ) -> Message:
        """Ask the agent's program for something.

        Args:
            written: set when the question is on its way: what is said from then on comes after it.

        Returns:
            Its answer: `subtype` is success or error, or empty when the program ended instead.

        Raises:
            BackendError: `backend_timeout`.
        """
        self._next += 1
        id = f"backplane-{self._next}"
        waiting: tuple[anyio.Event, list[Message]] = (anyio.Event(), [])
        self._waiting[id] = waiting
        try:
            with anyio.move_on_after(timeout_s):
                await self._write(
                    {"type": "control_request", "request_id": id, "request": {"subtype": subtype, **members}}
                )
                if written is not None:
                    written.set()
                if not self.ended.is_set():
                    await waiting[0].wait()
                return waiting[1][0] if waiting[1] else {"subtype": ""}
        finally:
            del self._waiting[id]
        raise BackendError("backend_timeout", f"no answer to {subtype} within {timeout_s:g} s")

    def withdraw(self) -> None:
        """Answer no open question any more."""
        for scope in self._asked.values():
            scope.cancel()

    @property
    def asking(self) -> bool:
        """Whether a question of the agent is open."""
        return bool(self._asked)

    async def _take(self, line: bytes, tasks: anyio.abc.TaskGroup) -> None:
        message = read(line)
        kind = message.get("type") if message is not None else None
        if message is None:
            await self._unread(line[:EVIDENCE_BYTES])
        elif kind == "control_request":
            await self._take_question(message, tasks)
        elif kind == "control_response":
            response = message.get("response")
            waiting = self._waiting.get(str(response.get("request_id"))) if isinstance(response, dict) else None
            if waiting is not None and isinstance(response, dict):
                waiting[1].append(response)
                waiting[0].set()
        elif kind == "control_cancel_request":
            scope = self._asked.get(str(message.get("request_id")))
            if scope is not None:
                scope.cancel()
        else:
            await self._hear(message, line)

    async def _take_question(self, message: Message, tasks: anyio.abc.TaskGroup) -> None:
        id, request = message.get("request_id"), message.get("request")
        if not isinstance(id, str) or not isinstance(request, dict):
            return
        if len(self._asked) >= ASKED_MAX:
            await self._reply(id, Refused(f"{ASKED_MAX} questions are open"))
            return
        self._asked[id] = anyio.CancelScope()
        tasks.start_soon(self._work_on, id, request)

    async def _work_on(self, id: str, request: Message) -> None:
        answer: Json | Refused = None
        with self._asked[id] as scope:
            try:
                answer = await self._answer(request)
            finally:
                del self._asked[id]
        if not scope.cancelled_caught:
            await self._reply(id, answer)

    async def _reply(self, id: str, answer: Json | Refused) -> None:
        body: Message = {"subtype": "success", "request_id": id, "response": answer}
        if isinstance(answer, Refused):
            body = {"subtype": "error", "request_id": id, "error": answer.message}
        await self._write({"type": "control_response", "response": body})

    async def _write(self, message: Message) -> None:
        await self._ends.write(msgspec.json.encode(message) + b"\n")


def read(line: bytes) -> Message | None:
    """One line as a message; None when it is none."""
    if isinstance(line, Overlong):
        return None
    try:
        bounded(line)
        value = strict(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("type"), str) else None
