"""How long staging takes, as a multiple of `cp -a` of the same tree in the same run."""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from backplane.workspace import Quota, open_workspace

ROUNDS = 5
QUOTA = Quota(bytes_max=1 << 40, files_max=1_000_000)


def make_tree(root: Path, files: int) -> None:
    """Lay out small text files (0.2 to 2 KB) in folders of 50, as a source tree has them."""
    chance = random.Random(20)
    words = [f"word{number}" for number in range(500)]
    for number in range(files):
        folder = root / f"pkg{number // 1000}" / f"mod{number // 50 % 20}"
        folder.mkdir(parents=True, exist_ok=True)
        text = " ".join(chance.choices(words, k=chance.randint(25, 280)))
        (folder / f"file{number}.py").write_text(f"# {number}\n{text}\n")
    (root / ".gitignore").write_text("*.pyc\nbuild/\n")


def measure(files: int = 20_000, folder: str | None = None) -> dict[str, float]:
    """Stage a plain folder and a git repository, each against `cp -a`, interleaved.

    Args:
        folder: where to work; the default is the system's folder for temporary files.

    Returns:
        Medians: `cp_s`, `plain_s`, `git_s`, `difference_s` (of ten changed files), and the
        ratios `plain_ratio`, `git_ratio`, medians of paired rounds.
    """
    with tempfile.TemporaryDirectory(prefix="bench-workspace-", dir=folder) as name:
        base = Path(name)
        plain, repository = base / "plain", base / "repository"
        make_tree(plain, files)
        shutil.copytree(plain, repository)
        who = ["-c", "user.name=b", "-c", "user.email=b@h"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "b"]):
            subprocess.run(["git", *words], cwd=repository, check=True)
        rounds = [_round(base, plain, repository) for _ in range(ROUNDS)]
    found = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    for kind in ("plain", "git"):
        found[f"{kind}_ratio"] = statistics.median(each[f"{kind}_s"] / each[f"{kind}_cp_s"] for each in rounds)
    return found


def _round(base: Path, plain: Path, repository: Path) -> dict[str, float]:
    spent = {}
    for kind, root in (("plain", plain), ("git", repository)):
        spent[f"{kind}_cp_s"] = _timed(lambda root=root: _copy(root, base / "copy"))  # type: ignore[misc]
        shutil.rmtree(base / "copy")
        stage = base / "stage"
        started = time.perf_counter()
        workspace = open_workspace(
            root,
            mode="staged",
            include=[],
            exclude=[],
            run_dir=base / "run",
            stage_dir=stage,
            tree=stage / "tree",
            quota=QUOTA,
        )
        spent[f"{kind}_s"] = time.perf_counter() - started
        for path in sorted(workspace.root.glob("pkg0/mod0/*"))[:10]:
            path.write_text("changed\n")
        spent["difference_s"] = _timed(workspace.difference)
        spent["close_s"] = _timed(workspace.close)
    return spent


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    print({key: round(value, 3) for key, value in measure(folder=sys.argv[1] if len(sys.argv) > 1 else None).items()})
