"""The lock of an open file: whoever holds it is alive, and whoever comes meanwhile passes by.

A descriptor comes in, yes or no comes out at once. Which file stands for what is its owner's affair.
"""

from __future__ import annotations

import fcntl


def try_lock(fd: int) -> bool:
    """Lock a file until the descriptor is closed, by whatever end of the process; False when another has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
