"""Every option of every command is heeded or refused: by each action of a command, and beside or without the others."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backplane.cli import COMMANDS, main
from backplane.cli.parser import Parser, parser

Path_ = tuple[str, ...]


def commands_of(made: argparse.ArgumentParser) -> dict[str, Parser]:
    return next((dict(one.choices) for one in made._actions if isinstance(one, argparse._SubParsersAction)), {})


def walk(path: Path_, made: Parser) -> Iterator[tuple[Path_, Parser]]:
    yield path, made
    for name, part in commands_of(made).items():
        yield from walk((*path, name), part)


PARSERS = {path: part for name in COMMANDS for path, part in walk((name,), parser(name))}


def options_of(made: Parser) -> dict[str, argparse.Action]:
    return {one.option_strings[-1]: one for one in made._actions if one.option_strings and one.dest != "help"}


def value_of(option: argparse.Action) -> list[str]:
    choices = [str(one) for one in option.choices or ()]
    return [] if option.nargs == 0 else choices[:1] or ["1"]


def words_of(made: Parser) -> list[str]:
    """A word for each that the command needs."""
    words = [one for one in made._actions if not one.option_strings and one.nargs is None]
    options = [word for name, one in options_of(made).items() if one.required for word in (name, *value_of(one))]
    return [*options, *(str(next(iter(one.choices))) if one.choices else "x" for one in words)]


# Of another action ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["queue", "receipts", "runs", "sessions"])
def test_an_option_of_another_action_is_refused_with_the_actions_own(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = commands_of(PARSERS[name,])
    assert len(parts) > 2, "its actions are commands of their own"
    everybodys = {word: one for part in (PARSERS[name,], *parts.values()) for word, one in options_of(part).items()}
    for action, part in parts.items():
        own = options_of(part)
        for option in everybodys.keys() - own.keys():
            given = [option, *value_of(everybodys[option])]
            assert main([name, action, *words_of(part), *given]) == 2
            assert option in capfd.readouterr().err
        before = options_of(PARSERS[name,])
        for option in before if not part.command.inherits else ():
            assert main([name, option, *value_of(before[option]), action, *words_of(part)]) == 2
            assert option in capfd.readouterr().err


# Not read at all ------------------------------------------------------------------------------------------------------


def test_every_option_is_read_somewhere_on_the_command_line() -> None:
    sources = " ".join(path.read_text() for path in (PACKAGE / "cli").rglob("*.py"))
    known = {one.dest for made in PARSERS.values() for one in made._actions} - {"help", argparse.SUPPRESS}
    assert sorted(name for name in known if not re.search(rf"\.{name}\b|\"{name}\"", sources)) == []


# Without another ------------------------------------------------------------------------------------------------------


ALONE = [
    ("serve", "--label", "x"), ("serve", "--label", "default"), ("serve", "--priority", "1"),
    ("serve", "--content", "x"), ("queue", "events", "x", "--content", "x"),
    ("sessions", "export", "x", "--into-store"),
    ("doctor", "--protocol", "x"), ("doctor", "--key-env", "x"), ("doctor", "--model", "x"),
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


@pytest.mark.parametrize("words", [("runs",), ("receipts", "list"), ("queue", "status"), ("doctor", "--url", "x")])
def test_a_configuration_that_nobody_reads_is_refused(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "x.toml", *words]) == 2
    assert "_invalid: --config " in capfd.readouterr().err


# Named in messages ----------------------------------------------------------------------------------------------------


STYLES = ("view/report_files.py", "view/web_files.py")
PACKAGE = Path(inspect.getfile(main)).parent.parent
OTHERS = {"--no-input", "--batch", "--version", "--help", "--config", "--git", "--cc", "--comb"}
"""Of other programs, and of all commands."""


def prose(tree: ast.AST) -> Iterator[str]:
    """Texts of more than one word, what is filled in as `…`; no docstrings."""
    inner = {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in ast.walk(one)}
    plain = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in one.values)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in inner | plain:
            yield one.value


def test_every_option_that_a_message_names_is_there() -> None:
    known = OTHERS.union(*map(options_of, PARSERS.values()))
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in prose(ast.parse(path.read_text())) if str(path.relative_to(PACKAGE)) not in STYLES else ():
            named = re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if " " in text else []
            wrong += [f"{path.name}: {name} in {text[:200]}" for name in named if name not in known]
    assert not wrong, "\n".join(wrong)
