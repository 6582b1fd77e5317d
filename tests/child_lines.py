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
    """The lines seen, file by file, each written to the record file when it is new."""

    def __init__(self, folder: str, sources: tuple[str, ...]) -> None:
        import fcntl

        self.sources = sources
        self.seen: dict[str, set[int]] = {}
        fd = os.open(os.path.join(folder, f"{os.getpid()}.lines"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(fd, 0o600)  # Whatever the mask of the child is: only root could read the record otherwise.
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD_MIN)
            os.close(fd)
        except OSError:  # a low limit of descriptors
            self.fd = fd

    def lines_of(self, filename: str) -> set[int] | None:
        """Return the lines seen of a file of ours, None for any other file."""
        return self.seen.setdefault(filename, set()) if filename.startswith(self.sources) else None

    def add(self, filename: str, line: int) -> None:
        self.seen[filename].add(line)
        try:
            os.write(self.fd, f"{line} {filename}\n".encode())
        except OSError:  # the child closed every descriptor it did not know: nothing more is noted
            sys.settrace(None)


def trace_with_settrace(record: Record) -> None:
    """Follow calls and lines of our files by the trace function, worker threads included."""
    followers: dict[str, Any] = {}
    threads_followed = False

    def follower(filename: str) -> Any:
        seen = record.lines_of(filename)
        if seen is None:
            return None

        def line(frame: FrameType, event: str, _argument: Any) -> Any:
            # Nearly always the line is known: this one look is what a hot loop pays.
            if frame.f_lineno not in seen and event == "line":
                record.add(filename, frame.f_lineno)
                follow_threads()
            return line

        return line

    def follow_threads() -> None:
        nonlocal threads_followed
        if not threads_followed and (threading := sys.modules.get("threading")) and hasattr(threading, "settrace"):
            threading.settrace(call)
            threads_followed = True

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        filename = frame.f_code.co_filename
        if filename not in followers:
            followers[filename] = follower(filename)
        return followers[filename]

    sys.settrace(call)


def trace_with_monitoring(record: Record) -> None:
    """Follow lines by `sys.monitoring` (Python 3.12): a line that was noted once costs nothing again."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

    def line(code: CodeType, number: int) -> Any:
        seen = record.lines_of(code.co_filename)
        if seen is not None and number not in seen:
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
        if sys.version_info >= (3, 12):
            trace_with_monitoring(record)
        else:
            trace_with_settrace(record)
    except (OSError, ValueError):  # no place for the record, or another tool is at work
        return
