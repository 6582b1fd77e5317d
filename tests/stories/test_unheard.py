"""Stories of `tests/all/doors/test_unheard.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_unheard import (  # noqa: F401
    test_a_misspelt_setting_of_ours_is_refused_however_it_is_given,
)
