"""`queue show`: show the state of an order, and fetch its receipt."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import QueuedOrder, bring_home, opened_order, order_line
from backplane.scale.commands.waits import held

HELP = "Show the state of an order. The receipt and patch of an ended order are fetched, verified and stored."
EXAMPLE = "backplane queue show ORDER && backplane why last"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p, content=True)
    add.json(p, "the order's state as one JSON object", "cli_queue_show")


def run(args: Args) -> int:
    with opened_order(args) as (engine, place, order_id):
        status = engine.status(order_id)
        result = engine.result(order_id) if status.state == "done" else None
        if not args.json:
            streams.write(order_line(status) + "\n")
        if result is not None:
            given = status if args.json else None
            return bring_home(engine.job(order_id), result, place.contents(), status=given)
        found = held(engine, status) if status.state != "broken" else None
    if args.json:
        streams.write_record(QueuedOrder(status, found))
    elif found is None:
        streams.write(f"{streams.one_line(status.error or '')}\n")
    else:
        verdict = "" if found.kind == "nothing" else f"{found.verdict}: "
        streams.write(f"{streams.one_line(f'{verdict}{found.fact}')}\n")
        if found.kind in ("question_waits", "approval_waits"):
            streams.write(f"  {streams.one_line(found.step)}\n")
    return int(found is None)
