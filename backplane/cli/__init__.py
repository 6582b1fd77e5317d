"""The command line: argv and environment in, text or JSON lines out, an exit code at the end.

`INDEX` names every command; its module is imported when it is called. No traceback leaves this file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from backplane.cli import streams

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt
    from backplane.errors import BackplaneError

INDEX: Final[dict[str, dict[str, str]]] = {
    "run work": {
        "run": "run one work order, from start to receipt",
        "chat": "hold a conversation in the terminal",
        "compare": "run one order on several backends from the same tree",
        "apply": "apply a run's patch to the original workspace",
        "rewind": "list a run's checkpoints, or restore the workspace to one",
    },
    "see and steer runs": {
        "runs": "list runs, live ones first: task, state, cause, cost",
        "show": "show one run: task, state, cause, cost, files",
        "why": "say what a run waits for, or why it failed, and the next step",
        "watch": "follow a run from any terminal, and answer its questions",
        "answer": "answer a live run's question from any terminal",
        "cancel": "end a live run in order, with its receipt",
        "report": "write a run as one HTML page, as Markdown or as a test report",
        "web": "show runs in a browser, and answer, cancel, apply and rewind there",
        "cost": "sum up what runs have cost",
    },
    "conversations": {
        "sessions list": "list conversations, the last used first",
        "sessions show": "print a conversation, as text or as JSON",
        "sessions resume": "continue a conversation",
        "sessions fork": "copy a conversation, and print the copy's id",
        "sessions handover": "continue a conversation on another backend",
        "sessions import": "read a conversation from a file or from a vendor's program",
    },
    "the record": {
        "receipts show": "print one receipt",
        "receipts verify": "check hashes and the chain of receipts",
        "receipts audit": "compare the agent's claims with what was observed",
        "receipts export": "write receipt, patch and journal as one folder",
        "receipts import": "verify a receipt from another machine or store, and store it",
        "policy test": "judge stored runs by another policy, and list each decision that would differ",
        "prune": "remove the files of older runs; the chain still verifies",
    },
    "many machines": {
        "queue submit": "put a work order into a queue, for a worker on any machine",
        "queue worker": "take orders from a queue and run them on this machine",
        "queue list": "list orders, the newest first",
        "queue show": "show where an order is, and fetch its receipt and patch",
        "queue answer": "answer an order's question",
        "queue events": "print the events of an order",
        "queue cancel": "end an order; it still gets a receipt",
        "queue status": "count orders, and list the workers",
        "queue limit": "show or set limits of a label",
        "queue prune": "remove all but the newest ended orders",
    },
    "set up": {
        "init": "write a first backplane.toml in this folder",
        "doctor": "check this machine and the configuration",
        "backends": "list the backends: ready, or why not and how to mend it",
        "demo": "run a sample from bug to fix and receipt, without key or network",
        "completion": "print the completion script of a shell",
        "version": "print the version",
    },
    "for programs": {
        "serve": "be a host: run orders for programs in any language, on stdin and stdout",
        "mcp": "be an MCP server: tools to run orders and read receipts",
        "validate": "check work orders, receipts, policies and other files",
        "schema": "print a JSON Schema",
        "conform": "check any program that claims to be a host",
        "translate": "convert a request, response or stream between vendors' formats",
        "explain": "explain an error code",
    },
}
"""Heading of the help → its commands → what each does. The order is the help's."""

GROUPS: Final = {
    "sessions": "work with kept conversations",
    "receipts": "read, verify and move receipts",
    "policy": "try a policy on stored runs",
    "queue": "run orders on many machines",
}
"""First word of commands with two → what they are for."""

COMMANDS: Final = {name: line for group in INDEX.values() for name, line in group.items()}

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
    REFUSED: "refused before it started: policy, or a missing capability; or nothing to judge",
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
        error: one that its receipt does not have, as that could not be stored.
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
  --config FILE  read this configuration (default: ./backplane.toml, else the user's)
  --version      print the version
  -h, --help     print this; `backplane COMMAND --help` says more

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
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        streams.repair()
        with (interrupts := streams.Interrupts()):
            return _main(words)
    except SystemExit as end:  # argparse's way to say that the help was printed
        return end.code if isinstance(end.code, int) else USAGE
    except KeyboardInterrupt:  # Before anything more is loaded: what it came into the middle of may be half there.
        code = INTERRUPTED
    except BaseException as error:  # the outermost edge: whatever it is, it becomes words and a code
        code = _report(error, as_message=_speaks_protocol(words))
    return 128 + interrupts.number if interrupts is not None and code == INTERRUPTED else code


def _speaks_protocol(words: list[str]) -> bool:
    """Return True if the reader of stdout expects messages of the protocol."""
    return "run" in words[:3] and "--json" in words and "--dry-run" not in words


def _main(words: list[str]) -> int:
    config: str | None = None
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option == "--config":
            if not equals and not words:
                raise _usage("--config needs a file")
            config = value if equals else words.pop(0)
        elif option == "--version":
            words = ["version"]
        elif option in ("-h", "--help"):
            words = ["help"]
        else:
            raise _usage(f"no option {option!r} before the command")
    if not words:
        streams.complain(help_text())
        return USAGE
    if words[0] == "help":
        words = [*words[1:], "--help"]
    if words[0] == "--help":
        streams.write(help_text())
        return DONE
    return _command(words, config)


def _command(words: list[str], config: str | None) -> int:
    name, arguments = words[0], words[1:]
    if name in GROUPS:
        if arguments[:1] in (["--help"], ["-h"]):
            streams.write(_group_help(name))
            return DONE
        if not arguments:
            raise _usage(f"{name} needs a second word", near=", ".join(_parts(name)) + "; ", command=name)
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    from backplane.cli.command import Parser, did_you_mean, load

    if name not in COMMANDS:
        known = _parts(words[0]) if words[0] in GROUPS else [*COMMANDS, *GROUPS]
        raise _usage(f"no command {name!r}", near=did_you_mean(name.split()[-1], known))
    command = load(name)
    args = Parser(name, command).parse_args(arguments)
    if "config" in args:
        args.config = args.config or config
    elif config is not None:
        raise _usage(f"--config has no effect before {name}, which reads no configuration")
    if name != "version":  # It alone says nothing of what a message holds.
        importlib.import_module("backplane.contract.light")
    return command.run(args)


def _parts(group: str) -> list[str]:
    """Return the second words of a group's commands."""
    return [name.removeprefix(f"{group} ") for name in COMMANDS if name.startswith(f"{group} ")]


def help_text() -> str:
    """Return what `backplane --help` prints."""
    commands = "\n".join("\n".join([f"{heading}:", *_help_rows(rows)]) for heading, rows in INDEX.items())
    exits = "\n".join(f"  {code:<4} {line}" for code, line in EXITS.items())
    return HELP.format(commands=commands, exits=exits)


def _help_rows(rows: dict[str, str]) -> Iterator[str]:
    """Yield a row a command, and one for all commands of a group."""
    shown = set[str]()
    for name, line in rows.items():
        group = name.partition(" ")[0]
        if group == name:
            yield f"  {name:<12} {line}"
        elif group not in shown:
            shown.add(group)
            yield f"  {group:<12} {GROUPS[group]}: {', '.join(_parts(group))}"


def _group_help(group: str) -> str:
    """Return what `backplane GROUP --help` prints."""
    rows = "\n".join(f"  {part:<12} {COMMANDS[f'{group} {part}']}" for part in _parts(group))
    first = GROUPS[group]
    return (
        f"usage: backplane {group} COMMAND …\n\n{first[0].upper()}{first[1:]}.\n\ncommands:\n{rows}\n\n"
        f"example:\n  backplane {group} {_parts(group)[0]} --help\n"
    )


def _usage(fact: str, near: str = "", command: str = "") -> Exception:
    from backplane.cli.command import wrong_words

    return wrong_words(fact, " ".join(filter(None, (f"{near}backplane", command, "--help"))))


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
