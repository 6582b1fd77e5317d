"""`queue answer`: answer an order's question."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong
from backplane.contract.approval import Decision
from backplane.runtime.door import AnswerCommand, find_ask
from backplane.scale.commands.common import opened_order
from backplane.scale.orders import open_asks

HELP = "Answer the question of an order that was submitted with --asks."
EXAMPLE = "backplane queue answer ORDER allow"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p)
    add.answer(p)


def run(args: Args) -> int:
    given = AnswerCommand(ask=args.ask, decision=args.decision, reason=args.reason, text=args.text)
    with opened_order(args) as (engine, _, order_id):
        status = engine.status(order_id)
        if status.state != "running" or not engine.job(order_id).asks:
            fact = f"order {order_id} is {status.state} and has no open question"
            raise wrong(fact, "it must be running, and submitted with --asks")
        asks = open_asks(engine, status)
        id, text = find_ask(asks, given)
        decision = Decision(given.decision, given.reason, text=text)
        if not engine.answer(order_id, status.attempts[-1], id, decision):
            fact = f"the question {id!r} was answered already, and the first answer counts"
            raise wrong(fact, f"backplane queue show {order_id}")
        streams.write(streams.one_line(f"{given.decision}: {asks[id].message}") + "\n")
    return 0
