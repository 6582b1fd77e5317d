"""Every option of every command is read, and refused where it has no effect; messages name options that there are."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import pytest

from backplane.cli import COMMANDS, main
from backplane.cli.command import Parser, load

PARSERS = {tuple(name.split()): Parser(name, load(name)) for name in COMMANDS}


def options_of(made: Parser) -> dict[str, argparse.Action]:
    return {name: one for one in made._actions for name in one.option_strings if one.dest != "help"}


# Not read at all ------------------------------------------------------------------------------------------------------


def test_every_option_is_read_somewhere_on_the_command_line() -> None:
    files = [*(PACKAGE / "cli").rglob("*.py"), *(PACKAGE / "scale/commands").glob("*.py")]
    sources = " ".join(path.read_text() for path in files)
    known = {one.dest for made in PARSERS.values() for one in made._actions} - {"help", argparse.SUPPRESS}
    assert sorted(name for name in known if not re.search(rf"\.{name}\b|\"{name}\"", sources)) == []


# The shape of a command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_these_four_names(name: str) -> None:
    command = load(name)
    assert command.HELP[0].isupper()
    assert command.HELP.rstrip().endswith(".")
    assert f"backplane {name}" in command.EXAMPLE
    assert all(map(callable, (command.options, command.run)))


def test_the_help_of_an_option_is_a_phrase_without_a_bare_default() -> None:
    helps = {
        f"{' '.join(path)} {(one.option_strings or [str(one.metavar)])[-1]}": str(one.help)
        for path, made in PARSERS.items()
        for one in made._actions
    }
    wrong = [name for name, text in helps.items() if len(text.split()) < 2 or text.endswith((".", "(none)", "(.)"))]
    assert wrong == []


# Without another ------------------------------------------------------------------------------------------------------


ALONE = [
    ("serve", "--label", "x"), ("serve", "--label", "default"), ("serve", "--priority", "1"),
    ("serve", "--content", "x"), ("receipts", "verify", "--config", "x"),
]  # fmt: skip


@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_an_option_without_the_one_that_it_belongs_to_is_refused(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "home"))
    assert main(list(words)) == 2
    option = next(word for word in words if word.startswith("--"))
    assert capfd.readouterr().err.startswith(f"usage_invalid: {option} ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("runs",), ("receipts", "show"), ("queue", "status"), ("show",)])
def test_a_configuration_that_nobody_reads_is_refused(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--config", "x.toml"]) == 2
    assert "--config" in capfd.readouterr().err


# Named in messages ----------------------------------------------------------------------------------------------------


PACKAGE = Path(inspect.getfile(main)).parent.parent
OTHERS = {"--no-input", "--batch", "--version", "--help", "--config", "--git", "--cc", "--comb", "--reject"}
"""Of other programs, and of all commands."""


def test_every_option_that_a_message_names_is_there() -> None:
    known = OTHERS.union(*map(options_of, PARSERS.values()))
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        texts = re.findall(r'(?<!")"([^"\n]* [^"\n]*)"', path.read_text())  # of more than one word
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(texts))
        wrong += [f"{path.name}: {name}" for name in named if name not in known]
    assert not wrong, "\n".join(wrong)
