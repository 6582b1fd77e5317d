"""A patch on its way into the original, its command killed with -9; `tests/all/workspace` does it at every step."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from backplane.errors import WorkspaceError
from backplane.workspace import apply_patch, writing
from tests.receipt_writer import memory_of, puts
from tests.test_workspace import Place, files_of, snapshot

KILLER: Final = """
import os, sys
left = int(sys.argv.pop(1))
armed = False
def killing(event, words):
    global left, armed
    creates = event == "open" and isinstance(words[2], int) and words[2] & os.O_CREAT
    armed = armed or (creates and str(words[0]).endswith(".applying"))
    if armed and (creates or event in CHANGES):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
CHANGES = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "os.chown"}
sys.addaudithook(killing)
"""
"""Ends its own process by SIGKILL before the n-th change of the disk from the mark on: real, and at every place."""

APPLY: Final = KILLER + "from pathlib import Path; from backplane.workspace import apply_patch\n"


CHANGES_MAX: Final = 200
"""Far more than the patch of these tests makes."""


def killed(script: str, after: int, *words: str) -> int:
    """Run a script until its n-th change; gives its exit code, -9 when it did not get to its end."""
    done = subprocess.run([sys.executable, "-c", script, str(after), *words], capture_output=True, timeout=60)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


@pytest.fixture
def patched(tmp_path: Path) -> Place:
    """A patch with every kind of step: replaced, deleted, new, a folder for a file and the other way round, links."""
    place = Place(tmp_path)
    place.write({"same": "s\n", "edited": "e\n", "gone/deep/f": "f\n", "turn": "a file\n", "fold/f": "f\n"})
    place.write({"run": "r\n"})
    (place.original / "link").symlink_to("same")
    (place.original / "edited").chmod(0o640)
    (place.original / "gone").chmod(0o750)
    with place.staged() as found:
        root = found.root
        for name in ("gone/deep/f", "turn", "fold/f", "link"):
            (root / name).unlink()
        for name in ("gone/deep", "gone", "fold"):
            (root / name).rmdir()
        place.write({"edited": "E\n", "turn/f": "in a folder\n", "fold": "a file\n", "new/d/f": "n\n"}, root)
        (root / "link").symlink_to("edited")
        (root / "run").chmod(0o755)
        found.difference()
    return place


def kill_at(patched: Place, steps: Iterable[int]) -> None:
    """Apply and kill before each of these changes of the disk: each file is old or new, and applying goes on."""
    before, kept = files_of(patched.original), patched.base / "kept"
    shutil.copytree(patched.original, kept, symlinks=True)
    apply_patch(patched.run_dir)
    after = files_of(patched.original)
    cut = 0
    for step in steps:
        shutil.rmtree(patched.original)
        shutil.copytree(kept, patched.original, symlinks=True)
        code = killed(APPLY + "apply_patch(Path(sys.argv[1]))", step, str(patched.run_dir))
        now = {path: data for path, data in files_of(patched.original).items() if b".backplane-" not in path}
        assert all(data in (before.get(path), after.get(path)) for path, data in now.items())
        assert before.keys() & after.keys() <= now.keys()
        lines = writing.cut_off(patched.base)
        cut += len(lines)
        assert lines or code == 0 or now == before
        if code == 0:
            break
        assert apply_patch(patched.run_dir).files
        assert files_of(patched.original) == after
        assert writing.cut_off(patched.base) == []
        with pytest.raises(WorkspaceError, match="applied already"):
            apply_patch(patched.run_dir)
    assert step > 15
    assert cut > 2


def test_a_kill_of_apply_leaves_old_or_new_files_and_applying_goes_on(patched: Place) -> None:
    kill_at(patched, range(1, CHANGES_MAX, 4))


def test_a_write_that_is_under_way_is_left_alone(patched: Place) -> None:
    with writing.marked(patched.run_dir) as mark:
        mark.write(writing.Writing("apply", str(patched.original), "t", ()))
        assert writing.cut_off(patched.base) == []
        with pytest.raises(WorkspaceError, match="another command"):
            apply_patch(patched.run_dir)
    (line,) = writing.cut_off(patched.base)
    assert line.startswith(f"run run: putting its patch into '{patched.original}' was cut off")
    assert line.endswith("`backplane apply run` goes on")


def test_a_mark_that_cannot_be_read_is_named_and_nothing_is_changed(patched: Place) -> None:
    mark = writing.mark_of(patched.run_dir)
    mark.write_bytes(b"not json\n")
    before = snapshot(patched.original)
    (line,) = writing.cut_off(patched.base)
    assert f"'{mark}' cannot be read" in line
    with pytest.raises(WorkspaceError, match="cannot be read"):
        apply_patch(patched.run_dir)
    assert snapshot(patched.original) == before
    mark.write_bytes(b'{"half')  # Nothing is changed before the first line is whole.
    assert apply_patch(patched.run_dir).files


@pytest.mark.parametrize("kind", ["pipe", "deep"])
@pytest.mark.parametrize("name", ["patch.json", "patch.diff", "repo.git/objects/pack"])
def test_no_pipe_hole_or_link_in_place_of_a_kept_file_is_waited_at_or_read_whole(
    patched: Place, name: str, kind: str
) -> None:
    place = patched.run_dir / name
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        puts(path, kind) if kind != "deep" else path.write_bytes(b"[" * 100_000)
    with memory_of(256 << 20), pytest.raises(WorkspaceError, match="execution_workspace_error"):
        apply_patch(patched.run_dir)
    assert (patched.original / "edited").read_text() == "e\n"


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}
