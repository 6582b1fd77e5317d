"""Stories of `tests/all/doors/test_doors.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_doors import (  # noqa: F401
    test_a_question_is_answered_from_another_terminal,
    test_a_run_is_cancelled_from_another_terminal_in_order,
)
