"""Runs the fault suite and prints its figures: `xtask.py faults [--quick | --long]`.

Quick: every case once. Long: every case three times, the first time at full size, then the queue's own failure test.
Where this is root, the cases about permissions run once more as an ordinary user. A figure that nothing measured says
so.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
NOBODY: Final = 65534
CATALOGUE: Final = [
    *(1, 2, 3, 4, 5, 8, 12, 13, 14, 16, 17, 18, 20, 21, 24, 25, 26, 28, 32, 33, 34, 35, 36, 38, 40),
    *(42, 44, 45, 46, 47, 48, 50, 51, 52, 54, 57, 58, 59),
]
"""The numbers of the fault catalogue; a case is passed when every test that names it is."""

Measured = tuple[float, str]
Row = tuple[str, str, str, Callable[[float], bool]]

ROWS: Final[tuple[Row, ...]] = (
    ("C2", "survived", "200 of 200 kills survived", lambda value: value > 0),
    ("C3", "", "0 left over", lambda value: value == 0),
    ("C4", "good", "good host <= 0.3 s", lambda value: value <= 0.3),
    ("C4", "deaf", "SIGKILL at grace (0.4 s here) + 0.5 s, 0.25 s for the receipt", lambda value: value <= 1.15),
    ("C5", "", "deadline + 0.5 s", lambda value: value <= 0.5),
    ("C6", "", "0 lost of 20000", lambda value: value == 0),
    ("C7", "MiB grown", "<= 64 MiB", lambda value: value <= 64),
    ("C7", "MiB for one", "<= 192 MiB", lambda value: value <= 192),
    ("C7", "MB in all", "<= 150 MB", lambda value: value <= 150),
    ("C8", "", "+5 % at most", lambda value: value <= 5),
    ("C9", "", ">= 20 runs/s", lambda value: value >= 20),
    ("C10", "", "200000 events <= 10 s", lambda value: value <= 10),
    ("C11", "ms", "<= 100 ms", lambda value: value <= 100),
    ("C11", " of ", "0 wrong", lambda value: value == 0),
    ("C12", "", "0 disagree", lambda value: value == 0),
    ("C13", "", "p99 <= 25 ms", lambda value: value <= 25),
    ("C14", "", "0 missed", lambda value: value == 0),
    ("C15", "", "0 hits", lambda value: value == 0),
    ("C16", "ms", "<= 50 ms", lambda value: value <= 50),
    ("C16", "wrong", "0 wrong", lambda value: value == 0),
    ("C17", "", "0 programs", lambda value: value == 0),
    ("C18", "", "0 lost", lambda value: value == 0),
    ("C19", "", "label flips, required refuses", lambda value: value == 1),
    ("C20", "", "+25 ms at most", lambda value: value <= 25),
)
"""Figure, a word of what was measured, goal, and whether a value meets it."""


def run(arguments: Sequence[str], figures: Path, report: Path, *, long: bool) -> int:
    """Run the suite once, its outcome in a JUnit file, its measurements added to `figures`."""
    environ = {**os.environ, "BACKPLANE_FAULTS_FIGURES": str(figures), "BACKPLANE_FAULTS": "long" if long else "quick"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def python_of_everybody() -> str | None:
    """An interpreter of our version that an ordinary user may run; None when there is none."""
    for name in (sys.executable, shutil.which(f"python3.{sys.version_info[1]}"), "/usr/bin/python3"):
        # By way of a shell: setpriv itself still has the rights to start what its child could not.
        words = [*as_nobody(), "sh", "-c", '"$0" -c "import sys; sys.exit(sys.version_info[1])"', str(name)]
        if name and subprocess.run(words, capture_output=True, check=False).returncode == sys.version_info[1]:
            return name
    return None


def as_nobody() -> list[str]:
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def run_as_nobody(report: Path) -> str:
    """Run the cases about permissions as an ordinary user; say how it went."""
    if os.geteuid() != 0:
        return "this is an ordinary user already"
    python = python_of_everybody() if shutil.which("setpriv") else None
    if python is None:
        return "not measured: needs setpriv and an interpreter that an ordinary user may run"
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        os.chmod(folder, 0o777)
        packages = Path(pytest.__file__).parents[1]
        environ = {"PATH": os.environ["PATH"], "HOME": name, "TMPDIR": name, "PYTHONPATH": f"{ROOT}:{packages}"}
        words = [*as_nobody(), python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={folder / 'xml'}"]
        words += ["tests/all/faults/test_process_faults.py", "tests/all/faults/test_workspace_faults.py"]
        words += ["tests/all/faults/test_resource_faults.py", "tests/all/faults/test_start_faults.py"]
        words += ["tests/all/faults/test_guard_faults.py"]
        words += ["-k", "f02 or f05 or f12 or f42 or f45 or f58 or started"]
        done = subprocess.run(words, cwd=ROOT, env=environ, check=False)
        if (folder / "xml").exists():
            shutil.copy(folder / "xml", report)
    return "passed" if done.returncode == 0 else f"failed ({done.returncode})"


def outcomes(reports: Sequence[Path]) -> dict[int, list[bool]]:
    """Per case of the catalogue, whether each of its tests in each run passed; a skip counts as neither."""
    found: dict[int, list[bool]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            named = re.match(r"test_f(\d\d)_", case.get("name", ""))
            if named and case.find("skipped") is None:
                found[int(named[1])].append(case.find("failure") is None and case.find("error") is None)
    return found


def read(figures: Path) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = defaultdict(list)
    for line in figures.read_text(encoding="utf-8").splitlines() if figures.exists() else ():
        entry = json.loads(line)
        found[entry["figure"]].append((entry["value"], entry.get("what", "")))
    return found


def lines_of(name: str, word: str, goal: str, good: Callable[[float], bool], found: list[Measured]) -> list[str]:
    """The table's lines of one row: the worst value of each thing that was measured."""
    rows = [(value, what) for value, what in found if word in what]
    if not rows:
        return [f"{name:<4} {'not measured':<14} {goal}"]
    by_what: dict[str, list[float]] = defaultdict(list)
    for value, what in rows:
        by_what[what].append(value)
    told = []
    for what, values in by_what.items():
        worst = min(values, key=lambda value: (good(value), -value))
        times = f" (×{len(values)})" if len(values) > 1 else ""
        verdict = "ok" if good(worst) else "MISSED"
        told.append(f"{name:<4} {verdict:<7} {worst:10.4g} {what}{times}; goal {goal}")
    return told


def table(found: dict[str, list[Measured]], cases: dict[int, list[bool]]) -> list[str]:
    passed = [number for number in CATALOGUE if cases.get(number) and all(cases[number])]
    missed = [f"F{number:02}" for number in CATALOGUE if number not in passed]
    told = [f"C1   {'ok' if not missed else 'MISSED':<7} {len(passed)} of {len(CATALOGUE)} cases passed"]
    if missed:
        told[0] += f"; not passed or not run: {', '.join(missed)}"
    for name, word, goal, good in ROWS:
        told += lines_of(name, word, goal, good, found.get(name, []))
    return told


def main(words: list[str]) -> int:
    """Run the suite; 0 when every run of it passed."""
    long = "--long" in words
    rest = [word for word in words if word not in ("--long", "--quick")]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-report-") as name:
        folder = Path(name)
        figures, reports, codes = folder / "figures.jsonl", [], []
        for number in range(3 if long else 1):
            reports.append(folder / f"{number}.xml")
            codes.append(run(["tests/all/faults", *rest], figures, reports[-1], long=long and number == 0))
        if long:
            queue = ["-s", "tests/all/scale/test_queue_faults.py", *rest]
            codes.append(run(queue, figures, folder / "scale.xml", long=True))
        ordinary = run_as_nobody(folder / "nobody.xml")
        cases, found = outcomes([*reports, folder / "nobody.xml"]), read(figures)
    cores, load = os.cpu_count(), os.getloadavg()[1]
    print(f"\n{platform.platform()}, {cores} cores, load {load:.1f}, Python {platform.python_version()}")
    print(f"as an ordinary user: {ordinary}")
    print("\n".join(table(found, cases)))
    print(f"faults: {time.monotonic() - began:.0f} s, {'passed' if not any(codes) else 'FAILED'}")
    return 1 if any(codes) or ordinary.startswith("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
