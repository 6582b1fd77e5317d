"""Sends ended runs to a collector from a thread: whatever the collector does, no run changes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.contract.receipt import Receipt
from backplane.telemetry.context import TRACEPARENT, has_content, read_parent
from backplane.telemetry.spans import RunAbout, spans_of

LEAVE_S_MAX: Final = 10.0
"""Seconds to wait at the end: the SDK may still be loading (0.1 s on a quiet machine) and sends by its own limits."""

WAITING_MAX: Final = 64
"""Runs that wait for the thread; further ones are not sent."""


class Sender:
    """Sends the runs of one control plane, one after the other.

    Args:
        environ: with the standard variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._parent = read_parent(environ.get(TRACEPARENT))
        self._content = has_content(environ)
        self._runs: queue.Queue[tuple[Receipt, RunAbout] | None] = queue.Queue(WAITING_MAX)
        self._is_used = False
        self._lost: str | None = None
        # A daemon: the event loop's own threads would be waited for at its end, without a limit.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, receipt: Receipt, about: RunAbout) -> None:
        """Have a sealed run sent; return at once."""
        self._is_used = True
        try:
            self._runs.put_nowait((receipt, msgspec.structs.replace(about, content=self._content)))
        except queue.Full:
            self._lose(f"{WAITING_MAX} runs wait to be sent")

    def leave(self) -> str | None:
        """Wait until all is sent, at most `LEAVE_S_MAX`; return why something was lost. Blocks."""
        try:
            self._runs.put_nowait(None)
        except queue.Full:
            return self._lost
        if self._is_used:
            self._thread.join(LEAVE_S_MAX)
            if self._thread.is_alive():
                self._lose(f"not sent within {LEAVE_S_MAX:g} s")
        return self._lost

    def _work(self) -> None:
        try:
            # Loaded while the run is at work, so that only sending is left at its end.
            from backplane.telemetry.export import Exporter

            exporter = Exporter()
            while (run := self._runs.get()) is not None:
                try:
                    exporter.send(spans_of(*run), run[0].meta.run_id, self._parent)
                except Exception as error:  # Whatever the SDK raises: the next run is sent all the same.
                    self._lose(f"{type(error).__name__}: {error}")
            exporter.close()
            if exporter.lost:
                self._lose(exporter.lost)
        except Exception as error:  # Whatever the SDK raises.
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        fact = f"telemetry is incomplete: {why}"
        logging.getLogger("backplane").info(fact)
        self._lost = self._lost or fact
