"""Stories of `tests/all/doors/test_server.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_server import (  # noqa: F401
    root,
    test_a_server_that_is_killed_leaves_no_process_and_its_runs_are_sealed_at_the_next_start,
    test_bad_lines_are_answered_and_the_rest_goes_on,
    test_many_runs_at_once_each_with_its_own_events_and_a_receipt_whose_bytes_hold,
)
