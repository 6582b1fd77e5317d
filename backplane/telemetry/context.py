"""Decides whether telemetry is wanted, and makes a run's ids: its UUID is the trace's, spans are numbered by event.

Pure, and light: every run asks it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

TRACEPARENT: Final = "TRACEPARENT"
_ADDRESSES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if the standard variables name a collector and do not disable it."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return any(environ.get(name) for name in _ADDRESSES) and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"


def has_content(environ: Mapping[str, str]) -> bool:
    """Return True if the conventions' variable allows messages, inputs and results in spans."""
    return environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower() in ("true", "1")


def trace_id(run_id: str) -> int:
    """Return a run's UUID as a number."""
    return int(run_id.replace("-", ""), 16)


def span_id(run_id: str, number: int) -> int:
    """Return the id of the span that begins with an event of a run; number 0 is the run itself."""
    digest = hashlib.sha256(f"{run_id} {number} ".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def traceparent(run_id: str) -> str:
    """Return the parent that a run's host gets, the run's own span, in W3C's form."""
    return f"00-{trace_id(run_id):032x}-{span_id(run_id, 0):016x}-01"


def read_parent(text: str | None) -> tuple[int, int] | None:
    """Parse a `TRACEPARENT` as trace and span; return None if it is invalid."""
    found = _PARENT.fullmatch(text or "")
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return int(found[1], 16), int(found[2], 16)
