"""Whether telemetry is wanted, and the trace that a run is: its id is the trace's, span ids come of event numbers.

Pure, and light: it is asked before each run.
"""

from __future__ import annotations

import hashlib
import logging
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
    """Whether the standard variables name a collector and do not switch it off."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return any(environ.get(name) for name in _ADDRESSES) and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"


def address_of(environ: Mapping[str, str]) -> str:
    """Where spans are sent, the exporter's own default included."""
    return next((environ[name] for name in _ADDRESSES[1::-1] if environ.get(name)), "http://localhost:4318")


def log(fact: str) -> None:
    """Say what went wrong to whoever has set up a log."""
    logging.getLogger("backplane").info(fact)


def has_content(environ: Mapping[str, str]) -> bool:
    """Whether messages, inputs and results may go into spans: only by the conventions' own variable."""
    return environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower() in ("true", "1")


def trace_id(run_id: str) -> int:
    """The run's UUID as a number."""
    return int(run_id.replace("-", ""), 16)


def span_id(run_id: str, number: int, part: str = "") -> int:
    """The id of what began with this event of a run.

    Args:
        number: of the event, from 1; 0 is the run itself.
        part: tells apart what begins with the same event.
    """
    digest = hashlib.sha256(f"{run_id} {number} {part}".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def traceparent(run_id: str) -> str:
    """What a host is given as its parent: the run's own span, in W3C's form."""
    return f"00-{trace_id(run_id):032x}-{span_id(run_id, 0):016x}-01"


def read_parent(text: str | None) -> tuple[int, int] | None:
    """Trace and span of a `TRACEPARENT`; None where it is none."""
    found = _PARENT.fullmatch(text or "")
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return int(found[1], 16), int(found[2], 16)
