"""Removes keys that a host needs from its own environment and from that of its commands."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Final

_PR_SET_DUMPABLE: Final = 4
"""Option of prctl(2); set to 0, other processes of the user cannot read this one's memory."""


def take(names: tuple[str, ...]) -> dict[str, str]:
    """Remove variables from this process's environment and return their values.

    A command that a model runs belongs to the same user. It can read `/proc/PID/environ`, which is the memory that the
    process started with, so the values are overwritten there; `prctl` closes the rest of the memory.
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
    """Return an environment without these keys, under any name."""
    values = [value for value in keys.values() if value]
    return {name: value for name, value in env.items() if name not in keys and not any(key in value for key in values)}
