"""`python -m backplane` and the script `backplane`: argv in, exit code out.

From the first line of `main` to the last Ctrl-C ends it without a word; what a command puts right before is its own.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130


def main() -> int:
    """Run the command of this process; gives its exit code."""
    sys.unraisablehook = _lost
    try:
        from backplane.cli import main as command

        return command()
    except KeyboardInterrupt:
        return INTERRUPTED


def _lost(what: Any) -> None:
    """End at an interrupt that came where none can be raised: nothing was begun yet, or all is over."""
    if issubclass(what.exc_type, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(what)


if __name__ == "__main__":
    sys.exit(main())
