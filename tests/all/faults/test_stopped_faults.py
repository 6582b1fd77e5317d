"""A control plane that was stopped, or waited for its disk, reads what lies in its pipe before it judges a deadline.

Real processes and real signals; the limits are of seconds, as a stop has to be longer than them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backplane.config import Limits
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE, ended, go, order, plane, script

STOP_S = 3.5

TICKS = """
hello(); run = take()
for number in range(40):
    put(event(run, str(number))); time.sleep(0.1)
put(final(run)); end()
"""
LATE_HELLO = "time.sleep(1.5); hello(); run = take(); put(event(run), final(run)); end()"
EARLY_FINAL = "hello(); run = take(); put(event(run)); time.sleep(1); put(final(run)); end()"


@pytest.mark.parametrize(
    ("host", "limit", "with_host"),
    [
        (TICKS, {"BACKPLANE_IDLE_S": "2"}, False),
        (TICKS, {"BACKPLANE_IDLE_S": "2"}, True),
        (LATE_HELLO, {"BACKPLANE_HELLO_S": "3"}, False),
        (EARLY_FINAL, {"BACKPLANE_RUN_S": "3"}, False),
    ],
    ids=["idle", "idle, the host stopped, too", "hello", "run"],
)
def test_a_stopped_control_plane_reads_before_it_judges(
    host: str, limit: dict[str, str], with_host: bool, tmp_path: Path
) -> None:
    path, noted = tmp_path / "host.py", tmp_path / "pid"
    note = f"open({str(noted)!r}, 'w').write(str(os.getpid()))\n"
    path.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + note + host)
    words = ["run", "tick", "--json", "--root", str(tmp_path), "--in-place", "--isolation", "off"]
    program = [sys.executable, "-m", "backplane", *words, "--sidecar", f"{sys.executable} -I -S {path}"]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, cwd=ROOT, text=True, env={**os.environ, **limit})
    assert child.stdout is not None
    try:
        end_s = time.monotonic() + 20
        while not noted.exists() or not noted.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        if host is not LATE_HELLO:
            child.stdout.readline()  # The first event is out: the order was sent.
        stopped = [child.pid, *([int(noted.read_text())] if with_host else [])]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        last = json.loads(child.stdout.read().splitlines()[-1])
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert (last["t"], last.get("error_code")) == ("final", None)
    assert last["receipt"]["outcome"] == "complete"


@pytest.mark.anyio
async def test_a_slow_disk_is_no_silence_of_the_host(
    backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    slow: list[int] = []

    def write(fd: int, data: bytes) -> int:
        if not slow and os.readlink(f"/proc/self/fd/{fd}").endswith("trace.jsonl"):
            slow.append(fd)
            time.sleep(2.0)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    body = TICKS.replace("40", "30")
    async with plane(backplane_home, Limits(hello_s=5.0, cancel_grace_s=0.4, idle_s=0.8)) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert slow
    assert ended(run) == ("complete", None, "complete")
    assert len(events) == 30
