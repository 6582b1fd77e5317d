"""Finds Landlock's version in this kernel, and makes the rules that the guard applies.

The rules restrict writing, and TCP if a port is given. Reading is restricted by `mounts`, because Landlock would need a
list of everything that an agent may read, which is almost the whole system.
"""

from __future__ import annotations

import sys
from typing import Final

from backplane.process import guard

Rules = tuple[bytes, int, int, list[bytes], list[bytes]]
"""Arguments of `guard.confine`."""

VERSION_MIN: Final = 2
"""The first version in which files can be moved between two writable folders, which git needs."""

_ASK_VERSION: Final = 1
"""Flag that makes the call only return the interface's version."""

_WRITE_FILE: Final = 1 << 1
_TRUNCATE: Final = 1 << 14
_CHANGES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 14))
"""Rights to write, remove and make entries of every kind, and to move them (REFER)."""

_CONNECT_TCP: Final = 1 << 1
_SCOPES: Final = 0b11
"""Scopes that block abstract unix sockets and signals to processes outside the sandbox."""

_TRUNCATE_SINCE, NETWORK_SINCE, SCOPES_SINCE = 3, 4, 6


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if it is missing or refused."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, guard._libc("syscall", guard.LANDLOCK_CREATE_RULESET, 0, 0, _ASK_VERSION))


def rules(interface: int, writable: list[str], tcp_port: int | None = None) -> Rules:
    """Return rules that allow writing only below these paths.

    Args:
        interface: the result of `version()`.
        tcp_port: the only TCP port to which the host may connect; None for no rule on TCP.
    """
    truncate = _TRUNCATE if interface >= _TRUNCATE_SINCE else 0
    network = _CONNECT_TCP if tcp_port is not None and interface >= NETWORK_SINCE else 0
    words = [_CHANGES | truncate]
    if interface >= NETWORK_SINCE:
        words.append(network)
    if interface >= SCOPES_SINCE:
        words.append(_SCOPES)
    ports = [_word(network) + _word(tcp_port)] if network and tcp_port is not None else []
    paths = [path.encode(errors="surrogateescape") for path in writable]
    return b"".join(map(_word, words)), _CHANGES | truncate, _WRITE_FILE | truncate, paths, ports


def _word(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder)
