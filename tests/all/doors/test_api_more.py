"""More of `tests/test_api.py`: what takes many processes, or seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import WAIT_S

WAITING = """
import backplane, sys, time
def ask(asked):
    print("asked", flush=True)
    WAIT
policy = backplane.PolicyProfile(require_approval_for=("bash",))
backplane.run("echo hi", backend="shell", root=".", policy=policy, on_ask=ask)
"""


@pytest.mark.parametrize("waits", ["input()", "time.sleep(600)"])
def test_a_function_that_waits_keeps_no_program_alive_after_ctrl_c(
    backplane_home: Path, tmp_path: Path, waits: str
) -> None:
    words = [sys.executable, "-c", WAITING.replace("WAIT", waits)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, text=True, **pipes) as program:  # type: ignore[call-overload]
        assert program.stdout.readline() == "asked\n"
        program.send_signal(signal.SIGINT)
        assert program.wait(WAIT_S) == -signal.SIGINT
        said = program.stderr.read()
    assert "Fatal Python error" not in said
    assert said.rstrip().endswith("KeyboardInterrupt")
