"""Stories of `tests/all/doors/test_enforced.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_enforced import (  # noqa: F401
    person,
    test_a_strict_profile_is_refused_without_bubblewrap,
    user,
)
