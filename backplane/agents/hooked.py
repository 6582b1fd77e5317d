"""The socket at which an agent's hook program, see `hook`, asks about a call."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from backplane.agents import hook
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.lines import LINE_BYTES_MAX, strict

COMMAND: Final = shlex.join((sys.executable, "-I", "-S", hook.__file__))
"""Command that an agent starts as a hook; the variable `hook.SOCKET` names the socket."""
READ_S: Final = 30.0
"""Seconds for a question to arrive completely; the hook program writes it at once."""
ASKED_MAX: Final = 64
"""Maximum questions that are answered at the same time; others wait."""
PATH_BYTES_MAX: Final = 100
"""Maximum bytes of a socket's path: macOS takes 103, Linux 107."""

Answer = Callable[[dict[str, Any]], Awaitable[Json]]
"""Answers a question; None denies the call."""


class Hooked:
    """The socket that the agent's hook program connects to."""

    def __init__(self, path: str, answer: Answer) -> None:
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            fact = f"hooks need a socket, and {path[:200]!r} is too long for one"
            raise BackendError("backend_unavailable", fact, hint="set TMPDIR to a shorter path")
        self._path, self._answer = path, answer
        self._room = anyio.Semaphore(ASKED_MAX)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer questions until cancelled."""
        async with await anyio.create_unix_listener(self._path) as listener:
            task_status.started()
            await listener.serve(self._take)

    async def _take(self, line: anyio.abc.SocketStream) -> None:
        try:
            async with self._room, line:
                said = await _read(line)
                answer = await self._answer(said) if said is not None else None
                if answer is not None:
                    await line.send(msgspec.json.encode(answer))
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # The hook program has ended.


async def _read(line: anyio.abc.SocketStream) -> dict[str, Any] | None:
    data = bytearray()
    with anyio.move_on_after(READ_S), contextlib.suppress(ValueError, RecursionError):
        while len(data) <= LINE_BYTES_MAX:
            try:
                data += await line.receive()
            except anyio.EndOfStream:
                value = strict(bytes(data))
                return value if isinstance(value, dict) else None
    return None
