"""Stories of `tests/all/doors/test_store_faults.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_store_faults import (  # noqa: F401
    test_nothing_promised_is_lost_when_the_writer_is_killed,
)
