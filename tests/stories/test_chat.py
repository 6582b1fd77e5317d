"""Stories of `tests/all/doors/test_chat.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_chat import (  # noqa: F401
    chat,
    folder,
    test_a_turn_is_said_and_answered_and_its_session_kept,
)
