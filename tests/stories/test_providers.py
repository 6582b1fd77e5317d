"""Stories of `tests/all/doors/test_providers.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_providers import (  # noqa: F401
    ground,
    test_a_host_that_dies_ends_the_turn_and_not_the_session,
    test_a_session_over_an_api_knows_what_was_said,
    test_a_stream_that_is_left_early_is_ended_by_the_next_call,
    test_an_approval_waits_for_its_answer,
    test_an_interrupt_stops_the_turn_and_not_the_session,
    test_functions_are_tools_and_their_calls_are_in_the_history,
)

pytestmark = pytest.mark.anyio
