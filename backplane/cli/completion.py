"""`completion`: a script that completes commands, their options and choices in a shell, made from the option tables.

The script is static but for the names of runs, backends and sessions, which it asks this command for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import msgspec

from backplane import config
from backplane.cli import COMMANDS, GROUPS, streams
from backplane.cli.command import Args, Parser, load, open_store
from backplane.cli.runs import ID_CHARS
from backplane.contract.receipt import FINDINGS
from backplane.errors import CODES, OWN_CODES
from backplane.view.omit import OMISSIBLE

NAMES_MAX: Final = 50
"""Most names of runs or sessions offered, newest first."""


class Words(msgspec.Struct, frozen=True):
    """What may follow one command, or one command of a command."""

    path: tuple[str, ...]
    about: str
    options: dict[str, str]
    """Option → its help."""
    values: dict[str, tuple[str, ...]]
    """Option → its choices; an option that takes a value and has none is here with none."""
    next: dict[str, str]
    """Its own commands → what each does; else the choices of its first word."""
    named: dict[str, str]
    """Option → the kind of names that it takes, one of `NAMES`; "" stands for the words that are no options."""


HELP = "Print the completion script of a shell; put it where the shell looks for it, as below."
EXAMPLE = """
backplane completion bash > ~/.local/share/bash-completion/completions/backplane
backplane completion zsh > "${fpath[1]}/_backplane"
backplane completion fish > ~/.config/fish/completions/backplane.fish
"""


def options(p: Parser) -> None:
    p.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    p.add_argument("--names", choices=tuple(NAMES), help="print these names in place of the script")


def run(args: Args) -> int:
    if args.names is not None:
        streams.write("".join(f"{name}\n" for name in NAMES[args.names]()))
        return 0
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]
    streams.write("\n".join(make(list(tables()))) + "\n")
    return 0


def _runs() -> Iterator[str]:
    from backplane.receipts.memory import remembered

    yield "last"
    with open_store() as store:
        yield from (run.run_id[:ID_CHARS] for run in islice(remembered(store), NAMES_MAX))


def _backends() -> Iterator[str]:
    from backplane.runtime.backends import SHIPPED

    yield from sorted({*SHIPPED, *config.load(None, os.environ, streams.folder(), None).backends})


def _sessions() -> Iterator[str]:
    from backplane.contract.conversation import SessionFile
    from backplane.providers import store

    yield "last"
    found = (file for file in store.listed(config.home_path(os.environ)) if isinstance(file, SessionFile))
    yield from (file.id[:ID_CHARS] for file in islice(found, NAMES_MAX))


NAMES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "runs": _runs, "backends": _backends, "sessions": _sessions,
}  # fmt: skip


_LISTED: Final = {"--fail-on": (*FINDINGS, "none"), "--omit": OMISSIBLE}
"""Option → words of its comma-separated list."""


def tables() -> Iterator[Words]:
    """Yield what can be typed, from the parsers themselves."""
    whole = {name: line for name, line in COMMANDS.items() if " " not in name}
    yield Words((), "", {"--config": "", "--help": "", "--version": ""}, {"--config": ()}, {**whole, **GROUPS}, {})
    for group, line in GROUPS.items():
        parts = {name.partition(" ")[2]: text for name, text in COMMANDS.items() if name.startswith(f"{group} ")}
        yield Words((group,), line, {"--help": ""}, {}, parts, {})
    for name, line in COMMANDS.items():
        yield _words(tuple(name.split()), line, Parser(name, load(name)))


def _words(path: tuple[str, ...], about: str, made: Parser) -> Words:
    found = Words(path, about, {}, {}, {}, {})
    for action in made._actions:
        choices = tuple(map(str, action.choices)) if action.choices is not None else ()
        if kind := _kind(path, action):
            found.named.update(dict.fromkeys(action.option_strings or [""], kind))
        if not action.option_strings:
            found.next.update(dict.fromkeys(CODES | OWN_CODES if action.metavar == "CODE" else choices, ""))
        for option in action.option_strings:
            found.options[option] = (action.help or "").replace("%%", "%")
            if action.nargs != 0:
                found.values[option] = choices or _LISTED.get(option, ())
    return found


def _kind(path: tuple[str, ...], action: argparse.Action) -> str:
    """Return the kind of names that an option or word takes, one of `NAMES`; "" if it takes none of these."""
    if action.dest == "backend" or (action.metavar == "NAME" and action.dest in ("to", "names")):
        return "backends"
    if action.metavar == "ID":
        of_session = path[0] in ("chat", "sessions")
        return "sessions" if of_session else "runs" if not action.option_strings else ""
    return "runs" if action.metavar == "RUN" else ""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _places(found: list[Words]) -> str:
    """A pattern of the shell: each path of commands, as it is typed."""
    return "|".join(_quoted(" " + " ".join(words.path)) for words in found if words.path)


# Bash -----------------------------------------------------------------------------------------------------------------


def _bash(found: list[Words]) -> Iterator[str]:
    yield "# Completion of backplane for bash; made by `backplane completion bash`."
    yield "_backplane() {"
    yield "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} place= i words= files="
    yield "  for ((i = 1; i < COMP_CWORD; i++)); do"
    yield '    case "$place ${COMP_WORDS[i]}" in'
    yield f"      {_places(found)})"
    yield '        place="$place ${COMP_WORDS[i]}" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$place" in'
    for words in found:
        yield f"    {_quoted(''.join(' ' + part for part in words.path))})"
        yield '      case "$before" in'
        for option, choices in words.values.items():
            made = "words=" + _quoted(" ".join(choices)) if choices else "files=yes"
            if option in words.named:
                made = f'words=$("${{COMP_WORDS[0]}}" completion bash --names {words.named[option]} 2>/dev/null)'
            yield f"        {option}) {made} ;;"
        offered = " ".join((*words.next, *words.options))
        yield f"        *) words={_quoted(offered)}{'' if words.next or '' in words.named else ' files=yes'}"
        if "" in words.named:
            ask = f'words=$("${{COMP_WORDS[0]}}" completion bash --names {words.named[""]} 2>/dev/null)'
            yield f"          [[ $word == -* ]] || {ask}"
        yield "          ;;"
        yield "      esac ;;"
    yield "  esac"
    yield '  if [[ $word != -* && -n $files ]]; then COMPREPLY=($(compgen -f -- "$word"))'
    yield '  else COMPREPLY=($(compgen -W "$words" -- "$word")); fi'
    yield "}"
    yield "complete -o filenames -F _backplane backplane"


# Zsh ------------------------------------------------------------------------------------------------------------------


def _zsh(found: list[Words]) -> Iterator[str]:
    yield "#compdef backplane"
    yield "# Completion of backplane for zsh; made by `backplane completion zsh`."
    yield "_backplane() {"
    yield "  local place= i"
    yield "  local -a offered"
    yield "  for ((i = 2; i < CURRENT; i++)); do"
    yield '    case "$place $words[i]" in'
    yield f"      {_places(found)})"
    yield '        place="$place $words[i]" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$place" in'
    for words in found:
        yield f"    {_quoted(''.join(' ' + part for part in words.path))})"
        yield '      case "$words[CURRENT-1]" in'
        for option, choices in words.values.items():
            offer = f"compadd -- {' '.join(map(_quoted, choices))}" if choices else "_files"
            offer = _zsh_names(words.named[option]) if option in words.named else offer
            yield f"        {option}) {offer}; return ;;"
        yield "      esac"
        rows = {**words.next, **words.options}
        yield f"      offered=({' '.join(_quoted(_row(name, about)) for name, about in rows.items())})"
        more = _zsh_names(words.named[""]) if "" in words.named else "" if words.next else "_files"
        yield "      _describe backplane offered" + (f"; [[ $words[CURRENT] != -* ]] && {more}" if more else "")
        yield "      ;;"
    yield "  esac"
    yield "}"
    yield 'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _backplane "$@"'
    yield "else compdef _backplane backplane; fi"


def _zsh_names(kind: str) -> str:
    return f'compadd -- ${{(f)"$($words[1] completion zsh --names {kind} 2>/dev/null)"}}'


def _row(name: str, about: str) -> str:
    return f"{name}:{about}" if about else name


# Fish -----------------------------------------------------------------------------------------------------------------


def _fish(found: list[Words]) -> Iterator[str]:
    yield "# Completion of backplane for fish; made by `backplane completion fish`."
    for words in found:
        seen = " and ".join(f"__fish_seen_subcommand_from {part}" for part in words.path)
        seen = seen.replace(" and ", "; and ") or "__fish_use_subcommand"
        for name, about in words.next.items():
            yield f"complete -c backplane -f -n {_quoted(seen)} -a {_quoted(name)} -d {_quoted(about)}"
        if "" in words.named:
            yield f"complete -c backplane -f -n {_quoted(seen)} -a {_fish_names(words.named[''])}"
        for option, about in words.options.items():
            spelt = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            value = ""
            if option in words.values:
                value = f" -x -a {_quoted(' '.join(words.values[option]))}" if words.values[option] else " -r"
                value = f" -x -a {_fish_names(words.named[option])}" if option in words.named else value
            yield f"complete -c backplane -n {_quoted(seen)} {spelt}{value} -d {_quoted(about)}"


def _fish_names(kind: str) -> str:
    return _quoted(f"(backplane completion fish --names {kind} 2>/dev/null)")
