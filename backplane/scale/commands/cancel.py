"""`queue cancel`: cancel an order."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.runtime.door import CancelCommand
from backplane.scale.commands.answer import send

HELP = "Cancel an order. A cancelled order still gets a receipt."
EXAMPLE = "backplane queue cancel ORDER"


def options(p: Parser) -> None:
    add.order_id(p)
    add.queue(p)
    add.reason(p)


def run(args: Args) -> int:
    return send(args, CancelCommand(reason=args.reason))
