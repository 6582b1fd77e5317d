"""`backplane serve` as a client in any language sees it: a child, lines, and receipts checked by their bytes alone."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backplane.receipts.store import Store
from tests.peers import ROOT, Child, run

SERVE = (sys.executable, "-m", "backplane", "serve")
STAGE = ("stage/1",)
"""What a client announces that pipes its orders in and is gone."""
CLIENT = ("cancel/1", "ping/1", "ask/1", "stage/1", "many/1")


def serve(**options: Any) -> Child:
    """A running `backplane serve`, before its hello; settings come as `BACKPLANE_…` variables."""
    given = {name: str(options.pop(name)) for name in list(options) if name.startswith("BACKPLANE_")}
    return Child(SERVE, cwd=options.pop("cwd", ROOT), env={**os.environ, **given}, **options)


def mock(
    run_id: str, root: Path, *steps: dict[str, Any], extensions: Sequence[str] = CLIENT, **members: Any
) -> dict[str, Any]:
    """A `run` for the scripted agent."""
    config = {"vendor": {"abp": {"backend": "mock"}, "mock": {"scenario": list(steps)}}, **members.pop("config", {})}
    workspace = {"root": str(root), **members.pop("workspace", {})}
    return run(run_id, extensions=extensions, workspace=workspace, config=config, **members)


def ends(messages: Sequence[Any]) -> dict[str, Any]:
    """The last message of each run, by its id."""
    return {message["ref_id"]: message for message in messages if message["t"] in ("final", "fatal")}


def until_ended(child: Child, *run_ids: str, wait_s: float = 20.0) -> list[Any]:
    """Every message until these runs have ended."""
    missing, found = set(run_ids), list[Any]()
    while missing:
        message = child.read(wait_s)
        assert message is not None, (found[-3:], child.stderr())
        found.append(message)
        if message["t"] in ("final", "fatal"):
            missing.discard(message["ref_id"])
    return found


def texts(messages: Sequence[Any], run_id: str) -> list[str]:
    return [
        message["event"].get("text", "")
        for message in messages
        if message["t"] == "event" and message["ref_id"] == run_id and message["event"]["type"].startswith("assistant")
    ]


def carried(messages: Sequence[Any], name: str) -> list[Any]:
    events = [message["event"] for message in messages if message["t"] == "event"]
    return [event["ext"][name] for event in events if name in event.get("ext", {})]


def holds(line: bytes, lines: Sequence[bytes]) -> bool:
    """Whether the hash in a last message holds, found without reading a number.

    Args:
        line: the `final` or `fatal` with a receipt.
        lines: everything that came, for a trace that was left out.
    """
    frame = msgspec.json.decode(line)
    receipt = line[line.index(b',"receipt":{') + 11 : -1]
    if frame.get("trace") == "as_streamed":
        start = msgspec.json.encode({"t": "event", "ref_id": frame["ref_id"]})[:-1] + b',"event":'
        events = [event[len(start) : -1] for event in lines if event.startswith(start)]
        receipt = receipt.replace(b'"trace":[]', b'"trace":[' + b",".join(events) + b"]", 1)
    bare, count = re.subn(rb'"receipt_sha256":"[0-9a-f]{64}"', b'"receipt_sha256":null', receipt, count=1)
    sealed: str = frame["receipt"]["receipt_sha256"]
    return count == 1 and hashlib.sha256(bare).hexdigest() == sealed


def stored(home: Path) -> dict[str, str | None]:
    """How every kept run ended: end reason by run id. Every hash and the chain are checked."""
    with Store.open(home, readonly=True) as store:
        assert store.verify_all().findings == ()
        return {row.run_id: row.reason for row in store.scan()}
