"""Runs for tests: a control plane, hosts of a few lines, and what must hold of every receipt."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from backplane import host as sidecar
from backplane.config import Limits, Settings
from backplane.contract import canonical
from backplane.contract.approval import Decision
from backplane.contract.capability import NATIVE, Level
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.host.link import serve as serve_host
from backplane.receipts.store import Store
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.memory import MemoryBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from hosts import mock
from tests import closed, described
from tests.peers import PYTHON, ROOT

QUICK = Limits(hello_s=5.0, cancel_grace_s=0.4, idle_s=20.0)
"""Limits of a test that is not about them."""

SLACK_S = 3.0
"""What a loaded machine may add to a deadline."""

HELLO = {
    "t": "hello",
    "contract_version": "abp/v0.1",
    "backend": {"id": "script"},
    "capabilities": {"streaming": "native"},
}

PRELUDE = """
import json, os, signal, sys, time
HELLO = json.loads({hello!r})
def put(*messages):
    data = b"".join(m if isinstance(m, bytes) else json.dumps(m).encode() + b"\\n" for m in messages)
    while data:
        data = data[os.write(1, data):]
def hello(**members): put({{**HELLO, **members}})
def take():
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None
def event(run, text="a", **members):
    body = {{"ts": "2026-01-15T12:00:00Z", "type": "assistant_delta", "text": text, **members}}
    return {{"t": "event", "ref_id": run["id"], "event": body}}
def final(run, **members):
    receipt = {{
        "meta": {{"run_id": run["id"], "work_order_id": run["work_order"]["id"], "contract_version": "abp/v0.1",
                 "started_at": "2026-01-15T12:00:00Z", "finished_at": "2026-01-15T12:00:01Z", "duration_ms": 1000}},
        "backend": {{"id": "script"}}, "capabilities": {{"streaming": "native"}}, "usage_raw": {{}},
        "usage": {{}}, "trace": [], "artifacts": [], "verification": {{"harness_ok": True}}, "outcome": "complete",
    }}
    return {{"t": "final", "ref_id": run["id"], "receipt": {{**receipt, **members}}}}
def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
def end(): sys.stdin.buffer.read()
"""


def script(
    folder: Path, body: str, *, name: str = "script.py", hello: dict[str, Any] = HELLO, **options: Any
) -> Backend:
    """A host of a few lines of Python that uses nothing of ours; `hello`, `take`, `put`, `event`, `final` are there."""
    path = folder / name
    path.write_text(PRELUDE.format(hello=json.dumps(hello)) + body)
    return ProcessBackend(id="script", argv=(sys.executable, "-I", "-S", str(path)), **options)


def mock_backend(way: str, *, capabilities: dict[str, Level] = mock.CAPABILITIES, **options: Any) -> Backend:
    """The scripted agent, in a process of its own or in this one."""
    if way == "process":
        wire = json.dumps({name: level.to_wire() for name, level in capabilities.items()})
        argv = (*PYTHON, str(ROOT / "hosts" / "mock.py"), "--capabilities", wire)
        return ProcessBackend(id="mock", argv=argv, **options)
    return memory(mock.work_of(), sidecar.Host(id="mock", capabilities=capabilities), **options)


def not_begun(run: Run) -> bool:
    """Return True if nothing of a host and no event is kept of a run, only the order, its sandbox and its end."""
    assert run.folder is not None
    facts = [json.loads(line)["fact"] for line in (run.folder / "head.jsonl").read_text().splitlines()]
    return facts in (["order"], ["order", "held"]) and (run.folder / "trace.jsonl").read_bytes() == b""


def memory(work: sidecar.Work, host: sidecar.Host | None = None, **options: Any) -> Backend:
    host = host or sidecar.Host(id="memory", capabilities={"streaming": NATIVE})
    return MemoryBackend(id=host.id, serve=functools.partial(serve_host, host, work), **options)


def order(
    root: Path, *steps: dict[str, Any], task: str = "do it", mode: str = "pass_through", **members: Any
) -> WorkOrder:
    """An order on a folder; steps are a mock's scenario."""
    value = msgspec.structs.replace(WorkOrder(task), workspace=WorkspaceSpec(root=str(root), mode=mode), **members)  # type: ignore[arg-type]
    if not steps:
        return value
    vendor = {**value.config.vendor, "mock": {"scenario": list(steps)}}
    return msgspec.structs.replace(value, config=msgspec.structs.replace(value.config, vendor=vendor))


def plane(
    home: Path, limits: Limits = QUICK, *, isolation: Literal["best_effort", "off"] = "off", **members: Any
) -> ControlPlane:
    """A control plane with some limits changed; hosts run without a cage unless the test is about it."""
    settings = Settings(limits=msgspec.structs.replace(limits, **members), isolation=isolation)
    return ControlPlane(settings, home, os.environ)


async def go(
    plane: ControlPlane,
    order: WorkOrder,
    backend: Backend,
    *,
    on_ask: OnAsk | None = None,
    limits: Limits | None = None,
) -> tuple[Run, list[AgentEvent]]:
    """Run an order to its end and check everything that holds of every run."""
    events: list[AgentEvent] = []
    async with plane.start(order, backend, on_ask=on_ask, limits=limits) as run:
        async for event in run:
            events.append(event)
    check(run, events)
    return run, events


def is_empty(folder: Path) -> bool:
    """Wait up to 5 s until a folder is empty or missing: the folders of an ended run are removed in a thread."""
    for _ in range(500):
        try:
            if not os.listdir(folder):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def check(run: Run, events: Iterable[AgentEvent] | None = None) -> dict[str, Any]:
    """What must hold of every run that has ended; gives the receipt as a closed peer reads it."""
    assert run.end is not None
    data = b"".join(run.receipt_chunks())
    read = closed.read(data)
    assert described.faults(run.receipt.backplane) == []
    assert read["receipt_sha256"] == run.receipt.receipt_sha256
    assert read["meta"]["run_id"] == run.id
    assert read["meta"]["work_order_id"] == run.order.id
    # Not as texts: a whole second prints no fraction, and "Z" sorts after ".".
    assert datetime.fromisoformat(read["meta"]["started_at"]) <= datetime.fromisoformat(read["meta"]["finished_at"])
    assert run.receipt.backplane["end"]["reason"] == run.end.reason or run.end.reason == "store"
    assert (run.end_error is None) == (run.end.code is None)
    assert run.end_error is None or run.end_error.code == run.end.code
    told = run.receipt.backplane.get("error")
    if run.end.reason not in ("store", "interrupted") and run.end.code != "internal":
        assert (told is None) == (run.end_error is None)
        if run.end_error is not None and told is not None:
            assert told["code"] == (run.end_error.foreign_code or run.end_error.code)
            assert told["message"] == run.end_error.message[:2000]
    if events is not None:
        assert [canonical.encode(event) for event in run.receipt.trace] == [canonical.encode(event) for event in events]
    home = run.drive.plane.home
    assert is_empty(home / "stage" / run.id)
    if run.end.reason != "store":
        with Store.open(home, readonly=True) as store:
            assert store.verify(run.id) == []
            assert store.load(run.id).receipt_sha256 == run.receipt.receipt_sha256
    return read


def backplane_of(run: Run) -> dict[str, Any]:
    return run.receipt.backplane


def counts(run: Run) -> dict[str, int]:
    found: dict[str, int] = backplane_of(run)["counts"]
    return found


def texts(events: Iterable[AgentEvent]) -> list[str]:
    return [event.text for event in events if hasattr(event, "text")]


def saying(decision: Decision) -> OnAsk:
    """A callback that gives the same answer to everything."""

    async def on_ask(_: object) -> Decision:
        return decision

    return on_ask


def ended(run: Run) -> tuple[str, str | None, str]:
    """Reason, code and outcome."""
    assert run.end is not None
    return run.end.reason, run.end.code, run.receipt.outcome


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK_S
