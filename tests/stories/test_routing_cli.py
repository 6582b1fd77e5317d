"""Stories of `tests/all/doors/test_routing_cli.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_routing_cli import (  # noqa: F401
    folder,
    test_a_failure_before_any_effect_goes_on_and_the_receipt_says_who_was_tried,
    test_a_run_without_a_backend_asks_the_router_and_its_receipt_tells_the_choice,
)

pytestmark = pytest.mark.usefixtures("no_agents")
