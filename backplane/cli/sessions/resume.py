"""`sessions resume`: continue a conversation."""

from __future__ import annotations

from typing import Any

from backplane.cli import chat, order, sessions
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.contract.conversation import UserMessage

HELP = "Continue a conversation: send one message, or open the chat."
EXAMPLE = 'backplane sessions resume last "and now the tests"'


def options(p: Parser) -> None:
    add.session_id(p)
    add.value(p, "words", metavar="WORDS", nargs="?", help="message to send (default: open the chat)")
    add.many(p, "--image", metavar="FILE", help="show this picture with the message")
    sessions.turn_options(p)


def run(args: Args) -> int:
    if args.words is None:
        return chat.resume(args)

    async def resume(registry: Any) -> int:
        file = sessions.read(registry.plane.home, args.id)
        session = await registry.get(file.provider).resume(file.id, sessions.turn_config(args))
        return await sessions.turn(session, UserMessage(content=args.words, images=order.images(args.image)))

    return sessions.with_registry(args, resume)
