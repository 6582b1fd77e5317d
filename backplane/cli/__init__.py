"""The front door: argv and environment in, text or JSON lines out, an exit code at the end.

One file a command group; each is imported when its command is called, so that help and version
cost nothing. This file finds the command and is the last edge: no traceback leaves it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from backplane import __version__
from backplane.cli import streams

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
PARTIAL: Final = 3
REFUSED: Final = 4
INTERRUPTED: Final = 130
READER_GONE: Final = 141

EXITS: Final[dict[int, str]] = {
    DONE: "done",
    FAILED: "the work failed, or a check found something",
    USAGE: "usage, unreadable input, unknown backend, bad configuration",
    PARTIAL: "outcome partial",
    REFUSED: "refused before the order was sent, or nothing there to judge",
    129: "interrupted by SIGHUP, after an orderly stop",
    INTERRUPTED: "interrupted by SIGINT, after an orderly stop",
    131: "interrupted by SIGQUIT, after an orderly stop",
    READER_GONE: "the reader of stdout went away",
    143: "interrupted by SIGTERM, after an orderly stop",
}
"""Every exit code, of every command."""

GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "begin": {
        "init": ("init", "write a first backplane.toml here, from what is ready on this machine"),
        "doctor": ("doctor", "say what this machine and configuration can do"),
        "backends": ("backends", "list the backends, ready or why not"),
    },
    "run work": {
        "run": ("run", "run one work order, from start to receipt"),
        "route": ("route", "say which backend an order would get, and why"),
        "compare": ("compare", "run one order on several backends from the same tree"),
        "apply": ("apply", "apply a run's patch to the original workspace"),
        "checkpoints": ("checkpoints", "list the states of a run's workspace that were kept"),
        "rewind": ("checkpoints", "take a workspace from a run's result back to one of these"),
    },
    "converse": {
        "chat": ("chat", "hold a conversation in the terminal"),
        "sessions": ("sessions", "find conversations again, go on, fork, hand over to another backend"),
    },
    "see and steer runs": {
        "runs": ("runs", "find runs again, live and ended ones: task, state, cause, cost"),
        "top": ("watch", "all live runs at a glance, those that wait for you first"),
        "watch": ("watch", "follow a run from any terminal, answer what it asks; leaving ends nothing"),
        "why": ("runs", "say what a run waits for, or why it failed, and the next step"),
        "answer": ("doors", "answer what a live run asks, from any terminal"),
        "interrupt": ("doors", "stop the turn of a live run's agent"),
        "cancel": ("doors", "end a live run in order, with its receipt"),
        "report": ("report", "write a run as one HTML page, as Markdown or as a test report"),
        "web": ("web", "show runs in a browser: followed, answered, cancelled, started"),
        "cost": ("route", "say what runs have cost, by provider, model, day, session or folder"),
    },
    "the record": {
        "receipts": ("receipts", "list, show, verify, compare and move receipts"),
        "replay": ("replay", "judge stored runs by another policy: each decision that would differ"),
    },
    "many machines": {
        "submit": ("queue", "put a work order into a queue, for a worker on any machine"),
        "worker": ("queue", "take orders of a queue and run them here"),
        "queue": ("queue", "look into a queue: list, show, cancel, events, status"),
    },
    "for programs": {
        "serve": ("serve", "be a host: runs for programs in any language, on stdin and stdout"),
        "mcp": ("mcp", "be an MCP server: run, receipts and validate for agents"),
        "validate": ("checks", "check work orders, receipts, policies and other files"),
        "schema": ("checks", "print a JSON Schema"),
        "translate": ("translate", "say one vendor's request, response or stream in another's dialect"),
        "conform": ("checks", "check any program that claims to be a host"),
    },
    "about": {
        "errors": ("about", "explain the error codes"),
        "completion": ("completion", "print what completes commands and options in your shell"),
        "version": ("about", "print the version"),
    },
}
"""Heading of the help → its commands → the file of each one here, and its line for the help."""

COMMANDS: Final = {name: row for group in GROUPS.values() for name, row in group.items()}

HELP: Final = """\
usage: backplane [--config FILE] COMMAND …

Run any coding agent through one contract: a work order in, events and one
sealed receipt out.

{commands}

options:
  --config FILE  configuration instead of ./backplane.toml or the user's
  --version      print the version
  -h, --help     print this; `backplane help COMMAND` says more

example:
  backplane run "make test" --backend shell

exit codes:
{exits}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; None takes this process's.

    Returns:
        The exit code, one of `EXITS`.
    """
    interrupts: streams.Interrupts | None = None
    name, arguments = "", list(sys.argv[1:] if argv is None else argv)
    try:
        streams.repair()
        with (interrupts := streams.Interrupts()):
            config, rest = _global_options(arguments)
            if rest is None:
                return DONE
            if not rest:
                streams.complain(help_text())
                return USAGE
            name, *arguments = rest
            return _command(name, arguments, config)
    except SystemExit as end:  # argparse's way to say that the help was printed
        return end.code if isinstance(end.code, int) else USAGE
    except BaseException as error:  # the outermost edge: whatever it is, it becomes words and a code
        code = _report(error, as_message=name == "run" and "--json" in arguments)
        return 128 + interrupts.number if interrupts is not None and code == INTERRUPTED else code


def _command(name: str, arguments: list[str], config: str | None) -> int:
    if name == "help":
        if not arguments:
            streams.write(help_text())
            return DONE
        name, arguments = arguments[0], [*arguments[1:], "--help"]
    if name not in COMMANDS:
        from backplane.cli.parser import did_you_mean

        raise _usage(f"no command {name!r}", did_you_mean(name, COMMANDS))
    # An interrupt while msgspec imports this is lost in there, and the first type that it then reads ends the process.
    importlib.import_module("datetime")
    group = importlib.import_module(f"backplane.cli.{COMMANDS[name][0]}")
    parser = group.parser(name)
    options = parser.parse_args(arguments)
    if getattr(options, "config", None) is None:
        options.config = config
    code: int = options.call(options)
    return code


def _global_options(words: list[str]) -> tuple[str | None, list[str] | None]:
    """The value of `--config`, and the words from the command on; None for these when all has been printed."""
    config: str | None = None
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option == "--config":
            if not equals and not rest:
                raise _usage("--config needs a file")
            config = value if equals else rest.pop(0)
        elif option == "--version":
            streams.write(f"backplane {__version__}\n")
            return config, None
        elif option in ("-h", "--help"):
            streams.write(help_text())
            return config, None
        else:
            raise _usage(f"no option {option!r} before the command")
    return config, rest


def help_text() -> str:
    """What `backplane --help` prints."""
    commands = "\n".join(
        "\n".join([f"{heading}:", *(f"  {name:<12} {line}" for name, (_, line) in rows.items())])
        for heading, rows in GROUPS.items()
    )
    exits = "\n".join(f"  {code:<4} {line}" for code, line in EXITS.items())
    return HELP.format(commands=commands, exits=exits)


def _usage(fact: str, near: str = "") -> Exception:
    from backplane.errors import ConfigError

    return ConfigError("config_invalid", fact, hint=near + "backplane --help")


def _report(error: BaseException, *, as_message: bool) -> int:
    """Say what ended the command, in three lines at most, and give its exit code.

    Args:
        as_message: say it on stdout, too, as the `fatal` of no run.
    """
    try:
        return _explain(error, as_message)
    except KeyboardInterrupt:
        return INTERRUPTED


def _explain(error: BaseException, as_message: bool) -> int:
    from backplane.errors import BackplaneError, leaves, unforeseen

    found = leaves(error)
    if any(isinstance(leaf, streams.ReaderGone) for leaf in found):
        return READER_GONE
    # One that comes while a class is made has another error around it.
    if any(isinstance(error, KeyboardInterrupt) for leaf in found for error in (leaf, leaf.__cause__)):
        return INTERRUPTED
    known = unforeseen(error)
    if os.environ.get("BACKPLANE_DEBUG") and known.code == "internal":
        import traceback

        streams.complain("".join(traceback.format_exception(found[0])))
    streams.error(known)
    if as_message:
        from backplane.serve.messages import fatal_of_no_run

        with suppress(streams.ReaderGone, BackplaneError):  # Where stdout cannot take it, stderr has it.
            streams.write_bytes(fatal_of_no_run(known))
    return known.facts.exit_code
