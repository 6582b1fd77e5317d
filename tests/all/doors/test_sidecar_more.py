"""More of `tests/test_sidecar.py`: what takes many processes, or seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.peers import PLAIN, Child, is_gone, run
from tests.test_sidecar import program

pytestmark = pytest.mark.anyio


def test_a_program_whose_output_is_closed_ends_within_five_seconds(tmp_path: Path) -> None:
    with Child(program(tmp_path)) as child:
        child.send(run(task="deaf", extensions=PLAIN))
        child.until("hello")
        child.until("event")
        child.until("event")
        assert child.process.stdout is not None
        child.process.stdout.close()
        child.wait(5.0)
        assert "Traceback" not in child.stderr()


def test_a_program_whose_parent_is_gone_ends_within_five_seconds(tmp_path: Path) -> None:
    words = [*program(tmp_path)]
    # The parent hands its pipes on and dies: stdin and stdout stay open, only the parent is gone.
    parent = (
        f"import os, subprocess, sys, time\np = subprocess.Popen({words!r})\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\ntime.sleep(60)"
    )
    with Child([sys.executable, "-I", "-S", "-c", parent]) as child:
        child.send(run(task="wait", extensions=PLAIN))
        child.until("hello")
        child.until("event")
        child.until("event")
        pid = int((tmp_path / "pid").read_text())
        child.process.kill()
        child.process.wait()
        final = child.until("final")[-1]
        assert final["receipt"]["usage_raw"] == {"cancelled": "the control plane is gone"}
        assert child.read() is None
        assert is_gone(pid)
