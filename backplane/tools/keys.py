"""Keys that a host needs and its commands must not see: taken out of the environment, and kept out of theirs.

Names of variables go in, their values come out; afterwards they stand nowhere else in the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Final

_PR_SET_DUMPABLE: Final = 4
"""Of prctl(2): without it nobody else of this user can read the process's memory."""


def take(names: tuple[str, ...]) -> dict[str, str]:
    """Take variables out of this process's environment, also where other processes of the user could read it.

    A command that a model runs belongs to the same user. It can read `/proc/PID/environ`, which shows the memory
    that the process was started with, and without the second call all of its memory.
    """
    found = {name: os.environ[name] for name in names if name in os.environ}
    kept = without(os.environ, found)
    gone = [name for name in os.environ if name not in kept]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        for name in gone:
            address = libc.getenv(os.fsencode(name))
            if address:
                ctypes.memset(address, 0, len(os.fsencode(os.environ[name])))
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name in gone:
        del os.environ[name]
    return found


def without(env: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """An environment without these keys, under whatever names they stand in it."""
    values = [value for value in keys.values() if value]
    return {name: value for name, value in env.items() if name not in keys and not any(key in value for key in values)}
