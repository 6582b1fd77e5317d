"""Stories of `tests/all/doors/test_replayed.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_replayed import (  # noqa: F401
    root,
    test_the_command_replays_a_stored_run,
)

pytestmark = pytest.mark.anyio
