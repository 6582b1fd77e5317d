"""How long the fault suite tries: quick for every change, long for the figures.

`BACKPLANE_FAULTS=long` (what `xtask.py faults --long` sets) takes the second of each pair. Read once, at import: the
tests' own fixtures take our variables out of the environment.
"""

from __future__ import annotations

import os
from typing import Final

TRACED: Final = "BACKPLANE_SUITE_SUMMARY" in os.environ
"""Every line of ours is noted in every child, for coverage: several times slower, and no measure of anything."""
LONG: Final = os.environ.get("BACKPLANE_FAULTS") == "long"
FIGURES: Final = os.environ.get("BACKPLANE_FAULTS_FIGURES")
"""File that takes what was measured, a JSON line each; None when nobody asked."""
ISOLATION: Final = os.environ.get("BACKPLANE_FAULTS_ISOLATION", "best_effort")
"""What holds the hosts of most cases: what the product does by itself."""
SLACK_S: Final = float(os.environ.get("BACKPLANE_FAULTS_SLACK_S", "5.0" if TRACED else "1.0"))
"""Beyond every bound of time, for a machine that others use too; the figures say what was measured."""


def share() -> float:
    """How many times longer than alone a command may take: other work on this machine has its share, too."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def of(quick: int, long: int) -> int:
    """The size of a trial."""
    return long if LONG else max(quick // 4, min(quick, 4)) if TRACED else quick
