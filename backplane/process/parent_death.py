"""A pipe by which the kernel kills a group of processes with us: whose every writing end is closed signals its reader.

`PR_SET_PDEATHSIG` would have to be asked for between fork and exec, where Python cannot run safely beside other
threads, and follows the thread that forked.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

try:
    import fcntl
except ImportError:  # pragma: no cover - a system without it has no such signal either
    fcntl = None  # type: ignore[assignment]

_WORKS: Final = hasattr(fcntl, "F_SETSIG") and hasattr(os, "O_ASYNC")


def tie(reader: int, leader: int, *, armed: bool = True) -> None:
    """Have this leader's group killed once no writing end of the pipe is open, while a reading end is; on Linux alone.

    Args:
        armed: it holds from now on; else from when somebody sets `O_ASYNC` on the reading end.
    """
    if not _WORKS:
        return
    with suppress(OSError):  # It may have ended already; and no program is worse for having none.
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETOWN, -leader)
        if armed:
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
