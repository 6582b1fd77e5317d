"""Stories of `tests/all/doors/test_examples.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_examples import (  # noqa: F401
    folder,
    test_basic_usage_runs_both_kinds_of_tools,
)
