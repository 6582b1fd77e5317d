"""Stories of `tests/all/doors/test_remote.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_remote import (  # noqa: F401
    root,
    test_the_work_and_the_lane_have_their_effect_in_the_folder_there,
)
