"""Shortens the start of our own programs, which import this module first.

It imports msgspec without `typing_extensions`, which msgspec does not need from Python 3.11 on and which takes a third
of its import time; other modules can still import it. It also makes garbage collection a hundred times rarer: nearly
all objects made during the start stay, and scanning them took a tenth of the time.
"""

import gc
import sys

gc.set_threshold(70_000)  # Number of new container objects that starts a collection.

if "typing_extensions" not in sys.modules:
    # msgspec then imports from `typing` instead, as if `typing_extensions` were not installed.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]

OPTIONAL_OF_HTTPX = ("httpx._main", "trio")
"""Modules that httpx imports if they are installed, and that we do not use; they take a third of its import time."""
