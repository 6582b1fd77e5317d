"""A worker's queue as gauges: its depth and age by label, read beside the work, with any collector."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

pytest.importorskip("dbos")
from backplane.telemetry.export import Depths, sending_queue
from tests.all.doors.test_telemetry import collector
from tests.queues import a_queue, needs_queue, until

LABEL = "backplane.queue.label"


def gauges_of(bodies: list[bytes]) -> dict[str, dict[str, float]]:
    """The newest values that a collector has: metric → label → number."""
    found: dict[str, dict[str, float]] = {}
    for body in bodies:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.gauge.data_points:
                    label = next(one.value.string_value for one in point.attributes if one.key == LABEL)
                    found.setdefault(metric.name, {})[label] = point.as_int or point.as_double
    return found


def test_a_worker_sends_the_depth_and_age_of_its_queue(tmp_path: Path) -> None:
    needs_queue()
    with a_queue(tmp_path) as queue, collector() as server:
        for label in ("gpu", "gpu", "big"):
            assert queue.cli("queue", "submit", "true", "-b", "shell", "--root", ".", "--label", label).returncode == 0
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as connection, connection:
            connection.execute(
                "UPDATE workflow_status SET created_at = created_at - 3600000 WHERE queue_name LIKE '%gpu'"
            )
        url = f"http://127.0.0.1:{server.server_port}"
        worker = queue.worker(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_METRIC_EXPORT_INTERVAL="200")
        until(lambda: server.taken)
        worker.terminate()
        assert worker.wait(30) == 0
    assert {path for path, _ in server.taken} == {"/v1/metrics"}
    found = gauges_of([body for _, body in server.taken])
    assert found.keys() == {"backplane.queue.depth", "backplane.queue.age"}
    assert found["backplane.queue.depth"] == {"default": 0, "gpu": 2, "big": 1}
    age_s = found["backplane.queue.age"]
    assert age_s["default"] == 0
    assert 3600 <= age_s["gpu"] < 3700
    assert 0 < age_s["big"] < 100


def test_a_label_that_emptied_is_sent_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: Iterator[Depths | None] = iter([{"a": (3, 5000)}, None, {"b": (1, 1)}, {}])

    def read() -> Depths:
        found = next(rounds, {})
        if found is None:
            raise OSError("the database is away")
        return found

    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with sending_queue(read, "own"):
            until(lambda: len(server.taken) >= 4)
    depths = [
        found
        for body in (body for _, body in server.taken)
        if (found := gauges_of([body]).get("backplane.queue.depth"))
    ]
    assert depths[:3] == [{"a": 3, "own": 0}, {"a": 0, "b": 1, "own": 0}, {"a": 0, "b": 0, "own": 0}]
