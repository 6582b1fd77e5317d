"""One process of a live run, as the system shows it. Only the shape; `process.snapshot` looks."""

from __future__ import annotations

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a run's host has started, or the host itself."""

    pid: int
    command: str
    """Its command line, cut."""
    started_ms: int
    """Its start time in milliseconds since 1970."""
    is_busy: bool = False
    """It used the processor between the two looks."""
