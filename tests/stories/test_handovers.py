"""The conversations of `tests/all/doors/test_handovers.py`, of which `HANDOVERS=200` tries more."""

from __future__ import annotations

import pytest

from tests.all.doors.test_handovers import test_a_conversation_that_is_cut_off_goes_on_and_repeats_nothing  # noqa: F401

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
