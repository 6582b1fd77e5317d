"""A host in the manner of the public family's Python one: blanks in its JSON, microseconds, no `mode`, serial reading.

Its argument says what it does beyond the ordinary: `extra`, `odd`, `stays`, `deaf`, `wrong_hash`.
"""

import datetime
import json
import signal
import sys
import time
from typing import Any

WHAT = set(sys.argv[1:])


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if "deaf" in WHAT:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
capabilities: dict[str, Any] = {"streaming": "native", "tool_read": "emulated"}
if "odd" in WHAT:
    capabilities.update({"telepathy": "native", "streaming": {"native": None}, "vision": "superb"})
hello: dict[str, Any] = {
    "t": "hello",
    "contract_version": "abp/v0.1",
    "backend": {"id": "python_sidecar"},
    "capabilities": capabilities,
}
if "mode" in WHAT:
    hello["mode"] = "mapped"
send(hello)
for line in sys.stdin:
    if not line.strip():
        continue
    try:
        message = json.loads(line)
    except ValueError:
        send({"t": "fatal", "ref_id": None, "error": "invalid json: {}"})
        continue
    if message["t"] == "ping":
        send({"t": "pong", "seq": message["seq"]})
    if message["t"] != "run":
        continue  # cancel and whatever else is ignored
    run_id, order, began = message["id"], message["work_order"], now()

    def event(kind: str, **members: Any) -> None:
        send({"t": "event", "ref_id": run_id, "event": {"ts": now(), "type": kind, **members}})  # noqa: B023

    event("run_started", message="python sidecar starting")
    if "odd" in WHAT:
        event("usage", input_tokens=3)
        event("assistant_message", text=None)
        event("error", message="codex run failed: {}", error_code="E001")
        event("tool_call", tool_name="Read", input={"path": "a"}, cost=1.0)
    if "waits" in WHAT:
        time.sleep(1.5)
    event("assistant_message", text=order["task"])
    event("run_completed", message="done")
    receipt: dict[str, Any] = {
        "meta": {
            "run_id": "550E8400-E29B-41D4-A716-446655440000",
            "work_order_id": order["id"],
            "contract_version": "abp/v0.1",
            "started_at": began,
            "finished_at": now(),
            "duration_ms": 3,
        },
        "backend": {"id": "python_sidecar"},
        "capabilities": capabilities,
        "usage_raw": {"note": "n", "f": 1.0},
        "usage": {"estimated_cost_usd": 0},
        "trace": [],
        "artifacts": [],
        "verification": {"harness_ok": True},
        "outcome": "partial" if "partial" in WHAT else "complete",
    }
    if "extra" in WHAT:
        receipt.update({"tool_calls": [{"name": "Read"}], "stream_equivalent": True})
    if "wrong_hash" in WHAT:
        receipt["receipt_sha256"] = "0" * 64
    send({"t": "final", "ref_id": run_id, "receipt": receipt})
    if "late" in WHAT:
        event("warning", message="too late")
if "stays" in WHAT:
    time.sleep(60)
