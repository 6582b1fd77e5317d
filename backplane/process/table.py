"""Defines the record of one process of a live run; `process.snapshot` fills it in."""

from __future__ import annotations

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a run's host has started, or the host itself."""

    pid: int
    command: str
    """The command line, shortened."""
    started_ms: int
    """The start time in milliseconds since 1970."""
    is_busy: bool = False
    """True if the process used the processor while we inspected it."""
