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
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.commands import COMMANDS as COMMANDS
from backplane.cli.commands import GROUPS

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt
    from backplane.errors import BackplaneError

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
    PARTIAL: "outcome partial, whatever ended the run, or a finding of --fail-on",
    REFUSED: "refused by policy or for want of an ability, or nothing there to judge",
    129: "interrupted by SIGHUP, after an orderly stop",
    INTERRUPTED: "interrupted by SIGINT, after an orderly stop",
    131: "interrupted by SIGQUIT, after an orderly stop",
    READER_GONE: "the reader of stdout went away",
    143: "interrupted by SIGTERM, after an orderly stop",
}
"""Every exit code, of every command."""


def code_of(receipt: Receipt, error: BackplaneError | None = None) -> int:
    """Return the exit code of an ended run: 3 if it is partial, else its error's code, else its outcome's.

    A complete run with a finding that its order lists in `fail_on` is 3, too.

    Args:
        error: one that its receipt does not have, as that could not be kept.
    """
    from backplane.receipts.build import failure_of

    if receipt.outcome == "partial":
        return PARTIAL
    failure = error or failure_of(receipt)
    if failure is not None:
        return failure.facts.exit_code
    if receipt.outcome != "complete":
        return FAILED
    return PARTIAL if receipt.failed_on else DONE


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
    except KeyboardInterrupt:  # Before anything more is loaded: what it came into the middle of may be half there.
        code = INTERRUPTED
    except BaseException as error:  # the outermost edge: whatever it is, it becomes words and a code
        code = _report(error, as_message=name == "run" and "--json" in arguments)
    return 128 + interrupts.number if interrupts is not None and code == INTERRUPTED else code


def _command(name: str, arguments: list[str], config: str | None) -> int:
    if name == "help":
        if not arguments:
            streams.write(help_text())
            return DONE
        name, arguments = arguments[0], [*arguments[1:], "--help"]
    from backplane.cli.parser import did_you_mean, parser

    if name not in COMMANDS:
        raise _usage(f"no command {name!r}", did_you_mean(name, COMMANDS))
    options = parser(name).parse_args(arguments)
    if "config" in options:
        options.config = options.config or config
    elif config is not None:
        raise _usage(f"--config has no effect before {name}, which takes none")
    if name != "version":  # It alone says nothing of what a message holds.
        importlib.import_module("backplane.contract.light")
    code: int = function_of(options.call)(options)
    return code


def function_of(call: str) -> Any:
    """Load what does a command, by the table's word for it."""
    file, _, function = call.partition(":")
    return getattr(importlib.import_module(f"backplane.cli.{file}"), function)


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
            _command("version", [], None)
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
        "\n".join([f"{heading}:", *(f"  {name:<12} {command.line}" for name, command in rows.items())])
        for heading, rows in GROUPS.items()
    )
    exits = "\n".join(f"  {code:<4} {line}" for code, line in EXITS.items())
    return HELP.format(commands=commands, exits=exits)


def _usage(fact: str, near: str = "") -> Exception:
    from backplane.errors import ConfigError

    return ConfigError("usage_invalid", fact, hint=near + "backplane --help")


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
