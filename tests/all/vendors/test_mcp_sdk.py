"""`backplane mcp`, spoken with by the public SDK."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.all.doors.test_mcp import SERVER
from tests.all.vendors.found import referee
from tests.peers import ROOT


def test_the_public_sdk_runs_reads_and_validates(tmp_path: Path) -> None:
    python = referee("mcp")
    script = ROOT / "tests" / "all" / "vendors" / "sdk_client_of_mcp.py"
    command = json.dumps([*SERVER, "--root", str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, str(script), command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["server"], seen["tools"]) == ("backplane", ["run", "receipts", "validate"])
    ran, listed, wrong, right, *refused = seen["answers"]
    assert (ran[0], ran[1]["outcome"]) == (False, "complete")
    assert "+hi\n" in ran[1]["patch"]
    assert [row["run_id"] for row in listed[1]["receipts"]] == [ran[1]["run_id"]]
    assert (wrong[1]["valid"], wrong[1]["findings"][0]["pointer"], right[1]["valid"]) == (False, "/task", True)
    assert [answer[0] for answer in refused] == [True, True, True]
    assert [line for _, line in seen["progress"]] == ["shell starts", "calls bash", "shell ends: complete"]
    assert "run, receipts, validate" in seen["refused"]
