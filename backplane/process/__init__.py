"""The only room that starts a process.

A command goes in; bytes, an exit and a promise come out: when the block is left, or the call
returns, nothing that was started is alive any more. What the bytes mean is not known here.
Nothing is loaded until it is used: who only locks a file loads no event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from backplane.process.child import Child, Exit
    from backplane.process.launch import GUARD_WORKS, NO_CAGE, Cage, Evidence, StartCommand
    from backplane.process.spawn import guard_command
    from backplane.process.start import Ready, open_child
    from backplane.process.tool import Finished, run_tool, search_path

__all__ = [
    "GUARD_WORKS",
    "NO_CAGE",
    "Cage",
    "Child",
    "Evidence",
    "Exit",
    "Finished",
    "Ready",
    "StartCommand",
    "guard_command",
    "open_child",
    "run_tool",
    "search_path",
]

_HOME: Final[dict[str, str]] = {
    **dict.fromkeys(("Child", "Exit"), "child"),
    **dict.fromkeys(("GUARD_WORKS", "NO_CAGE", "Cage", "StartCommand", "Evidence"), "launch"),
    "guard_command": "spawn",
    **dict.fromkeys(("Ready", "open_child"), "start"),
    **dict.fromkeys(("Finished", "run_tool", "search_path"), "tool"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'backplane.process' has no attribute {name!r}")
    return getattr(import_module(f"backplane.process.{_HOME[name]}"), name)
