"""The processes of a live run, by two looks at the process table a moment apart. Linux only; elsewhere there are none.

A process that may not be inspected, such as another user's, shows less and is no error.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.process.guard import PARENT, START, STATE, ZOMBIE, look
from backplane.process.sweep import Table, descendants
from backplane.process.table import Process

BETWEEN_S: Final = 0.05
"""Seconds between the two looks: five ticks of the processor's clock."""

PROCESSES_MAX: Final = 500
"""Processes of one run that are inspected; a build has dozens."""

COMMAND_CHARS_MAX: Final = 160
"""Characters kept of a command line."""

_SLEEPING: Final = ord("S")
_READ: Final = frozenset({0, 19}) if os.uname().machine == "x86_64" else frozenset({63, 65})
_SELECT: Final = frozenset({7, 23, 270, 271}) if os.uname().machine == "x86_64" else frozenset({72, 73})
"""System call numbers of `read` and `readv`, of `poll` and `select`, on x86_64 and on other machines."""


def snapshot(pid: int, start: int) -> tuple[Process, ...]:
    """Inspect a process and its descendants. Blocks for `BETWEEN_S`.

    Args:
        start: its start time in clock ticks; a process with another start time has only the same number.

    Returns:
        It and its descendants, parents first; empty if it has ended.
    """
    if sys.platform != "linux":
        return ()
    table = look()
    if pid not in table or (start and table[pid][START] != start):
        return ()
    family = sorted(descendants(table, {pid}) & table.keys(), key=lambda one: table[one][START])[:PROCESSES_MAX]
    before = {one: _ticks(one) for one in family}
    time.sleep(BETWEEN_S)
    boot_ms = _boot_ms()
    pipes = {one: _writable_pipes(one) for one in family}
    return tuple(
        _process(one, table, boot_ms, busy=_ticks(one) > before[one], pipes=pipes)
        for one in family
        if table[one][STATE] != ZOMBIE
    )


def _process(pid: int, table: Table, boot_ms: int, *, busy: bool, pipes: dict[int, frozenset[str]]) -> Process:
    return Process(
        pid=pid,
        command=_command(pid),
        started_ms=boot_ms + table[pid][START] * 1000 // os.sysconf("SC_CLK_TCK"),
        is_busy=busy,
        waits_for_input=table[pid][STATE] == _SLEEPING and _reads(pid, table, pipes),
    )


def _reads(pid: int, table: Table, pipes: dict[int, frozenset[str]]) -> bool:
    """Return True if a sleeping process reads a terminal, or a standard input that no other program fills."""
    fields = _text(Path(f"/proc/{pid}/syscall")).split()
    if len(fields) < 2 or not fields[0].isdigit() or int(fields[0]) not in _READ | _SELECT:
        return False
    is_read = int(fields[0]) in _READ
    fd = int(fields[1], 16) if is_read else 0
    source = _link(pid, fd)
    if source.startswith(("/dev/pts/", "/dev/tty")):
        return True
    if not is_read or fd != 0 or not source.startswith("pipe:"):
        return False
    # A pipe that another program of the same command fills is no wait for a person.
    above = _above(pid, table)
    return not any(source in held for one, held in pipes.items() if one != pid and one not in above)


def _above(pid: int, table: Table) -> set[int]:
    found: set[int] = set()
    while pid in table and (pid := table[pid][PARENT]) not in found:
        found.add(pid)
    return found


def _writable_pipes(pid: int) -> frozenset[str]:
    folder, found = f"/proc/{pid}/fd", set()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.lstat(f"{folder}/{name}").st_mode & 0o200:
                    found.add(os.readlink(f"{folder}/{name}"))
    return frozenset(one for one in found if one.startswith("pipe:"))


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


def _link(pid: int, fd: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    return ""


def _text(path: Path, bytes_max: int = 1 << 20) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(bytes_max).decode("utf-8", "replace")
    return ""
