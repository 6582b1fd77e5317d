"""`sessions handover`: continue a conversation on another backend."""

from __future__ import annotations

from typing import Final

from backplane.cli import options as add
from backplane.cli import sessions
from backplane.cli.command import Args, Parser

HELP = "Continue a conversation on another backend. The parts that the backend cannot take over are listed on stderr."
EXAMPLE = "backplane sessions handover last --to mine"

GO_ON: Final = "Continue the work from where it stopped."
"""Message to the new backend if none is given."""


def options(p: Parser) -> None:
    sessions.turn_options(p)
    add.value(p, "words", metavar="WORDS", nargs="?", default=GO_ON, help=f"message to send (default: {GO_ON})")
    add.value(p, "--to", metavar="BACKEND", required=True, help="backend that continues the conversation")
    add.model(p)


def run(args: Args) -> int:
    return sessions.send(args, args.words, args.to, args.model)
