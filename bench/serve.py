"""Events a second with fifty hosts at once: through `backplane serve`, and by the Python API. Prints JSON.

`bench/serve.py api|serve RUNS COUNT`. The same children write the same lines in both; the client of
`serve` reads blocks, counts the lines in them and looks at nothing else. Wall clock, the time of runs
with few events taken off, so that the start of fifty children is not what is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import anyio

import backplane
from backplane.config import Limits, Settings
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane

CHILD = str(Path(__file__).with_name("child.py"))
FEW = 100
"""Events of each of the runs that are taken off."""
READ_BYTES = 1024 * 1024
EVENT, FINAL = b'\n{"t":"event"', b'\n{"t":"final"'
"""How such a line begins; of one length, so that neither is counted twice where two blocks meet."""


def command(count: int) -> list[str]:
    return [sys.executable, "-E", "-s", CHILD, "abp", "stream", str(count)]


def folders() -> tuple[Path, Path]:
    """A state folder and an empty workspace; removed by whoever started this process."""
    base = Path(tempfile.mkdtemp())
    (base / "root").mkdir()
    return base / "home", base / "root"


def api(runs: int, count: int) -> float:
    """Seconds of so many runs at once by the Python API."""
    home, root = folders()
    settings = Settings(limits=Limits(runs_max=runs), isolation="off")
    spec = backplane.WorkspaceSpec(root=str(root), mode="pass_through")
    backend = ProcessBackend(id="bench", argv=tuple(command(count)))
    seen = 0

    async def one(plane: ControlPlane) -> None:
        nonlocal seen
        async with plane.start(backplane.WorkOrder("bench", workspace=spec), backend) as run:
            async for _ in run:
                seen += 1

    async def every() -> None:
        async with ControlPlane(settings, home, os.environ) as plane, anyio.create_task_group() as tasks:
            for _ in range(runs):
                tasks.start_soon(one, plane)

    began = time.perf_counter()
    anyio.run(every)
    assert seen == runs * count, seen
    return time.perf_counter() - began


def serve(runs: int, count: int) -> float:
    """Seconds of so many runs at once through `serve`, its own start not counted."""
    home, root = folders()
    home.mkdir()
    config = home.parent / "backplane.toml"
    config.write_text(
        f"default_backend = 'bench'\nisolation = 'off'\n[limits]\nruns_max = {runs}\n"
        f"[backends.bench]\ncommand = {json.dumps(command(count))}\n"
    )
    environ = {**os.environ, "BACKPLANE_HOME": str(home), "BACKPLANE_CONFIG": str(config)}
    words = [sys.executable, "-m", "backplane", "serve"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0)
    assert server.stdin is not None
    assert server.stdout is not None
    held = os.read(server.stdout.fileno(), READ_BYTES)
    assert b'"t":"hello"' in held
    began = time.perf_counter()
    for _ in range(runs):
        order = {"id": str(uuid.uuid4()), "task": "bench", "workspace": {"root": str(root), "mode": "pass_through"}}
        run = {"t": "run", "id": str(uuid.uuid4()), "work_order": order, "extensions": ["many/1"]}
        server.stdin.write(json.dumps(run).encode() + b"\n")
    events = finals = 0
    # Counting without looking: a client's own reading is not what is measured, and it has two cores to share.
    rest = b"\n"
    while finals < runs:
        data = os.read(server.stdout.fileno(), READ_BYTES)
        assert data, "serve ended before its runs"
        block = rest + data
        events += block.count(EVENT)
        finals += block.count(FINAL)
        rest = block[-len(EVENT) + 1 :]
    spent = time.perf_counter() - began
    assert events == runs * count, events
    server.stdin.close()
    server.wait()
    return spent


WAYS: dict[str, Callable[[int, int], float]] = {"api": api, "serve": serve}


def main() -> None:
    way, runs, count = WAYS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    spent = way(runs, count) - way(runs, FEW)
    print(json.dumps({"events_s": runs * (count - FEW) / max(spent, 1e-9)}))


if __name__ == "__main__":
    main()
