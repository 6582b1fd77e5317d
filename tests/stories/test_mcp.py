"""Stories of `tests/all/doors/test_mcp.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_mcp import (  # noqa: F401
    test_a_client_that_goes_away_ends_its_runs,
)
