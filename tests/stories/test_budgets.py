"""Stories of `tests/all/doors/test_budgets.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_budgets import (  # noqa: F401
    test_many_processes_keep_to_one_budget,
)
