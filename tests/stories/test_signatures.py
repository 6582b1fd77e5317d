"""Stories of `tests/all/doors/test_signatures.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_signatures import (  # noqa: F401
    cli,
    keys,
    test_a_tool_that_is_not_ours_verifies_a_receipts_signature,
    test_verify_wants_a_signature_by_this_key_where_one_is_named,
)

pytestmark = pytest.mark.needs("openssl")
