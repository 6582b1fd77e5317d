"""Hooks of such an agent, as a way to ask us: what it starts before and after a tool puts its question to our socket.

The questions come in and answers go out; what they mean is the run's affair. Hooks are ours by their hash: those of a
user or a workspace that the agent finds beside them get no trust here.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from backplane.agents.codex import hook
from backplane.agents.events import mappings
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol import LINE_BYTES_MAX, bounded, strict

SOCKET: Final = hook.SOCKET
BEFORE: Final = "PreToolUse"
AFTER: Final = "PostToolUse"
TOOLS: Final = {BEFORE: "Bash|mcp__.*", AFTER: ""}
"""Tools that are asked about then, as the agent's hooks call them; a patch comes before it is made, by approval."""

HOOK_S: Final = hook.ANSWER_S_MAX + 40
"""The agent's own bound of a hook: after it the tool's output would be shown as it is."""
READ_S: Final = 30.0
"""For a question to come in whole; it is written at once."""
ASKED_MAX: Final = 64
"""Questions that are worked on at once; those beyond wait."""
PATH_BYTES_MAX: Final = 100
"""Of a socket's path: macOS takes 103, Linux 107."""

Answer = Callable[[dict[str, Any]], Awaitable[Json]]
"""Answers a question; None denies what was asked about."""
Must = Callable[[str, Json], Awaitable[dict[str, Any]]]
"""Asks the agent for something that has to be had."""


def settings(*, after: bool) -> tuple[str, ...]:
    """The agent's settings that make it ask us.

    Args:
        after: after its tools, too.
    """
    command = shlex.join((sys.executable, "-I", "-S", hook.__file__))
    return tuple(
        f"hooks.{event}=[{{matcher={_toml(TOOLS[event])},hooks=[{{type='command',"
        f"command={_toml(command)},timeout={HOOK_S}}}]}}]"
        for event in ((BEFORE, AFTER) if after else (BEFORE,))
    )


def _toml(text: str) -> str:
    # A string of JSON is one of TOML.
    return msgspec.json.encode(text).decode()


async def trust(must: Must, root: str) -> None:
    """Have the agent trust these hooks and no others. Raises BackendError: it would not ask us."""
    rows = await _ours(must, root)
    trusted = {str(row.get("key")): {"trusted_hash": row.get("currentHash")} for row in rows}
    edit = {"keyPath": "hooks.state", "value": trusted, "mergeStrategy": "upsert"}
    await must("config/batchWrite", {"edits": [edit], "reloadUserConfig": True})
    rows = await _ours(must, root)
    if not rows or any(row.get("trustStatus") != "trusted" for row in rows):
        raise BackendError("backend_unavailable", "the agent does not trust our hooks, so it would not ask us")


async def _ours(must: Must, root: str) -> list[dict[str, Any]]:
    found = mappings((await must("hooks/list", {"cwds": [root]})).get("data"))
    return [row for each in found for row in mappings(each.get("hooks")) if row.get("source") == "sessionFlags"]


class Hooked:
    """The socket that the agent's hooks ask at."""

    def __init__(self, path: str, answer: Answer) -> None:
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            fact = f"hooks need a socket, and {path[:200]!r} is too long for one"
            raise BackendError("backend_unavailable", fact, hint="set TMPDIR to a shorter path")
        self._path, self._answer = path, answer
        self._room = anyio.Semaphore(ASKED_MAX)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take questions until cancelled."""
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
            return  # Its asker is gone.


async def _read(line: anyio.abc.SocketStream) -> dict[str, Any] | None:
    data = bytearray()
    with anyio.move_on_after(READ_S):
        try:
            while len(data) <= LINE_BYTES_MAX:
                data += await line.receive()
        except anyio.EndOfStream:
            return _value(bytes(data))
    return None


def _value(line: bytes) -> dict[str, Any] | None:
    try:
        bounded(line)
        value = strict(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
