"""Sizes of the fault tests: the usual ones, and those of `xtask.py faults --long`, which sets `BACKPLANE_FAULTS=long`.

Read once, at import: the tests' own fixtures take our variables out of the environment.
"""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("BACKPLANE_FAULTS") == "long"
TRACED: Final = "BACKPLANE_SUITE_SUMMARY" in os.environ
"""Lines are noted in every child, for coverage: slower, and with one descriptor more."""
SLACK_S: Final = 5.0 if TRACED else 1.0
"""Added to every bound of time, as other programs use the machine too."""


def share() -> float:
    """How many times longer than alone a command may take: other work on this machine has its share, too."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def of(usual: int, long: int) -> int:
    """The size of a trial."""
    return long if LONG else usual
