"""`queue list`: list orders, the newest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import on_queue, order_line
from backplane.scale.engine import Status
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

HELP = "List orders, the newest first."
EXAMPLE = "backplane queue list --label gpu"


def options(p: Parser) -> None:
    add.queue(p)
    add.value(p, "--limit", metavar="N", type=int, default=50, help="list the newest N orders (default: 50)")
    add.value(p, "--label", metavar="LABEL", help="list only orders with this label")
    add.json(p, "one JSON object per order, one per line", "cli_queue_list")


def run(args: Args) -> int:
    def show(orders: Iterable[Status]) -> int:
        streams.write_rows(orders, order_line, "no orders", as_json=args.json)
        return 0

    async def look(_: Args, engine: DurableEngine, __: QueuePlace) -> int:
        return show(await engine.list(limit=args.limit, label=args.label, outcomes=True))

    return on_queue(look, args, lambda: show(()))
