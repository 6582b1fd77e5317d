"""Runs the command line for the script `backplane` and for `python -m backplane`."""

from __future__ import annotations

import gc
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command of this process, and return its exit code."""
    try:
        from backplane.cli import main as command

        code = command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    gc.freeze()  # Saves Python's two garbage collections at exit: a sixth of a short command's time.
    return code


if __name__ == "__main__":
    sys.exit(main())
