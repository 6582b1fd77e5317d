"""The demo as its user starts it: a program of its own, in any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEMO_S_MAX = 60
"""It takes two seconds; a loaded machine has needed ten."""


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a child in an empty folder, its temporary folder inside that one."""
    (folder / "tmp").mkdir()
    (folder / "cwd").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "backplane", "demo", *arguments],
        cwd=folder / "cwd",
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def test_the_demo_repairs_its_sample_and_shows_a_receipt_that_verifies(tmp_path: Path) -> None:
    with demo(tmp_path) as child:
        out, err = child.communicate(timeout=DEMO_S_MAX)
    assert child.returncode == 0, err
    steps = ("FAILED (failures=2)", "+    return -(-total // size)", "last: intact", "changed 1 file", "\nOK\n")
    places = [out.index(step) for step in steps]
    assert places == sorted(places)


def test_the_demo_keeps_its_run_in_a_folder_of_its_own_and_says_how_to_look(
    tmp_path: Path, backplane_home: Path
) -> None:
    with demo(tmp_path) as child:
        out, _ = child.communicate(timeout=DEMO_S_MAX)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "cwd").iterdir()) == []
    assert [path.name for path in backplane_home.iterdir()] == ["demo"]
    lines = [line.strip() for line in out.splitlines()]
    assert f"export BACKPLANE_HOME={backplane_home / 'demo'}" in lines
    script = lines[lines.index(f"export BACKPLANE_HOME={backplane_home / 'demo'}") :]
    assert [next(word for word in ("show", "why", "report") if word in line) for line in script[1:]]
    shown = subprocess.run(
        ["sh", "-ec", "\n".join(script)], cwd=tmp_path, capture_output=True, text=True, timeout=DEMO_S_MAX, check=True
    ).stdout
    assert "complete" in shown
    assert "-(-total // size)" in (tmp_path / "run.html").read_text()
