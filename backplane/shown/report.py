"""Stored and live runs with their rows, patch and comparison, as the pages draw them."""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.receipts.journal import PATCH
from backplane.receipts.memory import Remembered
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store
from backplane.receipts.trace import open_plain
from backplane.routing.intervals import Comparison
from backplane.shown import diagnosis_of, picture_of
from backplane.view.compared import FOLDER as COMPARISONS
from backplane.view.omit import Omission
from backplane.view.page import Shown
from backplane.view.picture import Picture
from backplane.view.rows import Story

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes read of a patch or a comparison; a page shows fewer, and a thousand runs compared are half a megabyte."""


def shown_of(store: Store, run: Remembered, *, rows: Story | None = None, omission: Omission | None = None) -> Shown:
    """Return a run as its page draws it.

    Args:
        rows: takes its events (default: the first rows, cut).
        omission: leaves content out of everything that is read (default: nothing).

    Raises:
        StoreError: as `picture_of`.
    """
    rows, omission = rows if rows is not None else Story(), omission or Omission()
    picture = picture_of(store, run, rows.take, omission)
    return Shown(
        picture=picture,
        state=run.state,
        diagnosis=omission.of(diagnosis_of(store, picture, run)),
        rows=rows,
        patch=omission.of(patch_of(store, run.run_id)),
        compared=omission.of(comparison_of(store, picture)),
    )


def comparison_of(store: Store, picture: Picture) -> Comparison | None:
    """Return the comparison that a run was part of; None if there is none, or it was broken off."""
    named = picture.ended.added.get("compare") if picture.ended is not None else None
    id = named.get("id") if isinstance(named, dict) else None
    if not isinstance(id, str) or not is_run_id(id):
        return None
    try:
        with open_plain(store.home / COMPARISONS / f"{id}.json") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Comparison)
    except (OSError, msgspec.MsgspecError):
        return None


def patch_of(store: Store, run_id: str) -> str | None:
    """Return the beginning of a run's patch; None if it was pruned, or nothing was changed."""
    try:
        with open_plain(store.folder(run_id) / PATCH) as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
