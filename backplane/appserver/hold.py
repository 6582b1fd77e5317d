"""A command that says nothing before its end, and the way back to what it was. Pure.

Such an agent shows its model what a longer command has said so far before its hook is asked; so there is nothing yet.
"""

from __future__ import annotations

import shlex
from typing import Final

_HOLD: Final = ("sh", "-c", 'f=$(mktemp)||exit 125;"$1" -c "$2">"$f" 2>&1;s=$?;cat "$f";rm -f "$f";exit $s', "hold")


def held(command: str) -> str:
    """The command, held; for the shell that would have had it as it is, by whose own name it is run."""
    return f'{shlex.join(_HOLD)} "$0" {shlex.quote(command)}'


def unheld(command: str) -> str:
    """What was held; any other command as it is."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    return words[-1] if words == [*_HOLD, "$0", words[-1] if words else ""] else command
