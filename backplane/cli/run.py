"""`run`: run one work order, from start to receipt. `execute` does it, so that help loads nothing of it."""

from __future__ import annotations

from typing import Final

from backplane.cli import options as add
from backplane.cli.command import Args, Parser

HELP = "Run one work order, from start to receipt."
EXAMPLE = """
backplane run "make test" --backend shell --root ~/project
backplane run --order order.json --sidecar 'node my-host.mjs' --json > events.jsonl
"""

LAST: Final = "last"
"""Word for the last conversation of a backend."""


def options(p: Parser) -> None:
    add.task_or_order(p)
    add.config(p)
    who = p.add_argument_group("the backend (default: the configured backend, else the router's choice)")
    named = who.add_mutually_exclusive_group()
    name = "use this backend (see `backplane backends`), or replay:RUN to replay a stored run"
    add.value(named, "-b", "--backend", metavar="NAME", help=name)
    add.value(
        named, "--sidecar", metavar="COMMAND",
        help="use this program as the backend; `backplane conform` checks whether it follows the sidecar protocol",
    )  # fmt: skip
    add.model(who)
    add.value(
        who, "--prefer", metavar="P", help="let backplane choose the backend by speed, quality, cost or all (balanced)"
    )
    talk = p.add_argument_group("the conversation")
    add.flag(talk, "--keep", help="store the conversation, and print its id")
    latest = "continue this conversation; `last` is the latest one with this backend"
    add.value(talk, "--resume", metavar="ID", help=latest)
    talk.add_argument("-c", "--continue", dest="resume", action="store_const", const=LAST, help="same as --resume last")
    add.value(talk, "--schema", metavar="FILE", help="JSON Schema that the answer must satisfy; - for stdin")
    add.many(talk, "--mcp", metavar="NAME=COMMAND", help="give the agent this MCP server, or a remote one: NAME=URL")
    place = p.add_argument_group("the workspace")
    add.root(place)
    add.in_place(place)
    add.flag(place, "--apply", help="apply the patch to the folder if the run ends as complete")
    add.files(place)
    add.many(place, "--image", metavar="FILE", help="attach this picture to the task: PNG, JPEG, GIF or WebP")
    add.flag(place, "--checkpoints", help="store the workspace's state before each tool call that may change files")
    may = p.add_argument_group("what the agent needs, and what it may do")
    add.bounds(may)
    how = (
        "answer requests for approval: deny, allow, prompt (on a terminal), wait (for `backplane answer` or `watch`), "
        "or a command that reads a request as JSON and prints its decision (default: prompt on a terminal, else deny)"
    )
    add.value(may, "--on-ask", metavar="HOW", help=how)
    add.many(may, "--env", metavar="K[=V]", help="set a variable for the agent; K alone copies your own variable")
    add.value(may, "--timeout", metavar="TIME", type=add.seconds, help="end the run after TIME, such as 90s, 5m or 2h")
    out = p.add_argument_group("output")
    add.many(out, "--tag", metavar="TAG", help="tag the run with a word or KEY=VALUE")
    loud = out.add_mutually_exclusive_group()
    add.flag(loud, "-v", "--verbose", help="print the run's id and folder on stderr")
    add.flag(loud, "-q", "--quiet", help="print only the answer")
    schemas = ("envelope_event", "envelope_final", "envelope_fatal", "cli_dry_run")
    add.json(out, "all messages of the protocol, one JSON object per line", *schemas)
    add.flag(out, "--dry-run", help="start nothing; print the backend that would run the order (-v: and why)")
    add.value(out, "--run-id-file", metavar="FILE", help="write the run's id to FILE when the run begins")
    add.value(out, "--receipt", metavar="FILE", help="also write the receipt to FILE; - for stdout")
    add.value(out, "--patch", metavar="FILE", help="also write the patch to FILE; - for stdout")


def run(args: Args) -> int:
    from backplane.cli.execute import execute

    return execute(args)
