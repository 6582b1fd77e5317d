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
from backplane.workspace import apply_patch, transaction
from tests.receipt_writer import memory_of, puts
from tests.test_workspace import Place, snapshot

KILLER: Final = """
import os, sys
left = int(sys.argv.pop(1))
armed = False
def killing(event, words):
    global left, armed
    creates = event == "open" and isinstance(words[2], int) and words[2] & os.O_CREAT
    armed = armed or (creates and str(words[0]).endswith(".begun"))
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
    """Apply and kill before each of these changes of the disk, and settle: it is all there, or nothing of it."""
    before, kept = snapshot(patched.original), patched.base / "kept"
    shutil.copytree(patched.original, kept, symlinks=True)
    told: list[bool] = []
    for step in steps:
        code = killed(APPLY + "apply_patch(Path(sys.argv[1]))", step, str(patched.run_dir))
        found = transaction.settle(transaction.pending(patched.base))
        told += [one.applied for one in found]
        assert [(one.problem, one.kept) for one in found] in ([], [("", ())])
        assert transaction.pending(patched.base) == []
        now = snapshot(patched.original)
        if any(one.applied for one in found) or code == 0:
            with pytest.raises(WorkspaceError, match="applied already"):
                apply_patch(patched.run_dir)
            shutil.rmtree(patched.original)
            shutil.copytree(kept, patched.original, symlinks=True)
        else:
            assert now == before
        if code == 0:
            break
    assert step > 20
    assert {True, False} == set(told)
    assert apply_patch(patched.run_dir).files


def test_a_kill_of_apply_leaves_all_or_nothing(patched: Place) -> None:
    kill_at(patched, range(1, CHANGES_MAX, 5))


def test_what_somebody_has_changed_since_is_left_and_the_old_file_kept(patched: Place) -> None:
    for step in range(10, CHANGES_MAX):
        transaction.settle(transaction.pending(patched.base))
        killed(APPLY + "apply_patch(Path(sys.argv[1]))", step, str(patched.run_dir))
        if "E\n" in contents(patched.original).values():
            break
    (patched.original / "edited").write_text("mine since\n")
    (found,) = transaction.settle(transaction.pending(patched.base))
    assert (found.kept, found.problem) == (("edited",), "")
    assert "'edited', changed since; what was there before lies in its folder .backplane-" in found.describe()
    assert (patched.original / "edited").read_text() == "mine since\n"
    assert (patched.original / "gone/deep/f").read_text() == "f\n"
    (depot,) = patched.original.glob(".backplane-*")
    assert "e\n" in [path.read_text() for path in depot.iterdir() if path.is_file()]


def test_an_exchange_that_is_under_way_is_left_alone(patched: Place) -> None:
    with transaction._begin(patched.run_dir):
        assert transaction.settle(transaction.pending(patched.base)) == []
        assert transaction.unsettled(patched.base) == []
        with pytest.raises(WorkspaceError, match="another command"):
            apply_patch(patched.run_dir)
    assert transaction.unsettled(patched.base) == ["run run: putting its patch was cut off"]
    assert apply_patch(patched.run_dir).files


def test_a_mark_that_cannot_be_read_touches_nothing_and_is_told(tmp_path: Path) -> None:
    mark = tmp_path / ".run.begun"
    mark.write_bytes(b"not json\n")
    assert transaction.unsettled(tmp_path) == ["run run: putting its patch was cut off"]
    (found,) = transaction.settle(transaction.pending(tmp_path))
    assert found.problem
    assert "the next start tries again" in found.describe()
    assert mark.exists()


@pytest.mark.parametrize("kind", ["pipe", "deep"])
@pytest.mark.parametrize("name", ["patch.json", "patch.diff", "patch.blobs"])
def test_no_pipe_hole_or_link_in_place_of_a_kept_file_is_waited_at_or_read_whole(
    patched: Place, name: str, kind: str
) -> None:
    for path in [patched.run_dir / name] if name != "patch.blobs" else sorted((patched.run_dir / name).iterdir()):
        puts(path, kind) if kind != "deep" else path.write_bytes(b"[" * 100_000)
    with memory_of(256 << 20), pytest.raises(WorkspaceError, match="execution_workspace_error"):
        apply_patch(patched.run_dir)
    assert (patched.original / "edited").read_text() == "e\n"


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}
