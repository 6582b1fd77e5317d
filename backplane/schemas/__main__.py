"""`python -m backplane.schemas`: write the schemas, or compare them with `--check`."""

import sys

from backplane.schemas.build import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
