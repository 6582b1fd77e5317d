"""`sessions list`: list conversations, the most recently used first."""

from __future__ import annotations

import os
from pathlib import Path

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.contract.conversation import SessionFile
from backplane.providers import store
from backplane.view.figures import ID_CHARS

HELP = "List conversations, the most recently used first."
EXAMPLE = "backplane sessions list"


def options(p: Parser) -> None:
    add.json(p, "one JSON object per session, one per line", "session")


def run(args: Args) -> int:
    home = config.home_path(os.environ)
    found = list(store.listed(home))
    for file in found:
        if not isinstance(file, SessionFile):
            streams.error(file)
    readable = (file for file in found if isinstance(file, SessionFile))
    streams.write_rows(readable, lambda file: _row(home, file), "no sessions", as_json=args.json)
    return 0


def _row(home: Path, file: SessionFile) -> str:
    state = "open" if store.is_open(home, file.id) else streams.count(len(file.turns), "turn")
    words = "(no message was sent)" if file.first_words is None else file.first_words
    return f"{file.id[:ID_CHARS]}  {state:<9}  {file.provider:<12}  {streams.one_line(words, 60)}"
