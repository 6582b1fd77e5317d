"""The only room that starts a process.

A command goes in; bytes, an exit and a promise come out: when the block is left, or the call
returns, nothing that was started is alive any more. What the bytes mean is not known here.
"""

from backplane.process.child import Child, Exit
from backplane.process.start import GUARD_WORKS, NO_CAGE, Cage, Command, guard_command, open_child
from backplane.process.tool import Finished, run_tool

__all__ = [
    "GUARD_WORKS",
    "NO_CAGE",
    "Cage",
    "Child",
    "Command",
    "Exit",
    "Finished",
    "guard_command",
    "open_child",
    "run_tool",
]
