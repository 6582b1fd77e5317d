"""Backends that other wheels bring: entry points, looked up for a name that is neither shipped nor configured.

An entry point of the group `backplane.backends` names a function without arguments that returns the command of a host,
a tuple of words. What it brings runs as any other program does: as a child, under the policy, in the sandbox.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.tool import run_tool

GROUP: Final = "backplane.backends"


LOAD_S_MAX: Final = 10.0
"""Seconds for a plug-in to be loaded and called; it only returns a few words."""

MARK: Final = b"\nbackplane-plugin "
"""Stands before the answer, as a plug-in may print, too."""

_CALL: Final = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from importlib.metadata import entry_points
try:
    (entry,) = entry_points(group=sys.argv[2], name=sys.argv[3])
    answer = {"command": entry.load()()}
    text = json.dumps(answer, default=repr)
except Exception as error:
    text = json.dumps({"error": f"{type(error).__name__}: {error}"})
sys.stdout.flush()
os.write(1, b"\\nbackplane-plugin " + text.encode())
"""


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


def find(name: str, environ: Mapping[str, str]) -> Plugin | None:
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
        command = _command_of(name, environ)
    except BackendError as error:
        fact = f"the backend {name!r} of {wheel} cannot be loaded: {error.message}"
        raise BackendError("backend_unavailable", fact[:400], hint=f"correct or remove {wheel}") from error
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        fact = f"the backend {name!r} of {wheel} gives no command: {command!r:.80}"
        raise BackendError("backend_unavailable", fact, hint="its function returns a tuple of words")
    assert entry.dist is not None
    return Plugin(name, tuple(command), entry.dist.name, entry.dist.version)


def _command_of(name: str, environ: Mapping[str, str]) -> Json:
    """Call a plug-in's function in a process of its own, which it may end. Raises BackendError."""
    argv = (sys.executable, "-I", "-c", _CALL, json.dumps(sys.path), GROUP, name)
    done = run_tool(argv, env=environ, timeout_s=LOAD_S_MAX)
    _, found, said = done.stdout.rpartition(MARK)
    if not found:
        raise BackendError("execution_tool_failed", f"it ended the process with code {done.code}")
    answer = json.loads(said)
    if "error" in answer:
        raise BackendError("execution_tool_failed", answer["error"])
    return answer["command"]


def _wheel(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown wheel"
