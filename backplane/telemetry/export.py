"""Sends spans, measurements and a queue's depth by OpenTelemetry's SDK; the only file that imports it (extra `otel`).

The SDK's own processors hold what is to be sent, send it from their threads, and stop at their own limits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context

from backplane.telemetry import spans as ours
from backplane.telemetry.context import trace_id

# Without a log of the program's own, the warnings of a dead collector would stand on its terminal.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())

SERVICE: Final = "backplane"
QUEUED_SPANS: Final = 2 * ours.SPANS_MAX
"""Spans that wait for the collector: two of the longest runs. The SDK drops the oldest beyond that."""

QUEUE_LABEL: Final = "backplane.queue.label"

TIMEOUT: Final = "OTEL_EXPORTER_OTLP_TIMEOUT"
SEND_S_MAX: Final = 0.7
"""Seconds for a collector to accept a batch (default of `TIMEOUT`), which may delay the end of a command.

Shorter than the SDK's first pause before a retry (0.8 s), so a refused connection is given up at once."""

LEAVE_MS_MAX: Final = 3_000
"""Milliseconds for a collector to accept what was not sent yet at the end; the rest is dropped."""

NOT_ACCEPTED: Final = (
    f"the collector did not take data: check OTEL_EXPORTER_OTLP_ENDPOINT, or raise {TIMEOUT} (default: {SEND_S_MAX})"
)

Depths = Mapping[str, tuple[int, int]]
"""Label → number of waiting orders, and the age of the oldest in milliseconds."""


class Exporter:
    """Sends runs as spans and measurements.

    Args:
        processor: takes the spans (default: in batches to the collector that the standard variables name).
        reader: takes the measurements (default: periodically to that collector).
    """

    def __init__(self, processor: SpanProcessor | None = None, reader: MetricReader | None = None) -> None:
        self._ids = _Ids()
        self._tracers = TracerProvider(resource=_resource(), id_generator=self._ids, shutdown_on_exit=False)
        self._spans, self._metrics = _Spans(timeout=_limit_s()), _Metrics(timeout=_limit_s())
        self._tracers.add_span_processor(processor or BatchSpanProcessor(self._spans, QUEUED_SPANS))
        self._tracer = self._tracers.get_tracer(SERVICE)
        self._meters = _meters(reader or PeriodicExportingMetricReader(self._metrics))
        meter = self._meters.get_meter(SERVICE)
        self._duration = meter.create_histogram(ours.DURATION_METRIC, unit="s")
        self._tokens = meter.create_histogram(ours.TOKENS_METRIC, unit="{token}")
        self._cost = meter.create_histogram(ours.COST, unit="USD")

    def send(self, spans: Sequence[ours.RunSpan], run_id: str, parent: tuple[int, int] | None = None) -> None:
        """Send a run.

        Args:
            spans: the run's own first, parents before their children.
            parent: trace and span in which the run was started; the run's own span links to it.
        """
        self._ids.trace = trace_id(run_id)
        sampled = TraceFlags(TraceFlags.SAMPLED)
        links = [] if parent is None else [Link(SpanContext(*parent, is_remote=True, trace_flags=sampled))]
        # An empty context: the spans of the program around us are no parents of a run.
        contexts: dict[int | None, Context] = {None: Context()}
        for span in spans:
            self._ids.span = span.id
            made = self._tracer.start_span(
                span.name,
                context=contexts[span.parent],
                kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
                attributes=_some(span.attributes, *span.attributes),
                links=links if span.parent is None else None,
                start_time=span.start_ns,
            )
            contexts[span.id] = set_span_in_context(made)
            for name, time_ns, attributes in span.notes:
                made.add_event(name, attributes, time_ns)
            if (error := span.attributes.get(ours.ERROR)) is not None:
                made.set_status(Status(StatusCode.ERROR, error))
            made.end(span.end_ns)
        self._measure(spans[0])

    def _measure(self, run: ours.RunSpan) -> None:
        given = run.attributes
        common = _some(given, ours.PROVIDER, ours.REQUEST_MODEL)
        agent = {**common, **_some(given, ours.AGENT_NAME, ours.ERROR)}
        self._duration.record((run.end_ns - run.start_ns) / 1e9, agent)
        for kind in ("input", "output"):
            if (count := given.get(ours.USAGE[f"{kind}_tokens"])) is not None:
                self._tokens.record(count, {**common, **_some(given, ours.OPERATION), ours.TOKEN_TYPE: kind})
        if (cost_usd := given.get(ours.COST)) is not None:
            self._cost.record(cost_usd, agent)

    @property
    def lost(self) -> str:
        """Why a batch was not accepted; empty if all were."""
        return NOT_ACCEPTED if self._spans.lost or self._metrics.lost else ""

    def close(self) -> None:
        """Send what is left, for at most about `LEAVE_MS_MAX`. Blocks."""
        # Side by side, as a collector that is away costs both of them their limit.
        measured = threading.Thread(target=self._meters.shutdown, args=(LEAVE_MS_MAX,), daemon=True)
        measured.start()
        self._tracers.shutdown()
        measured.join()


def _some(given: ours.Attributes, *names: str) -> ours.Attributes:
    return {name: value for name in names if (value := given.get(name)) is not None}


class _Watched:
    """Counts the batches that a collector did not accept."""

    lost = 0

    def export(self, *args: Any, **options: Any) -> Any:
        self.lost += 1
        result = super().export(*args, **options)  # type: ignore[misc]
        self.lost -= result.name == "SUCCESS"
        return result


class _Spans(_Watched, OTLPSpanExporter): ...


class _Metrics(_Watched, OTLPMetricExporter): ...


class _Ids(IdGenerator):
    """Ids that we choose, so that sending a run twice gives the same spans."""

    trace = span = 1

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


@contextmanager
def sending_queue(read: Callable[[], Depths], label: str) -> Iterator[None]:
    """Send a queue's depth and age periodically while the block runs, and at its end.

    Args:
        read: returns them; may block and raise, in a thread of the SDK.
        label: always sent, with 0 while nothing waits.
    """
    labels, found = {label}, dict[str, tuple[int, int]]()

    def depths(_: object) -> list[Observation]:
        found.clear()
        found.update(read())
        # A label that has emptied is sent as 0: otherwise its last value would stay in the collector.
        labels.update(found)
        return [Observation(found.get(name, (0, 0))[0], {QUEUE_LABEL: name}) for name in sorted(labels)]

    def ages(_: object) -> list[Observation]:
        return [Observation(found.get(name, (0, 0))[1] / 1000, {QUEUE_LABEL: name}) for name in sorted(labels)]

    provider = _meters(PeriodicExportingMetricReader(_Metrics(timeout=_limit_s())))
    meter = provider.get_meter(SERVICE)
    meter.create_observable_gauge("backplane.queue.depth", [depths], unit="{order}")
    meter.create_observable_gauge("backplane.queue.age", [ages], unit="s")
    try:
        yield
    finally:
        provider.shutdown(LEAVE_MS_MAX)


def _meters(reader: MetricReader) -> MeterProvider:
    return MeterProvider([reader], resource=_resource(), shutdown_on_exit=False)


def _resource() -> Resource:
    """Return our name; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override it."""
    # `Resource.create` searches all installed packages for detectors, in threads, which takes a second.
    return Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())


def _limit_s() -> float | None:
    return None if TIMEOUT in os.environ else SEND_S_MAX
