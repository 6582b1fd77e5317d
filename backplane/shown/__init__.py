"""Stored and live runs as the views want them: read from the store, folded by `view`. Nothing here writes or waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from backplane.contract.events import AgentEvent
from backplane.errors import StoreError
from backplane.process.snapshot import snapshot
from backplane.receipts.journal import WORDS, boot_id
from backplane.receipts.memory import UNFOLLOWED, Remembered, follow_step
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.receipts.trace import open_plain
from backplane.view.omit import Omission
from backplane.view.picture import Picture
from backplane.view.why import Diagnosis, Evidence, Moment, diagnose

WORDS_BYTES_MAX: Final = 64 * 1024
"""Of what a live host said on stderr; `runtime` keeps less."""

CHECKED_BYTES_MAX: Final = 32 << 20
"""Longest trace whose hash is recomputed where somebody asks why; it takes 30 ms."""


def diagnosis_of(store: Store, picture: Picture, run: Remembered) -> Diagnosis:
    """What a run waits for now, or why it failed.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    return diagnose(picture, moment_of(store, picture, run))


def why(store: Store, run: Remembered, more: Callable[[Picture, Moment, Diagnosis], Moment] | None = None) -> Diagnosis:
    """What a run waits for now, or why it failed, also where its receipt cannot be read any more.

    Args:
        more: what else is known where the kind asks for it: the moment with that in it, or as it was.

    Raises:
        StoreError: `receipt_store_failed`: pruned, or the disk fails.
    """
    if run.reason == UNFOLLOWED and run.queued is not None:
        verdict = "who followed it here has ended; the order goes on without"
        step = f"{follow_step(run.queued)} [--engine URL]"
        evidence = (Evidence(f"order {run.queued} of a queue"),)
        return Diagnosis(
            run_id=run.run_id, kind="interrupted", sure=True, verdict=verdict, since_ms=None, evidence=evidence,
            next=(step,),
        )  # fmt: skip
    try:
        picture = picture_of(store, run)
        moment = moment_of(store, picture, run)
    except StoreError as error:
        faults = tuple(one.fact for one in store.verify(run.run_id)) if run.state == "ended" else ()
        if not faults:
            raise
        picture = Picture(run_id=run.run_id)
        moment = Moment(now_ms=0, state="ended", faults=(error.message, *faults))
    found = diagnose(picture, moment)
    fuller = more(picture, moment, found) if more is not None else moment
    return found if fuller is moment else diagnose(picture, fuller)


def moment_of(store: Store, picture: Picture, run: Remembered) -> Moment:
    """What is known of a run now beside its journal and receipt. Blocks for two looks at a live run's processes.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    host = picture.host
    return Moment(
        now_ms=time.time_ns() // 1_000_000,
        state=run.state,
        boot_id=boot_id(),
        processes=snapshot(host.pid, host.start) if run.state == "live" and host is not None else (),
        words=_words(store, run) if run.state != "ended" else "",
        free_bytes=_free_bytes(store) if run.state == "cut_off" else None,
        faults=_faults(store, run) if run.state == "ended" else (),
    )


def _words(store: Store, run: Remembered) -> str:
    try:
        with open_plain(store.folder(run.run_id) / WORDS) as file:
            return file.read(WORDS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def _free_bytes(store: Store) -> int | None:
    try:
        seen = os.statvfs(store.home)
    except OSError:
        return None
    return seen.f_bavail * seen.f_frsize


def _faults(store: Store, run: Remembered) -> tuple[str, ...]:
    """What of a receipt is not as it was sealed; a long trace is left to `verify`, as it takes a second a gigabyte."""
    row = store.find(run.run_id)
    return () if row.trace_bytes > CHECKED_BYTES_MAX else tuple(one.fact for one in store.verify(run.run_id))


def picture_of(
    store: Store, run: Remembered, hear: Callable[[AgentEvent], None] | None = None, omission: Omission | None = None
) -> Picture:
    """Return the picture of a run as it is now.

    Args:
        hear: takes its events, too.
        omission: leaves content out of facts, events and receipt before anything reads them (default: nothing).

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
            if hear is not None:
                hear(event)
    if receipt is not None:
        picture.end(receipt)
        picture.ended = omission.of(picture.ended)
    return picture
