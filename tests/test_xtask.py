"""The project's commands, as far as they can be tested without a network: usage, stamps, errors, fixtures."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import xtask
from bench import against

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


def run_nested(tmp_path: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over one file of its own beside a copy of our conftest."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_nested.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    env = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


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
    monkeypatch.setattr(against, "CHECKOUTS", tmp_path / "against")
    folder = against.checkout("HEAD")
    words = (sys.executable, "-c", "import backplane; print(backplane.__file__)")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert Path(done.stdout.strip()).is_relative_to(folder)
    assert (folder / "bench" / "work.py").exists()
    with pytest.raises(RuntimeError, match=r"single revision"):
        against.checkout("no-such-commit")
    subprocess.run(("git", "worktree", "remove", "--force", str(folder)), cwd=ROOT, check=True)
