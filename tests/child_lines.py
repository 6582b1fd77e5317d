"""Notes which of our lines run in the Python children of the test suite.

`suite.py` copies this file into `.venv`'s site-packages beside a `.pth` line, so it starts in every child whatever its
environment. It runs only below a suite at work, imports nothing that a child has not loaded anyway (tests look at
`sys.modules`), sets no signal handler, and notes each line when it first runs: SIGKILL loses nothing.

All children write to one file, a byte a line of our sources. A child reads it when it starts and follows only functions
with lines that have not run yet. Following still makes a start half as long again, so the `.pth` line follows one child
in eight, by chance: of ten thousand that is enough.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes half as long to load as Python takes to start.
    from types import CodeType, FrameType
    from typing import Any

ANCESTORS_MAX = 64
"""How far up a suite is looked for; a bound for the loop, real chains are under ten."""
FD_MIN = 900
"""The record's descriptor is moved out of the way of tests that count or reuse low numbers."""

MARKERS = os.path.join(sys.prefix, "suites")
"""One file a running suite: its name is the pid of pytest, its lines are `Record`'s arguments."""


def suite_above() -> list[str]:
    """Return the lines of the marker of the suite that this process belongs to, empty when there is none."""
    try:
        running = set(os.listdir(MARKERS))
        pid = os.getpid()
        for _ in range(ANCESTORS_MAX):
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The program's name is in parentheses and may hold anything, spaces and parentheses too.
                pid = int(file.read().rpartition(b")")[2].split()[1])
            if str(pid) in running:
                with open(os.path.join(MARKERS, str(pid)), encoding="utf-8") as file:
                    return file.read().splitlines()
            if pid <= 1:
                break
    except (OSError, ValueError):
        pass
    return []


class Record:
    """What is known of all lines: `seen[firsts[filename] + line]` is 1 when the line has run."""

    def __init__(self, file: str, firsts: list[str]) -> None:
        import fcntl

        self.firsts: dict[str, int] = {}
        for row in firsts:
            first, _, filename = row.partition(" ")
            self.firsts[filename] = int(first)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD_MIN)
            os.close(fd)
        except OSError:  # a low limit of descriptors
            self.fd = fd
        self.seen = bytearray(os.pread(self.fd, os.fstat(self.fd).st_size, 0))

    def is_whole(self, code: CodeType, first: int) -> bool:
        """Tell whether every line of this code has run."""
        return all(self.seen[first + line] for _, _, line in code.co_lines() if line)

    def add(self, place: int) -> None:
        self.seen[place] = 1
        try:
            os.pwrite(self.fd, b"\1", place)
        except OSError:  # the child closed every descriptor it did not know: nothing more is noted
            sys.settrace(None)


def trace_with_settrace(record: Record) -> None:
    """Follow calls and lines of our files by the trace function, worker threads included."""
    firsts, seen = record.firsts, record.seen
    followers: dict[int, Any] = {}  # Where a function begins → what follows its lines, None for one that is whole.
    threads_followed = False

    def follower(first: int) -> Any:
        def line(frame: FrameType, event: str, _argument: Any) -> Any:
            # Nearly always the line is known: this one look is what a hot loop pays.
            if not seen[first + frame.f_lineno] and event == "line":
                record.add(first + frame.f_lineno)
            return line

        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal threads_followed
        code = frame.f_code
        first = firsts.get(code.co_filename)
        if first is None:
            return None
        if not threads_followed and (threading := sys.modules.get("threading")) and hasattr(threading, "settrace"):
            threading.settrace(call)
            threads_followed = True
        begins = first + code.co_firstlineno
        if begins not in followers:
            followers[begins] = None if record.is_whole(code, first) else follower(first)
        return followers[begins]

    sys.settrace(call)


def trace_with_monitoring(record: Record) -> None:
    """Follow lines by `sys.monitoring` (Python 3.12): a line that was noted once costs nothing again."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

    def line(code: CodeType, number: int) -> Any:
        first = record.firsts.get(code.co_filename)
        if first is not None and not record.seen[first + number]:
            record.add(first + number)
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "child_lines")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def start() -> None:
    """Begin to note lines if a suite is above this process; a child is never the worse for it."""
    file, *firsts = suite_above() or [""]
    if not file:
        return
    try:
        record = Record(file, firsts)
        if sys.version_info >= (3, 12):
            trace_with_monitoring(record)
        else:
            trace_with_settrace(record)
    except (OSError, ValueError):  # no place for the record, or another tool is at work
        return
