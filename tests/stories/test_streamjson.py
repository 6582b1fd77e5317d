"""Stories of `tests/all/doors/test_streamjson.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

import pytest

from tests.all.doors.test_streamjson import (  # noqa: F401
    test_a_result_that_a_hook_withholds_is_told_as_an_error,
    test_an_event_names_what_ran_and_not_what_the_model_wanted,
)

pytestmark = pytest.mark.anyio
