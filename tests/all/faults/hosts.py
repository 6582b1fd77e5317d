"""Hosts of a few lines for the fault suite: plain Python on the bare protocol, nothing of ours inside.

The prelude gives a script `hello`, `take`, `event`, `final`, `put` and `deaf`; what a case does to the control plane
stands in the case.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Final

PRELUDE: Final = r"""
import json, os, signal, sys, time
RUN = None
BACKEND = {"id": "fault", "backend_version": None, "adapter_version": None}
def put(data, fd=1):
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data):]
def say(t, **members):
    put(json.dumps({"t": t, **members}).encode() + b"\n")
def hello(version="abp/v0.1", extensions=(), **members):
    say("hello", **{"contract_version": version, "backend": BACKEND, "capabilities": {"streaming": "native"},
                    "mode": "mapped", "extensions": list(extensions), **members})
HELD = b""
def line():
    global HELD
    while b"\n" not in HELD:
        piece = os.read(0, 65536)
        if not piece:
            return HELD
        HELD += piece
    data, _, HELD = HELD.partition(b"\n")
    return data
def take():
    global RUN
    data = line()
    if not data:
        os._exit(0)
    RUN = json.loads(data)
    return RUN
def body(text="a", kind="assistant_message", **members):
    own = {"text": text} if kind.startswith("assistant") else {}
    return {"ts": "2026-01-15T12:00:00Z", "type": kind, **own, **members}
def framed(text):
    return json.dumps({"t": "event", "ref_id": RUN["id"], "event": body(text)}, ensure_ascii=False).encode() + b"\n"
def event(text="a", ref_id=None, **members):
    say("event", ref_id=ref_id or RUN["id"], event=body(text, **members))
def receipt(outcome="complete", **members):
    return {
        "meta": {"run_id": RUN["id"], "work_order_id": RUN["work_order"]["id"], "contract_version": "abp/v0.1",
                 "started_at": "2026-01-15T12:00:00Z", "finished_at": "2026-01-15T12:00:01Z", "duration_ms": 1000},
        "backend": BACKEND, "capabilities": {}, "mode": "mapped", "usage_raw": {}, "usage": {}, "trace": [],
        "artifacts": [], "verification": {"git_diff": None, "git_status": None, "harness_ok": True},
        "outcome": outcome, "receipt_sha256": None, **members}
def final(outcome="complete", ref_id=None, **members):
    say("final", ref_id=ref_id or RUN["id"], receipt=receipt(outcome, **members))
def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
def rest():
    while os.read(0, 65536):
        pass
"""

GOOD: Final = "hello(); take(); event('one'); event('two'); final(); rest()\n"
"""A host that does everything right."""


def script(folder: Path, body: str, *, name: str = "host.py", python: str = sys.executable) -> tuple[str, ...]:
    """Write a host and give its command."""
    path = folder / name
    path.write_text(PRELUDE + body)
    return (python, "-I", "-S", str(path))


def command(words: tuple[str, ...]) -> str:
    """The same as one text, for `--sidecar`."""
    return shlex.join(words)
