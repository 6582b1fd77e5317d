"""The other event loop: stories of the core once more on trio, and runs in a row.

The stories are the core's own tests; `anyio_backend` is what differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backplane.contract.work import WorkOrder
from tests.all.doors.test_providers import (  # noqa: F401
    ground,
    test_a_session_over_an_api_knows_what_was_said,
    test_a_stream_that_is_left_early_is_ended_by_the_next_call,
    test_a_turn_that_is_cancelled_from_outside_leaves_nothing_running,
    test_an_approval_waits_for_its_answer,
    test_an_interrupt_stops_the_turn_and_not_the_session,
    test_functions_are_tools_and_their_calls_are_in_the_history,
)
from tests.runs import ended, go, mock_backend, order, plane, texts
from tests.test_hooks import (  # noqa: F401
    test_a_hook_after_a_tool_changes_or_withholds_what_the_agent_sees,
    test_an_async_function_hook_denies_and_the_agent_is_told_why,
)
from tests.test_runtime import (  # noqa: F401
    mock,
    root,
    test_a_cancelled_task_leaves_the_run_to_the_other,
    test_a_complete_run_has_its_events_and_a_sealed_stored_receipt,
    test_a_failed_run_has_an_error_and_a_next_step,
    test_a_run_is_read_in_one_task_and_waited_for_in_others,
    test_runs_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused,
)
from tests.test_runtime_asks import (  # noqa: F401
    test_a_denied_tool_is_a_tool_result_and_the_run_goes_on,
    test_a_tool_on_the_approval_list_waits_for_the_caller,
    test_an_ask_that_nobody_answers_in_time_has_its_default,
)
from tests.test_runtime_cancel import (  # noqa: F401
    test_a_block_is_left_in_another_task_and_outside_of_the_scope_it_was_entered_in,
    test_a_good_host_is_cancelled_with_its_last_words_and_without_waiting,
    test_a_stubborn_host_is_gone_after_the_grace,
    test_leaving_the_block_early_cancels_the_run,
    test_the_cancelled_scope_of_the_caller_ends_the_run_in_order,
)
from tests.test_runtime_ends import (  # noqa: F401
    test_a_host_that_dies_mid_run_has_crashed,
    test_a_slow_consumer_of_a_dead_host_still_gets_its_final,
)
from tests.test_runtime_limits import (  # noqa: F401
    test_the_total_deadline_ends_a_run_that_talks,
)

pytestmark = pytest.mark.anyio

RUNS = 10


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


async def test_runs_in_a_row_end_alike_and_leave_nothing(backplane_home: Path, root: Path) -> None:
    async with plane(backplane_home) as control:
        for number in range(RUNS):
            wanted: WorkOrder = order(root, {"say": str(number)})
            run, events = await go(control, wanted, mock_backend("process"))
            assert (ended(run), texts(events)) == (("complete", None, "complete"), [str(number)])
    assert not list((backplane_home / "stage").iterdir())
