"""The script `backplane`, and `python -m backplane`."""

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
    gc.freeze()  # Otherwise Python collects garbage twice at its end: a sixth of a short command's time.
    return code


if __name__ == "__main__":
    sys.exit(main())
