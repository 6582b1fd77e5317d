"""`sessions fork`: copy a conversation."""

from __future__ import annotations

from typing import Any

from backplane.cli import options as add
from backplane.cli import sessions
from backplane.cli.command import Args, Parser

HELP = "Copy a conversation, and print the copy's id. The original stays as it is."
EXAMPLE = "backplane sessions fork last --at 4"


def options(p: Parser) -> None:
    add.session_id(p)
    add.value(p, "--at", metavar="N", type=int, help="copy only the first N messages")
    add.config(p)


def run(args: Args) -> int:
    async def fork(registry: Any) -> Any:
        file = sessions.read(registry.plane.home, args.id)
        return await registry.get(file.provider).fork_session(file.id, at=args.at)

    return sessions.keep(args, fork)
