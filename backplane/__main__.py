"""`python -m backplane` and the script `backplane`: argv in, exit code out.

From the first line of `main` to the last Ctrl-C ends it without a word; what a command puts right before is its own.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` spends 5 ms on its enums
import atexit
import gc
import os
import sys
from contextlib import suppress

SIGNALLED = 128
INTERRUPTED = 130


def main() -> int:
    """Run the command of this process; gives its exit code, and ends the process itself after an interrupt."""
    try:
        from backplane.cli import main as command

        code = command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_IGN)  # All is done and said; what Python still does for itself is short.
    gc.freeze()  # Or it looks for garbage among all there is, twice: a sixth of a short command's time.
    if code > SIGNALLED:
        # It would end by SIGINT else, where the interrupt came in code that was made of a text, as of named tuples.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
