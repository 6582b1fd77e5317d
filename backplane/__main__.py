"""`python -m backplane` and the script `backplane`: argv in, exit code out."""

import sys

from backplane.cli import main

if __name__ == "__main__":
    sys.exit(main())
