"""`runs`: list runs, live ones first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.cli.terminal import look as stdout_look
from backplane.receipts.memory import Remembered, mentions, remembered
from backplane.receipts.store import Store
from backplane.view.columns import fitted, padded, width
from backplane.view.console import Look
from backplane.view.figures import ago, milliseconds, money, standing

HELP = "List runs, live ones first, then the newest."
EXAMPLE = """
backplane runs
backplane runs --failed --since 2d --text "parser"
backplane runs --live
"""

ROWS_MAX: Final = (1 << 63) - 1

ID_CHARS: Final = 8
"""Characters of an id in a list; any beginning that only one run has names it."""

TASK_CHARS_MAX: Final = 400

ROW_COLUMNS: Final = 80

_FROM_COLUMNS: Final = {"when": 50, "backend": 60, "cost": 70}
"""Least width at which a list has this column; the task needs the room else."""


def options(p: Parser) -> None:
    add.flag(p, "--failed", help="list only ended runs that are not complete")
    add.flag(p, "--live", help="list only live runs, those that wait for an answer first")
    add.since(p)
    add.value(p, "-b", "--backend", metavar="NAME", help="list only runs on this backend")
    add.value(p, "--folder", metavar="DIR", help="list only runs in this folder or its subfolders")
    add.value(p, "--tag", metavar="TAG", help="list only runs with this tag; a key alone matches every value")
    add.value(p, "--text", metavar="WORDS", help="list only runs whose task, tags or events have all these words")
    add.value(p, "--limit", metavar="N", type=int, default=30, help="list at most N runs (default: 30)")
    add.json(p, "one JSON object per run, one per line", "cli_runs")


def run(args: Args) -> int:
    if not 0 <= args.limit <= ROWS_MAX:
        raise wrong_words(f"--limit {args.limit} is out of range", "give 0 or more")
    look = stdout_look()
    with open_store() as store:
        chosen = islice(_waiting_first(_chosen(store, args), args), args.limit)
        streams.write_rows(
            chosen, lambda run: row(run, look, time.time_ns() // 1_000_000), "no runs", as_json=args.json
        )
    return 0


def _waiting_first(runs: Iterator[Remembered], args: Args) -> Iterator[Remembered]:
    return iter(sorted(runs, key=lambda run: not run.waits)) if args.live else runs


def _chosen(store: Store, args: Args) -> Iterator[Remembered]:
    """The runs that the filters leave; those that cost nothing come first."""
    words = args.text.split() if args.text is not None else []
    folder = os.path.realpath(args.folder) if args.folder is not None else None
    for run in remembered(store):
        if args.failed and not run.has_failed:
            continue
        if args.live and run.state != "live":
            continue
        if args.backend is not None and run.backend != args.backend:
            continue
        if args.since is not None and (milliseconds(run.started_at) or 0) < args.since:
            continue
        if args.tag is not None and not any(_has_tag(tag, args.tag) for tag in run.tags):
            continue
        if folder is not None and not _is_below(run.root, folder):
            continue
        if mentions(store, run, words):
            yield run


def _has_tag(tag: str, wanted: str) -> bool:
    return tag == wanted or tag.partition("=")[0] == wanted


def _is_below(root: str | None, folder: str) -> bool:
    return root is not None and (os.path.realpath(root) + "/").startswith(folder.rstrip("/") + "/")


def row(run: Remembered, look: Look, now_ms: int) -> str:
    """One run on one line: on a terminal as wide as that, elsewhere as long as it is."""
    word, colour = state_of(run)
    started_ms = milliseconds(run.started_at)
    when = ago(now_ms - started_ms) if started_ms is not None else "?"
    columns = streams.columns() if look.terminal else ROW_COLUMNS
    cells = {
        "id": padded(streams.one_line(run.run_id)[:ID_CHARS], ID_CHARS),
        "when": padded(when, 10),
        "state": padded(word, 11),
        "backend": padded(streams.one_line(run.backend), 10),
        "cost": f"{money(run.cost_usd_micros):>8}",
    }
    cells = {name: cell for name, cell in cells.items() if columns >= _FROM_COLUMNS.get(name, 0)}
    text = streams.one_line(run.task, TASK_CHARS_MAX) if run.task is not None else "(task unknown)"
    if run.check_of is not None:
        text = f"(check of {streams.one_line(run.check_of)[:ID_CHARS]}) {text}"
    if run.tags:
        text += f"  [{', '.join(streams.one_line(tag) for tag in run.tags)}]"
    if run.cause is not None:
        text += f" — {streams.one_line(run.cause, TASK_CHARS_MAX)}"
    if look.terminal:
        text = fitted(text, max(columns - width("  ".join(cells.values())) - 2, 0))
    cells["state"] = look.dress(colour, cells["state"])
    return "  ".join([*cells.values(), text])


def state_of(run: Remembered) -> tuple[str, str]:
    """Return the state of a run in one word, and that word's colour."""
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    return word, _COLOURS[tone]


_COLOURS: Final = {"good": "green", "warn": "yellow", "bad": "red", "live": "cyan"}
