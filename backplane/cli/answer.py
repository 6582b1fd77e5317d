"""`answer`: answer a live run's question from any terminal."""

from __future__ import annotations

from typing import Any

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong
from backplane.receipts.memory import find
from backplane.runtime.door import AnswerCommand, Request, knock

HELP = "Answer a question of a live run from any terminal. `why RUN` and `watch RUN` show the question."
EXAMPLE = "backplane answer last allow"


def options(p: Parser) -> None:
    add.run_id(p)
    add.answer(p)
    add.flag(p, "--always", help="give the same answer to calls like this one until the run ends")


def run(args: Args) -> int:
    remember: Any = "run" if args.always else "once"
    given = AnswerCommand(ask=args.ask, decision=args.decision, reason=args.reason, text=args.text, remember=remember)
    return send(args.run, given)


def send(name: str, request: Request) -> int:
    """Send a request to a live run, and print what it answers. Raises what `door.knock` raises."""
    with open_store() as store:
        run = find(store, name)
        if run.state != "live":
            fact = f"run {run.run_id} is not live: it is {run.outcome or run.reason or 'cut off'}"
            raise wrong(fact, "list the live runs: backplane runs --live")
        streams.write(streams.one_line(knock(store.home, run.run_id, request)) + "\n")
    return 0
