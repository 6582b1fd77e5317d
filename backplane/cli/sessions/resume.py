"""`sessions resume`: continue a conversation."""

from __future__ import annotations

from backplane.cli import chat, order, sessions
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.contract.conversation import UserMessage

HELP = "Continue a conversation: send one message, or open the chat."
EXAMPLE = 'backplane sessions resume last "and now the tests"'


def options(p: Parser) -> None:
    sessions.turn_options(p)
    add.value(p, "words", metavar="WORDS", nargs="?", help="message to send (default: open the chat)")
    add.many(p, "--image", metavar="FILE", help="attach this picture to the message")
    p.set_defaults(**dict.fromkeys(("backend", "model", "system", "root", "in_place", "max_turns")))


def run(args: Args) -> int:
    if args.words is None:
        args.resume = args.id
        return chat.run(args)
    return sessions.send(args, UserMessage(content=args.words, images=order.images(args.image)))
