"""`report`: runs as one page to read, send and keep; as Markdown for a CI step, or as a test report."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options, Parser
from backplane.cli.runs import open_store

SIDES = 2

EXAMPLE = """
backplane report last > run.html
backplane report 3f2a1b0c 9c41d2e7 > both.html
backplane report last --summary >> "$GITHUB_STEP_SUMMARY"
"""


def parser(name: str) -> Parser:
    """The options of `report`."""
    about = "Write a run, or two side by side, as one HTML file that needs nothing beside it."
    made = Parser(f"backplane {name}", about, EXAMPLE, _report)
    made.add_argument("runs", metavar="RUN", nargs="+", help="run ids or their beginnings, `last`, or `last~2`")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--summary", action="store_true", help="Markdown instead, for the summary of a CI step")
    form.add_argument(
        "--junit", action="store_true", help="a JUnit test report instead; an incomplete end is a failure"
    )
    made.add_argument("--full", action="store_true", help="draw every row, for paper; a long run's page opens slowly")
    made.add_argument(
        "--omit", metavar="WHAT", default="", help="of a page for others: outputs, prompts, paths, with commas between"
    )
    return made


def _report(options: Options) -> int:
    from backplane.errors import ConfigError
    from backplane.receipts.memory import find
    from backplane.shown import shown_of
    from backplane.view import report
    from backplane.view.story import ROWS_MAX, Story

    omit = frozenset(options.omit.split(",")) - {""}
    if unknown := omit - set(report.OMISSIBLE):
        fact = f"--omit {streams.one_line(min(unknown))} is nothing that can be left out"
        raise ConfigError("config_invalid", fact, hint=f"one of: {', '.join(report.OMISSIBLE)}")
    as_page = not (options.summary or options.junit)
    if not as_page and (omit or options.full):
        raise ConfigError("config_invalid", "--omit and --full are of a page", hint="without --summary and --junit")
    if as_page and len(options.runs) > SIDES:
        raise ConfigError("config_invalid", f"a page has at most {SIDES} runs", hint="--summary or --junit take more")
    if as_page and streams.is_terminal(streams.STDOUT):
        raise ConfigError("config_invalid", "a page on a terminal helps nobody", hint="backplane report RUN > run.html")
    rows_max = None if options.full else ROWS_MAX
    with open_store() as store:
        shown = [
            shown_of(store, find(store, name), Story(rows_max=rows_max if as_page else 0, omit=omit))
            for name in options.runs
        ]
    make = report.junit if options.junit else report.markdown if options.summary else report.page
    for piece in make(shown):
        streams.write_bytes(piece.encode("utf-8", "replace"))
    return 0
