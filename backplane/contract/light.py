"""Loads msgspec without `typing_extensions`: from Python 3.11 on that does nothing for it but take a third of the time.

For programs that are ours alone and where each ms counts, before anything else that loads msgspec; who needs the
module afterwards gets it.
"""

import sys

if "typing_extensions" not in sys.modules:
    # msgspec takes what it needs from `typing` then, as where the other is not installed.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]
