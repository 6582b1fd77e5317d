"""`queue events`: print the events of an order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong
from backplane.scale.commands.common import ended_words, followed, on_queue
from backplane.scale.orders import bring
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Event

HELP = "Print the events of an order."
EXAMPLE = "backplane queue events ORDER --follow"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p, content=True)
    add.flag(p, "--follow", help="wait for more events until the order ends")
    add.value(p, "--after", metavar="CURSOR", type=int, default=0, help="print only events after this cursor")
    p.only_with["--content"] = "--follow"


def run(args: Args) -> int:
    return on_queue(_events, args)


async def _events(args: Args, engine: DurableEngine, place: QueuePlace) -> int:
    if not args.follow and (await engine.status(args.order)).state not in ("done", "broken"):
        raise wrong("the order has not ended", "give --follow to wait for its events")
    if not args.follow or args.after:
        async for event in engine.events(args.order, after=args.after):
            await _write_event(event)
        return 0
    job = await engine.job(args.order)
    async with followed(engine, args.order):
        row, result = await bring(engine, job, place.contents(), config.home(os.environ), _write_event)
    with open_store() as store:
        streams.complain(ended_words(row, result, store.load(row.run_id)) + "\n")
    return 0


async def _write_event(event: Event) -> None:
    head = f'{{"attempt":"{event.attempt}","seq":{event.seq},"cursor":{event.cursor},'
    if event.superseded is not None:
        head += f'"superseded":"{event.superseded}",'
    streams.write_json(head.encode() + b'"event":' + event.record.rstrip() + b"}\n")
