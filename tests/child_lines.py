"""Notes which of our lines run in the Python children of the test suite.

`suite.py` copies this file into `.venv`'s site-packages beside a `.pth` line, so it starts in every child whatever its
environment. It runs only below a suite at work, imports nothing that a child has not loaded anyway (tests look at
`sys.modules`), sets no signal handler, and writes each line when it first runs: SIGKILL loses nothing.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any

ANCESTORS_MAX = 64
"""How far up a suite is looked for; a bound for the loop, real chains are under ten."""
FD_MIN = 900
"""The record's descriptor is moved out of the way of tests that count or reuse low numbers."""

MARKERS = os.path.join(sys.prefix, "suites")
"""One file a running suite: its name is the pid of pytest, its lines are the record's folder and our source folders."""


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
    """The set of lines seen, each written to the record file when it is new."""

    def __init__(self, folder: str, sources: tuple[str, ...]) -> None:
        import fcntl

        self.sources = sources
        self.seen: set[tuple[str, int]] = set()
        fd = os.open(os.path.join(folder, f"{os.getpid()}.lines"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD_MIN)
            os.close(fd)
        except OSError:  # a low limit of descriptors
            self.fd = fd

    def is_ours(self, filename: str) -> bool:
        return filename.startswith(self.sources)

    def add(self, filename: str, line: int) -> None:
        key = (filename, line)
        if key in self.seen:
            return
        self.seen.add(key)
        try:
            os.write(self.fd, f"{line} {filename}\n".encode())
        except OSError:  # the child closed every descriptor it did not know: nothing more is noted
            sys.settrace(None)


def trace_with_settrace(record: Record) -> None:
    """Follow calls and lines of our files by the trace function, worker threads included."""
    threads_followed = False

    def lines(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            record.add(frame.f_code.co_filename, frame.f_lineno)
        return lines

    def calls(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal threads_followed
        filename = frame.f_code.co_filename
        if not record.is_ours(filename):
            return None
        if not threads_followed and (threading := sys.modules.get("threading")) and hasattr(threading, "settrace"):
            threading.settrace(calls)
            threads_followed = True
        return lines

    sys.settrace(calls)


def trace_with_monitoring(record: Record) -> None:
    """Follow lines by `sys.monitoring` (Python 3.12): a line that was noted once costs nothing again."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

    def line(code: CodeType, number: int) -> Any:
        if record.is_ours(code.co_filename):
            record.add(code.co_filename, number)
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "child_lines")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def start() -> None:
    """Begin to note lines if a suite is above this process; a child is never the worse for it."""
    folder, *sources = suite_above() or [""]
    if not folder:
        return
    try:
        record = Record(folder, tuple(sources))
    except OSError:
        return
    if sys.version_info >= (3, 12):
        trace_with_monitoring(record)
    else:
        trace_with_settrace(record)
