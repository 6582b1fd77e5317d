"""Stories of `tests/all/doors/test_acp.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_acp import (  # noqa: F401
    start,
    test_a_denied_tool_is_a_result_and_the_agent_is_told_no,
    test_a_failure_of_the_model_has_its_code,
    test_a_plain_answer_is_complete_and_its_session_is_named,
    test_an_agent_that_ends_in_the_middle_is_a_crash_with_its_last_words,
    test_an_allowed_tool_changes_files_and_the_patch_shows_it,
    workspace,
)
