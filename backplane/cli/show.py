"""`show`: one run: task, state, cause, cost, files; or one exchange of the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.exchanges import find_either
from backplane.cli.terminal import look as stdout_look
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered
from backplane.view.console import Look
from backplane.view.diff import changes
from backplane.view.exchanges import exchange_facts, exchange_standing
from backplane.view.figures import ID_CHARS, lasting, standing
from backplane.view.load import patch_of, picture_of
from backplane.view.page import facts_of

if TYPE_CHECKING:
    from backplane.view.picture import Picture

HELP = """Show the task, state, cause of failure, cost and files of a run. For the id of an exchange of
`backplane gateway`, show its client, models, times, tokens, cost and losses."""
EXAMPLE = "backplane show last\nbackplane show 5e0c9a17"

FILES_SHOWN: Final = 10

MESSAGE_LINES_MAX: Final = 12


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.json(p, "the run as one JSON object", "cli_runs, cli_exchanges")


def run(args: Args) -> int:
    with open_store() as store:
        found = find_either(store, args.run)
        if args.json:
            streams.write_record(found)
            return 0
        if isinstance(found, RecordedExchange):
            _show_exchange(found)
            return 0
        picture, patch = picture_of(store, found), patch_of(store, found.run_id) or ""
    look = stdout_look()
    for label, text in _rows(found, picture, patch, look):
        if text:
            streams.write(f"{look.dress('dim', f'{label:<8}')}{text}\n")
    return 0


def _show_exchange(one: RecordedExchange) -> None:
    look, (word, tone) = stdout_look(), exchange_standing(one)
    status = f"  (HTTP {one.status})" if one.status is not None else ""
    facts = {"id": one.id, "state": look.dress(tone, word) + status}
    facts |= exchange_facts(one, time.time_ns() // 1_000_000)
    facts["losses"] = str(one.losses) if one.losses else ""
    for label, text in facts.items():
        if text:
            streams.write(f"{look.dress('dim', f'{label:<8}')}{text}\n")
            for row in one.lost if label == "losses" else ():
                streams.write(f"        {streams.one_line(row)}\n")
    streams.write(f"{look.dress('dim', 'more    ')}backplane why {one.id[:ID_CHARS]}\n")


def _rows(run: Remembered, picture: Picture, patch: str, look: Look) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each line; an empty text has no line."""
    line, id, end = streams.one_line, run.run_id[:ID_CHARS], picture.ended
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    yield "task", line(run.task, 4000) if run.task is not None else "(unknown)"
    yield "tags", ", ".join(map(line, run.tags))
    yield "state", look.dress(tone, word) + (f"  ({line(run.outcome)})" if run.outcome not in (None, word) else "")
    yield "cause", ": ".join(line(text) for text in (run.code, run.cause) if text)
    yield "next", line(end.hint) if end is not None and end.hint else ""
    facts = facts_of(picture, lasting(run.duration_ms) if run.duration_ms is not None else "")
    yield from ((label, line(text)) for label, text in facts.items())
    yield from _files(picture, patch, look)
    for number, text in enumerate(picture.message.strip().splitlines()[-MESSAGE_LINES_MAX:]):
        yield "" if number else "says", line(text) or " "
    yield "more", f"backplane why {id}" + (f", backplane receipts show {id}" if run.state == "ended" else "")


def _files(picture: Picture, patch: str, look: Look) -> Iterator[tuple[str, str]]:
    """Yield the files of the patch; until there is one, those that the agent names."""
    if picture.ended is None:
        shown = [streams.one_line(path) for path in picture.files]
    else:
        found = changes(patch.splitlines())
        sums = [f"{look.dress('good', f'+{one.added}')} {look.dress('bad', f'−{one.removed}')}" for one in found]
        shown = [f"{streams.one_line(one.path)}  {sum}" for one, sum in zip(found, sums, strict=True)]
    for number, text in enumerate(shown[:FILES_SHOWN]):
        yield "" if number else "claims" if picture.ended is None else "files", text
    if len(shown) > FILES_SHOWN:
        yield "", f"and {len(shown) - FILES_SHOWN} more"
