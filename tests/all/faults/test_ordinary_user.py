"""The cases about permissions once more without root's rights, before which no mode is closed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.all.faults.ground import ROOT
from tests.ordinary import as_nobody, python_of_everybody

FILES = ("process", "workspace", "resource", "start")
CASES = "may_read or may_not_be_read or its_modes or no_process or closed and (out_of_its_reach or nowhere_says)"


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
def test_the_cases_about_permissions_pass_as_an_ordinary_user() -> None:
    python = python_of_everybody() if shutil.which("setpriv") else None
    if python is None:
        pytest.skip("needs setpriv and an interpreter that an ordinary user may run")
    with tempfile.TemporaryDirectory(prefix="ordinary-") as folder:  # Not below pytest's own, which is root's alone.
        os.chmod(folder, 0o777)
        path = f"{ROOT}:{Path(pytest.__file__).parents[1]}"
        env = {"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "PYTHONPATH": path}
        words = [*as_nobody(), python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CASES]
        words += [f"tests/all/faults/test_{name}_faults.py" for name in FILES]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
