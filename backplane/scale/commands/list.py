"""`queue list`: list orders, the newest first."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import find_queue, opened, order_line, within

HELP = "List orders, the newest first."
EXAMPLE = "backplane queue list --label gpu"


def options(p: Parser) -> None:
    add.queue(p)
    add.value(p, "--limit", metavar="N", type=int, default=50, help="list the newest N orders (default: 50)")
    add.value(p, "--label", metavar="LABEL", help="list only orders with this label")
    add.json(p, "one JSON object per order, one per line", "cli_queue_list")


def run(args: Args) -> int:
    within(args, "limit", 1)
    place = find_queue(args)
    if place.is_new and args.engine is None:  # This user has no queue yet.
        streams.write_rows((), order_line, "no orders", as_json=args.json)
        return 0
    with opened(place, may_make=False) as engine:
        orders = engine.list(limit=args.limit, label=args.label, outcomes=True)
    streams.write_rows(orders, order_line, "no orders", as_json=args.json)
    return 0
