"""Each transcript of the contract, played through a run, gives the receipt whose digest `transcripts.jsonl` keeps.

`pytest tests/test_transcripts.py --words` writes that file anew; a receipt that changes is a change of the contract.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest

from backplane import resources
from backplane.config import Limits
from backplane.contract.approval import Decision
from backplane.runtime.memory import MemoryBackend
from backplane.runtime.plane import ControlPlane
from tests.runs import check, order, plane, saying

TRANSCRIPTS: Final = sorted((resources.find("contracts") / "transcripts").glob("*.jsonl"))
KEPT: Final = Path(__file__).with_name("transcripts.jsonl")
WAIT_S: Final = 20.0
"""For a line of the control plane that comes at once."""
MARKS: Final = (
    (r"20\d\d-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r'"(duration_ms|work_order_sha256|receipt_sha256|record_sha256)":("[^"]*"|\d+)', r'"\1":0'),
    (r'"claims":\{("duration_ms":0,)?', '"claims":{'),  # Only where it differs from what was seen.
)
"""What differs from run to run, and what stands for it."""


async def receipt_of(name: str, rows: list[dict[str, Any]], control: ControlPlane, root: Path) -> dict[str, Any]:
    """Play the host's part of a transcript, and return the receipt without times."""
    limits = rows.pop(0)["set"] if "set" in rows[0] else {}
    run_id = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    named = [json.loads(row["line"])["id"] for row in rows if row["from"] == "control" and _type(row) == "run"]

    if named and "line_bytes_max" in limits:
        limits["line_bytes_max"] += len(run_id) - len(named[0])

    async def serve(stdin: int, stdout: int) -> None:
        kept, is_sent, is_asking = bytearray(), False, name.startswith("ext_ask")
        for row in rows:
            if row["from"] == "control":
                if (_type(row) == "answer" and is_asking) or (_type(row) == "run" and not is_sent):
                    with anyio.move_on_after(WAIT_S):
                        is_sent = await _take(stdin, kept) or is_sent
                continue
            data = base64.b64decode(row["line_base64"]) if "line_base64" in row else row["line"].encode()
            for its in named[:1]:
                data = data.replace(json.dumps(its).encode(), json.dumps(run_id).encode())
            await _write(stdout, data + b"\n")

    backend = MemoryBackend(id=name, serve=serve, limits=Limits(hello_s=WAIT_S, idle_s=WAIT_S, **limits))
    asked = msgspec.structs.replace(order(root, task="say hi"), id=run_id)
    on_ask = saying(Decision("allow", "fine"))
    async with control.start(asked, backend, on_ask=on_ask, run_id=run_id) as run:
        events = [event async for event in run]
    check(run, events)
    text = b"".join(run.receipt_chunks()).decode()
    for found, mark in MARKS:
        text = re.sub(found, mark, text)
    value: dict[str, Any] = json.loads(text.replace(str(root), "ROOT"))
    value["usage_raw"]["backplane"]["counts"].pop("unwritten", None)  # A host may end before it has read its answer.
    if not run.was_sent:  # It may have ended before its folder was read.
        value.pop("verification")
        for member in ("patch", "claimed", "enforcement"):
            value["usage_raw"]["backplane"].pop(member, None)
    return value


def _type(row: dict[str, Any]) -> str:
    found = re.search(r'"t":"(\w+)"', row.get("line", ""))
    return found[1] if found else ""


async def _take(stdin: int, kept: bytearray) -> bool:
    """Wait for a line; False if the input has ended."""
    while b"\n" not in kept:
        await anyio.wait_readable(stdin)
        if not (piece := os.read(stdin, 65536)):
            return False
        kept += piece
    del kept[: kept.index(b"\n") + 1]
    return True


async def _write(stdout: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(stdout, data) :]
        except BlockingIOError:
            await anyio.wait_writable(stdout)
        except BrokenPipeError:  # The run has ended.
            return


@pytest.mark.anyio
async def test_each_transcript_gives_its_receipt(
    backplane_home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found: dict[str, dict[str, Any]] = {}
    root = tmp_path / "work"
    root.mkdir()

    async def play(name: str, rows: list[dict[str, Any]]) -> None:
        found[name] = await receipt_of(name, rows, control, root)

    async with plane(backplane_home) as control, anyio.create_task_group() as playing:
        for path in TRANSCRIPTS:
            rows = [json.loads(row) for row in path.read_text().split("\n") if row]
            playing.start_soon(play, path.stem, rows)
    now = [_row(name, found[name]) for name in sorted(found)]
    if request.config.getoption("words"):
        KEPT.write_text("".join(json.dumps(row) + "\n" for row in now))
    kept = [json.loads(line) for line in KEPT.read_text().splitlines()]
    for row in now:
        assert row in kept, json.dumps(found[row["name"]], indent=1)
    assert len(now) == len(kept)


def _row(name: str, receipt: dict[str, Any]) -> dict[str, Any]:
    own = receipt["usage_raw"]["backplane"]
    return {
        "name": name,
        "outcome": receipt["outcome"],
        "end": own["end"]["reason"],
        "code": own["end"].get("code"),
        "events": len(receipt["trace"]),
        "sha256": hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest(),
    }
