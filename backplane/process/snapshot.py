"""The processes of a live run, by two looks at the process table a moment apart. Linux only; elsewhere there are none.

What a look may not see, another user's or one that may not be traced, says less and is no error.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from backplane.process.guard import PARENT, START, STATE, ZOMBIE, look
from backplane.process.sweep import Table, descendants
from backplane.process.table import Process

BETWEEN_S: Final = 0.05
"""Between the two looks: five ticks of the processor's clock, and nobody who asks notices it."""

PROCESSES_MAX: Final = 500
"""Processes of one run that are looked at closely; a build has dozens."""

COMMAND_CHARS_MAX: Final = 160

NET_BYTES_MAX: Final = 4 << 20
"""Read of a table of sockets: 25,000 of them."""

_STOPPED: Final = (ord("T"), ord("t"))
_SLEEPING: Final = ord("S")
_READ: Final = frozenset({0, 19}) if os.uname().machine == "x86_64" else frozenset({63, 65})
_WRITE: Final = frozenset({1, 20}) if os.uname().machine == "x86_64" else frozenset({64, 66})
_SELECT: Final = frozenset({7, 23, 270, 271}) if os.uname().machine == "x86_64" else frozenset({72, 73})
"""Numbers of `read` and `readv`, `write` and `writev`, `poll` and `select`; other machines have those of the second."""

_LISTEN, _ESTABLISHED = "0A", "01"


def snapshot(pid: int, start: int) -> tuple[Process, ...]:
    """Look at a process and all that descends from it. Blocks for `BETWEEN_S`.

    Args:
        start: when it began, in clock ticks; where another one has its number by now, there is nothing to see.

    Returns:
        It and its descendants, parents first; empty where it is gone.
    """
    if sys.platform != "linux":
        return ()
    table = look()
    if pid not in table or (start and table[pid][START] != start):
        return ()
    family = sorted(descendants(table, {pid}) & table.keys(), key=lambda one: table[one][START])[:PROCESSES_MAX]
    before = {one: _ticks(one) for one in family}
    time.sleep(BETWEEN_S)
    seen, boot_ms = _Sockets(), _boot_ms()
    pipes = {one: _writable_pipes(one) for one in family}
    return tuple(
        _process(one, table, boot_ms, busy=_ticks(one) > before[one], seen=seen, pipes=pipes)
        for one in family
        if table[one][STATE] != ZOMBIE
    )


def _process(
    pid: int, table: Table, boot_ms: int, *, busy: bool, seen: _Sockets, pipes: dict[int, frozenset[str]]
) -> Process:
    sockets = seen.of(pid)
    return Process(
        pid=pid,
        command=_command(pid),
        started_ms=boot_ms + table[pid][START] * 1000 // os.sysconf("SC_CLK_TCK"),
        is_stopped=table[pid][STATE] in _STOPPED,
        is_busy=busy,
        waits=_waits(pid, table, pipes) if table[pid][STATE] == _SLEEPING else "",
        listens=tuple(sorted({port for state, port in sockets if state == _LISTEN})),
        is_connected=any(state == _ESTABLISHED for state, _ in sockets),
    )


def _waits(pid: int, table: Table, pipes: dict[int, frozenset[str]]) -> Any:
    """What a sleeping process waits for, by the call of the system that it is in."""
    fields = _text(Path(f"/proc/{pid}/syscall")).split()
    if len(fields) < 2 or not fields[0].isdigit():
        return ""
    number, first = int(fields[0]), int(fields[1], 16)
    if number in _WRITE:
        return "output" if _link(pid, first).startswith("pipe:") else ""
    if number not in _READ and not (number in _SELECT and _link(pid, 0).startswith(("/dev/pts/", "/dev/tty"))):
        return ""
    source = _link(pid, first if number in _READ else 0)
    if source.startswith(("/dev/pts/", "/dev/tty")):
        return "input"
    if not source.startswith("pipe:") or first != 0:
        return ""
    # A pipe that another program of the same command fills is no wait for a person.
    above = _above(pid, table)
    return "" if any(source in held for one, held in pipes.items() if one != pid and one not in above) else "input"


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


class _Sockets:
    """The sockets of processes, with one look at the table of each network."""

    def __init__(self) -> None:
        self._networks: dict[str, dict[str, tuple[str, int]]] = {}

    def of(self, pid: int) -> list[tuple[str, int]]:
        """State and own port of each TCP socket of a process."""
        inodes = _socket_inodes(pid)
        if not inodes:
            return []
        network = _readlink(f"/proc/{pid}/ns/net")
        if network not in self._networks:
            self._networks[network] = _table_of_sockets(pid)
        table = self._networks[network]
        return [table[inode] for inode in inodes if inode in table]


def _table_of_sockets(pid: int) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        for line in _text(Path(f"/proc/{pid}/net/{name}"), NET_BYTES_MAX).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9:
                found[fields[9]] = fields[3], int(fields[1].rpartition(":")[2], 16)
    return found


def _socket_inodes(pid: int) -> list[str]:
    folder, found = f"/proc/{pid}/fd", []
    with suppress(OSError):
        for name in os.listdir(folder):
            link = _readlink(f"{folder}/{name}")
            if link.startswith("socket:["):
                found.append(link[8:-1])
    return found


def _ticks(pid: int) -> int:
    """What it has used of the processor."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _command(pid: int) -> str:
    words = _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    return words[:COMMAND_CHARS_MAX] or _text(Path(f"/proc/{pid}/comm")).strip()


def _boot_ms() -> int:
    lines = _text(Path("/proc/stat"), NET_BYTES_MAX).splitlines()
    return next((int(line.split()[1]) * 1000 for line in lines if line.startswith("btime ")), 0)


def _link(pid: int, fd: int) -> str:
    return _readlink(f"/proc/{pid}/fd/{fd}")


def _readlink(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def _text(path: Path, bytes_max: int = 65536) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(bytes_max).decode("utf-8", "replace")
    return ""
