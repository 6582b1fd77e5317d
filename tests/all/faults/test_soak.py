"""The soak in short: every case of `bench/soak.py` twice, and nothing is left; `python -m bench.soak` runs it whole."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.soak import CASES
from tests.peers import ROOT


@pytest.mark.timeout(300)
def test_bad_hosts_and_callers_leave_nothing() -> None:
    command = [sys.executable, "-m", "bench.soak", str(2 * len(CASES))]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
