"""The few screens whose exact words matter: `pytest tests/test_words.py --words` writes `tests/words.txt` anew."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Said = Callable[[str, str], None]


def cli(*words: str, cwd: Path, **env: str) -> str:
    """What the program prints, to both of its streams."""
    command = [sys.executable, "-m", "backplane", *words]
    return subprocess.run(
        command, cwd=cwd, env=env or None, stdout=-1, stderr=-2, text=True, timeout=30, check=False
    ).stdout


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    return folder


def test_help(work: Path, said: Said) -> None:
    said("help", cli("--help", cwd=work))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse breaks its lines otherwise since Python 3.13")
def test_help_of_run(work: Path, said: Said) -> None:
    said("help of run", cli("run", "--help", cwd=work))


def test_what_doctor_finds_missing(work: Path, said: Said) -> None:
    (work / "backplane.toml").write_text("default_backend = 'gone'\n[backends.mine]\ncommand = ['surely-not-there']\n")
    report = cli("doctor", cwd=work, PATH="/nonexistent", BACKPLANE_HOME="/dev/null/x", HOME=str(work))
    said("doctor", "\n".join(re.findall(r"^MISSING .*(?:\n .*)*", report, re.M)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a patch", ("-b", "shell", "echo two >> a.txt")),
        ("a failure", ("-b", "shell", "exit 3")),
        ("a crash", ("-b", "mock", "--param", 'mock.scenario=[{"stderr":"oh no\\n"},{"exit":7}]', "task")),
        ("a refusal", ("-b", "mock", "--require", "vision", "task")),
    ],
)
def test_a_run_and_why(name: str, words: tuple[str, ...], work: Path, said: Said) -> None:
    said(f"run: {name}", cli("run", *words, cwd=work))
    said(f"why: {name}", cli("why", cwd=work))


def test_wrong_usage(work: Path, said: Said) -> None:
    told = [cli(*words, cwd=work) for words in (["rnu"], ["run", "--bakend", "mock", "x"], ["run", "-b", "shel", "x"])]
    said("wrong usage", "\n".join(told))
