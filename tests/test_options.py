"""Every option of every command is heeded or refused: by each action of a command, and beside or without the others."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane.cli import COMMANDS, function_of, main
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
            told = capfd.readouterr().err
            assert f"unrecognized arguments: {option}" in told
            assert f"backplane {name} {action} --help" in told
            assert all(word in told for word in own), told
        before = options_of(PARSERS[name,])
        for option in before if not part.command.inherits else ():
            assert main([name, option, *value_of(before[option]), action, *words_of(part)]) == 2
            assert f"{option} stands before {action}" in capfd.readouterr().err


def test_who_is_not_a_command_chooses_nothing_that_other_options_are_for() -> None:
    for path, made in PARSERS.items():
        for one in made._actions:
            chooses = one.choices and not one.option_strings and not isinstance(one, argparse._SubParsersAction)
            assert not chooses or path == ("completion",) or one.metavar == "allow|deny", path


# Not read at all ------------------------------------------------------------------------------------------------------


def reads(call: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    """Names of the options that a function reads, itself or by functions of the command line that it names."""
    if call in seen:
        return
    seen.add(call)
    module = inspect.getmodule(call)
    assert module is not None
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    rooms = {
        alias.asname or alias.name: importlib.import_module(f"backplane.cli.{alias.name}")
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom) and one.module == "backplane.cli"
        for alias in one.names
        if alias.name not in ("DONE", "FAILED", "PARTIAL", "REFUSED", "USAGE")
    }
    named: dict[str, Any] = dict(vars(module))
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module is not None and one.module.startswith("backplane.cli."):
            source = importlib.import_module(one.module)
            named |= {alias.asname or alias.name: getattr(source, alias.name) for alias in one.names}
    for one in ast.walk(tree):
        found: Any = None
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            if one.value.id in ("options", "self"):
                yield one.attr
            found = getattr({**vars(module), **rooms}.get(one.value.id), one.attr, None)
        elif isinstance(one, ast.Attribute):
            yield one.attr  # As of `self.options`.
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value  # As in `getattr`.
        elif isinstance(one, ast.Name):
            found = named.get(one.id)
        if (inspect.isfunction(found) or inspect.isclass(found)) and found.__module__.startswith("backplane.cli"):
            yield from reads(found, seen)


@pytest.mark.parametrize("path", PARSERS, ids=" ".join)
def test_every_option_is_read_by_what_its_command_calls(path: Path_) -> None:
    assert PARSERS[path].command.call or commands_of(PARSERS[path])
    if PARSERS[path].command.call:
        call = function_of(PARSERS[path].command.call)
        calls = [call.func, *call.args] if isinstance(call, functools.partial) else [call]
        seen: set[Any] = set()
        found = {name for one in calls for name in reads(one, seen)}
        own = {one.dest for one in PARSERS[path]._actions if one.dest not in ("help", "what", argparse.SUPPRESS)}
        assert own <= found, path


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
    assert f"usage_invalid: {option} has no effect without --" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("runs",), ("receipts", "list"), ("queue", "status"), ("doctor", "--url", "x")])
def test_a_configuration_that_nobody_reads_is_refused(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "x.toml", *words]) == 2
    assert capfd.readouterr().err.partition(": ")[2].startswith("--config has no effect ")


# Named in messages ----------------------------------------------------------------------------------------------------


STYLES = ("view/report_files.py", "view/web_files.py")
PACKAGE = Path(inspect.getfile(main)).parent.parent
QUEUES = ("scale/", "cli/queue.py", "serve/queue.py")
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


def all_options(*commands: str) -> set[str]:
    return {word for path, made in PARSERS.items() if path[0] in commands or not commands for word in options_of(made)}


def not_there(text: str, here: set[str]) -> Iterator[str]:
    """Options in a text that the command before them has not; without a command before, that none of `here` is."""
    for found in re.finditer(r"(?<![\w-])--[a-z][a-z-]+", text):
        clause = re.split(r"[;,:()\n]|&&| or ", text[: found.start()].replace(", or deny", " deny"))[-1]
        named = [
            path
            for path in PARSERS
            if re.search(rf"(backplane |`){' '.join(path)}(?![\w-])|(?<![\w-]){' '.join(path)} $", clause)
        ]
        path = max(named, key=len, default=None)
        has = here if path is None else set(options_of(PARSERS[path]))
        if found[0] not in has | OTHERS:
            yield f"{found[0]} of {path or 'none'}: {text[:200]}"


@pytest.mark.parametrize("place", ["queue", "why", "all"])
def test_every_option_that_a_message_names_is_there(place: str) -> None:
    here = {
        "queue": all_options("submit", "queue", "worker", "serve"),
        "why": all_options("submit"),
        "all": all_options(),
    }
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name not in STYLES and name.startswith({"queue": QUEUES, "why": ("view/why.py",), "all": ("",)}[place]):
            for text in prose(ast.parse(path.read_text())):
                if " " in text and "--" in text:
                    wrong += [f"{name}: {one}" for one in not_there(text, here[place])]
    assert not wrong, "\n".join(wrong)
