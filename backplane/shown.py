"""Stored and live runs as the views want them: read from the store, folded by `view`. Nothing here writes or waits."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from backplane.contract.events import AgentEvent
from backplane.errors import StoreError
from backplane.process.snapshot import snapshot
from backplane.process.table import Process
from backplane.receipts.journal import PATCH, WORDS, boot_id
from backplane.receipts.memory import UNFOLLOWED, Remembered, follow_step
from backplane.receipts.pieces import canonical_chunks
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.receipts.trace import open_plain
from backplane.view.picture import HostProcess, Picture
from backplane.view.why import Diagnosis, Evidence, Moment, diagnose

if TYPE_CHECKING:  # Of a report alone, and what most of its start goes to.
    from backplane.routing.intervals import Comparison
    from backplane.view.report import Shown
    from backplane.view.story import Story

WORDS_BYTES_MAX: Final = 64 * 1024
"""Of what a live host said on stderr; `runtime` keeps less."""

CHECKED_BYTES_MAX: Final = 32 << 20
"""Longest trace whose hash is recomputed where somebody asks why; it takes 30 ms."""

COMPARISON_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a comparison's file: a thousand runs are half a megabyte."""

PATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a patch; a page has fewer lines than that."""


def picture_of(store: Store, run: Remembered) -> Picture:
    """The picture of a run as it is now.

    Raises:
        StoreError: `receipt_store_failed`, also where its content was pruned.
    """
    return _folded(store, run, None)[0]


def shown_of(store: Store, run: Remembered, story: Story | None = None) -> Shown:
    """A run as a report shows it.

    Args:
        story: takes its events; None draws the first rows and leaves out nothing.

    Raises:
        StoreError: as `picture_of`.
    """
    from backplane.view.report import Shown
    from backplane.view.story import Story

    story = story or Story()
    picture, packed = _folded(store, run, story)
    return Shown(
        picture=picture,
        state=run.state,
        diagnosis=diagnosis_of(store, picture, run),
        story=story,
        patch=patch_of(store, run.run_id),
        packed=packed,
        compared=_compared(store, picture),
    )


def _compared(store: Store, picture: Picture) -> Comparison | None:
    """The comparison that a run was part of; None where there is none, or it was broken off."""
    from backplane.routing.intervals import Comparison
    from backplane.view.compared import FOLDER as COMPARISONS

    told = picture.ended.added.get("compare") if picture.ended is not None else None
    id = told.get("id") if isinstance(told, dict) else None
    if not isinstance(id, str) or not is_run_id(id):
        return None
    try:
        with open_plain(store.home / COMPARISONS / f"{id}.json") as file:
            return msgspec.json.decode(file.read(COMPARISON_BYTES_MAX), type=Comparison)
    except (OSError, msgspec.MsgspecError):
        return None


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
        processes=_processes(host) if run.state == "live" and host is not None else (),
        words=_words(store, run) if run.state != "ended" else "",
        free_bytes=_free_bytes(store) if run.state == "cut_off" else None,
        faults=_faults(store, run) if run.state == "ended" else (),
    )


def _processes(host: HostProcess) -> tuple[Process, ...]:
    return snapshot(host.pid, host.start)


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


def patch_of(store: Store, run_id: str) -> str | None:
    """The beginning of a run's patch; None where it was pruned, or nothing was changed."""
    path: Path = store.folder(run_id) / PATCH
    try:
        with open_plain(path) as file:
            return file.read(PATCH_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None


def _folded(store: Store, run: Remembered, story: Story | None) -> tuple[Picture, bytes | None]:
    """The picture, and with a story also the bytes that the receipt's hash is of, packed."""
    picture, packed = Picture(run_id=run.run_id), None
    with closing(Tail(store.folder(run.run_id))) as tail:
        for fact in tail.facts():
            picture.begin(fact)
        if run.state == "ended":
            receipt = store.load(run.run_id)
            events: Iterator[AgentEvent] = iter(receipt.trace)
        else:
            events = (event for batch in iter(tail.events, []) for event in batch)
        for event in events:
            picture.take(event)
            if story is not None:
                story.take(event)
        if run.state == "ended":
            picture.end(receipt)
            if story is not None and not story.omit:
                packed = _packed(canonical_chunks(msgspec.structs.replace(receipt, receipt_sha256=None)))
    return picture, packed


def _packed(chunks: Iterator[bytes]) -> bytes | None:
    from backplane.view.report import PACKED_BYTES_MAX, RECEIPT_BYTES_MAX

    packer = zlib.compressobj(3, wbits=31)  # 31: as gzip, which browsers can read.
    packed, whole = bytearray(), 0
    for chunk in chunks:
        whole += len(chunk)
        packed += packer.compress(chunk)
        if whole > RECEIPT_BYTES_MAX or len(packed) > PACKED_BYTES_MAX:
            return None
    return bytes(packed + packer.flush())
