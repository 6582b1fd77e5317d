"""The command line: argv and environment in, text or JSON lines out, an exit code at the end.

`INDEX` names every command; its module is imported when it is called. No traceback leaves this file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
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
        "compare": "run one order on several backends, from the same files",
        "apply": "apply a run's patch to the original workspace",
        "rewind": "list a run's checkpoints, or restore its workspace to one of them",
    },
    "see and steer runs": {
        "runs": "list runs, live runs first: task, state, cause of failure, cost",
        "show": "show one run: task, state, cause of failure, cost, files",
        "why": "explain what a run waits for or why it failed, and what to do next",
        "watch": "follow a run from any terminal, and answer its questions",
        "answer": "answer a live run's question from any terminal",
        "cancel": "end a live run cleanly; it still gets a receipt",
        "report": "write a run as one HTML page, as Markdown or as a test report",
        "web": "show runs in a browser, and answer questions and apply patches there",
        "cost": "sum up what runs have cost",
    },
    "conversations": {
        "sessions list": "list conversations, the most recently used first",
        "sessions show": "print a conversation, as text or as JSON",
        "sessions resume": "continue a conversation",
        "sessions fork": "copy a conversation, and print the copy's id",
        "sessions handover": "continue a conversation on another backend",
        "sessions import": "read a conversation from a file or from a vendor's program",
    },
    "the record": {
        "receipts show": "print one receipt",
        "receipts verify": "check the hashes and the chain of the stored receipts",
        "receipts audit": "compare the agent's claims with what was observed",
        "receipts export": "write a run's receipt, patch and journal to a new folder",
        "receipts import": "verify a receipt from another machine, and store it on this one",
        "policy test": "apply another policy to stored runs, and list each decision that would differ",
        "prune": "remove the files of older runs, but keep their entries in the chain of receipts",
    },
    "many machines": {
        "queue submit": "put a work order into a queue, for a worker on any machine",
        "queue worker": "take orders from a queue and run them on this machine",
        "queue list": "list orders, the newest first",
        "queue show": "show the state of an order, and fetch its receipt and patch",
        "queue answer": "answer an order's question",
        "queue events": "print the events of an order",
        "queue cancel": "end an order; it still gets a receipt",
        "queue status": "count the orders in each state, and list the workers",
        "queue limit": "show or set the limits for orders with a label",
        "queue prune": "remove ended orders, except the newest ones",
    },
    "set up": {
        "init": "write a first backplane.toml in this folder",
        "doctor": "check this machine and the configuration",
        "backends": "list the backends, which of them are ready, and how to fix the others",
        "demo": "show a whole run on a small sample project, without a key or a network",
        "completion": "print the completion script of a shell",
        "version": "print the version",
    },
    "for programs": {
        "gateway": "answer the model requests of any client by any configured service",
        "serve": "run the orders that another program sends on stdin",
        "acp": "start an agent for editors that speak the Agent Client Protocol",
        "mcp": "start an MCP server with tools that run orders and read receipts",
        "validate": "check work orders, receipts, policies and other files",
        "schema": "print a JSON Schema",
        "conform": "check whether a program follows the sidecar protocol",
        "translate": "convert a request, response or stream between vendors' formats",
        "explain": "explain an error code",
    },
}
"""Heading of the help → its commands → what each does. The order is the help's."""

GROUPS: Final = {
    "sessions": "work with stored conversations",
    "receipts": "read, verify and move receipts",
    "policy": "try a policy on stored runs",
    "queue": "run orders on many machines",
}
"""First word of commands with two → what they are for."""

COMMANDS: Final = {name: line for group in INDEX.values() for name, line in group.items()}

DONE, FAILED, USAGE, PARTIAL, REFUSED = range(5)
INTERRUPTED, READER_GONE = 130, 141


def code_of(receipt: Receipt, error: BackplaneError | None = None) -> int:
    """Return the exit code of an ended run: 3 if it is partial, else its error's code, else its outcome's.

    Args:
        error: one that its receipt does not have, as that could not be stored.
    """
    from backplane.receipts.outcomes import failure_of

    if receipt.outcome == "partial":
        return PARTIAL
    if (failure := error or failure_of(receipt)) is not None:
        return failure.facts.exit_code
    if receipt.outcome != "complete":
        return FAILED
    return PARTIAL if receipt.failed_on else DONE


HELP: Final = """\
usage: backplane COMMAND …

Run any coding agent through one contract: backplane reads a work order, and
writes events and one sealed receipt.

{commands}

options:
  --version   print the version
  -h, --help  print this help; `backplane COMMAND --help` prints the help of a command

example:
  backplane run "make test" --backend shell

exit codes:
  0    done
  1    the work failed, or a check found a fault
  2    wrong usage, unreadable input, unknown backend or wrong configuration
  3    the outcome is partial, or the run has a finding that --fail-on names
  4    refused by policy or for a missing capability; or no claim could be judged
  130  stopped cleanly by Ctrl-C (129, 131 or 143: by another signal)
  141  the reader of stdout closed the pipe
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of these words (default: those of this process), and return its exit code."""
    words, came = list(sys.argv[1:] if argv is None else argv), list[int]()
    try:
        streams.repair()
        with streams.interruptible() as came:
            return _main(words)
    except SystemExit as end:  # argparse's way to say that the help was printed
        return end.code if isinstance(end.code, int) else USAGE
    except BaseException as error:  # the outermost edge: whatever it is, it becomes words and a code
        code = _report(error, as_message="run" in words[:1] and "--json" in words and "--dry-run" not in words)
        return 128 + came[0] if came and code == INTERRUPTED else code


def _main(words: list[str]) -> int:
    words = [*words[1:], "--help"] if words[:1] == ["help"] else words
    group = words[0] if words and words[0] in GROUPS else ""
    rest = words[1:] if group else words
    first = rest[0] if rest else ""
    if first in ("", "-h", "--help"):
        (streams.write if first else streams.complain)(_group_help(group) if group else help_text())
        return DONE if first else USAGE
    from backplane.cli.command import Parser, did_you_mean, load, wrong_words

    name = "version" if words == ["--version"] else f"{group} {first}".strip()
    if name not in COMMANDS:
        near = did_you_mean(first, _parts(group) if group else [*COMMANDS, *GROUPS])
        raise wrong_words(f"no command {name!r}", f"{near}`backplane --help` lists the commands")
    with streams.postponed():
        if name != "version" and not {"-h", "--help"} & set(rest):
            importlib.import_module("backplane.contract.light")  # Before msgspec is loaded by a command's module.
        command = load(name)
    return int(command.run(Parser(name, command).parse(rest[1:])))


def _parts(group: str) -> dict[str, str]:
    """Return the second words of a group's commands, each with what it does."""
    return {name.removeprefix(f"{group} "): line for name, line in COMMANDS.items() if name.startswith(f"{group} ")}


def help_text() -> str:
    """Return what `backplane --help` prints: a row for a command or a whole group, then the exit codes."""
    rows = list[str]()
    for heading, names in INDEX.items():
        rows.append(f"{heading}:")
        for name in dict.fromkeys(name.partition(" ")[0] for name in names):
            line = f"{GROUPS[name]}: {', '.join(_parts(name))}" if name in GROUPS else names[name]
            rows.append(f"  {name:<12} {line}")
    return HELP.format(commands="\n".join(rows))


def _group_help(group: str) -> str:
    """Return what `backplane GROUP --help` prints."""
    rows = "\n".join(f"  {part:<12} {line}" for part, line in _parts(group).items())
    return f"usage: backplane {group} COMMAND …\n\n{GROUPS[group].capitalize()}.\n\ncommands:\n{rows}\n"


def _report(error: BaseException, *, as_message: bool) -> int:
    """Write what ended the command to stderr, and return its exit code.

    Args:
        as_message: write it to stdout, too, as the `fatal` of no run.
    """
    if isinstance(error, KeyboardInterrupt):  # Nothing is imported: an interrupted import may be half done.
        return INTERRUPTED
    from backplane.errors import BackplaneError, leaves, unforeseen

    found = leaves(error)
    for kind, code in ((streams.ReaderGone, READER_GONE), (KeyboardInterrupt, INTERRUPTED)):
        if any(isinstance(leaf, kind) for leaf in found):
            return code
    known = unforeseen(error)
    streams.error(known)
    if as_message:
        from backplane.serve.messages import fatal_of_no_run

        with suppress(streams.ReaderGone, BackplaneError):  # Where stdout cannot take it, stderr has it.
            streams.write_bytes(fatal_of_no_run(known))
    return known.facts.exit_code
