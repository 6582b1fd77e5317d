"""Stories of `tests/all/doors/test_workspace_kill.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_workspace_kill import (  # noqa: F401
    patched,
    test_a_kill_of_apply_leaves_old_or_new_files_and_applying_goes_on,
)
