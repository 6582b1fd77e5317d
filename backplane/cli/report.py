"""`report`: runs as one page to read, send and keep; as Markdown for a CI step, or as a test report."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import open_store, wrong_words
from backplane.receipts.memory import find
from backplane.shown.report import shown_of
from backplane.view import report
from backplane.view.html import text
from backplane.view.story import ROWS_MAX, Story
from backplane.view.text import in_workspace

SIDES = 2
TASK_CHARS = 200
"""Of a task, looked for in the rows: a call's head has as many of its input."""


def write_report(options: Options) -> int:
    omit = frozenset(options.omit.split(",")) - {""}
    if unknown := omit - set(report.OMISSIBLE):
        fact = f"--omit {streams.one_line(min(unknown))} is nothing that can be left out"
        raise wrong_words(fact, f"one of: {', '.join(report.OMISSIBLE)}")
    as_page = not (options.summary or options.junit)
    if not as_page and (omit or options.full):
        raise wrong_words("--omit and --full are of a page", "without --summary and --junit")
    if as_page and len(options.runs) > SIDES:
        raise wrong_words(f"a page has at most {SIDES} runs", "--summary or --junit take more")
    if as_page and streams.is_terminal(streams.STDOUT):
        raise wrong_words("a page on a terminal helps nobody", "backplane report RUN > run.html")
    rows_max = None if options.full else ROWS_MAX
    with open_store() as store:
        shown = [
            shown_of(store, find(store, name), Story(rows_max=rows_max if as_page else 0, omit=omit))
            for name in options.runs
        ]
    for run in shown if "prompts" in omit else ():
        if _repeats_task(run):
            fact = "its events repeat the task, as those of `shell` always do, and are on the page"
            streams.note(f"run {run.picture.run_id[:8]}: {fact}")
    make = report.junit if options.junit else report.markdown if options.summary else report.page
    for piece in make(shown):
        streams.write_bytes(piece.encode("utf-8", "replace"))
    return 0


def _repeats_task(run: report.Shown) -> bool:
    """Whether the rows that are drawn have the beginning of the task, as far as a row's head goes."""
    task = text(in_workspace((run.picture.task or "").strip()[:TASK_CHARS]))
    return bool(task) and any(task in row.head or task in row.body for row in run.story.rows)
