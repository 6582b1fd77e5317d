"""`queue prune`: remove all but the newest ended orders."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import find_queue, opened, within

HELP = "Remove ended orders, except the newest ones."
EXAMPLE = "backplane queue prune --keep 1000"


def options(p: Parser) -> None:
    add.queue(p)
    add.value(p, "--keep", metavar="N", type=int, default=1000, help="keep the newest N ended orders (default: 1000)")


def run(args: Args) -> int:
    within(args, "keep", 0)
    with opened(find_queue(args), may_make=False) as engine:
        streams.write(f"{engine.prune(args.keep)} ended orders removed\n")
    return 0
