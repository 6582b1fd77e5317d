"""Who is left of a child, by the process table, and how to kill exactly those.

The second-best way, for when there is no guard or it was lost: descent, process group, session and the
child's ends of our pipes are what can be seen. Who has left all four is not found. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import sys
from contextlib import suppress

import msgspec

from backplane.process.guard import GROUP, PARENT, SESSION, START, STATE, ZOMBIE, look, look_at
from backplane.process.spawn import pidfd_of

Table = dict[int, tuple[int, int, int, int, int]]
"""pid → fields, see `_guard.look`."""

FileId = tuple[int, int]
"""Device and inode."""


class Traces(msgspec.Struct, frozen=True):
    """What is known of a child."""

    guard: int | None
    """Pid of its guard while that is not reaped."""
    host: int
    start: int
    """When the host began, in clock ticks: tells it from a stranger with its number."""
    ends: frozenset[tuple[FileId, int]]
    """The child's ends of our pipes as (file, mode bit of opening), those only that somebody has."""


def remains(traces: Traces) -> dict[int, int]:
    """Look once: pid → start of everybody who is the child's, zombies, guard and ourselves left out."""
    if sys.platform != "linux":
        return {}
    table = look()
    roots = set() if traces.guard is None else {traces.guard}
    host = table.get(traces.host)
    if host is None or host[START] == traces.start:
        # Unless the number is a stranger's by now, who has it as group or session is of the child's making.
        roots |= {pid for pid, row in table.items() if traces.host in (pid, row[GROUP], row[SESSION])}
    found = descendants(table, roots) - {os.getpid(), traces.guard}
    if traces.ends:
        # Who was there before the child, a terminal's server say, was handed the pipe and is not the child's.
        found |= {pid for pid, row in table.items() if row[START] >= traces.start and _holds(pid, traces.ends)}
    return {pid: table[pid][START] for pid in found if pid in table and table[pid][STATE] != ZOMBIE}


def start_of(pid: int) -> int:
    """When a process began, in clock ticks; 0 when it is gone or the system does not say."""
    row = look_at(pid) if sys.platform == "linux" else None
    return row[START] if row else 0


def kill_exactly(pid: int, start: int) -> bool:
    """Kill this process, not one that has its number by now; whether the signal was sent."""
    fd = pidfd_of(pid)
    try:
        if start_of(pid) != start:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def far_end(fd: int) -> tuple[FileId, int] | None:
    """The other end of this pipe, as `Traces.ends` has it; None when nobody holds it."""
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):
        return None
    we_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return _file_id(os.fstat(fd)), stat.S_IWUSR if we_read else stat.S_IRUSR


def descendants(table: Table, roots: set[int]) -> set[int]:
    """These processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row[PARENT], []).append(pid)
    found, unseen = set(roots), list(roots)
    while unseen:
        fresh = [pid for pid in children.get(unseen.pop(), ()) if pid not in found]
        found.update(fresh)
        unseen += fresh
    return found


def _holds(pid: int, ends: frozenset[tuple[FileId, int]]) -> bool:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        return any(_is_one_of(f"{folder}/{name}", ends) for name in os.listdir(folder))
    return False


def _is_one_of(path: str, ends: frozenset[tuple[FileId, int]]) -> bool:
    with suppress(OSError):
        file, how = _file_id(os.stat(path)), os.lstat(path).st_mode
        return any(file == wanted and how & mode for wanted, mode in ends)
    return False


def _file_id(seen: os.stat_result) -> FileId:
    return seen.st_dev, seen.st_ino
