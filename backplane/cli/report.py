"""`report`: runs as one page to read, send and keep; as Markdown for a CI step, or as a test report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options, Parser
from backplane.cli.runs import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from backplane.receipts import Store
    from backplane.view.report import Shown

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
    form.add_argument("--junit", action="store_true", help="a JUnit test report instead; not complete is a failure")
    return made


def _report(options: Options) -> int:
    from backplane.errors import ConfigError
    from backplane.view import report

    as_page = not (options.summary or options.junit)
    if as_page and len(options.runs) > SIDES:
        raise ConfigError("config_invalid", f"a page has at most {SIDES} runs", hint="--summary or --junit take more")
    if as_page and streams.is_terminal(streams.STDOUT):
        raise ConfigError("config_invalid", "a page on a terminal helps nobody", hint="backplane report RUN > run.html")
    with open_store() as store:
        shown = [_shown(store, name) for name in options.runs]
    make = report.junit if options.junit else report.markdown if options.summary else report.page
    for piece in make(shown):
        streams.write_bytes(piece.encode("utf-8", "replace"))
    return 0


def _shown(store: Store, name: str) -> Shown:
    import time

    import msgspec

    from backplane.receipts.journal import PATCH, boot_id
    from backplane.receipts.memory import find
    from backplane.receipts.pieces import canonical_chunks
    from backplane.receipts.tail import Tail
    from backplane.view.picture import Picture
    from backplane.view.report import RECEIPT_BYTES_MAX, Shown, Story
    from backplane.view.why import Moment, diagnose

    run = find(store, name)
    picture, story, sealed = Picture(run_id=run.run_id), Story(), None
    folder = store.folder(run.run_id)
    with closing(Tail(folder)) as tail:
        for fact in tail.facts():
            picture.begin(fact)
        if run.state == "ended":
            receipt = store.load(run.run_id)
            events: Iterator[object] = iter(receipt.trace)
        else:
            events = (event for batch in iter(tail.events, []) for event in batch)
        for event in events:
            picture.take(event)  # type: ignore[arg-type]
            story.take(event)  # type: ignore[arg-type]
        if run.state == "ended":
            picture.end(receipt)
            sealed = _bounded(
                canonical_chunks(msgspec.structs.replace(receipt, receipt_sha256=None)), RECEIPT_BYTES_MAX
            )
    now = Moment(now_ms=time.time_ns() // 1_000_000, state=run.state, boot_id=boot_id())
    return Shown(
        picture=picture, diagnosis=diagnose(picture, now), story=story, patch=_patch(folder / PATCH), sealed=sealed
    )


def _bounded(chunks: Iterator[bytes], most: int) -> bytes | None:
    whole = bytearray()
    for chunk in chunks:
        whole += chunk
        if len(whole) > most:
            return None
    return bytes(whole)


def _patch(path: Path) -> str | None:
    from backplane.receipts.trace import open_plain

    try:
        with open_plain(path) as file:
            return file.read(PATCH_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None


PATCH_BYTES_MAX = 8 * 1024 * 1024
"""Of a patch; a page has fewer lines than that."""
