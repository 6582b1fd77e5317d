"""A host that claims what it cannot do is found out by `backplane backends --probe`, and an honest one is not blamed.

The liar is a copy of the project whose host claims all 41 abilities at once: each claim that the honest one does not
make is one mutation. One agent is tried so in every run of the suite, all of them with
BACKPLANE_FAULTS=long, and then the honest hosts, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backplane.agents import rows
from backplane.contract.capability import CAPABILITIES
from hosts.agent import host_of
from tests.all.faults.sizes import LONG
from tests.all.vendors.found import ROOT
from tests.all.vendors.found import program as pinned
from tests.all.vendors.ground import Agent
from tests.all.vendors.matrix import untried
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.timeout(300)]

AGENTS = [Claude(), Codex(), Copilot(), Gemini(), Kimi()] if LONG else [Codex()]
ROWS = rows.rows_of(str(ROOT / "hosts"))
PROBE_S = 240
CLAIMS = ("native", "emulated", "restricted")
LIAR = """
import runpy, sys
from pathlib import Path
from backplane.contract.capability import CAPABILITIES, Manifest

Manifest.to_wire = lambda manifest: dict.fromkeys(CAPABILITIES, "native")
sys.argv[0] = str(Path(__file__).with_name("honest") / Path(__file__).name)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    chosen: Agent = request.param
    return chosen


def project(folder: Path, host: str | None = None) -> Path:
    """A copy of the project as it is installed; with a host that lies."""
    for part in ("backplane", "hosts", "contracts", "schemas"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    if host is not None:
        file, honest = folder / "hosts" / host, folder / "hosts" / "honest"
        honest.mkdir()
        for name in (file.name, "agents.toml"):
            shutil.copy(folder / "hosts" / name, honest / name)
        file.write_text(LIAR)
    return folder


def probe(agent: Agent, installed: Path, folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """What `backends --probe` says of an agent: its exit code, and its findings by ability."""
    state, work = folder / "state", folder / "work"
    state.mkdir()
    work.mkdir()
    program = Path(agent.options("http://127.0.0.1:1")["program"])
    env = {**os.environ, "PYTHONPATH": str(installed), "BACKPLANE_HOME": str(state)}
    env["PATH"] = f"{program.parent}:{pinned('rg').parent}:{env['PATH']}"
    words = (sys.executable, "-m", "backplane", "backends", "--probe", agent.name, "--json")
    done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=PROBE_S, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {finding["ability"]: finding for finding in json.loads(done.stdout)["findings"]}


def false_claims(findings: dict[str, dict[str, Any]], name: str) -> set[str]:
    explained = untried(name)
    return {
        ability
        for ability, found in findings.items()
        if found["claim"] in CLAIMS and found["proof"] != "proved" and ability not in explained
    }


def honest_claims(agent: Agent, folder: Path) -> set[str]:
    """What the honest host claims, each proved by a probe of its own: by the same trials as the liar's."""
    (folder / "honest").mkdir()
    code, honest = probe(agent, ROOT, folder / "honest")
    assert code == 0
    assert false_claims(honest, agent.name) == set()
    return {name for name, found in honest.items() if found["claim"] in CLAIMS}


def test_a_host_that_claims_everything_is_found_out_in_each_claim(agent: Agent, tmp_path: Path) -> None:
    manifest = host_of(agent.name, rows.read(ROWS, agent.name, {})).capabilities
    true = honest_claims(agent, tmp_path) if LONG else set(manifest)
    (tmp_path / "liar").mkdir()
    code, lying = probe(agent, project(tmp_path / "copy", rows.HOST), tmp_path / "liar")
    # A claim that no trial can show is listed as untried, and is not called false.
    assert code == any(found["claim"] in CLAIMS and found["proof"] == "failed" for found in lying.values())
    assert set(lying) == set(CAPABILITIES)
    assert false_claims(lying, agent.name) == set(CAPABILITIES) - true
    assert len(false_claims(lying, agent.name)) >= 20
