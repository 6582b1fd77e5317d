"""`sessions list`: list conversations, the last used first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.cli.sessions import ID_CHARS
from backplane.contract import canonical
from backplane.contract.conversation import SessionFile, UserMessage
from backplane.errors import BackplaneError
from backplane.providers import store

HELP = "List conversations, the last used first."
EXAMPLE = "backplane sessions list"

WORDS_CHARS_MAX: Final = 60
"""Most characters of a session's first words."""


def options(p: Parser) -> None:
    add.json(p, "one JSON object per session, one per line", "session")


def run(args: Args) -> int:
    home = config.home_path(os.environ)
    files = _readable(store.listed(home))
    if args.json:
        for file in files:
            streams.write_json(canonical.encode(file) + b"\n")
    else:
        streams.write_lines((_row(home, file) for file in files), "no sessions")
    return 0


def _readable(files: Iterable[SessionFile | BackplaneError]) -> Iterator[SessionFile]:
    """Yield those that could be read, and say on stderr what is wrong with the others."""
    for file in files:
        if isinstance(file, BackplaneError):
            streams.error(file)
        else:
            yield file


def _row(home: Path, file: SessionFile) -> str:
    state = "open" if store.is_open(home, file.id) else streams.count(len(file.turns), "turn")
    said = streams.one_line(_first_words(file), WORDS_CHARS_MAX)
    return f"{file.id[:ID_CHARS]}  {state:<9}  {file.provider:<12}  {said}"


def _first_words(file: SessionFile) -> str:
    said = (message for turn in file.turns for message in turn.messages if isinstance(message, UserMessage))
    first = next(said, None)
    return first.content if first is not None else "(nothing was said)"
