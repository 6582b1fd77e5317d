"""Runs as OpenTelemetry's spans and metrics: the mapping as a table, ids, a collector that is dead, and no cost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    ToolCall,
    ToolResult,
    Warned,
    carried,
    carry,
)
from backplane.contract.receipt import BackendIdentity, Receipt, Usage
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.telemetry.context import is_wanted, read_parent, span_id, trace_id, traceparent
from backplane.telemetry.export import NOT_ACCEPTED, SEND_S_MAX, Exporter
from backplane.telemetry.spans import RunAbout, spans_of
from tests.receipt_writer import receipt_of

RUN = "0f8fad5b-d9cb-469f-a165-70867728950e"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def at(seconds: float) -> str:
    return f"2025-01-15T12:00:{seconds:06.3f}Z"


def call(id: str, second: float, tool: str = "bash", **members: Any) -> ToolCall:
    return ToolCall(ts=at(second), tool_name=tool, tool_use_id=id, input={"command": "make"}, **members)


def result(id: str, second: float, tool: str = "bash", *, failed: bool = False) -> ToolResult:
    return ToolResult(ts=at(second), tool_name=tool, tool_use_id=id, output="secret output", is_error=failed)


EVENTS: tuple[AgentEvent, ...] = (
    AssistantDelta(ts=at(1.5), text="hm"),
    AssistantMessage(ts=at(2), text="I look"),
    call("c1", 2),
    carry("ask", {"id": "a1", "kind": "tool", "name": "bash"}, ts=at(2.1), message="asks"),
    carry("answer", {"id": "a1", "decision": "allow", "by": "policy", "reason": "fine"}, ts=at(2.2), message="yes"),
    CommandExecuted(ts=at(3), command="make", exit_code=2),
    result("c1", 3, failed=True),
    call("t1", 3.5, "task"),
    call("c2", 4, parent_tool_use_id="t1"),
    result("c2", 5),
    result("t1", 6, "task"),
    carry("usage", {"input_tokens": 100, "output_tokens": 10, "cache_read_tokens": 60, "cache_write_tokens": 5},
          ts=at(7), message="u"),
    carry("turn", {"stop_reason": "tool_use", "model": "m-2", "id": "resp-1"}, ts=at(7), message="t"),
    carry("task", {"plan": [{"content": "a", "status": "done"}]}, ts=at(7.5), message="p"),
    carry("retry", {"status": 529}, ts=at(8), message="overloaded"),
    Failed(ts=at(8.1), message="it broke", error_code="execution_tool_failed"),
    Warned(ts=at(8.2), message="careful"),
    carry("checkpoint", {"what": "made"}, ts=at(8.3), message="kept"),
    FileChanged(ts=at(8.4), path="a.py", summary="written"),
    carry("usage", {"input_tokens": 250, "output_tokens": 30}, ts=at(9), message="u"),
    carry("turn", {"stop_reason": "end_turn"}, ts=at(9), message="t"),
)  # fmt: skip


def receipt(**changes: Any) -> Receipt:
    made = receipt_of(
        [carried(event) for event in EVENTS], RUN, backend=BackendIdentity("agent-x", "1.2"),
        usage=Usage(input_tokens=250, output_tokens=30, cache_read_tokens=60, estimated_cost_usd=0.5),
        usage_raw={"backplane": {"end": {"reason": "complete"}, "session": {"id": "conv-1"}}}, **changes,
    )  # fmt: skip
    meta = msgspec.structs.replace(made.meta, started_at=at(1), finished_at=at(10))
    return msgspec.structs.replace(made, meta=meta, receipt_sha256="ab" * 32)


def exported(made: Receipt, parent: str | None = None, **about: Any) -> dict[str, ReadableSpan]:
    memory = InMemorySpanExporter()
    spans = spans_of(made, RunAbout(backend="house", model="m-1", task="do it", **about))
    Exporter(SimpleSpanProcessor(memory), InMemoryMetricReader()).send(spans, made.meta.run_id, read_parent(parent))
    return {span.name + str(span.attributes.get("gen_ai.tool.call.id", "")): span  # type: ignore[union-attr]
            for span in memory.get_finished_spans()}  # fmt: skip


def seen(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


COMMON = {"gen_ai.provider.name": "agent-x", "gen_ai.request.model": "m-1"}
TABLE: dict[str, tuple[SpanKind, str | None, tuple[float, float], dict[str, Any]]] = {
    "invoke_agent house": (SpanKind.INTERNAL, None, (1, 10), {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "house", "gen_ai.agent.id": "agent-x",
        "gen_ai.agent.version": "1.2", "gen_ai.conversation.id": "conv-1", "backplane.run.id": RUN,
        "backplane.outcome": "complete", "backplane.receipt.sha256": "ab" * 32, "gen_ai.usage.input_tokens": 250,
        "gen_ai.usage.output_tokens": 30, "gen_ai.usage.cache_read.input_tokens": 60,
        "backplane.cost.usd": 0.5, "backplane.cost.source": "backend", **COMMON}),
    "chat m-2": (SpanKind.CLIENT, "invoke_agent house", (1, 7), {
        "gen_ai.operation.name": "chat", "gen_ai.response.model": "m-2", "gen_ai.response.id": "resp-1",
        "gen_ai.response.finish_reasons": ("tool_use",), "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 60, "gen_ai.usage.cache_creation.input_tokens": 5, **COMMON}),
    "chat m-1": (SpanKind.CLIENT, "invoke_agent house", (7, 9), {
        "gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": ("end_turn",),
        "gen_ai.usage.input_tokens": 150, "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.usage.cache_creation.input_tokens": 0, **COMMON}),
    "execute_tool bashc1": (SpanKind.INTERNAL, "invoke_agent house", (2, 3), {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash", "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.type": "function", "error.type": "tool_error"}),
    "execute_tool taskt1": (SpanKind.INTERNAL, "invoke_agent house", (3.5, 6), {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "task", "gen_ai.tool.call.id": "t1",
        "gen_ai.tool.type": "function"}),
    "execute_tool bashc2": (SpanKind.INTERNAL, "execute_tool taskt1", (4, 5), {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash", "gen_ai.tool.call.id": "c2",
        "gen_ai.tool.type": "function"}),
}  # fmt: skip
"""The mapping: span → kind, parent, its two ends in seconds, attributes."""


@pytest.mark.parametrize("name", TABLE)
def test_a_run_is_these_spans(name: str) -> None:
    kind, parent, ends, attributes = TABLE[name]
    spans = exported(receipt())
    assert spans.keys() == TABLE.keys()
    span = spans[name]
    assert (span.kind, seen(span)) == (kind, attributes)
    assert (span.parent.span_id if span.parent else None) == (spans[parent].context.span_id if parent else None)
    assert ((span.start_time or 0) % (60 * 10**9) / 1e9, (span.end_time or 0) % (60 * 10**9) / 1e9) == ends
    assert span.status.is_ok == ("error.type" not in attributes)


def test_decisions_failures_and_files_are_events_of_the_run() -> None:
    found = [(event.name, dict(event.attributes or {})) for event in exported(receipt())["invoke_agent house"].events]
    assert found[:2] == [
        ("backplane.approval", {"backplane.approval.id": "a1", "backplane.approval.kind": "tool",
                                "backplane.approval.name": "bash"}),
        ("backplane.approval", {"backplane.approval.id": "a1", "backplane.approval.decision": "allow",
                                "backplane.approval.by": "policy"}),
    ]  # fmt: skip
    assert [name for name, _ in found[2:]] == [
        *("gen_ai.client.operation.exception", "gen_ai.client.operation.exception", "backplane.file_changed")
    ]


def test_ids_are_the_run_s_own_and_the_same_each_time() -> None:
    first, second = exported(receipt(), PARENT), exported(receipt(), PARENT)
    assert {name: span.context.span_id for name, span in first.items()} == {
        name: span.context.span_id for name, span in second.items()
    }
    assert {span.context.trace_id for span in first.values()} == {trace_id(RUN)} == {uuid.UUID(RUN).int}
    root = first["invoke_agent house"]
    assert traceparent(RUN) == f"00-{uuid.UUID(RUN).hex}-{root.context.span_id:016x}-01"
    (link,) = root.links
    assert f"{link.context.trace_id:032x}" == PARENT[3:35]
    assert first["execute_tool bashc1"].context.span_id == span_id(RUN, 3)
    for text in ("", None, "00-0-0-01", PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), PARENT + "x"):
        assert read_parent(text) is None


def test_texts_go_along_only_where_they_are_wanted() -> None:
    for content in (False, True):
        spans = exported(receipt(), content=content)
        text = str([seen(span) for span in spans.values()])
        assert ("secret output" in text, "do it" in text, "I look" in text) == (content,) * 3
        assert ("gen_ai.tool.call.arguments" in text) == content


def test_a_failed_run_has_its_code_and_no_open_span() -> None:
    added = {"end": {"reason": "idle", "code": "backend_timeout"}, "error": {"code": "backend_timeout"}}
    made = receipt_of([call("c1", 2)], RUN, outcome="failed", usage_raw={"backplane": added})
    spans = exported(msgspec.structs.replace(made, meta=receipt().meta), is_remote=True)
    assert seen(spans["invoke_agent house"])["error.type"] == "backend_timeout"
    assert spans["invoke_agent house"].kind == SpanKind.CLIENT
    assert seen(spans["execute_tool bashc1"])["error.type"] == "unfinished"
    assert all(span.end_time for span in spans.values())


def test_the_measurements_are_those_of_the_conventions() -> None:
    reader = InMemoryMetricReader()
    exporter = Exporter(SimpleSpanProcessor(InMemorySpanExporter()), reader)
    exporter.send(spans_of(receipt(), RunAbout(backend="house", model="m-1")), RUN)
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: (metric.unit, sorted((point.count, round(point.sum, 3)) for point in metric.data.data_points))  # type: ignore[union-attr]
        for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    }  # fmt: skip
    assert found == {
        "gen_ai.client.token.usage": ("{token}", [(1, 30), (1, 250)]),
        "gen_ai.invoke_agent.duration": ("s", [(1, 9.0)]),
        "backplane.cost.usd": ("USD", [(1, 0.5)]),
    }


def test_the_standard_variables_decide() -> None:
    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert is_wanted(address)
    assert not is_wanted({})
    assert not is_wanted({**address, "OTEL_SDK_DISABLED": "TRUE"})
    assert not is_wanted({**address, "OTEL_TRACES_EXPORTER": "none"})


# The command ----------------------------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[Any]:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.taken = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def cli(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backplane", "run", *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def newest(home: Path) -> Receipt:
    with Store.open(home, readonly=True) as store:
        return store.load(find(store, "last").run_id)


def test_a_run_goes_to_the_collector_and_its_host_gets_the_context(backplane_home: Path, tmp_path: Path) -> None:
    task = 'echo "parent: $TRACEPARENT"'
    with collector() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        done = cli(task, "--backend", "shell", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=url, TRACEPARENT=PARENT)
        assert done.returncode == 0, done.stderr
    run_id = newest(backplane_home).meta.run_id
    assert f"parent: {traceparent(run_id)}" in done.stdout
    taken = dict(server.taken)
    assert taken.keys() == {"/v1/traces", "/v1/metrics"}
    assert uuid.UUID(run_id).bytes in taken["/v1/traces"]
    assert b"execute_tool bash" in taken["/v1/traces"]
    assert b"parent: " not in taken["/v1/traces"]
    plain = cli(task, "--backend", "shell", cwd=tmp_path, TRACEPARENT=PARENT)
    assert f"parent: {PARENT}" in plain.stdout


def test_a_dead_collector_costs_one_line_and_no_time(backplane_home: Path, tmp_path: Path) -> None:
    done = cli("echo hi", "--backend", "shell", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("\n"), newest(backplane_home).outcome) == (0, 1, "complete")
    assert NOT_ACCEPTED in done.stderr


def test_a_refused_connection_is_given_up_at_once_and_a_silent_collector_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, limit_s in ((9, 0.3), (silent.getsockname()[1], SEND_S_MAX + 0.3)):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
            exporter = Exporter()
            exporter.send(spans_of(receipt(), RunAbout(backend="house")), RUN)
            started_s = time.monotonic()
            exporter.close()
            assert time.monotonic() - started_s < limit_s
            assert exporter.lost == NOT_ACCEPTED


def test_without_a_collector_nothing_of_it_is_loaded(backplane_home: Path, tmp_path: Path) -> None:
    look = (
        "import atexit, sys; from backplane.cli import main; code = main(sys.argv[1:]); "
        "bad = [n for n in sys.modules if n.startswith(('opentelemetry', 'backplane.telemetry', 'backplane.view.why', "
        "'backplane.process.snapshot', 'backplane.view.page'))]; print(bad, file=sys.stderr); sys.exit(code)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    for words in (["run", "true", "--backend", "shell", "--json"], ["--help"]):
        command = [sys.executable, "-c", look, *words]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (0, "[]"), done.stderr
