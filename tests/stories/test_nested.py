"""Stories of `tests/all/doors/test_nested.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_nested import (  # noqa: F401
    root,
    test_the_outer_patch_holds_what_the_inner_agent_changed,
)

pytestmark = pytest.mark.anyio
