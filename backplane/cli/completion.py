"""`completion`: what completes commands, options and names in a shell.

The printed script asks this command at each Tab; what it answers is read from the parsers, so nothing can be stale.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from backplane import config
from backplane.cli import COMMANDS, GROUPS, streams
from backplane.cli.command import Args, Parser, load, open_store
from backplane.errors import CODES, OWN_CODES
from backplane.receipts.memory import remembered
from backplane.runtime.backends import by_name
from backplane.view.figures import ID_CHARS

HELP = "Print a script that completes backplane commands in a shell. The examples show where to save it."
EXAMPLE = """
backplane completion bash > ~/.local/share/bash-completion/completions/backplane
backplane completion zsh > "${fpath[1]}/_backplane"
backplane completion fish > ~/.config/fish/completions/backplane.fish
"""

NAMES_MAX: Final = 50
"""Most ids of runs that are offered, newest first."""

SCRIPTS: Final = {
    "bash": """\
_backplane() {
  local offered=$("${COMP_WORDS[0]}" completion bash --of "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$offered" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _backplane backplane
""",
    "zsh": """\
#compdef backplane
_backplane() {
  local -a offered
  offered=(${(f)"$($words[1] completion zsh --of "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#offered )); then compadd -a offered; else _files; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _backplane "$@"; else compdef _backplane backplane; fi
""",
    "fish": """\
complete -c backplane -a '(backplane completion fish --of (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
"""Shell → its script. It passes the words up to the cursor, and offers files where nothing is answered."""


def options(p: Parser) -> None:
    p.add_argument("shell", choices=tuple(SCRIPTS), help="shell that the script is for")
    p.add_argument("--of", metavar="WORD", nargs=argparse.REMAINDER, help="print the completions of the last WORD")


def run(args: Args) -> int:
    if args.of is None:
        streams.write(SCRIPTS[args.shell])
    else:
        streams.write("".join(f"{value}\n" for value in offered(args.of or [""])))
    return 0


def offered(words: list[str]) -> Iterator[str]:
    """Yield what may stand in place of the last word."""
    *before, word = words[1:] if words[0] == "help" and len(words) > 1 else words
    group = before[0] if before and before[0] in GROUPS else ""
    if before in ([], [group]):
        names = [name for name in (*COMMANDS, "help", "--version") if name.startswith(group)]
        yield from dict.fromkeys(name.removeprefix(f"{group} ").split()[0] for name in names)
    elif (name := " ".join(before[: 2 if group else 1])) in COMMANDS:
        parser = Parser(name, load(name))
        options, taken = parser._option_string_actions, [one for one in parser._actions if not one.option_strings]
        if before[-1] in options and options[before[-1]].nargs != 0:
            taken = [options[before[-1]]]
        elif word.startswith("-"):
            taken = []
            yield from options
        for action in taken:
            found = _NAMES.get(action.metavar) or _NAMES.get(action.dest)
            yield from map(str, action.choices or (found() if found else ()))


def _runs() -> Iterator[str]:
    with open_store() as store:
        yield from ("last", *(run.run_id[:ID_CHARS] for run in islice(remembered(store), NAMES_MAX)))


def _backends() -> Iterable[str]:
    return {*by_name(), *config.load(None, os.environ, streams.folder(), None).backends}


_NAMES: Final[dict[object, Callable[[], Iterable[str]]]] = {
    "RUN": _runs, "FILE-or-RUN": _runs, "CODE": lambda: CODES | OWN_CODES, "BACKEND": _backends, "backend": _backends,
}  # fmt: skip
"""Placeholder or name of an option or a word → the values that it stands for; files and free text have none."""
