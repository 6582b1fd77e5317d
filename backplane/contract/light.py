"""Makes the start of our own programs shorter; they import it first.

msgspec is loaded without `typing_extensions`: from Python 3.11 on that does nothing for it but take a third of the
time; who needs the module afterwards gets it. And garbage is looked for a hundredth as often: nearly all of what a
start makes stays, and looking at it again and again took a tenth of the time.
"""

import gc
import sys

gc.set_threshold(70_000)  # Values that may hold others.

if "typing_extensions" not in sys.modules:
    # msgspec takes what it needs from `typing` then, as where the other is not installed.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]

OPTIONAL_OF_HTTPX = ("httpx._main", "trio")
"""Modules that httpx loads if they are installed: its command, and another loop than ours. A third of its import."""
