"""Stories of `tests/all/doors/test_findings.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_findings import (  # noqa: F401
    cli,
    host,
    test_false_claims_and_errors_of_a_complete_run_are_one_line_on_stderr,
)
