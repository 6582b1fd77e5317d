"""Plays the cases of a file through the Python API, with `backplane serve` as the host, and says how each went.

The outer control plane stages, asks and seals by itself; the inner one is what the other clients talk to.
Many runs at once go to hosts of its own, one child each: a Python program needs no server for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec

from backplane import config
from backplane.contract.approval import Decision
from backplane.contract.events import Approval
from backplane.contract.receipt import verify_bytes
from backplane.contract.work import WorkOrder
from backplane.protocol import LINE_BYTES_MAX
from backplane.receipts.build import ends_in_final
from backplane.runtime import backends
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.plane import ControlPlane

Record = dict[str, Any]


def say(record: Record) -> None:
    print(json.dumps(record), flush=True)


def one_digit_changed(receipt: bytes) -> bytes:
    before, mark, after = receipt.partition(b'"duration_ms":')
    return before + mark + b"%d" % (int(after[:1]) % 9 + 1) + after[1:]


async def play(plane: ControlPlane, serve: ProcessBackend, one: Record) -> Record:
    asks: list[str] = []
    types: list[str] = []
    said = hashlib.sha256()
    text_bytes = tool_errors = 0

    async def on_ask(event: Approval) -> Decision:
        asks.append(event.body["name"])
        return Decision(**one["answer"])

    order = msgspec.convert(one["order"], WorkOrder)
    async with plane.start(order, serve, on_ask=on_ask if "answer" in one else None) as run:
        async for event in run:
            plain = msgspec.to_builtins(event)
            if plain["type"] != "warning":
                types.append(plain["type"])
            tool_errors += plain.get("is_error", False)
            if plain["type"] != "assistant_message":
                continue
            said.update(plain["text"].encode())
            text_bytes += len(plain["text"].encode())
            if one.get("when") == "cancel":
                await run.cancel("the user changed his mind")
            elif one.get("when") == "kill the server":
                os.kill(server_of(list(serve.argv)), signal.SIGKILL)
            elif one.get("when") == "wait":
                say({"cell": one["cell"], "ready": True})
    assert run.end is not None
    receipt = b"".join(run.receipt_chunks())
    return {
        "types": types,
        "text_bytes": text_bytes,
        "text_sha256": said.hexdigest(),
        "tool_errors": tool_errors,
        "asks": asks,
        "end": "final" if ends_in_final(run.end, run.error) else "fatal",
        "code": run.error.code if run.error is not None else None,
        "outcome": run.receipt.outcome,
        "reason": run.end.reason,
        "as_streamed": len(receipt) > LINE_BYTES_MAX,
        "verified": verify_bytes(receipt) is None,
        "changed_verifies": verify_bytes(one_digit_changed(receipt)) is None if one.get("change") else None,
    }


def server_of(command: list[str]) -> int:
    """The process of the one `backplane serve` that was started with these words."""
    wanted = [word.encode() for word in command]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")[:-1]
        except OSError:  # ended meanwhile
            continue
        if words == wanted:
            return int(path.parent.name)
    raise AssertionError("the server has gone already")


async def play_many(plane: ControlPlane, backend: Backend, one: Record) -> Record:
    counts = {"runs": 0, "finals": 0, "verified": 0, "own": 0}

    async def one_run(number: int) -> None:
        task = f"{one['order']['task']} {number}"
        order = msgspec.convert(one["order"] | {"task": task}, WorkOrder)
        async with plane.start(order, backend) as run:
            text = "".join([getattr(event, "text", "") async for event in run])
        counts["runs"] += 1
        counts["finals"] += ends_in_final(run.end, run.error)
        counts["verified"] += verify_bytes(b"".join(run.receipt_chunks())) is None
        counts["own"] += text == task

    async with anyio.create_task_group() as tasks:
        for number in range(one["times"]):
            tasks.start_soon(one_run, number)
    return counts


async def main(plan: Record) -> None:
    own_home = Path(os.environ["BACKPLANE_HOME"]).with_name("outer")
    passed_on = {name: os.environ[name] for name in ("BACKPLANE_HOME", "PYTHONPATH")}
    serve = ProcessBackend(id="serve", argv=tuple(plan["command"]), env=passed_on)
    settings = config.load(Path(sys.argv[1]).with_name("backplane.toml"), os.environ, Path.cwd())
    settings = msgspec.structs.replace(settings, isolation="off")
    async with ControlPlane(settings, own_home, os.environ) as plane:
        for one in plan["cases"]:
            if "times" in one:
                echo = backends.find(one["order"]["config"]["vendor"]["abp"]["backend"], settings, os.environ)
                record = await play_many(plane, echo, one)
            else:
                record = await play(plane, serve, one)
            say({"cell": one["cell"], **record})


anyio.run(main, json.loads(Path(sys.argv[1]).read_bytes()))
