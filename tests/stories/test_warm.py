"""Stories of `tests/all/doors/test_warm.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_warm import (  # noqa: F401
    test_the_third_order_of_a_kind_finds_its_host_and_the_receipt_says_so,
)

pytestmark = pytest.mark.anyio
