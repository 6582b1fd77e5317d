"""`report`: runs as one page to read, send and keep; as Markdown for a CI step, or as a test report."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import open_store, wrong_words
from backplane.receipts.memory import find
from backplane.shown.report import shown_of
from backplane.view import page, summary
from backplane.view.omit import OMISSIBLE, Omission
from backplane.view.rows import ROWS_MAX, Story

SIDES = 2


def write_report(options: Options) -> int:
    omit = frozenset(options.omit.split(",")) - {""}
    if unknown := omit - set(OMISSIBLE):
        fact = f"--omit {streams.one_line(min(unknown))}: there is no such kind of content"
        raise wrong_words(fact, f"one of: {', '.join(OMISSIBLE)}")
    as_page = not (options.summary or options.junit)
    if not as_page and options.full:
        raise wrong_words("--full works with a page only", "without --summary and --junit")
    if as_page and len(options.runs) > SIDES:
        raise wrong_words(f"a page has at most {SIDES} runs", "--summary or --junit take more")
    if as_page and streams.is_terminal(streams.STDOUT):
        raise wrong_words("refusing to print HTML to a terminal", "backplane report RUN > run.html")
    rows_max = None if options.full else ROWS_MAX if as_page else 0
    with open_store() as store:
        shown = [
            shown_of(store, find(store, name), rows=Story(rows_max=rows_max), omission=Omission(omit))
            for name in options.runs
        ]
    make = summary.junit if options.junit else summary.markdown if options.summary else page.page
    for piece in make(shown):
        streams.write_bytes(piece.encode("utf-8", "replace"))
    return 0
