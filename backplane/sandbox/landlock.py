"""Finds Landlock's version in this kernel, and makes the rules that the guard applies.

The rules are about writing, and about TCP if a port is given. Mounts hide what must not be read (`mounts`): a list of
everything that an agent may read would be the whole system.
"""

from __future__ import annotations

import sys
from typing import Final

from backplane.process import guard

Rules = tuple[bytes, int, int, list[bytes], list[bytes]]
"""Arguments of `guard.confine`."""

VERSION_MIN: Final = 2
"""The first version in which files can move between two writable folders; git needs that."""

_ASK_VERSION: Final = 1
"""Flag of a call that only returns the interface's version."""

_WRITE_FILE: Final = 1 << 1
_TRUNCATE: Final = 1 << 14
_CHANGES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 14))
"""Writing, removing and making entries of every kind, and moving them (REFER)."""

_CONNECT_TCP: Final = 1 << 1
_SCOPES: Final = 0b11
"""Abstract unix sockets, and signals to processes outside."""

_TRUNCATE_SINCE, NETWORK_SINCE, SCOPES_SINCE = 3, 4, 6


def version() -> int:
    """Return the version of the kernel's interface; 0 if there is none, or it is refused."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, guard._libc("syscall", guard.LANDLOCK_CREATE_RULESET, 0, 0, _ASK_VERSION))


def rules(interface: int, writable: list[str], tcp_port: int | None = None) -> Rules:
    """Return rules that allow writing only below these paths.

    Args:
        interface: `version()`.
        tcp_port: the only TCP port that can be connected to; None for no rule on TCP.
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
