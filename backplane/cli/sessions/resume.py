"""`sessions resume`: continue a conversation."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import order, sessions
from backplane.cli.command import Args, Parser
from backplane.contract.conversation import UserMessage

HELP = "Send one message to a stored conversation; `backplane chat --resume` continues it as a chat."
EXAMPLE = 'backplane sessions resume last "and now the tests"'


def options(p: Parser) -> None:
    sessions.turn_options(p)
    add.value(p, "words", metavar="WORDS", help="message to send")
    add.many(p, "--image", metavar="FILE", help="attach this picture to the message")


def run(args: Args) -> int:
    return sessions.send(args, UserMessage(content=args.words, images=order.images(args.image)))
