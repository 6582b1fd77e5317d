"""A small client for one child: raw lines in both directions, everything bounded.

Knows framing and nothing of the rules, so that it can show what a broken host did.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.process.child import Child, Exit, open_child
from backplane.process.launch import StartCommand
from backplane.protocol.lines import Lines, Overlong, bare, strict

OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes that a child may write in one check; answers to our small orders have far fewer."""

READ_BYTES_MAX: Final = 64 * 1024
OVERLONG: Final = "over 16 MiB"
"""The fault of a line that is too long to be parsed."""

LOOK_S: Final = 0.1
"""Seconds between two reads of the child's output while we write, so that both pipes cannot be full."""


class HostLine(msgspec.Struct, frozen=True):
    """One line of the host, parsed as far as possible."""

    raw: bytes
    value: Json = None
    """The object; None if the line is no strict JSON object."""
    fault: str | None = None
    """Why the line is not strict JSON; None if it does not begin like an object."""

    @property
    def t(self) -> str | None:
        """The kind of the message; None for noise."""
        t = self.get("t")
        return t if isinstance(t, str) else None

    @property
    def is_end(self) -> bool:
        return self.t in ("final", "fatal")

    def get(self, name: str) -> Json:
        return self.value.get(name) if isinstance(self.value, dict) else None


class Bounds(msgspec.Struct, frozen=True):
    """Limits for a host, in seconds."""

    hello_s: float = 10.0
    run_s: float = 60.0
    """Limit of a run; an agent that calls a model needs longer than an echo."""
    exit_s: float = 2.0
    """Time to exit after the end of stdin, or SIGTERM."""
    grace_s: float = 2.0
    """Time to end a run after `cancel`."""
    pong_s: float = 2.0
    """Time to answer a `ping`; the contract names no bound, but a person waits."""
    closed_s: float = 5.0
    """Time to exit after its stdout was closed."""
    quiet_s: float = 0.15
    """Time for which a host must be silent."""
    slack_s: float = 0.5
    """Added to a limit that a rule names, for a busy machine."""


class Wire:
    """One running child and its lines so far."""

    def __init__(self, child: Child, bounds: Bounds) -> None:
        self.child = child
        self.bounds = bounds
        self.lines: list[HostLine] = []
        self.handed = 0
        """Number of lines that `next` returned; the others wait."""
        self.ended = False
        """True if the child's stdout is closed."""
        self.flooded = False
        """True if it wrote more than `OUTPUT_BYTES_MAX`."""
        self.unended = False
        """True if the last line has no newline."""
        self._framing = Lines()
        self._taken = 0

    async def next(self, timeout_s: float) -> HostLine | None:
        """Return the next line, or None if none comes in time."""
        with anyio.move_on_after(timeout_s):
            while self.handed == len(self.lines) and not self.ended:
                await anyio.wait_readable(self.child.stdout)
                self._take()
        if self.handed == len(self.lines):
            return None
        self.handed += 1
        return self.lines[self.handed - 1]

    async def until(self, wanted: Callable[[HostLine], bool], timeout_s: float) -> HostLine | None:
        """Read up to the first line that is wanted; return None if it does not come in time."""
        with anyio.move_on_after(timeout_s):
            while (line := await self.next(timeout_s)) is not None:
                if wanted(line):
                    return line
        return None

    async def exit(self, within_s: float) -> Exit | None:
        """Read to the end and wait for the exit; return None if it does not come in time."""
        deadline_s = time.monotonic() + within_s + self.bounds.slack_s
        await self.until(lambda _: False, within_s + self.bounds.slack_s)
        # Its output ends a moment before its exit is known.
        return await self.child.wait(max(self.bounds.slack_s, deadline_s - time.monotonic()))

    async def send(self, message: Json, *, newline: bytes = b"\n", piece_bytes: int = READ_BYTES_MAX) -> None:
        """Write a message, or bytes unchanged, as far as the host reads them in time."""
        data = message if isinstance(message, bytes) else msgspec.json.encode(message)
        unsent = memoryview(data + newline)
        with anyio.move_on_after(self.bounds.run_s):
            while unsent and self.child.stdin >= 0:
                with anyio.move_on_after(LOOK_S):
                    await anyio.wait_writable(self.child.stdin)
                self._take()
                try:
                    unsent = unsent[os.write(self.child.stdin, unsent[:piece_bytes]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    return

    def _take(self) -> None:
        try:
            data = os.read(self.child.stdout, READ_BYTES_MAX) if self.child.stdout >= 0 else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._taken += len(data)
        self.flooded = self._taken > OUTPUT_BYTES_MAX
        self.ended = not data or self.flooded
        self.lines += map(_read, self._framing.feed(data))
        if self.ended and (last := self._framing.end()):
            self.lines.append(_read(last))
            self.unended = True


def _read(raw: bytes) -> HostLine:
    if isinstance(raw, Overlong):
        return HostLine(bytes(raw), None, OVERLONG)
    message = bare(raw)
    if not message.lstrip().startswith(b"{"):
        return HostLine(raw)
    try:
        return HostLine(raw, strict(message))
    except (ValueError, RecursionError) as error:
        return HostLine(raw, None, str(error))


class Program(msgspec.Struct, frozen=True):
    """The command of a child, and its surroundings."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    bounds: Bounds = Bounds()

    def started_in(self, folder: str) -> Program:
        """Return this program for another folder: the files that its command names are absolute."""
        first, *rest = self.command
        named = [os.path.join(self.cwd, word) for word in self.command]
        program = named[0] if os.sep in first else first  # A bare name is looked up in PATH.
        words = (path if os.path.isfile(path) else word for word, path in zip(rest, named[1:], strict=True))
        return msgspec.structs.replace(self, command=(program, *words), cwd=folder)


@asynccontextmanager
async def linked(program: Program) -> AsyncIterator[Wire]:
    """Start a fresh child; when the block ends, all its processes are gone.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    async with open_child(StartCommand(program.command, dict(program.env), program.cwd)) as child:
        yield Wire(child, program.bounds)


def vendor_of(greeting: Json) -> dict[str, Json]:
    """Return the settings of orders for this host: a control plane needs the name of a backend.

    The scripted one if there is one, as others may cost money; else the first that is ready.
    """
    known = greeting.get("backends") if isinstance(greeting, dict) else None
    entries = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
    ready = [str(entry["id"]) for entry in entries if entry.get("ready") is True and "id" in entry]
    return {"abp": {"backend": "mock" if "mock" in ready else ready[0]}} if ready else {}


def order(root: str, task: str, vendor: dict[str, Json]) -> dict[str, Json]:
    """Return a complete work order for a host."""
    id = "0f8a4c52-7d6b-4f0e-9a3c-5b1d2e3f4a5b"
    made = WorkOrder(task, id, workspace=WorkspaceSpec(root), config=RuntimeConfig(vendor=vendor))
    return dict(msgspec.to_builtins(made))
