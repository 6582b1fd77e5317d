"""`cancel`: end a live run cleanly."""

from __future__ import annotations

from backplane.cli import answer
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.runtime.door import CancelCommand

HELP = "End a live run cleanly: stop the agent, save its work and seal the receipt."
EXAMPLE = "backplane cancel last --reason 'wrong branch'"


def options(p: Parser) -> None:
    add.run_id(p)
    add.reason(p)


def run(args: Args) -> int:
    return answer.send(args.run, CancelCommand(reason=args.reason))
