"""The parser of one command: argparse with our manners.

A wrong word is an error of ours with three lines at most, help goes out like any other text,
and every command's help ends with an example.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NoReturn

from backplane.cli import streams
from backplane.cli.commands import COMMANDS, CommandRow
from backplane.cli.options import TASK_OR_ORDER, Late, Row, Rows

Options = argparse.Namespace

_WIDTH_MAX = 100
"""Widest help: longer lines are hard to read."""

_OPTIONS_SHOWN = 10
"""Options that fit the hint of one that is none: more are for `--help`."""

_EXAMPLE = "example:\n"


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """The parser of one command of the table.

    Args:
        prog: the command as it is typed.
    """

    _given: frozenset[str] = frozenset()
    """Destinations that were given; one that was not and one that took its default look alike in the result."""

    def __init__(self, prog: str, command: CommandRow) -> None:
        example = command.example if isinstance(command.example, str) else command.example()
        super().__init__(
            prog=prog,
            usage=f"{prog} [options] (TASK | --order FILE)" if TASK_OR_ORDER[0] in command.rows else None,
            description=command.about,
            epilog=_EXAMPLE + "\n".join("  " + line for line in example.strip().splitlines()),
            # Without a width argparse imports shutil, and that three compressors.
            formatter_class=partial(_Formatter, width=min(streams.columns(), _WIDTH_MAX) - 2),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS if command.inherits else None,
        )
        self.command = command
        self.set_defaults(**command.defaults, **({"call": command.call} if command.call else {}))
        _add(self, command.rows)
        if command.parts:
            add = self.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=not command.call)
            for name, part in command.parts.items():
                add.add_parser(name, help=part.line, command=part)

    def print_help(self, file: Any = None) -> None:
        streams.write(self.format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is left over here, and not in the command that this one is a part of: the hint names this one."""
        self._given = frozenset()
        found, extra = super().parse_known_args(args, namespace)
        for action in self._actions:
            # argparse gives up an optional word at the option before it, as in `export last --to VENDOR FILE`.
            is_left = action.nargs == "?" and not action.option_strings and action.dest not in self._given
            if is_left and extra and (extra[0] == "-" or not extra[0].startswith("-")):
                setattr(found, action.dest, self._get_values(action, [extra.pop(0)]))
        for option, other in self.command.belongs.items():
            one, whole = (self._option_string_actions[name].dest for name in (option, other))
            if one in self._given and whole not in self._given:
                self.error(f"{option} has no effect without {other}")
        if extra:
            is_task = not extra[0].startswith("-") and any(action.metavar == "TASK" for action in self._actions)
            quotes = "; a TASK of several words stands in quotes" if is_task else ""
            self.error(f"unrecognized arguments: {' '.join(extra)}{quotes}")
        return found, extra

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if isinstance(action, argparse._SubParsersAction) and arg_strings[0] in action.choices:
            part = action.choices[arg_strings[0]]
            before = [one.option_strings[-1] for one in self._actions if one.option_strings and one.dest in self._given]
            if before and part.argument_default is not argparse.SUPPRESS:
                part.error(f"{before[0]} stands before {arg_strings[0]}, where it has no effect")
        if action.option_strings or any(word != "--" for word in arg_strings):
            self._given |= {action.dest}
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        from backplane.errors import ConfigError

        wrong, known = self._mistyped(message)
        hint = did_you_mean(wrong, known)
        own = [one.option_strings[-1] for one in self._actions if one.option_strings and one.dest != "help"]
        if wrong.startswith("--") and len(own) <= _OPTIONS_SHOWN:
            hint += f"it takes {', '.join(own) or 'no option'}; "
        raise ConfigError("usage_invalid", message, hint=f"{hint}{self.prog} --help")

    def _mistyped(self, message: str) -> tuple[str, Collection[str]]:
        """The word that argparse refuses, and the words that it could have been."""
        if found := re.match(r"unrecognized arguments: (--?[^\s=]+)", message):
            return found[1], list(self._option_string_actions)
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            return found[1], re.findall(r"'([^']*)'", found[2])
        return "", ()


def did_you_mean(wrong: str, known: Collection[str]) -> str:
    """The beginning of a hint for a mistyped word; empty where nothing is near."""
    from backplane.contract.unheard import nearest_name

    near = nearest_name(wrong, known) if wrong else None
    return f"did you mean {near}? " if near is not None else ""


def scaled(value: str | float, scale: int, option: str) -> int:
    """A finite number in parts of which so many make one, exactly.

    Raises:
        ConfigError: `usage_invalid`, it has a part that is smaller.
    """
    from fractions import Fraction

    from backplane.errors import ConfigError

    parts = Fraction(str(value)) * scale
    if parts.denominator != 1:
        raise ConfigError("usage_invalid", f"{option} {value}", hint=f"the smallest part of it is {1 / scale:f}")
    return int(parts)


def parser(name: str) -> Parser:
    """Make the parser of a command."""
    return Parser(f"backplane {name}", COMMANDS[name])


def _add(made: argparse._ActionsContainer, rows: Iterable[Row | Rows | Late]) -> None:
    for row in rows:
        if isinstance(row, Rows):
            one = made.add_mutually_exclusive_group() if row.title is None else made.add_argument_group(row.title)
            _add(one, row.rows)
        else:
            names, keywords = row() if callable(row) else row
            made.add_argument(*names, **keywords)
