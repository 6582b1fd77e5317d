"""The parser of one command: argparse with our manners.

A wrong word is an error of ours with three lines at most, help goes out like any other text,
and every command's help ends with an example.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from backplane.cli import streams

Options = argparse.Namespace
Call = Callable[[Options], int]

_WIDTH_MAX = 100
"""Widest help: longer lines are hard to read."""


_OPTIONS_SHOWN = 10
"""Options that fit the hint of one that is none: more are for `--help`."""

_EXAMPLE = "example:\n"


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **keywords: Any) -> None:
        # Without a width argparse imports shutil, and that three compressors.
        keywords.setdefault("width", min(streams.columns(), _WIDTH_MAX) - 2)
        super().__init__(prog, **keywords)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """One command's options.

    Attributes:
        several: added where a word too many is refused.

    Args:
        prog: the command as it is typed.
        about: what it does.
        example: lines to type, shown at the end of the help.
        call: what to call with the options.
    """

    several = ""
    _given: frozenset[str] = frozenset()
    """Destinations that were given; one that was not and one that took its default look alike in the result."""

    def __init__(self, prog: str, about: str, example: str, call: Call | None = None) -> None:
        super().__init__(
            prog=prog,
            description=about,
            epilog=_EXAMPLE + "\n".join("  " + line for line in example.strip().splitlines()),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._belongs: dict[str, str] = {}
        if call is not None:
            self.set_defaults(call=call)

    def belong_to(self, option: str, *options: str) -> None:
        """Refuse options where the one is not given that alone makes them mean something."""
        self._belongs |= dict.fromkeys(options, option)

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
        for option, other in self._belongs.items():
            one, whole = (self._option_string_actions[name].dest for name in (option, other))
            if one in self._given and whole not in self._given:
                self.error(f"{option} has no effect without {other}")
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}{'' if extra[0].startswith('-') else self.several}")
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
        raise ConfigError("config_invalid", message, hint=f"{hint}{self.prog} --help")

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


def seconds(text: str) -> float:
    """Seconds as `90`, `1.5`, `90s`, `5m`, `2h` or `1d`. Raises ValueError for what is none."""
    from backplane.view.figures import span_s

    span = span_s(text)
    return float(text) if span is None else float(span)


def scaled(value: str | float, scale: int, option: str) -> int:
    """A finite number in parts of which so many make one, exactly.

    Raises:
        ConfigError: `config_invalid`, it has a part that is smaller.
    """
    from fractions import Fraction

    from backplane.errors import ConfigError

    parts = Fraction(str(value)) * scale
    if parts.denominator != 1:
        raise ConfigError("config_invalid", f"{option} {value}", hint=f"the smallest part of it is {1 / scale:f}")
    return int(parts)


seconds.__name__ = "time"  # argparse says: invalid time value.


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option of every command that reads the configuration."""
    parser.add_argument("--config", metavar="FILE", help="configuration instead of ./backplane.toml or the user's")


def add_task(parser: Parser, *, or_order: bool = False) -> None:
    """The task in words.

    Args:
        or_order: a file with the order may stand for it.
    """
    parser.several = "; a TASK of several words stands in quotes"
    add = parser.add_argument
    add("task", nargs="?" if or_order else None, metavar="TASK", help="what to do, in words")
    if or_order:
        add("--order", metavar="FILE", help="work order as JSON instead of TASK; - for stdin; options go over it")


def add_requirements(parser: argparse._ActionsContainer, model: str) -> None:
    """What the backend has to bring.

    Args:
        model: the help of `--model`.
    """
    parser.add_argument("--model", metavar="M", help=model)
    parser.add_argument(
        "--require",
        metavar="CAP[=LEVEL]",
        action="append",
        default=[],
        help="an ability it must have: native, emulated (if no level is given) or any",
    )


def add_json(parser: argparse._ActionsContainer, what: str, *schemas: str) -> None:
    """The option `--json`; its help names the schemas of what is printed then."""
    parser.add_argument("--json", action="store_true", help=f"{what}; schema: {', '.join(schemas)}")


def add_plain(parser: argparse._ActionsContainer) -> None:
    """The option `--plain`."""
    parser.add_argument(
        "--plain", action="store_true", help="only lines, none painted over, as for a screen reader (or set ACCESSIBLE)"
    )
