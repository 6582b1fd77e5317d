"""Stories of `tests/all/doors/test_conform.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_conform import (  # noqa: F401
    test_a_plain_host_without_extensions_reaches_behaves,
    test_announced_extensions_are_tried,
    test_what_a_crashed_host_wrote_to_stderr_is_shown,
)
