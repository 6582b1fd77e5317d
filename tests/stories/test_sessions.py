"""Stories of `tests/all/doors/test_sessions.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_sessions import (  # noqa: F401
    ground,
    root,
    shell,
    test_a_second_writer_is_refused_and_fork_offered,
    test_a_session_is_handed_over_by_command,
    test_the_work_of_a_turn_whose_program_was_killed_is_kept_and_told,
)

pytestmark = pytest.mark.anyio
