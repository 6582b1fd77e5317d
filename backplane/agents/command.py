"""A shell's command as people write it, of an agent that puts a shell of its own around it. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Final

from backplane.contract.canonical import Json

SHELLS: Final = ("bash", "sh", "zsh", "dash", "ash")


def plain_command(command: str | Sequence[Json]) -> str:
    """A command, one line or its words, as one line without the shell around it."""
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:
            return command
    else:
        words = [str(word) for word in command]
    if len(words) == 3 and os.path.basename(words[0]) in SHELLS and words[1] in ("-lc", "-c"):
        return words[2]
    return command if isinstance(command, str) else shlex.join(words)
