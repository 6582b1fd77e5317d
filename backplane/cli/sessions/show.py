"""`sessions show`: print a conversation."""

from __future__ import annotations

import os
from typing import Any

from backplane import config
from backplane.cli import options as add
from backplane.cli import sessions, streams
from backplane.cli.command import Args, Parser
from backplane.contract import canonical
from backplane.contract.conversation import AgentMessage, UserMessage
from backplane.providers.reading import text_of
from backplane.view.figures import ID_CHARS

HELP = "Print a conversation: as text, or as the JSON file that `sessions import` reads."
EXAMPLE = "backplane sessions show last\nbackplane sessions show last --json > session.json"


def options(p: Parser) -> None:
    add.value(
        p, "id", metavar="ID", nargs="?", default="last", help="session id or a prefix of it, or `last` (default: last)"
    )
    add.json(p, "the session as one JSON object", "session")


def run(args: Args) -> int:
    file = sessions.read(config.home_path(os.environ), args.id)
    if args.json:
        streams.write_json(canonical.encode(file) + b"\n")
        return 0
    streams.write(f"session {file.id} with {file.provider}\n")
    for number, turn in enumerate(file.turns):
        run = f"run {turn.run_id[:ID_CHARS]}" if turn.run_id is not None else "without a run on this machine"
        streams.write(f"\nturn {number + 1}: {turn.provider}, {run}, {turn.stop_reason or '?'}\n")
        for message in turn.messages:
            for line in _lines(message):
                streams.write(f"  {streams.printable(line)}\n")
    sessions.print_losses(file.losses)
    return 0


def _lines(message: Any) -> list[str]:
    if isinstance(message, UserMessage):
        shown = [f"> (a picture: {image.media_type or image.url})" for image in message.images]
        return [*(f"> {line}" for line in message.content.splitlines()), *shown]
    if isinstance(message, AgentMessage):
        calls = [f"tool: {call.name} {text_of(call.arguments)[:400]}" for call in message.tool_calls]
        return [*message.content.splitlines(), *calls]
    mark = "tool failed" if message.is_error else "result"
    return [f"{mark}: {line}" for line in message.content.splitlines()[:12]]
