"""A command that says nothing before its end, and the way back to what it was. Pure.

Such an agent shows its model what a longer command has said so far before its hook is asked; so there is nothing yet.
"""

from __future__ import annotations

import shlex
from typing import Final

HELD_BYTES_MAX: Final = 64 << 20
"""Of what a command says until its end; an agent itself keeps a megabyte of it. It is looked at once a second, so a
fast command has a second more; what is over goes, and the command goes on."""

_WATCH: Final = f'while sleep 1&&kill -0 $$&&n=$(wc -c<"$f");do [ $n -gt {HELD_BYTES_MAX} ]&&: >"$f.cut"&&: >"$f";done'
_CUT: Final = f"echo '[over {HELD_BYTES_MAX >> 20} MiB: what the command said first is left out]'"
_HOLD: Final = (
    "sh",
    "-c",
    f'f=$(mktemp)||exit 125;({_WATCH})</dev/null >/dev/null 2>&1&"$1" -c "$2">>"$f" 2>&1;s=$?;'
    f'[ -e "$f.cut" ]&&{_CUT};cat "$f";rm -f "$f" "$f.cut";exit $s',
    "hold",
)


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
