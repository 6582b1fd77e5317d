"""`queue answer`: answer an order's question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.runtime.door import AnswerCommand, Request
from backplane.scale.commands.common import on_queue
from backplane.scale.orders import tell
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
        streams.write(streams.one_line(await tell(engine, args.order, request)) + "\n")
        return 0

    return on_queue(send, args)
