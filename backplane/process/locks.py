"""Locks an open file; the lock lasts as long as the process that has it, at most."""

from __future__ import annotations

import fcntl


def try_lock(fd: int) -> bool:
    """Lock a file until its descriptor is closed; return False at once if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
