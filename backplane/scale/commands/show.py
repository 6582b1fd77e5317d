"""`queue show`: show the state of an order, and fetch its receipt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import QueuedOrder, bring_home, on_queue, order_line
from backplane.scale.commands.waits import held
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

HELP = "Show the state of an order. The receipt and patch of an ended order are fetched, verified and stored."
EXAMPLE = "backplane queue show ORDER && backplane why last"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p, content=True)
    add.json(p, "the order's state as one JSON object", "cli_queue_show")


def run(args: Args) -> int:
    return on_queue(_show, args)


async def _show(args: Args, engine: DurableEngine, place: QueuePlace) -> int:
    status = await engine.status(args.order)
    if status.state == "done":
        if not args.json:
            streams.write(order_line(status) + "\n")
        job, told = await engine.job(args.order), status if args.json else None
        return await bring_home(engine, job, place.contents(), config.home(os.environ), status=told)
    if args.json:
        streams.write_record(QueuedOrder(status, None if status.state == "broken" else await held(engine, status)))
        return int(status.state == "broken")
    streams.write(order_line(status) + "\n")
    if status.state == "broken":
        streams.write(f"{streams.one_line(status.error or '')}\n")
        return 1
    found = await held(engine, status)
    if found.kind != "nothing":
        streams.write(f"{streams.one_line(found.verdict)}: ")
    streams.write(f"{streams.one_line(found.fact)}\n")
    if found.kind in ("question_waits", "approval_waits"):
        streams.write(f"  {streams.one_line(found.step)}\n")
    return 0
