"""The signals that end a program of ours in order, by names that not every system knows."""

from __future__ import annotations

import signal
from typing import Final

_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def ending() -> list[signal.Signals]:
    """Those to be heeded: who started us with one ignored (nohup, a shell's background job) wants it so."""
    known = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
