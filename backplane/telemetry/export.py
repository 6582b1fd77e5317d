"""Hands spans and measurements to OpenTelemetry's SDK: the only file that knows it. Needs the extra `otel`.

Blocks as long as the exporter does, so it is called in a thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from opentelemetry import metrics as api_metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult, MetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from backplane.telemetry import spans as ours
from backplane.telemetry.context import log, trace_id

# Warnings of a collector that does not answer would stand on the terminal of a program that has set up no log.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())

SERVICE: Final = "backplane"

QUEUE_DEPTH: Final = "backplane.queue.depth"
QUEUE_AGE: Final = "backplane.queue.age"
QUEUE_LABEL: Final = "backplane.queue.label"

TIMEOUT: Final = "OTEL_EXPORTER_OTLP_TIMEOUT"

SEND_S_MAX: Final = 1
"""For a collector to take a batch, where the environment sets no other limit: most take milliseconds."""

BATCH_SPANS: Final = 512
"""Sent at once, as the SDK does."""


def _version() -> str:
    """Of this package, the scope's; empty where it runs from a folder and is not installed."""
    try:
        return version(SERVICE)
    except PackageNotFoundError:
        return ""


class _Ids(IdGenerator):
    """The ids that we have chosen: exporting a run twice gives the same spans."""

    def __init__(self, trace: int) -> None:
        self._trace = trace
        self.next_span = 1

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        return self.next_span


def resource() -> Resource:
    """Who we are; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` go over it."""
    # Not `Resource.create`, which looks through all that is installed for detectors, in threads: a second of work.
    return Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())


def send(told: ours.RunTelemetry, run_id: str, processor: SpanProcessor, parent: tuple[int, int] | None = None) -> None:
    """Give a run's spans to a processor, and let it finish.

    Args:
        parent: trace and span that the run was started in; the run's own span links to it.
    """
    ids = _Ids(trace_id(run_id))
    provider = TracerProvider(resource=resource(), id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer(SERVICE, _version())
    contexts: dict[int, Any] = {}
    sampled = TraceFlags(TraceFlags.SAMPLED)
    links = [] if parent is None else [Link(SpanContext(*parent, is_remote=True, trace_flags=sampled))]
    # A context without a span in it: what the program around us traces is no parent of a run.
    nothing = set_span_in_context(NonRecordingSpan(SpanContext(0, 0, is_remote=False)))
    for span in told.spans:
        ids.next_span = span.id
        made = tracer.start_span(
            span.name,
            context=contexts[span.parent] if span.parent is not None else nothing,
            kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
            attributes=span.attributes,
            links=links if span.parent is None else None,
            start_time=span.start_ns,
        )
        contexts[span.id] = set_span_in_context(made)
        for note in span.notes:
            made.add_event(note.name, note.attributes, note.time_ns)
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end_ns)
    provider.shutdown()


def measure(told: ours.RunTelemetry, reader: MetricReader) -> None:
    """Give a run's measurements to a reader."""
    meter = MeterProvider([reader], resource=resource(), shutdown_on_exit=False).get_meter(SERVICE, _version())
    instruments: dict[str, api_metrics.Histogram] = {}
    for one in told.measures:
        if one.metric not in instruments:
            instruments[one.metric] = meter.create_histogram(one.metric, unit=one.unit)
        instruments[one.metric].record(one.value if one.parts == 1 else one.value / one.parts, one.attributes)


def gauge(depths: Mapping[str, tuple[int, int]], reader: MetricReader) -> None:
    """Record a queue's depth and age for a metric reader; `depths` as for `export_queue`."""
    meter = MeterProvider([reader], resource=resource(), shutdown_on_exit=False).get_meter(SERVICE, _version())
    count, age = meter.create_gauge(QUEUE_DEPTH, unit="{order}"), meter.create_gauge(QUEUE_AGE, unit="s")
    for label, (orders, oldest_ms) in depths.items():
        count.set(orders, {QUEUE_LABEL: label})
        age.set(oldest_ms / 1000, {QUEUE_LABEL: label})


def export(told: ours.RunTelemetry, run_id: str, parent: tuple[int, int] | None) -> None:
    """Send a run to the collector that the standard variables name. Raises what the exporter does."""
    exporter = OTLPSpanExporter(timeout=_limit_s())
    send(told, run_id, BatchSpanProcessor(exporter, ours.SPANS_MAX, max_export_batch_size=BATCH_SPANS), parent)
    reader = InMemoryMetricReader()
    measure(told, reader)
    if not _export_metrics(reader):
        log(f"the collector accepted no measurements of run {run_id}")


def export_queue(depths: Mapping[str, tuple[int, int]]) -> None:
    """Send a queue's depth and age to the collector. Raises what the exporter does.

    Args:
        depths: label → how many orders wait, and the age of the oldest in milliseconds.
    """
    reader = InMemoryMetricReader()
    gauge(depths, reader)
    if not _export_metrics(reader):
        log("the collector did not accept the queue's depth")


def _export_metrics(reader: InMemoryMetricReader) -> bool:
    """Send what a reader has; return whether the collector took it."""
    data = reader.get_metrics_data()
    return data is None or OTLPMetricExporter(timeout=_limit_s()).export(data) is MetricExportResult.SUCCESS


def _limit_s() -> float | None:
    """Return how long a collector may take for a batch; the exporters' default, 10 s, would delay a process's exit."""
    return None if TIMEOUT in os.environ else SEND_S_MAX
