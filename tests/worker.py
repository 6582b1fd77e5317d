"""Coverage in a worker of the whole suite: started before anything of ours is imported, saved when the worker ends.

`suite.py` says by BACKPLANE_SUITE_FOLDER where the settings are and the data goes. Without it nothing happens here.
The Python children of a worker are noted by `child_lines.py`, which finds the worker by the marker left here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

NAME = os.environ.get("PYTEST_XDIST_WORKER")
FOLDER = os.environ.get("BACKPLANE_SUITE_FOLDER")
MARKER = Path(sys.prefix, "suites", str(os.getpid()))

if NAME and FOLDER:
    import coverage

    _data = f"{FOLDER}/parent.{NAME}.{os.getpid()}"
    _measured = coverage.Coverage(config_file=f"{FOLDER}/settings.toml", data_file=_data)
    _measured.start()
    MARKER.write_text(Path(FOLDER, "marker").read_text(encoding="utf-8"), encoding="utf-8")


CASES_FOLLOWED = 1
"""Of one test: the others run the same lines, and following them costs a third of their time."""
FOLLOWED_S_MAX = 1.0
"""Of this process's own time in one test: a property that is tried hundreds of times runs the same lines again."""

_cases: Counter[str] = Counter()
_following = True


def follow(nodeid: str) -> None:
    """Measure the test that begins, unless enough cases of it were measured here."""
    if not (NAME and FOLDER):
        return
    name = nodeid.partition("[")[0]
    _cases[name] += 1
    _measure(_cases[name] <= CASES_FOLLOWED)


def _measure(wanted: bool) -> None:
    global _following
    # Virtual: neither pytest's own limit nor anything that waits uses this clock.
    signal.signal(signal.SIGVTALRM, _enough)
    signal.setitimer(signal.ITIMER_VIRTUAL, FOLLOWED_S_MAX if wanted else 0)
    if wanted != _following:
        (_measured.start if wanted else _measured.stop)()
        _following = wanted


def _enough(_number: int, _frame: object) -> None:
    _measure(False)


def end() -> None:
    """Save what was measured; children that start from here on are not noted."""
    if NAME and FOLDER:
        MARKER.unlink(missing_ok=True)
        _measure(False)
        _measured.save()
