"""Stories of `tests/all/doors/test_telemetry.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_telemetry import (  # noqa: F401
    test_a_run_goes_to_the_collector_and_its_host_gets_the_context,
)
