"""Backends and dialects of other wheels: one is installed in a folder, and found by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import ROOT

WAIT_S = 120.0
ENTRIES = """
[backplane.backends]
walrus = walrus_hosts.walrus
shell = walrus_hosts.walrus
broken = walrus_hosts.absent
odd = walrus_agents:odd
[backplane.dialects]
walrus = walrus_agents:DIALECT
openai = walrus_agents:absent
odd = walrus_agents:odd
"""
MODULE = """
from backplane.dialects import dialect

DIALECT = dialect("claude")

def odd():
    return "words"

"""
HOST = """
from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, main
from . import name

async def work(run):
    await run.message(name + ": " + run.order.task)
    return Done()

main(Host(id="walrus-host", capabilities={"streaming": NATIVE}), work)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel leaves in it, as `pip install --target` unpacks one."""
    target = tmp_path_factory.mktemp("installed")
    about = "walrus_agents-4.5.6.dist-info"
    files = {
        "walrus_agents.py": MODULE,
        "walrus_hosts/__init__.py": "name = 'walrus'\n",
        "walrus_hosts/walrus.py": HOST,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: walrus-agents\nVersion: 4.5.6\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": ENTRIES,
        f"{about}/RECORD": "",
    }
    (target / about).mkdir()
    (target / "walrus_hosts").mkdir()
    for name, text in files.items():
        (target / name).write_text(text)
    return target


@pytest.fixture
def run(wheel: Path, backplane_home: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(wheel), str(ROOT)))}

    def call(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "backplane", *words]
        return subprocess.run(argv, cwd=tmp_path, env=env, input=stdin, capture_output=True, text=True, timeout=WAIT_S)

    return call


def test_a_backend_of_a_wheel_runs_and_the_receipt_names_wheel_and_version(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = run("run", "--backend", "walrus", "hello", "--receipt", "receipt.json")
    assert done.returncode == 0, done.stderr
    assert "walrus: hello" in done.stdout
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["usage_raw"]["backplane"]["plugin"] == {"wheel": "walrus-agents", "version": "4.5.6"}
    assert "walrus" in run("backends").stdout


def test_a_shipped_name_is_never_shadowed(run) -> None:  # type: ignore[no-untyped-def]
    done = run("run", "--backend", "shell", "echo from the shell", "--json")
    assert "from the shell" in done.stdout
    assert '"plugin"' not in done.stdout


@pytest.mark.parametrize(("name", "code"), [("broken", 1), ("odd", 1), ("absent", 2)])
def test_a_wheel_at_fault_is_named(run, name: str, code: int) -> None:  # type: ignore[no-untyped-def]
    done = run("run", "--backend", name, "hello")
    assert done.returncode == code
    assert ("walrus-agents 4.5.6" in done.stderr) == (name != "absent")


def test_a_dialect_of_a_wheel_translates_and_shadows_none(run) -> None:  # type: ignore[no-untyped-def]
    asked = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    there = run("translate", "--from", "openai", "--to", "walrus", "--kind", "request", stdin=asked)
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["messages"] == [{"role": "user", "content": "hi"}]
    for name, said in (("odd", "the dialect 'odd' of a wheel is none"), ("absent", "walrus")):
        refused = run("translate", "--from", name, "--to", "openai", "--kind", "request", stdin=asked)
        assert refused.returncode == 2
        assert said in refused.stderr
