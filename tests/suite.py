"""Runs the whole suite with coverage, children included, and ends with pytest's closing line.

The tests run in a few workers. A worker is measured by coverage.py, the Python children below it by `child_lines.py`;
both are joined here. Only `xtask.py test --all` comes this way; by hand, `suite.py tests/test_x.py` shows what a part
covers.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).resolve().parent.parent
SUITE_S_MAX = int(os.environ.get("BACKPLANE_SUITE_S_MAX", "3600"))
"""CI says what is left of its time; a suite that hangs is still reported."""
END_S_MAX = 10
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
WORKERS = 4
"""Two more than the cores of a small machine: much of the suite waits for a deadline or a child."""
SECOND_LOOKS_MAX = 8
"""More than this is no stall of the machine."""
LOWEST_SHOWN = 8
MEMORY_KB_MIN = 8 << 20
"""Free, or pytest's folder stays on the disk."""
PTH = (
    # One child in eight. Where `lib64` is a link to `lib`, some environments process a `.pth` twice in one start.
    "import os, sys; os.urandom(1)[0] % 8 or 'child_lines' in sys.modules "
    "or not os.path.isdir(sys.prefix + '/suites') "
    "or os.listdir(sys.prefix + '/suites') and __import__('child_lines').start()\n"
)


def settings_of_coverage() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings: dict[str, Any] = tomllib.load(file)["tool"]["coverage"]
    return settings


def write_settings(folder: Path, settings: dict[str, Any]) -> Path:
    """Write the project's coverage settings with absolute paths; a child may work anywhere."""
    run = {key: value for key, value in settings["run"].items() if key != "parallel"}
    run["source"] = [str(ROOT / name) for name in run["source"]]
    run["omit"] = [str(ROOT / name) for name in run.get("omit", [])]
    run["data_file"] = str(folder / "all")
    run["disable_warnings"] = ["no-data-collected"]
    run["core"] = "sysmon" if sys.version_info >= (3, 12) else "ctrace"
    tables = {"run": run, "report": settings.get("report", {})}
    lines = []
    for name, table in tables.items():
        lines.append(f"[tool.coverage.{name}]")
        # JSON's strings, lists, numbers and booleans are TOML's too.
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path = folder / "settings.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def install_child_lines() -> None:
    """Put the tracer and its `.pth` line into this environment, and the folder of the markers."""
    site_packages = Path(sysconfig.get_path("purelib"))
    tracer = Path(__file__).with_name("child_lines.py").read_text(encoding="utf-8")
    for name, text in (("child_lines.py", tracer), ("child_lines.pth", PTH)):
        path = site_packages / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            temporary = path.with_name(f"{name}.{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    markers = Path(sys.prefix) / "suites"
    markers.mkdir(exist_ok=True)
    for marker in markers.iterdir():
        if not Path(f"/proc/{marker.name}").exists():  # left by a suite that was killed
            marker.unlink(missing_ok=True)


def write_marker(folder: Path, sources: list[Path]) -> None:
    """Lay out the file that all children note their lines in, and write what they are told about it."""
    rows, size = [str(folder / "lines")], 0
    for path in sorted(path for source in sources for path in source.rglob("*.py")):
        rows.append(f"{size} {path}")
        size += path.read_bytes().count(b"\n") + 2  # Lines count from one, and the last may lack its end.
    (folder / "lines").write_bytes(bytes(size))
    (folder / "marker").write_text("\n".join(rows) + "\n", encoding="utf-8")


def lines_of_children(folder: Path) -> dict[str, set[int]]:
    """Return file → lines that ran in any child."""
    _, *rows = (folder / "marker").read_text(encoding="utf-8").splitlines()
    seen = (folder / "lines").read_bytes()
    firsts = [(int(first), name) for first, _, name in (row.partition(" ") for row in rows)]
    ends = [*(first for first, _ in firsts[1:]), len(seen)]
    return {
        name: {place - first for place in range(first, end) if seen[place]}
        for (first, name), end in zip(firsts, ends, strict=True)
    }


def run_pytest(folder: Path, sources: list[Path]) -> int:
    """Run pytest over everything, its children noted in `folder`; return its exit code."""
    install_child_lines()
    write_marker(folder, sources)
    LAST_FAILED.unlink(missing_ok=True)  # Or what failed long ago and is no more would be tried, too.
    command = [sys.executable, "-m", "pytest", f"--numprocesses={WORKERS}", "--dist=worksteal"]
    command += ["--durations=8", "--durations-min=2", *sys.argv[1:]]
    own = {"BACKPLANE_SUITE_SUMMARY": str(folder / "summary.json"), "BACKPLANE_SUITE_FOLDER": str(folder)}
    return wait_for(subprocess.Popen([*in_memory(), *command], cwd=ROOT, env={**os.environ, **own}))


def in_memory() -> list[str]:
    """Return what to put before a command so that pytest's folder is in memory; nothing where that can't be had.

    The suite makes and removes some millions of files, which may cost a disk's file system a tenth of all time. Root
    alone may mount. The mount is seen by the command and its children only, and goes with the last of them.
    """
    try:
        folder = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        mount = 'mount -t tmpfs -o mode=700 tests "$0" && exec "$@"'
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, str(folder)]
        free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        if not free or int(free[1]) < MEMORY_KB_MIN:
            return []
        return words if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else []
    except OSError:  # no such file, no such program
        return []


def wait_for(pytest: subprocess.Popen[bytes]) -> int:
    """Wait for pytest, at most `SUITE_S_MAX`; Ctrl-C and the limit let it print what it has."""
    try:
        return pytest.wait(SUITE_S_MAX)
    except subprocess.TimeoutExpired:
        print(f"\nsuite: stopped after {SUITE_S_MAX} s", flush=True)
        pytest.send_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    try:
        return pytest.wait(END_S_MAX) or 1
    except subprocess.TimeoutExpired:
        pytest.kill()
        pytest.wait()
        return 1


def second_look(folder: Path) -> int:
    """Run what failed once more, alone; 0 when all of it passes now and it was little, and say what it was.

    Hundreds of tests here start real processes under real deadlines, and a machine may stall for a second.
    A test that fails alone too has failed; one that does not is named, to be looked into.
    """
    try:
        failed = json.loads(LAST_FAILED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 1
    if not 0 < len(failed) <= SECOND_LOOKS_MAX:
        return 1
    print(f"\nsuite: {len(failed)} failed, and are tried once more, alone", flush=True)
    environment = {**os.environ, "BACKPLANE_SUITE_SUMMARY": str(folder / "second.json")}
    again = subprocess.Popen([*in_memory(), sys.executable, "-m", "pytest", "-q", *failed], cwd=ROOT, env=environment)
    code = wait_for(again)
    if code == 0:
        print("suite: passed at the second try only:", *failed, sep="\n  ")
    return code


def report(folder: Path, settings: Path) -> tuple[float, list[str]]:
    """Join parent and children; return the percentage and the lines to print."""
    measured = coverage.Coverage(config_file=str(settings))
    measured.combine([str(path) for path in folder.glob("parent.*")])
    children = coverage.CoverageData(basename=str(folder / "children"))
    children.add_lines({name: lines for name, lines in lines_of_children(folder).items() if lines})
    measured.get_data().update(children)
    measured.json_report(outfile=str(folder / "report.json"))
    result = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rows = sorted((file["summary"]["percent_covered"], name) for name, file in result["files"].items())
    low = [f"  {percent:5.1f} %  {os.path.relpath(name, ROOT)}" for percent, name in rows if percent < 100]
    totals = result["totals"]
    percent: float = totals["percent_covered"]
    head = f"coverage: {percent:.1f} % of {totals['num_statements']} lines, children included; lowest files:"
    return percent, [head, *low[:LOWEST_SHOWN]]


def closing_line(folder: Path) -> str:
    """Pytest's own; what failed at first and passed alone is counted as passed, and said."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        counts = summary["counts"]
        second = folder / "second.json"
        if second.exists():
            again = json.loads(second.read_text(encoding="utf-8"))["counts"]
            late = again["passed"]
            for name in ("failed", "error"):
                counts[name] = again[name]
            counts["passed"] += late
            parts = [f"{count} {name}" for name, count in counts.items() if count]
            return f"===== {', '.join(parts)} ({late} at the second try only) ====="
    except (OSError, ValueError):
        return "===== pytest did not come to its closing line ====="
    return f"===== {summary['closing']} ====="


def main() -> int:
    """Run the suite; 0 when every test passed and enough is covered."""
    settings = settings_of_coverage()
    gate = settings["report"]["fail_under"]
    parent = ROOT / ".cache"
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="coverage-", dir=parent))
    try:
        file = write_settings(folder, settings)
        began = time.monotonic()
        code = run_pytest(folder, [ROOT / name for name in settings["run"]["source"]])
        if code == 1:
            code = second_look(folder)
        try:
            percent, lines = report(folder, file)
        except coverage.CoverageException as error:
            percent, lines = 0.0, [f"coverage: none ({error})"]
        print("\n".join(lines))
        if percent < gate:
            print(f"FAIL: coverage {percent:.1f} % is under {gate} %")
        print(f"suite: {time.monotonic() - began:.0f} s in all")
        print(closing_line(folder), flush=True)
        return code or int(percent < gate)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
