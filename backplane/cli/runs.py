"""`runs`: list runs, live ones first; with `--gateway` the exchanges of `backplane gateway`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.cli.terminal import look as stdout_look
from backplane.gateway.journal import FOLDER, recorded
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered, mentions, remembered
from backplane.receipts.store import Store
from backplane.view.columns import fitted, padded, width
from backplane.view.console import Look
from backplane.view.exchanges import exchange_standing, figures_of, mentions_all, models_of
from backplane.view.figures import ID_CHARS, ago, milliseconds, money, standing

HELP = """List runs: live runs first, then the others from the newest to the oldest. With --gateway, list the model
requests that `backplane gateway` has answered, in the same order."""
EXAMPLE = """
backplane runs
backplane runs --failed --since 2d --text "parser"
backplane runs --live
backplane runs --gateway --failed --since 1h
"""

TASK_CHARS_MAX: Final = 400


def options(p: Parser) -> None:
    add.flag(p, "--gateway", help="list the exchanges of `backplane gateway`, and not the runs")
    add.flag(p, "--failed", help="list only ended runs with an outcome other than complete")
    add.flag(p, "--live", help="list only live runs; runs that wait for an answer come first")
    add.since(p)
    add.value(p, "-b", "--backend", metavar="NAME", help="list only runs on this backend; of exchanges the service")
    add.value(p, "--folder", metavar="DIR", help="list only runs in this folder or its subfolders")
    add.value(p, "--tag", metavar="TAG", help="list only runs with this tag; a key alone matches every value")
    words = "list only runs whose task, tags or events have all these words; of exchanges client, models or error"
    add.value(p, "--text", metavar="WORDS", help=words)
    add.value(p, "--limit", metavar="N", type=add.number, default=30, help="list at most N runs (default: 30)")
    add.json(p, "one JSON object per run, one per line", "cli_runs, cli_exchanges")


def run(args: Args) -> int:
    look = stdout_look()
    if args.gateway:
        if args.folder is not None or args.tag is not None:
            raise wrong_words("exchanges have no folder and no tags", "leave --folder and --tag out")
        found = islice(_exchanges(args), args.limit)
        streams.write_rows(found, lambda one: _exchange_row(one, look), "no exchanges", as_json=args.json)
        return 0
    with open_store() as store:
        chosen = _chosen(store, args)
        if args.live:
            chosen = iter(sorted(chosen, key=lambda run: not run.waits))
        none = "no runs"
        if any((config.home_path(os.environ) / FOLDER).glob("*.jsonl")):
            none += "; backplane runs --gateway lists the exchanges of the gateway"
        streams.write_rows(islice(chosen, args.limit), lambda run: _row(run, look), none, as_json=args.json)
    return 0


def _chosen(store: Store, args: Args) -> Iterator[Remembered]:
    """Yield the runs that the filters leave; the cheap filters come first."""
    words = args.text.split() if args.text is not None else []
    folder = os.path.realpath(args.folder).rstrip("/") + "/" if args.folder is not None else None
    for run in remembered(store):
        if (
            (run.has_failed or not args.failed)
            and (run.state == "live" or not args.live)
            and args.backend in (None, run.backend)
            and (args.since is None or (milliseconds(run.started_at) or 0) >= args.since)
            and (args.tag is None or any(args.tag in (tag, tag.partition("=")[0]) for tag in run.tags))
            and (folder is None or (os.path.realpath(run.root or "/") + "/").startswith(folder))
            and mentions(store, run, words)
        ):
            yield run


def _exchanges(args: Args) -> Iterator[RecordedExchange]:
    """Yield the exchanges that the filters leave."""
    words = args.text.split() if args.text is not None else []
    for one in recorded(config.home_path(os.environ)):
        if (
            (one.has_failed or not args.failed)
            and (one.state == "live" or not args.live)
            and args.backend in (None, one.backend)
            and (args.since is None or (milliseconds(one.began_at) or 0) >= args.since)
            and mentions_all(one, words)
        ):
            yield one


def _exchange_row(one: RecordedExchange, look: Look) -> str:
    """Return one exchange on one line: cut to the width of a terminal, else whole."""
    word, tone = exchange_standing(one)
    id, word = padded(streams.one_line(one.id)[:ID_CHARS], ID_CHARS), padded(word, 11)
    client, cost = padded(streams.one_line(one.client), 10), f"{money(one.cost_usd_micros):>8}"
    cells = [id, padded(_when(one.began_at), 10), word, client, cost]
    figures = figures_of(one)
    text = models_of(one) + (f"  ({figures})" if figures else "")
    if one.error is not None:
        text += f" — {streams.one_line(one.error, TASK_CHARS_MAX)}"
    return _line(cells, word, tone, text, look)


def _row(run: Remembered, look: Look) -> str:
    """Return one run on one line: cut to the width of a terminal, else whole."""
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    id, word = padded(streams.one_line(run.run_id)[:ID_CHARS], ID_CHARS), padded(word, 11)
    backend, cost = padded(streams.one_line(run.backend), 10), f"{money(run.cost_usd_micros):>8}"
    cells = [id, padded(_when(run.started_at), 10), word, backend, cost]
    text = streams.one_line(run.task, TASK_CHARS_MAX) if run.task is not None else "(task unknown)"
    if run.check_of is not None:
        text = f"(check of {streams.one_line(run.check_of)[:ID_CHARS]}) {text}"
    if run.tags:
        text += f"  [{', '.join(streams.one_line(tag) for tag in run.tags)}]"
    if run.cause is not None:
        text += f" — {streams.one_line(run.cause, TASK_CHARS_MAX)}"
    return _line(cells, word, tone, text, look)


def _when(timestamp: str) -> str:
    began_ms = milliseconds(timestamp)
    return ago(time.time_ns() // 1_000_000 - began_ms) if began_ms is not None else "?"


def _line(cells: list[str], word: str, tone: str, text: str, look: Look) -> str:
    """Return cells and a text on one line; the cell `word` gets the tone."""
    if look.terminal:
        text = fitted(text, max(streams.size()[0] - width("  ".join(cells)) - 2, 0))
    return "  ".join([*(look.dress(tone, cell) if cell is word else cell for cell in cells), text])
