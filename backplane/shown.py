"""Stored and live runs as the views want them: read from the store, folded by `view`. Nothing here writes or waits."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.events import AgentEvent
from backplane.receipts.journal import PATCH, boot_id
from backplane.receipts.memory import Remembered
from backplane.receipts.pieces import canonical_chunks
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.receipts.trace import open_plain
from backplane.view.picture import Picture
from backplane.view.report import PACKED_BYTES_MAX, RECEIPT_BYTES_MAX, Shown
from backplane.view.story import Story
from backplane.view.why import Diagnosis, Moment, diagnose

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
    story = story or Story()
    picture, packed = _folded(store, run, story)
    return Shown(
        picture=picture,
        diagnosis=diagnosis_of(picture, run),
        story=story,
        patch=patch_of(store, run.run_id),
        packed=packed,
    )


def diagnosis_of(picture: Picture, run: Remembered) -> Diagnosis:
    """What a run waits for now, or why it failed."""
    return diagnose(picture, Moment(now_ms=time.time_ns() // 1_000_000, state=run.state, boot_id=boot_id()))


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
    packer = zlib.compressobj(3, wbits=31)  # 31: as gzip, which browsers can read.
    packed, whole = bytearray(), 0
    for chunk in chunks:
        whole += len(chunk)
        packed += packer.compress(chunk)
        if whole > RECEIPT_BYTES_MAX or len(packed) > PACKED_BYTES_MAX:
            return None
    return bytes(packed + packer.flush())
