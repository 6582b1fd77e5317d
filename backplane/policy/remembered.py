"""Says which later asks an answer "for the rest of the run" answers, too. Pure.

An answer for `ls` must not allow `rm -rf`. So an answer about a command line is remembered by the program and its
sub-command, for programs whose sub-command says what they do; by the program alone, if it only shows things or runs
the project's own checks; and else by the whole line.
"""

from __future__ import annotations

import re
import shlex
from typing import Final

from backplane.contract import envelope as wire
from backplane.policy.paths import SHELLS

SHOWS: Final = frozenset({
    *("basename", "cat", "cmp", "cut", "date", "df", "diff", "dirname", "du", "echo", "egrep", "fgrep", "file", "grep"),
    *("head", "jq", "ls", "nl", "pwd", "readlink", "realpath", "stat", "tail", "test", "tr", "tree", "true", "wc"),
    *("which", "mypy", "pyright", "pytest", "ruff", "tsc"),
})  # fmt: skip
"""Programs whose arguments do not change what kind of thing they do."""

HAS_SUBCOMMANDS: Final = frozenset({
    *("apt", "apt-get", "brew", "bun", "cargo", "composer", "docker", "dotnet", "gem", "gh", "git", "glab", "go"),
    *("gradle", "helm", "hg", "kubectl", "make", "mvn", "npm", "pip", "pip3", "pnpm", "podman", "poetry", "svn"),
    *("systemctl", "terraform", "uv", "yarn"),
})  # fmt: skip
RUNS_OTHERS: Final = frozenset({"run", "exec", "x", "dlx", "foreach", "submodule", "bisect", "tool", "alias"})
"""Sub-commands that start whatever program their arguments name."""

ANY_ARGUMENTS: Final = "\0"
"""The last word of a key that leaves the rest of the line open; no command line can have it."""
_SUBCOMMAND: Final = re.compile(r"[a-z][a-z0-9:_-]*")
_JOINS_COMMANDS: Final = re.compile(r"[;&|<>$()`\n\r\0]")


def remembered_by(ask: wire.Ask) -> tuple[str, ...] | None:
    """Return the key under which an answer to an ask is remembered; None if the next ask is put again."""
    if ask.kind != "tool" or not isinstance(ask.name, str):
        return None
    command: object = ask.command
    if not isinstance(command, str) and isinstance(ask.input, dict):
        command = ask.input.get("command")
    if isinstance(command, str):
        words = command_key(command)
        return None if words is None else (ask.name, *words)
    return None if ask.name in SHELLS or ask.name.lower() == "bash" else (ask.name,)


def command_key(line: str) -> tuple[str, ...] | None:
    """Return the words that a command line shares with the lines it is remembered for.

    Returns None for a line with any of `; & | < > $ ( )`, a backtick or a line break, and for one that no shell reads.
    """
    if _JOINS_COMMANDS.search(line):
        return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if not words:
        return None
    if words[0] in SHOWS:
        return (words[0], ANY_ARGUMENTS)
    if words[0] in HAS_SUBCOMMANDS and len(words) > 1 and _SUBCOMMAND.fullmatch(words[1]):
        return tuple(words) if words[1] in RUNS_OTHERS else (words[0], words[1], ANY_ARGUMENTS)
    return tuple(words)
