"""Stories of `tests/all/doors/test_web.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_web import (  # noqa: F401
    served,
    test_a_run_is_followed_answered_and_found_again,
)
