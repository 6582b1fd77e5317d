"""Stories of `tests/all/doors/test_compare.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_compare import (  # noqa: F401
    folder,
    source,
    test_each_side_starts_from_the_same_tree_and_its_result_is_checked,
)
