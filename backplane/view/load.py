"""Read stored and live runs from the store and fold them for the views.

The only module of this room that reads files, the clock or processes. Nothing in it writes or waits.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Final

from backplane.errors import StoreError
from backplane.process.snapshot import snapshot
from backplane.receipts.journal import PATCH, boot_id
from backplane.receipts.memory import Remembered
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.receipts.trace import open_plain
from backplane.view.omit import Omission
from backplane.view.page import Shown
from backplane.view.picture import Picture
from backplane.view.rows import Story
from backplane.view.why import Diagnosis, diagnose
from backplane.view.why_kinds import Moment

CHECKED_BYTES_MAX: Final = 32 << 20
"""Longest trace whose hash is recomputed for a diagnosis; it takes 30 ms."""

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes read of a patch; a page shows fewer."""


def picture_of(store: Store, run: Remembered, rows: Story | None = None, omission: Omission | None = None) -> Picture:
    """Return the picture of a run as it is now.

    Args:
        rows: also takes the run's events.
        omission: removes content from facts, events and receipt before anything reads them (default: nothing).

    Raises:
        StoreError: `receipt_store_failed`, also where its content was pruned.
    """
    picture, receipt = Picture(run_id=run.run_id), None
    omission = omission or Omission()
    with closing(Tail(store.folder(run.run_id))) as tail:
        for fact in tail.facts():
            picture.begin(omission.fact(fact))
        if run.state == "ended":
            receipt = store.load(run.run_id)
        live = (event for batch in iter(tail.events, []) for event in batch)
        for event in map(omission.of, receipt.trace if receipt is not None else live):
            picture.take(event)
            if rows is not None:
                rows.take(event)
    if receipt is not None:
        picture.end(receipt)
        picture.ended = omission.of(picture.ended)
    return picture


def shown_of(store: Store, run: Remembered, *, rows: Story | None = None, omission: Omission | None = None) -> Shown:
    """Return a run as its page draws it.

    Args:
        rows: takes the run's events (default: the first rows, cut).
        omission: removes content from everything that is read (default: nothing).

    Raises:
        StoreError: as `picture_of`.
    """
    rows, omission = rows if rows is not None else Story(), omission or Omission()
    picture = picture_of(store, run, rows, omission)
    moment = moment_of(store, picture, run)
    return Shown(
        picture=picture,
        state=run.state,
        diagnosis=omission.of(diagnose(picture, moment)),
        rows=rows,
        patch=omission.of(patch_of(store, run.run_id)),
        now_ms=moment.now_ms,
    )


def why(store: Store, run: Remembered) -> Diagnosis:
    """Return what a run waits for or why it failed, even if its receipt cannot be read any more.

    Raises:
        StoreError: `receipt_store_failed`: pruned, or the disk fails.
    """
    try:
        picture = picture_of(store, run)
        return diagnose(picture, moment_of(store, picture, run))
    except StoreError as error:
        faults = tuple(one.fact for one in store.verify(run.run_id)) if run.state == "ended" else ()
        if not faults:
            raise
        return diagnose(Picture(run_id=run.run_id), Moment(now_ms=0, state="ended", faults=(error.message, *faults)))


def moment_of(store: Store, picture: Picture, run: Remembered) -> Moment:
    """Return what is known of a run beside its journal and receipt. Blocks for two looks at a live run's processes.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    faults, models = list[str](), tuple[str, ...]()
    if run.state == "ended" and store.find(run.run_id).trace_bytes <= CHECKED_BYTES_MAX:
        faults = [one.fact for one in store.verify(run.run_id)]
    if picture.ended is not None and picture.ended.code == "backend_model_not_found":
        from backplane.upstream.prices import known_models

        models = known_models()
    return Moment(
        now_ms=time.time_ns() // 1_000_000,
        state=run.state,
        boot_id=boot_id(),
        processes=snapshot(*picture.host) if run.state == "live" and picture.host is not None else (),
        faults=tuple(faults),
        models=models,
    )


def patch_of(store: Store, run_id: str) -> str | None:
    """Return the beginning of a run's patch, or None if it was pruned or is empty."""
    try:
        with open_plain(store.folder(run_id) / PATCH) as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
