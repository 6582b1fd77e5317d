"""The programs of README, guide and examples before two type checkers."""

from __future__ import annotations

import json
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


def test_the_readmes_programs_pass_pyright(tmp_path: Path, npm_programs: Callable[..., Path]) -> None:
    pyright = npm_programs("pyright@1.1.407") / "pyright"
    for number, program in enumerate(readme_programs()):
        (tmp_path / f"example_{number}.py").write_text(program)
    settings = {"typeCheckingMode": "strict", "venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**settings, "extraPaths": [str(ROOT)]}))
    done = subprocess.run([str(pyright), "-p", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
