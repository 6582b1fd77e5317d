"""Stories of `tests/all/doors/test_routing_kills.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_routing_kills import (  # noqa: F401
    test_the_python_door_asks_the_router_and_goes_on,
)
