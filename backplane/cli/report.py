"""`report`: runs as one page to read, send and keep; as Markdown for a CI step, or as a test report."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.receipts.memory import find
from backplane.view import page, summary
from backplane.view.load import shown_of
from backplane.view.omit import OMISSIBLE, Omission
from backplane.view.rows import ROWS_MAX, Story

HELP = "Print a report on one run, or on two side by side, as one self-contained HTML page."
EXAMPLE = """
backplane report last > run.html
backplane report 3f2a1b0c 9c41d2e7 > both.html
backplane report last --summary >> "$GITHUB_STEP_SUMMARY"
"""


def options(p: Parser) -> None:
    add.value(p, "runs", metavar="RUN", nargs="+", help="run ids or prefixes, `last`, or `last~2` (two runs earlier)")
    form = p.add_mutually_exclusive_group()
    add.flag(form, "--summary", help="write Markdown instead of HTML, for the summary of a CI step")
    add.flag(form, "--junit", help="write a JUnit test report, in which an incomplete run counts as a failure")
    add.value(
        p, "--omit", metavar="WHAT", default="",
        help="leave these out of a report that you want to share: outputs, prompts, paths (separated by commas)",
    )  # fmt: skip


def run(args: Args) -> int:
    omit = frozenset(args.omit.split(",")) - {""}
    if unknown := omit - set(OMISSIBLE):
        fact = f"--omit {streams.one_line(min(unknown))}: unknown kind of content"
        raise wrong_words(fact, f"give one or more of: {', '.join(OMISSIBLE)}")
    as_page = not (args.summary or args.junit)
    if as_page and len(args.runs) > 2:
        raise wrong_words("an HTML page can show at most two runs", "use --summary or --junit for more runs")
    if as_page and streams.is_terminal(streams.STDOUT):
        raise wrong_words("refusing to print HTML to a terminal", "write it to a file: backplane report RUN > run.html")
    rows_max = ROWS_MAX if as_page else 0
    with open_store() as store:
        shown = [
            shown_of(store, find(store, name), rows=Story(rows_max=rows_max), omission=Omission(omit))
            for name in args.runs
        ]
    make = summary.junit if args.junit else summary.markdown if args.summary else page.page
    for piece in make(shown):
        streams.write_bytes(piece.encode("utf-8", "replace"))
    return 0
