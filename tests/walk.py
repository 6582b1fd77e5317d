"""Counts the way of an order and of an event through the package, for `xtask.py stats --walk`.

The order is `run --backend shell --isolation off "echo hi > b.txt"` in a new repository, staged, in this process; its
threads make some 3 % of the changes differ from run to run. The event is a `tool_call` of a host that sends one at a
time. Only functions of the package count, the host's process not.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio

from backplane import ControlPlane, ToolCall, WorkOrder, WorkspaceSpec
from backplane.cli import main as command
from backplane.runtime.backends import ProcessBackend

PACKAGE = str(Path(__file__).resolve().parent.parent / "backplane") + os.sep
EVENTS = 30
SPEAKER = """
import json, sys, time
say = lambda **words: print(json.dumps(words), flush=True)
say(t="hello", contract_version="abp/v0.1", backend={"id": "speaker"}, capabilities={})
run = json.loads(sys.stdin.readline())["id"]
for n in range(int(sys.argv[1])):
    time.sleep(0.05)
    event = {"ts": "2026-01-01T00:00:00Z", "type": "tool_call", "tool_name": "read_file", "input": {"path": "a.txt"},
             "tool_use_id": str(n)}
    say(t="event", ref_id=run, event=event)
say(t="fatal", ref_id=run, error="that was all")
"""


class Walk:
    """Calls of the package's functions, in order, of all threads that begin meanwhile."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []

    def _note(self, frame: FrameType, what: str, _: Any) -> None:
        code = frame.f_code
        # Neither a module's body nor a class's is a function.
        if what == "call" and code.co_filename.startswith(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED:
            self.calls.append(code)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def files(self) -> int:
        return len({code.co_filename for code in self.calls})

    def changes(self) -> int:
        """Calls into another file than the call before."""
        names = [code.co_filename for code in self.calls]
        return sum(one != other for one, other in pairwise(names))


def order_walk(folder: Path) -> Walk:
    """Walk one order through the command line, which must end well."""
    work = folder / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    os.environ["BACKPLANE_HOME"] = str(folder / "home")
    os.chdir(work)
    walk = Walk()
    with silent(), walk.noted():
        code = command(["run", "--backend", "shell", "--isolation", "off", "echo hi > b.txt"])
    if code:
        raise RuntimeError(f"the run ended with {code}")
    return walk


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what is written to the two outputs' descriptors to nowhere."""
    kept, nowhere = [os.dup(fd) for fd in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    try:
        yield
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nowhere)


async def event_calls(folder: Path) -> tuple[int, int]:
    """Return the calls that one tool call's event takes, and the files it enters; medians."""
    walk = Walk()
    marks: list[int] = []
    backend = ProcessBackend(id="speaker", argv=(sys.executable, "-c", SPEAKER, str(EVENTS)))
    order = WorkOrder("say something", workspace=WorkspaceSpec(str(folder), mode="pass_through"))
    async with ControlPlane(home=folder / "home").start(order, backend) as run:
        with walk.noted():
            async for event in run:
                if isinstance(event, ToolCall):
                    marks.append(len(walk.calls))
    parts = [walk.calls[begin:end] for begin, end in pairwise(marks)]
    files = [len({code.co_filename for code in part}) for part in parts]
    return int(statistics.median(map(len, parts))), int(statistics.median(files))


def print_walk() -> None:
    """Print files entered, changes of file and calls, beside the house's goals."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walk = order_walk(folder)
        calls, files = anyio.run(event_calls, folder)
        os.chdir("/")
    print("\nthe way through")
    print(f"  an order: {walk.files()} files entered (goal 60), {walk.changes()} changes of file (goal 400)")
    print(f"  a tool call's event: {calls} calls (goal 45) through {files} files")


if __name__ == "__main__":
    print_walk()
