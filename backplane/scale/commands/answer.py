"""`queue answer`: answer an order's question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong
from backplane.contract.approval import Decision
from backplane.runtime.door import CANCELLED, AnswerCommand, CancelCommand, Request, find_ask
from backplane.scale.commands.common import on_queue
from backplane.scale.orders import open_asks
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

HELP = "Answer the question of an order that was submitted with --asks."
EXAMPLE = "backplane queue answer ORDER allow"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p)
    add.answer(p)


def run(args: Args) -> int:
    given = AnswerCommand(ask=args.ask, decision=args.decision, reason=args.reason, text=args.text)
    return send(args, given)


def send(args: Args, request: Request) -> int:
    """Send a request to the run of an order, and print what comes back."""

    async def send(args: Args, engine: DurableEngine, _: QueuePlace) -> int:
        if isinstance(request, CancelCommand):
            sent = await _cancel(engine, args.order, request)
        else:
            sent = await _answer(engine, args.order, request)
        streams.write(streams.one_line(sent) + "\n")
        return 0

    return on_queue(send, args)


async def _cancel(engine: DurableEngine, order_id: str, asked: CancelCommand) -> str:
    if not await engine.cancel(order_id, asked.reason or "cancelled"):
        state = (await engine.status(order_id)).state
        raise wrong(f"order {order_id} has ended: it is {state}", f"backplane queue show {order_id}")
    return CANCELLED


async def _answer(engine: DurableEngine, order_id: str, asked: AnswerCommand) -> str:
    status = await engine.status(order_id)
    if status.state != "running" or not (await engine.job(order_id)).asks:
        fact = f"order {order_id} is {status.state} and has no open question"
        raise wrong(fact, "it must be running, and submitted with --asks")
    asks = await open_asks(engine, status)
    id, text = find_ask(asks, asked)
    decision = Decision(asked.decision, asked.reason, text=text, remember=asked.remember)
    if not await engine.answer(order_id, status.attempts[-1], id, decision):
        fact = f"the question {id!r} was answered already, and the first answer counts"
        raise wrong(fact, f"backplane queue show {order_id}")
    return f"{asked.decision}: {asks[id].message}"
