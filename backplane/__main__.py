"""`python -m backplane` and the script `backplane`: argv in, exit code out."""

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
    gc.freeze()  # Or Python looks for garbage among all there is, twice: a sixth of a short command's time.
    return code


if __name__ == "__main__":
    sys.exit(main())
