"""Locks an open file, at most until the locking process ends."""

from __future__ import annotations

import fcntl


def try_lock(fd: int) -> bool:
    """Lock a file until its descriptor is closed; return False at once if another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
