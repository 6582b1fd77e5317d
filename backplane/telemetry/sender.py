"""Sends ended runs to a collector from a thread of its own: what that does or does not do changes no run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from backplane.contract.receipt import Receipt
from backplane.telemetry.context import TRACEPARENT, address_of, has_content, log, read_parent
from backplane.telemetry.spans import RunAbout, RunTelemetry, told

LEAVE_S_MAX: Final = 1.0
"""For a collector to take what was not sent yet when a control plane closes; `run` has said its last word by then."""

CONNECT_S_MAX: Final = 1.0
"""To find out, while the run is at work, that nobody listens: exporters try that again for ten seconds."""

LOAD_S_MAX: Final = 10.0
"""For the SDK to be loaded, which takes 0.1 s on a quiet machine, where a run was shorter than that."""

SENDING_MAX: Final = 64
"""Runs that are being sent at once; with a collector that hangs, the ones after them are not sent."""


class Sender:
    """Sends the runs of one control plane.

    Args:
        environ: with the standard variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._parent = read_parent(environ.get(TRACEPARENT))
        self._content = has_content(environ)
        self._threads: list[threading.Thread] = []
        self._address = address_of(environ)
        self._export: Callable[[RunTelemetry, str, tuple[int, int] | None], None] | None = None
        """None where nobody listens."""
        self._loaded = threading.Event()
        threading.Thread(target=self._load, daemon=True).start()

    def send(self, receipt: Receipt, about: RunAbout) -> None:
        """Have a sealed run sent; returns at once."""
        self._threads = [one for one in self._threads if one.is_alive()]
        if len(self._threads) < SENDING_MAX:
            # No thread of the loop's own: those are waited for at its end.
            thread = threading.Thread(target=self._send, args=(receipt, about), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _load(self) -> None:
        """Load the SDK while the run is at work: at its end only sending is left. Nothing where nobody listens."""
        try:
            if not _refuses(self._address):
                from backplane.telemetry.export import export

                self._export = export
        finally:
            self._loaded.set()

    def _send(self, receipt: Receipt, about: RunAbout) -> None:
        self._loaded.wait()
        if self._export is None:
            log(f"run {receipt.meta.run_id} is in no telemetry: nobody listens at {self._address}")
            return
        try:
            spans = told(receipt, msgspec.structs.replace(about, content=self._content))
            self._export(spans, receipt.meta.run_id, self._parent)
        except Exception as error:  # Whatever a foreign exporter raises: it is no affair of the run's.
            log(f"run {receipt.meta.run_id} is in no telemetry: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Wait until all is sent, at most `LEAVE_S_MAX` beyond the loading of the SDK. Blocks."""
        # Not left to Python's own end: the SDK's exporters start what cannot be started then.
        if self._threads:
            self._loaded.wait(LOAD_S_MAX)
        ends = time.monotonic() + LEAVE_S_MAX
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))


def _refuses(address: str) -> bool:
    """Whether nobody listens there; what cannot be found out is left to the exporter. Blocks."""
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "localhost", port), CONNECT_S_MAX):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
