"""The project's commands, as far as they can be tested without a network: usage, stamps, errors, the child tracer."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import xtask
from tests import bench_against, child_lines, suite

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "xtask.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "test", "check", "bench", "schema", "stats"))


@pytest.mark.parametrize("arguments", [(), ("nonsense",)])
def test_a_wrong_command_is_answered_with_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert done.stdout == ""


def test_stats_work_from_any_folder(tmp_path: Path) -> None:
    done = run("stats", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "type names defined twice" in done.stdout


def test_the_way_of_an_order_and_an_event_is_counted() -> None:
    walk = [sys.executable, str(ROOT / "tests" / "walk.py")]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"order: (\d+) files .* (\d+) changes .*\n.*event: (\d+) calls .* (\d+) files", done.stdout)
    assert found is not None, done.stdout
    assert all(int(number) > 0 for number in found.groups())


def test_an_older_python_can_read_the_file_and_gets_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse((ROOT / "xtask.py").read_text(encoding="utf-8"), feature_version=(3, 7))
    monkeypatch.setattr(xtask, "PYTHON_MIN", (99, 0))
    with pytest.raises(xtask.Trouble) as caught:
        xtask.require_python()
    assert len(caught.value.lines) == 3
    assert sys.executable in caught.value.lines[1]


def test_included_dependency_groups_are_unfolded() -> None:
    pyproject = {"dependency-groups": {"lint": ["ruff"], "dev": ["pytest>=8", {"include-group": "lint"}]}}
    assert xtask.development_packages(pyproject) == ["pytest>=8", "ruff"]


def test_only_what_is_installed_changes_the_stamp() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    before = xtask.wanted_stamp(pyproject)
    pyproject["tool"]["ruff"]["line-length"] = 80
    assert xtask.wanted_stamp(pyproject) == before
    pyproject["project"]["dependencies"].append("another")
    assert xtask.wanted_stamp(pyproject) != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"root": "/elsewhere"}'])
def test_a_broken_or_foreign_stamp_is_never_current(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stamp").write_text(content, encoding="utf-8")
    monkeypatch.setattr(xtask, "STAMP", str(tmp_path / "stamp"))
    monkeypatch.setattr(xtask, "PYTHON", sys.executable)
    assert xtask.read_stamp() != xtask.wanted_stamp(xtask.read_pyproject())


def test_the_error_line_of_a_tool_is_the_evidence() -> None:
    output = "Collecting x\nERROR: no matching distribution\n  hint\n"
    assert xtask.last_words(subprocess.CompletedProcess([], 1, output)) == "ERROR: no matching distribution"
    assert xtask.last_words(subprocess.CompletedProcess([], 3, "")) == "exit code 3, no output"


def start_traced_child(tmp_path: Path, program: str) -> dict[str, set[int]]:
    """Run a child below a suite of our own making; return the lines that were noted of `ours/`."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "worked.py").write_text(program, encoding="utf-8")
    markers = tmp_path / "suites"
    markers.mkdir()
    suite.write_marker(tmp_path, [ours])
    (markers / str(os.getpid())).write_bytes((tmp_path / "marker").read_bytes())
    begin = (
        f"import sys; sys.path[:0] = [{str(Path(child_lines.__file__).parent)!r}, {str(ours)!r}]; import child_lines; "
        f"child_lines.MARKERS = {str(markers)!r}; child_lines.start(); import worked"
    )
    # Empty, like the environment of a real host.
    subprocess.run([sys.executable, "-S", "-c", begin], env={}, timeout=30, check=False)
    return {Path(name).name: lines for name, lines in suite.lines_of_children(tmp_path).items()}


def test_the_lines_of_a_killed_child_are_noted_also_those_of_its_threads(tmp_path: Path) -> None:
    program = (
        "import os, signal, threading\n"
        "def in_a_thread():\n"
        "    return 3\n"
        "def begin():\n"
        "    thread = threading.Thread(target=in_a_thread)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
        "never = True\n"
    )
    assert start_traced_child(tmp_path, program) == {"worked.py": {1, 2, 3, 4, 5, 6, 7, 8, 9}}


def test_a_child_that_closes_its_descriptors_goes_on(tmp_path: Path) -> None:
    program = "import os\nos.closerange(3, 4096)\ndone = 1\nopen('done', 'w').close()\n".replace(
        "'done'", repr(str(tmp_path / "done"))
    )
    noted = start_traced_child(tmp_path, program)
    assert noted["worked.py"] >= {1, 2}
    assert (tmp_path / "done").exists()


def run_nested(tmp_path: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over one file of its own beside a copy of our conftest."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_nested.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    env = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_each_slow_test_that_is_named_is_there() -> None:
    names = [line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if "::" in line]
    files = {name.partition("::")[0] for name in names}
    texts = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file in files}
    gone = [name for name in names if f"def {name.partition('::')[2]}(" not in texts[name.partition("::")[0]]]
    assert gone == []


NEEDY = "import pytest\n@pytest.mark.needs('no-such-tool')\ndef test_it(): pass\n"


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    done = run_nested(tmp_path, NEEDY)
    assert done.returncode == 0, done.stdout
    assert "1 × needs no-such-tool: not found" in done.stdout


def test_a_skip_that_names_a_required_tool_is_a_failure(tmp_path: Path) -> None:
    done = run_nested(tmp_path, NEEDY, BACKPLANE_REQUIRE="node,no-such-tool")
    assert done.returncode == 1
    assert "BACKPLANE_REQUIRE names no-such-tool" in done.stdout


def test_a_test_that_leaves_a_child_fails_and_the_child_is_killed(tmp_path: Path) -> None:
    done = run_nested(
        tmp_path,
        "import subprocess, sys\n"
        "def test_it():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    child.returncode = 0  # so that its destructor does not warn\n"
        "def test_after(): pass\n",
    )
    assert done.returncode == 1
    assert "the test left processes running" in done.stdout
    assert "time.sleep(600)" in done.stdout
    assert "2 passed, 1 error" in done.stdout


def test_every_test_has_a_state_folder_of_its_own(backplane_home: Path, needs: Callable[[str], str]) -> None:
    assert os.environ["BACKPLANE_HOME"] == str(backplane_home)
    assert list(backplane_home.iterdir()) == []
    assert needs(Path(sys.executable).name)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository")
def test_bench_measures_another_commit_with_its_own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout of the other commit is imported, not this one."""
    monkeypatch.setattr(bench_against, "CHECKOUTS", tmp_path / "against")
    folder = bench_against.checkout("HEAD")
    words = (sys.executable, "-c", "import backplane; print(backplane.__file__)")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert Path(done.stdout.strip()).is_relative_to(folder)
    assert (folder / "tests" / "bench_work.py").exists()
    with pytest.raises(RuntimeError, match=r"single revision"):
        bench_against.checkout("no-such-commit")
    subprocess.run(("git", "worktree", "remove", "--force", str(folder)), cwd=ROOT, check=True)
