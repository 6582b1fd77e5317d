"""The programs of README, guide and examples before two type checkers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.peers import ROOT
from tests.test_readme import blocks


def readme_programs() -> list[str]:
    examples = [path.read_text() for path in sorted((ROOT / "docs/examples").glob("*.py"))]
    return [*(block for block in blocks("python") if "backplane" in block), *examples]


def test_the_readmes_programs_pass_mypy_strict(tmp_path: Path) -> None:
    files = []
    for number, program in enumerate(readme_programs()):
        files.append(tmp_path / f"example_{number}.py")
        files[-1].write_text(program)
    cache = ROOT / ".cache" / "mypy-readme"  # What is known of the package and its libraries is kept.
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) >= 17


SHOWN = """
from dataclasses import dataclass
from backplane import ControlPlane, run, start
from backplane.api import TaskRouter
from backplane.providers import Session
@dataclass
class Review:
    ok: bool
async def shown(plane: ControlPlane, session: Session) -> None:
    async with start("t", output=Review, timeout=3) as a, plane.start("t", "shell", output=Review, max_turns=1) as b:
        reveal_type(a.value)
        reveal_type(b.value)
    reveal_type((await TaskRouter(plane).run("t", output=Review, type="custom")).value)
    reveal_type((await session.run("t", output=Review, max_turns=1)).check().value)
    reveal_type(run("t", output=Review, on_event=print).check().value)
    reveal_type(run("t", output={"type": "object"}).value)
"""
VALUES = ["Review", "Review", "Review", "Review", "Review", "Any"]


def test_the_answer_of_a_run_has_the_type_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    cache = ROOT / ".cache" / "mypy-readme"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "shown.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r'Revealed type is "(?:shown\.)?(\w+)"', done.stdout) == VALUES, done.stdout


def test_pyright_shows_the_same_type_of_an_answer(tmp_path: Path, npm_programs: Callable[..., Path]) -> None:
    pyright = npm_programs("pyright@1.1.407") / "pyright"
    (tmp_path / "shown.py").write_text(SHOWN)
    settings = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name, "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run([str(pyright), "-p", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r'Type of ".*" is "(\w+)"', done.stdout) == VALUES, done.stdout


def test_the_readmes_programs_pass_pyright(tmp_path: Path, npm_programs: Callable[..., Path]) -> None:
    pyright = npm_programs("pyright@1.1.407") / "pyright"
    for number, program in enumerate(readme_programs()):
        (tmp_path / f"example_{number}.py").write_text(program)
    settings = {"typeCheckingMode": "strict", "venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**settings, "extraPaths": [str(ROOT)]}))
    done = subprocess.run([str(pyright), "-p", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
