"""One process of a live run, as the system shows it. Only the shape; `process.snapshot` looks."""

from __future__ import annotations

from typing import Literal

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process that a run's host has started, or the host itself."""

    pid: int
    command: str
    """Its words, cut."""
    started_ms: int
    """Since 1970."""
    is_stopped: bool = False
    """By a signal or a debugger."""
    is_busy: bool = False
    """It used the processor between the two looks."""
    waits: Literal["", "input", "output"] = ""
    """For input of a person or of who started it, or until somebody reads what it writes; empty for neither."""
    listens: tuple[int, ...] = ()
    """Ports."""
    is_connected: bool = False
    """It has a connection over the network."""
