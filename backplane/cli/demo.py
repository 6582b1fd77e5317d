"""`demo`: a whole run on a sample with a bug, from the order to the working sample; no key, no network.

The sample lies in a temporary folder; the run is stored in a state folder of the demo's own. The first step that fails
ends the demo.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import backplane
from backplane import config
from backplane.cli import ended, streams
from backplane.cli.command import Args, Parser
from backplane.config import Limits, Settings, child_environment
from backplane.contract.events import AgentEvent
from backplane.errors import BackendError
from backplane.process.tool import run_tool
from backplane.receipts.store import Store
from backplane.runtime.run import Run
from backplane.view.console import Look
from backplane.workspace import apply_patch

HELP = "Run an order on a small sample with a bug: staged, fixed, tested, sealed, verified, applied."
EXAMPLE = "backplane demo"

SAMPLE: Final = Path(__file__).resolve().parent / "sample"
"""The sample's files, each with `.txt` behind its name, as they are no code of ours."""

REPAIR: Final = "repair.py.txt"
"""The script that is the order's task; not part of the sample's project."""

TEST_S_MAX: Final = 60.0
"""Seconds for the sample's test: it takes milliseconds, and a minute on a machine that swaps."""

RUN_S_MAX: Final = 120.0
"""Seconds for the run, which takes one or two; then it ends as timed out."""

_PYTHON: Final = (sys.executable, "-E", "-s", "-B")
_LOOK: Final = Look(terminal=False)


def options(p: Parser) -> None:
    """Add no option: the demo is the same everywhere."""


def run(args: Args) -> int:
    began = time.monotonic()
    home = config.home(os.environ | {"BACKPLANE_HOME": str(config.home_path(os.environ) / "demo")})
    with tempfile.TemporaryDirectory(prefix="backplane-demo-") as folder:
        run = _demo(Path(folder) / "sample", home)
    streams.write(f"\ndemo: every step succeeded, {time.monotonic() - began:.1f} s\n")
    streams.write(f"\nThe run is stored in {streams.one_line(home)}; look at it:\n\n")
    streams.write(f"  export BACKPLANE_HOME={shlex.quote(str(home))}\n")
    name = "backplane" if shutil.which("backplane") else f"{shlex.quote(sys.executable)} -m backplane"
    for words, more in (("show", ""), ("receipts verify", ""), ("why", ""), ("report", " > run.html")):
        streams.write(f"  {name} {words} {run.id[:8]}{more}\n")
    return 0


def _demo(sample: Path, home: Path) -> Run:
    _step("A sample project with a bug")
    sample.mkdir()
    for source in sorted(SAMPLE.glob("*.txt")):
        if source.name != REPAIR:
            shutil.copyfile(source, sample / source.name.removesuffix(".txt"))
    _require(not _passes(sample), "the sample's test passes although the sample has a bug")

    _step("A work order for the backend 'shell': repair it, in a staged copy")
    script = (SAMPLE / REPAIR).read_text(encoding="utf-8")
    order = backplane.WorkOrder(shlex.join([*_PYTHON, "-c", script]))
    settings = Settings(limits=Limits(run_s=RUN_S_MAX))  # The user's own settings do not apply.
    run = backplane.run(order, backend="shell", root=sample, settings=settings, home=home, on_event=_show).check()
    streams.write(_LOOK.end_line())

    _step("Its result: a patch")
    assert run.patch is not None, "a run in a staged copy that changed a file has a patch"
    for line in ended.diff(run.patch, _LOOK):
        streams.write(f"  {line}")

    _step("The receipt, read back from the store and verified")
    with Store.open(home, readonly=True) as store:
        faults, receipt = store.verify(run.id), store.load(run.id)
    _require(not faults, "; ".join(fault.fact for fault in faults))
    rows = {"run": run.id, "outcome": receipt.outcome, "trace": streams.count(len(receipt.trace), "event")}
    for name, value in (rows | {"sha256": receipt.receipt_sha256}).items():
        streams.write(f"  {name:<10}{streams.one_line(value)}\n")

    _step("Apply the patch to the original and test again")
    _require(not _passes(sample), "the original changed before the patch was applied")
    apply_patch(home / "runs" / run.id)
    _require(_passes(sample), "the sample's test fails with the patch applied")
    return run


def _show(event: AgentEvent) -> None:
    streams.write(_LOOK.event(event))


def _passes(sample: Path) -> bool:
    """Run the sample's own test as a child and print its verdict; return True if it passed."""
    env = child_environment({}, {}, os.environ)
    done = run_tool((*_PYTHON, "-m", "unittest"), env=env, cwd=str(sample), timeout_s=TEST_S_MAX)
    for line in done.stderr.decode("utf-8", "replace").splitlines():
        if line.startswith(("FAIL: ", "ERROR: ", "AssertionError", "Ran ", "OK", "FAILED")):
            streams.write(f"  {streams.one_line(line)}\n")
    return done.code == 0


def _step(title: str) -> None:
    streams.write(f"\n== {title}\n")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BackendError("internal", f"the demo failed: {otherwise}")
