"""Finds backends in other wheels: each entry point of the group `backplane.backends` names the module of a host.

Such a host runs like any other: as a child process, under the policy and in the sandbox. Its code is not loaded here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Final

from backplane.errors import BackendError

GROUP: Final = "backplane.backends"

_START: Final = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"
"""Python code that runs a module from the folder in which a wheel is installed."""


def names(taken: Iterable[str]) -> tuple[str, ...]:
    """Return the names of plug-ins, except those that a shipped or configured backend has taken."""
    known = set(taken)
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)} - known))


def find(name: str) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """Return the command of a plug-in's host, and its wheel and version; None if no plug-in has this name.

    Raises:
        BackendError: `backend_unavailable`, the wheel lacks the module, or two wheels have a backend of this name.
    """
    found = [entry for entry in entry_points(group=GROUP, name=name) if entry.dist is not None]
    if not found:
        return None
    entry, dist = found[0], found[0].dist
    assert dist is not None
    wheels = sorted({f"{one.dist.name} {one.dist.version}" for one in found if one.dist is not None})
    if len(wheels) > 1:
        fact = f"the backend {name!r} comes with {' and '.join(wheels)}"
        raise BackendError("backend_unavailable", fact, hint="remove one, or declare [backends.NAME] with its command")
    module = str(dist.locate_file(entry.module.replace(".", "/")))
    if entry.attr or not (os.path.isfile(f"{module}.py") or os.path.isfile(f"{module}/__main__.py")):
        fact = f"the backend {name!r} of {wheels[0]} is {entry.value[:80]!r}, which is no module of this wheel"
        raise BackendError("backend_unavailable", fact, hint="its entry point names the module of a host")
    command = (sys.executable, "-P", "-c", _START, str(dist.locate_file("")), entry.module, wheels[0])
    return command, {"wheel": dist.name, "version": dist.version}
