"""`show`: one run: task, state, cause, cost, files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.runs import ID_CHARS, state_of
from backplane.cli.terminal import look as stdout_look
from backplane.receipts.memory import Remembered, find
from backplane.view.console import Look
from backplane.view.diff import changes
from backplane.view.ended import names
from backplane.view.figures import ago, count, lasting, milliseconds, money
from backplane.view.load import picture_of
from backplane.view.values import as_list, as_object

if TYPE_CHECKING:
    from backplane.view.picture import Picture

HELP = "Show one run: task, state, cause, cost, files."
EXAMPLE = "backplane show last"

FILES_SHOWN: Final = 10

MESSAGE_LINES_MAX: Final = 12

LABEL_COLUMNS: Final = 8


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.json(p, "the run as one JSON object", "cli_runs")


def run(args: Args) -> int:
    with open_store() as store:
        found = find(store, args.run)
        if args.json:
            streams.write_record(found)
            return 0
        picture = picture_of(store, found)
    look = stdout_look()
    for line in _lines(found, picture, look):
        streams.write(line + "\n")
    return 0


def _lines(run: Remembered, picture: Picture, look: Look) -> Iterator[str]:
    def line(label: str, text: str) -> str:
        return f"{look.dress('dim', f'{label:<{LABEL_COLUMNS}}')}{text}"

    started_ms = milliseconds(run.started_at)
    when = ago(time.time_ns() // 1_000_000 - started_ms) if started_ms is not None else "at an unknown time"
    took = f", took {lasting(run.duration_ms)}" if run.duration_ms is not None else ""
    word, colour = state_of(run)
    yield line("run", f"{streams.one_line(run.run_id)}  ({when}{took})")
    yield line("task", streams.one_line(run.task, 4000) if run.task is not None else "(unknown)")
    if run.tags:
        yield line("tags", ", ".join(streams.one_line(tag) for tag in run.tags))
    if run.root is not None:
        yield line("folder", f"{streams.one_line(run.root)}  ({streams.one_line(run.mode)})")
    model = f"  model {streams.one_line(run.model)}" if run.model else ""
    yield line("backend", f"{streams.one_line(run.backend)}{model}")
    outcome = f"  ({streams.one_line(run.outcome)})" if run.outcome not in (None, word) else ""
    yield line("state", look.dress(colour, word) + outcome)
    yield from (line(label, text) for label, text in _cause(run, picture))
    added = picture.ended.added if picture.ended is not None else {}
    if unnamed := as_list(as_object(added.get("claimed")).get("unexplained")):
        yield line("unnamed", f"changed, and named by no event: {names(list(map(str, unnamed)))}")
    usage = picture.usage
    tokens = f"{count(usage.input_tokens)} in, {count(usage.output_tokens)} out"
    yield line("tokens", f"{tokens}, {money(picture.cost_usd_micros)}")
    yield line(
        "did",
        f"{streams.count(picture.calls, 'call')} of tools, {picture.calls_failed} failed, "
        f"{picture.denials} denied; {streams.count(picture.events, 'event')}",
    )
    yield from (line(label, text) for label, text in _files(picture, look))
    said = picture.message.strip().splitlines()
    for number, text in enumerate(said[-MESSAGE_LINES_MAX:]):
        yield line("" if number else "says", streams.one_line(text))
    receipt = f", backplane receipts show {run.run_id[:ID_CHARS]}" if run.state == "ended" else ""
    yield line("more", f"backplane why {run.run_id[:ID_CHARS]}{receipt}")


def _cause(run: Remembered, picture: Picture) -> Iterator[tuple[str, str]]:
    if run.code is not None or run.cause is not None:
        code = f"{streams.one_line(run.code)}: " if run.code else ""
        yield "cause", f"{code}{streams.one_line(run.cause or '')}"
    if picture.ended is not None and picture.ended.hint:
        yield "next", streams.one_line(picture.ended.hint)


def _files(picture: Picture, look: Look) -> Iterator[tuple[str, str]]:
    """Changed files: of the patch once there is one, until then as the agent names them."""
    if picture.ended is None:
        named = list(picture.files)
        for number, path in enumerate(named[:FILES_SHOWN]):
            yield "" if number else "claims", streams.one_line(path)
        return
    found = changes(picture.ended.diff.splitlines()) if picture.ended.diff else []
    for number, file in enumerate(found[:FILES_SHOWN]):
        added, removed = look.dress("green", f"+{file.added}"), look.dress("red", f"−{file.removed}")
        yield "" if number else "files", f"{streams.one_line(file.path)}  {added} {removed}"
    if len(found) > FILES_SHOWN:
        yield "", f"and {len(found) - FILES_SHOWN} more"
