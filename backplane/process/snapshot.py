"""Lists the processes of a live run, and which of them are busy.

A process that may not be inspected, such as another user's, is listed with fewer details.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.process.guard import START, STATE, ZOMBIE, descendants, look
from backplane.process.table import Process

Table = dict[int, tuple[int, int, int, int, int]]
"""The process table: pid → the fields that `guard.look` reads."""

BETWEEN_S: Final = 0.05
"""Seconds between the two readings of processor time: five clock ticks."""

PROCESSES_MAX: Final = 500
"""Limit of inspected processes of one run; a build has dozens."""

COMMAND_CHARS_MAX: Final = 160
"""Maximum length of a command line; the rest is cut off."""


def snapshot(pid: int, start: int) -> tuple[Process, ...]:
    """Inspect a process and its descendants. Blocks for `BETWEEN_S`.

    Args:
        start: the process's start time in clock ticks, to recognize a reused pid; 0 to accept any.

    Returns:
        The process and its descendants, in the order of their start; empty if the process has ended.
    """
    table = look()
    if pid not in table or (start and table[pid][START] != start):
        return ()
    family = sorted(descendants(table, {pid}) & table.keys(), key=lambda one: table[one][START])[:PROCESSES_MAX]
    before = {one: _ticks(one) for one in family}
    time.sleep(BETWEEN_S)
    boot_ms = _boot_ms()
    return tuple(
        _process(one, table, boot_ms, busy=_ticks(one) > before[one]) for one in family if table[one][STATE] != ZOMBIE
    )


def _process(pid: int, table: Table, boot_ms: int, *, busy: bool) -> Process:
    return Process(
        pid=pid,
        command=_command(pid),
        started_ms=boot_ms + table[pid][START] * 1000 // os.sysconf("SC_CLK_TCK"),
        is_busy=busy,
    )


def _ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _command(pid: int) -> str:
    words = _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    return words[:COMMAND_CHARS_MAX] or _text(Path(f"/proc/{pid}/comm")).strip()


def _boot_ms() -> int:
    lines = _text(Path("/proc/stat")).splitlines()
    return next((int(line.split()[1]) * 1000 for line in lines if line.startswith("btime ")), 0)


def _text(path: Path, bytes_max: int = 1 << 20) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(bytes_max).decode("utf-8", "replace")
    return ""
