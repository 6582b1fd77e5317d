"""Backends that other wheels bring: entry points, looked up for a name that is neither shipped nor configured.

An entry point of the group `backplane.backends` names a function without arguments that returns the command of a host,
a tuple of words. What it brings runs as any other program does: as a child, under the policy, in the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import msgspec

from backplane.errors import BackendError

GROUP: Final = "backplane.backends"


class Plugin(msgspec.Struct, frozen=True):
    """A backend of another wheel."""

    name: str
    command: tuple[str, ...]
    wheel: str
    version: str


def names(taken: Iterable[str]) -> tuple[str, ...]:
    """Return the names of plug-ins that no shipped or configured backend has; nothing of them is loaded."""
    known = set(taken)
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)} - known))


def find(name: str) -> Plugin | None:
    """Load the plug-in of this name; None where there is none.

    Raises:
        BackendError: `backend_unavailable`, it cannot be loaded, gives no command, or two wheels have one of the name.
    """
    found = sorted(entry_points(group=GROUP, name=name), key=_wheel)
    if not found:
        return None
    entry, wheel = found[0], _wheel(found[0])
    if len(found) > 1:
        wheels = " and ".join(dict.fromkeys(map(_wheel, found)))
        fact = f"the backend {name!r} comes with {wheels}"
        raise BackendError("backend_unavailable", fact, hint="remove one, or declare [backends.NAME] with its command")
    try:
        command = entry.load()()
    except Exception as error:  # Somebody else's code: whatever it raises, its author finds the place.
        fact = f"the backend {name!r} of {wheel} cannot be loaded: {type(error).__name__}: {error}"
        raise BackendError("backend_unavailable", fact[:400], hint=f"correct or remove {wheel}") from error
    if not isinstance(command, tuple | list) or not command or not all(isinstance(word, str) for word in command):
        fact = f"the backend {name!r} of {wheel} gives no command: {command!r:.80}"
        raise BackendError("backend_unavailable", fact, hint="its function returns a tuple of words")
    assert entry.dist is not None
    return Plugin(name, tuple(command), entry.dist.name, entry.dist.version)


def _wheel(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown wheel"
