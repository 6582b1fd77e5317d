"""`queue prune`: remove all but the newest ended orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import on_queue
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

HELP = "Remove ended orders, except the newest ones."
EXAMPLE = "backplane queue prune --keep 1000"


def options(p: Parser) -> None:
    add.queue(p)
    add.value(p, "--keep", metavar="N", type=int, default=1000, help="keep the newest N ended orders (default: 1000)")


def run(args: Args) -> int:
    async def prune(args: Args, engine: DurableEngine, _: QueuePlace) -> int:
        removed = await engine.prune(args.keep)
        streams.write(f"{removed} ended orders removed\n")
        return 0

    return on_queue(prune, args)
