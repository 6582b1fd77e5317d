"""Sends ended runs to a collector from a thread: whatever the collector does, no run changes."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from backplane.contract.receipt import Receipt
from backplane.telemetry.context import TRACEPARENT, address_of, has_content, log, read_parent
from backplane.telemetry.spans import RunAbout, RunTelemetry, told

LEAVE_S_MAX: Final = 3.0
"""For a collector to accept what was not sent yet when a control plane closes; `run` has said its last word by then."""

CONNECT_S_MAX: Final = 1.0
"""To find out, while the run is at work, that nobody listens: exporters try that again for ten seconds."""

LOAD_S_MAX: Final = 10.0
"""For the SDK to be loaded, which takes 0.1 s on a quiet machine, where a run was shorter than that."""

WAITING_MAX: Final = 64
"""Runs that wait to be sent; those beyond are not sent."""

Export = Callable[[RunTelemetry, str, tuple[int, int] | None], None]


class Sender:
    """Sends the runs of one control plane, one after the other.

    Args:
        environ: with the standard variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._parent = read_parent(environ.get(TRACEPARENT))
        self._content = has_content(environ)
        self._address = address_of(environ)
        self._runs: queue.Queue[tuple[Receipt, RunAbout] | None] = queue.Queue(WAITING_MAX)
        self._loaded = threading.Event()
        self._is_used = False
        # No thread of the loop's own: those are waited for at its end.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, receipt: Receipt, about: RunAbout) -> None:
        """Have a sealed run sent; returns at once."""
        self._is_used = True
        try:
            self._runs.put_nowait((receipt, about))
        except queue.Full:
            log(f"run {receipt.meta.run_id} is in no telemetry: {WAITING_MAX} runs wait for the collector")

    def _work(self) -> None:
        try:
            # While the run is at work, so that at its end only sending is left.
            export = None if _refuses(self._address) else _load()
        finally:
            self._loaded.set()
        while (run := self._runs.get()) is not None:
            receipt, about = run
            try:
                if export is None:
                    raise ConnectionRefusedError(f"nobody listens at {self._address}")
                spans = told(receipt, msgspec.structs.replace(about, content=self._content))
                export(spans, receipt.meta.run_id, self._parent)
            except Exception as error:  # whatever a foreign exporter raises
                log(f"run {receipt.meta.run_id} is in no telemetry: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Wait until all is sent, at most `LEAVE_S_MAX` beyond the loading of the SDK. Blocks."""
        # Not left to Python's own end: the SDK's exporters start what cannot be started then.
        try:
            self._runs.put_nowait(None)
        except queue.Full:
            return
        if self._is_used and self._loaded.wait(LOAD_S_MAX):
            self._thread.join(LEAVE_S_MAX)


def _load() -> Export:
    from backplane.telemetry.export import export

    return export


def _refuses(address: str) -> bool:
    """Return True if nobody listens there; what cannot be found out is left to the exporter. Blocks."""
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "localhost", port), CONNECT_S_MAX):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
