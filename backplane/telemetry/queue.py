"""Sends a queue's depth and age to a collector, from a thread of its own: no order waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from backplane.telemetry.context import log
from backplane.telemetry.sender import LEAVE_S_MAX

INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
"""The standard variable for the time between two exports, in milliseconds."""
EVERY_S: Final = 60.0
"""Default of `INTERVAL`, by the standard."""
EVERY_S_MIN: Final = 5.0
"""Shortest time between two exports: each counts the waiting orders in the database."""

Depths = Mapping[str, tuple[int, int]]
"""Label → how many orders wait, and the age of the oldest in milliseconds."""


@contextmanager
def sending(read: Callable[[], Depths], label: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Send the depths at once, then periodically while the block runs.

    Args:
        read: returns them; may block and raise.
        label: always sent, with 0 while nothing waits.
    """
    over = threading.Event()
    thread = threading.Thread(target=_repeat, args=(read, {label}, every_s(environ), over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE_S_MAX)


def every_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between two exports."""
    with suppress(ValueError):
        return max(int(environ.get(INTERVAL, "")) / 1000, EVERY_S_MIN)
    return EVERY_S


def _repeat(read: Callable[[], Depths], labels: set[str], pause_s: float, over: threading.Event) -> None:
    while True:
        try:
            from backplane.telemetry.export import export_queue

            found = read()
            # A label that has emptied is sent as 0: otherwise its last value would stay in the collector.
            labels |= found.keys()
            export_queue({label: found.get(label, (0, 0)) for label in sorted(labels)})
        except Exception as error:  # A database that is away, or whatever a foreign exporter raises.
            log(f"the queue's depth was not sent: {type(error).__name__}: {error}")
        if over.wait(pause_s):
            return
