"""Opens the socket to which an agent's hook program (`hook`) sends its questions about tool calls."""

from __future__ import annotations

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
PATH_BYTES_MAX: Final = 100
"""Maximum bytes of a socket's path: macOS takes 103, Linux 107."""

Answer = Callable[[dict[str, Any]], Awaitable[Json]]
"""Callback that answers a question; None denies the call."""


def hook_answer(refused: str | None) -> Json:
    """Return the answer that allows a call, or denies it for a reason."""
    body = {"permissionDecision": "allow", "permissionDecisionReason": ""}
    if refused is not None:
        body = {"permissionDecision": "deny", "permissionDecisionReason": f"policy_denied: {refused}"}
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **body}}


class Hooked:
    """The socket that the agent's hook program connects to."""

    def __init__(self, path: str, answer: Answer) -> None:
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            fact = f"hooks need a socket, and {path[:200]!r} is too long for one"
            raise BackendError("backend_unavailable", fact, hint="set TMPDIR to a shorter path")
        self._path, self._answer = path, answer

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer questions until cancelled."""
        async with await anyio.create_unix_listener(self._path) as listener:
            task_status.started()
            await listener.serve(self._take)

    async def _take(self, line: anyio.abc.SocketStream) -> None:
        """Answer one question; the call is denied if the question is no JSON object or gets no answer."""
        data = bytearray()
        try:
            async with line:
                async for piece in line:
                    data += piece
                    if len(data) > LINE_BYTES_MAX:
                        return
                said = strict(bytes(data))
                answer = await self._answer(said) if isinstance(said, dict) else None
                if answer is not None:
                    await line.send(msgspec.json.encode(answer))
        except (OSError, ValueError, RecursionError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # The hook program has ended, or wrote no JSON.
