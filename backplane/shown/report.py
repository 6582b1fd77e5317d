"""Stored and live runs as a report shows them: with their story, patch and comparison."""

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
from backplane.view.picture import Picture
from backplane.view.report import Shown
from backplane.view.story import Story

COMPARISON_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a comparison's file: a thousand runs are half a megabyte."""

PATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a patch; a page has fewer lines than that."""


def shown_of(store: Store, run: Remembered, story: Story | None = None) -> Shown:
    """A run as a report shows it.

    Args:
        story: takes its events; None draws the first rows and leaves out nothing.

    Raises:
        StoreError: as `picture_of`.
    """
    story = story or Story()
    picture = picture_of(store, run, story.take)
    return Shown(
        picture=picture,
        state=run.state,
        diagnosis=diagnosis_of(store, picture, run),
        story=story,
        patch=patch_of(store, run.run_id),
        compared=_compared(store, picture),
    )


def _compared(store: Store, picture: Picture) -> Comparison | None:
    """The comparison that a run was part of; None where there is none, or it was broken off."""
    told = picture.ended.added.get("compare") if picture.ended is not None else None
    id = told.get("id") if isinstance(told, dict) else None
    if not isinstance(id, str) or not is_run_id(id):
        return None
    try:
        with open_plain(store.home / COMPARISONS / f"{id}.json") as file:
            return msgspec.json.decode(file.read(COMPARISON_BYTES_MAX), type=Comparison)
    except (OSError, msgspec.MsgspecError):
        return None


def patch_of(store: Store, run_id: str) -> str | None:
    """The beginning of a run's patch; None where it was pruned, or nothing was changed."""
    try:
        with open_plain(store.folder(run_id) / PATCH) as file:
            return file.read(PATCH_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
