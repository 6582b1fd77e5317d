"""Decides which later asks an answer "for the rest of the run" also covers. Pure.

An answer for `ls` must not allow `rm -rf`. So an answer about a command line covers lines with the same program, if
the program only shows things or runs the project's own checks; lines with the same program and sub-command, if the
program has sub-commands that name their action; and otherwise only the same line.
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
"""Programs that only show things or run checks, whatever their arguments are."""

HAS_SUBCOMMANDS: Final = frozenset({
    *("apt", "apt-get", "brew", "bun", "cargo", "composer", "docker", "dotnet", "gem", "gh", "git", "glab", "go"),
    *("gradle", "helm", "hg", "kubectl", "make", "mvn", "npm", "pip", "pip3", "pnpm", "podman", "poetry", "svn"),
    *("systemctl", "terraform", "uv", "yarn"),
})  # fmt: skip
RUNS_OTHERS: Final = frozenset({"run", "exec", "x", "dlx", "foreach", "submodule", "bisect", "tool", "alias"})
"""Sub-commands that may start any program named in their arguments."""

ANY_ARGUMENTS: Final = "\0"
"""Last word of a key that covers any further arguments; no command line can contain this word."""
_SUBCOMMAND: Final = re.compile(r"[a-z][a-z0-9:_-]*")
_JOINS_COMMANDS: Final = re.compile(r"[;&|<>$()`\n\r\0]")


def remembered_by(ask: wire.Ask) -> tuple[str, ...] | None:
    """Return the key for remembering an answer to an ask; None if the answer counts only for this ask."""
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
    """Return the words of a command line by which its answer is remembered.

    Returns None for a line with any of `; & | < > $ ( )`, a backtick or a line break, and for an empty line or one
    with unbalanced quotes.
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
