"""Stories of `tests/all/doors/test_remote.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_remote import (  # noqa: F401
    root,
    test_the_tree_travels_and_the_patch_comes_back,
)
