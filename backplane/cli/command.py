"""Shared parts of the command modules: argparse with our errors and help, the settings, and the store.

A command is a module with `HELP`, `EXAMPLE`, `options(p)` and `run(args)`; `INDEX` in `backplane.cli` names it.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from backplane.cli import streams
from backplane.cli.streams import wrong as wrong

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.errors import ConfigError
    from backplane.receipts.store import Store

Args = argparse.Namespace

WIDTH_MAX = 100
"""Widest help, in columns: longer lines are hard to read."""

_ROOMS = {"queue": "backplane.scale.commands"}
"""Group → the package of its commands, where that is not `backplane.cli.GROUP`."""


class Parser(argparse.ArgumentParser):
    """The parser of one command: a wrong word is an error of ours, and the help ends with an example.

    Attributes:
        only_with: option → the option without which it has no effect.
    """

    def __init__(self, name: str, command: Any) -> None:
        super().__init__(
            prog=f"backplane {name}",
            description=command.HELP,
            # Without a width argparse imports shutil, and that three compressors.
            formatter_class=partial(argparse.HelpFormatter, width=min(streams.size()[0], WIDTH_MAX) - 2),
            allow_abbrev=False,
        )
        self._example = "\n  ".join(command.EXAMPLE.strip().splitlines())
        self.only_with: dict[str, str] = {}
        command.options(self)

    def print_help(self, file: Any = None) -> None:
        streams.write(f"{self.format_help()}\nexample:\n  {self._example}\n")

    def parse(self, words: list[str]) -> Args:
        """Parse the words after the command's name. Raises ConfigError `usage_invalid`."""
        # Else argparse gives up an optional word at the option before it, as in `show --json RUN`.
        parse = self.parse_known_args if "--" in words else self.parse_known_intermixed_args
        found, extra = parse(words)
        if extra:
            near = did_you_mean(extra[0].partition("=")[0], self._option_string_actions)
            raise wrong_words(f"unrecognized arguments: {' '.join(extra)}", f"{near}see `{self.prog} --help`")
        for option, other in self.only_with.items():
            this, that = self._option_string_actions[option], self._option_string_actions[other]
            if getattr(found, this.dest) != this.default and getattr(found, that.dest) == that.default:
                self.error(f"{option} has no effect without {other}")
        return found

    def error(self, message: str) -> NoReturn:
        raise wrong_words(message, f"`{self.prog} --help` explains the options")


def load(name: str) -> Any:
    """Import the module of a command, as `run` or `sessions list`."""
    group, _, part = name.partition(" ")
    room = _ROOMS.get(group, f"backplane.cli.{group}")
    return importlib.import_module(f"{room}.{part}" if part else room)


def did_you_mean(wrong: str, known: Collection[str]) -> str:
    """Return the beginning of a hint for a mistyped word, empty if no known word is near."""
    from backplane.contract.unknown import nearest_name

    near = nearest_name(wrong, known) if wrong else None
    return f"did you mean {near}? " if near is not None else ""


def wrong_words(fact: str, hint: str) -> ConfigError:
    """Return the error `usage_invalid` for the words or options of a command."""
    return wrong(fact, hint, "usage_invalid")


def load_settings(args: Args, flags: Mapping[str, str | float | None] | None = None) -> Settings:
    """Read the configuration, over which `flags` go. Raises ConfigError: `config_invalid`."""
    from backplane import config

    return config.load(args.config or None, os.environ, streams.folder(), flags)


def open_store(*, readonly: bool = True) -> Store:
    """Open the store in this user's state folder; a missing folder is made only for writing."""
    from backplane import config
    from backplane.receipts.store import Store

    home = config.home_path(os.environ) if readonly else config.home(os.environ)
    return Store.open(home, readonly=readonly)
