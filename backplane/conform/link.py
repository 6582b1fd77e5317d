"""A small client for one child: raw lines in both directions, everything bounded.

Knows framing and nothing of the rules, so that it can show what a broken host did.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.process.child import Child, open_child
from backplane.process.launch import StartCommand
from backplane.protocol import Lines, Overlong, bare, strict

OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Most bytes that a child may write in one check; answers to our small orders have far fewer."""

READ_BYTES_MAX: Final = 64 * 1024
OVERLONG: Final = "over 16 MiB"
"""The fault of a line that is too long to be looked at."""

LOOK_S: Final = 0.1
"""While writing: how often what the child writes meanwhile is taken, so that both pipes cannot be full."""


class HostLine(msgspec.Struct, frozen=True):
    """One line of the host, read as far as it can be."""

    raw: bytes
    value: Json = None
    """The object; None where it is none, or not strict JSON."""
    fault: str | None = None
    """Why it is no strict JSON; None for what does not begin like an object."""

    @property
    def t(self) -> str | None:
        """Which message it is; None for noise."""
        t = self.value.get("t") if isinstance(self.value, dict) else None
        return t if isinstance(t, str) else None

    @property
    def is_end(self) -> bool:
        return self.t in ("final", "fatal")

    def get(self, name: str) -> Json:
        return self.value.get(name) if isinstance(self.value, dict) else None


class Bounds(msgspec.Struct, frozen=True):
    """Seconds that a host may take."""

    hello_s: float = 10.0
    run_s: float = 60.0
    """Time of a run. An agent that calls a model needs longer than an echo."""
    exit_s: float = 2.0
    """Time to exit after the end of stdin, or SIGTERM."""
    grace_s: float = 2.0
    """Time to end a run after `cancel`."""
    pong_s: float = 2.0
    """Time to answer a `ping`. The contract names no bound; a person who waits does."""
    closed_s: float = 5.0
    """Time to exit after its stdout was closed."""
    quiet_s: float = 0.15
    """Time for which a host is read that has to be silent."""
    slack_s: float = 0.5
    """Added to a bound that a rule names, for a busy machine."""


class Wire:
    """One running child and what it has said so far."""

    def __init__(self, child: Child, bounds: Bounds) -> None:
        self.child = child
        self.bounds = bounds
        self.lines: list[HostLine] = []
        self.handed = 0
        """Number of lines that `next` returned; the others wait."""
        self.mark = 0
        """Number of lines that came before the present case of a rule."""
        self.run_id = ""
        """Id of the run that was sent last."""
        self.ended = False
        """Its stdout is closed."""
        self.flooded = False
        self.unended = False
        """Its last line has no newline."""
        self._framing = Lines()
        self._queue: deque[HostLine] = deque()
        self._taken = 0

    async def next(self, timeout_s: float) -> HostLine | None:
        """The next line; None when there is none in time, or none any more."""
        with anyio.move_on_after(timeout_s):
            while not self._queue and not self.ended:
                await anyio.wait_readable(self.child.stdout)
                self._take()
        if not self._queue:
            return None
        self.handed += 1
        return self._queue.popleft()

    async def until(self, wanted: Callable[[HostLine], bool], timeout_s: float) -> HostLine | None:
        """Read on to the first line that is wanted; None when it does not come in time."""
        with anyio.move_on_after(timeout_s):
            while (line := await self.next(timeout_s)) is not None:
                if wanted(line):
                    return line
        return None

    def seen(self, wanted: Callable[[HostLine], bool]) -> HostLine | None:
        """Return the first line of the present case that is wanted, if it was handed out already."""
        return next(filter(wanted, self.lines[self.mark : self.handed]), None)

    async def send(self, message: Json, *, newline: bytes = b"\n", piece_bytes: int = READ_BYTES_MAX) -> bool:
        """Write a message, or bytes as they are; False when the host does not take it in time."""
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
                    return False
        return not unsent

    async def rest(self, timeout_s: float) -> None:
        """Read to the end of stdout, or until the time is over."""
        await self.until(lambda _: False, timeout_s)

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
        lines = self._framing.feed(data)
        if self.ended and (last := self._framing.end()):
            lines.append(last)
            self.unended = True
        for raw in lines:
            line = _read(raw)
            self.lines.append(line)
            self._queue.append(line)


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
    cwd: str | None = None
    bounds: Bounds = Bounds()

    def started_in(self, folder: str) -> Program:
        """Return this program for another folder: the files that its command names are absolute."""
        first, *rest = self.command
        named = [os.path.join(self.cwd or os.getcwd(), word) for word in self.command]
        program = named[0] if os.sep in first else first  # A bare name is looked up in PATH.
        words = (path if os.path.isfile(path) else word for word, path in zip(rest, named[1:], strict=True))
        return msgspec.structs.replace(self, command=(program, *words), cwd=folder)


@asynccontextmanager
async def linked(program: Program) -> AsyncIterator[Wire]:
    """Start a fresh child; nothing of it is left when the block is left.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    async with open_child(StartCommand(program.command, dict(program.env), program.cwd)) as child:
        yield Wire(child, program.bounds)


def vendor_of(greeting: Json) -> dict[str, Json]:
    """Return the settings that orders have for this host: a control plane needs the name of a backend.

    The scripted one where there is one, as the others may cost money; else the first that is ready.
    """
    known = greeting.get("backends") if isinstance(greeting, dict) else None
    entries = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
    ready = [str(entry["id"]) for entry in entries if entry.get("ready") is True and "id" in entry]
    return {"abp": {"backend": "mock" if "mock" in ready else ready[0]}} if ready else {}


def order(root: str, task: str, vendor: dict[str, Json]) -> dict[str, Json]:
    """A work order, whole, as hosts get them."""
    id = "0f8a4c52-7d6b-4f0e-9a3c-5b1d2e3f4a5b"
    made = WorkOrder(task, id, workspace=WorkspaceSpec(root), config=RuntimeConfig(vendor=vendor))
    return dict(msgspec.to_builtins(made))
