"""`queue cancel`: cancel an order."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong
from backplane.runtime.door import CANCELLED
from backplane.scale.commands.common import opened_order

HELP = "Cancel an order. A cancelled order still gets a receipt."
EXAMPLE = "backplane queue cancel ORDER"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p)
    add.reason(p)


def run(args: Args) -> int:
    with opened_order(args) as (engine, _, order_id):
        if not engine.cancel(order_id, args.reason or "cancelled"):
            raise wrong(f"order {order_id} has ended", f"backplane queue show {order_id}")
        streams.write(f"{CANCELLED}\n")
    return 0
