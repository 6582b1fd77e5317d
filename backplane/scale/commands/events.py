"""`queue events`: print the events of an order."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong
from backplane.scale.commands.common import opened_order, wait_for
from backplane.scale.engine import BATCH_EVENTS_MAX, Batch

HELP = "Print the events of an order."
EXAMPLE = "backplane queue events ORDER --follow"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p)
    add.flag(p, "--follow", help="wait for more events until the order ends")
    add.value(p, "--after", metavar="CURSOR", type=add.number, default=0, help="print only events after this cursor")


def run(args: Args) -> int:
    with opened_order(args) as (engine, _, order_id):
        if not args.follow and engine.status(order_id).state not in ("done", "broken"):
            raise wrong("the order has not ended", "give --follow to wait for its events")
        cursor = 0

        def write(batch: Batch) -> None:
            nonlocal cursor
            for number, record in enumerate(batch.records):
                if cursor + number >= args.after:
                    _write(batch, number, cursor + number + 1, record)
            cursor += BATCH_EVENTS_MAX

        wait_for(engine, order_id, write)
    return 0


def _write(batch: Batch, number: int, cursor: int, record: str) -> None:
    head = f'{{"attempt":"{batch.attempt}","seq":{batch.seq + number},"cursor":{cursor},'
    if batch.superseded is not None and number == 0:
        head += f'"superseded":"{batch.superseded}",'
    streams.write_json(f'{head}"event":{record.rstrip()}}}\n'.encode())
