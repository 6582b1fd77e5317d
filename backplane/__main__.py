"""Runs the command line for the script `backplane` and for `python -m backplane`."""

import gc
import sys


def main() -> int:
    """Run the command of this process, and return its exit code."""
    try:
        from backplane.cli import main as command

        return command()
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # Saves Python's two garbage collections at exit: a sixth of a short command's time.


if __name__ == "__main__":
    sys.exit(main())
