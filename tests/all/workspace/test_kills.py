"""A patch on its way into the original: killed before every change of the disk, on mounts, and by the front door."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from backplane.errors import WorkspaceError
from backplane.receipts.store import Store
from backplane.workspace import apply_patch, transaction
from tests.all.doors.test_workspace_kill import APPLY, CHANGES_MAX, KILLER, contents, kill_at, killed, patched
from tests.test_workspace import Place, git, snapshot

COMMAND: Final = KILLER + "from backplane.cli import main; sys.exit(main(sys.argv[1:]))\n"


def test_a_kill_before_any_step_of_apply_leaves_all_or_nothing(patched: Place) -> None:
    kill_at(patched, range(0, CHANGES_MAX, 3))


def test_a_kill_while_it_is_settled_changes_nothing_about_the_end(patched: Place) -> None:
    before = snapshot(patched.original)
    script = KILLER + (
        "from pathlib import Path; from backplane.workspace import transaction\n"
        "armed = True; transaction.settle(transaction.pending(Path(sys.argv[1])))\n"
    )
    assert killed(APPLY + "apply_patch(Path(sys.argv[1]))", 22, str(patched.run_dir)) == -signal.SIGKILL
    assert snapshot(patched.original) != before
    for step in range(CHANGES_MAX):
        # Each try goes on where the one before was killed, and gets a step further.
        if killed(script, step, str(patched.base)) == 0:
            break
    assert transaction.settle(transaction.pending(patched.base)) == []
    assert snapshot(patched.original) == before


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Mount a folder over itself: nothing can be moved or linked into it."""
    done = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write in a folder."""
    with mounted(folder):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


def below_a_mount(base: Path) -> Place:
    """A patch that replaces a file, and makes new ones in a folder `m` that is there."""
    place = Place(base)
    place.write({"a": "a\n", "gone/f": "f\n", "m/kept": "k\n"})
    place.patch_of([("a", "A\n"), ("gone/f", None), ("m/q/z", "z\n")])
    return place


@pytest.mark.needs("mount")
def test_a_patch_that_a_read_only_mount_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    place = below_a_mount(tmp_path)
    before = snapshot(place.original)
    with read_only(place.original / "m"), pytest.raises(WorkspaceError, match="EROFS at 'm/q/z'") as told:
        apply_patch(place.run_dir)
    assert "not all of it was put back" not in str(told.value)
    assert snapshot(place.original) == before
    assert transaction.pending(place.base) == []
    assert apply_patch(place.run_dir).files == ("a", "gone/f", "m/q/z")


@pytest.mark.needs("mount")
def test_a_patch_for_another_disk_in_the_workspace_is_refused_with_what_works_there(tmp_path: Path) -> None:
    place = below_a_mount(tmp_path)
    before = snapshot(place.original)
    with mounted(place.original / "m"):
        with pytest.raises(WorkspaceError, match="EXDEV at 'm/q/z'") as told:
            apply_patch(place.run_dir)
        assert snapshot(place.original) == before
        assert told.value.hint is not None
        assert f"use 'git apply' with '{place.run_dir / 'patch.diff'}'" in told.value.hint
        git("apply", str(place.run_dir / "patch.diff"), cwd=place.original)
    assert (place.original / "m/q/z").read_text() == "z\n"


@pytest.mark.needs("mount")
def test_one_file_that_cannot_be_put_back_yet_keeps_no_other_one_away(tmp_path: Path) -> None:
    place = below_a_mount(tmp_path)
    before = snapshot(place.original)
    for step in range(CHANGES_MAX):
        transaction.settle(transaction.pending(place.base))
        killed(APPLY + "apply_patch(Path(sys.argv[1]))", step, str(place.run_dir))
        if (place.original / "m/q/z").exists():
            break
    with read_only(place.original / "m"):
        (found,) = transaction.settle(transaction.pending(place.base))
        assert [(place.original / name).read_text() for name in ("a", "gone/f", "m/q/z")] == ["a\n", "f\n", "z\n"]
    assert (found.root, "'m/q/z': Read-only file system" in found.problem) == (str(place.original), True)
    (found,) = transaction.settle(transaction.pending(place.base))
    assert (found.kept, found.problem) == ((), "")
    assert snapshot(place.original) == before


# Through the front door -----------------------------------------------------------------------------------------------

HOST: Final = """
import json, os, sys
def say(**message): print(json.dumps(message), flush=True)
backend = {"id": "h", "backend_version": None, "adapter_version": None}
say(t="hello", contract_version="abp/v0.1", backend=backend, capabilities={}, mode="mapped")
run = json.loads(sys.stdin.readline())
root = run["work_order"]["workspace"]["root"]
for name in ("a", "b"):
    open(os.path.join(root, name), "w").write("new\\n")
if os.path.exists(os.path.join(root, "c")):
    os.unlink(os.path.join(root, "c"))
meta = {"run_id": run["id"], "work_order_id": run["work_order"]["id"], "contract_version": "abp/v0.1",
        "started_at": "2026-01-15T12:00:00Z", "finished_at": "2026-01-15T12:00:01Z", "duration_ms": 1}
say(t="final", ref_id=run["id"], receipt={"meta": meta, "backend": backend, "capabilities": {}, "mode": "mapped",
    "usage_raw": {}, "usage": {}, "trace": [], "artifacts": [], "outcome": "complete", "receipt_sha256": None,
    "verification": {"git_diff": None, "git_status": None, "harness_ok": True}})
"""


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """An original of three files, and the words of a run that changes all of them."""
    root = tmp_path / "ws"
    root.mkdir()
    for name in ("a", "b", "c"):
        (root / name).write_text("old\n")
    (tmp_path / "host.py").write_text(HOST)
    monkeypatch.setenv("BACKPLANE_ISOLATION", "off")
    return root, ["run", "do", "--root", str(root), "--sidecar", f"{sys.executable} {tmp_path / 'host.py'}"]


def says(*words: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-m", "backplane", *words], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


OLD = {"a": "old\n", "b": "old\n", "c": "old\n"}
NEW = {"a": "new\n", "b": "new\n"}


def test_a_kill_in_the_lane_is_settled_and_told_by_the_next_run(
    backplane_home: Path, order: tuple[Path, list[str]]
) -> None:
    root, words = order
    seen = set()
    for step in range(3, CHANGES_MAX, 8):
        code = killed(COMMAND, step, *words, "--apply")
        if code == 0:
            break
        half = contents(root)
        _, told = says(*words)
        now = contents(root)
        assert now in (OLD, NEW)
        with Store.open(backplane_home, readonly=True) as store:
            cut_off = store.load(store.list(2)[1].run_id)
        own = cut_off.usage_raw["backplane"]
        if exchange_told := "was cut off" in told:
            assert ("all is as before" in told) == (now == OLD)
        assert exchange_told or half in (OLD, NEW)
        if own["end"]["reason"] == "interrupted":
            # The receipt of a run that was killed says whether its patch is in the original.
            assert own.get("lane") == ({"applied": 3} if now == NEW else None)
        seen.add((own["end"]["reason"], now == NEW))
        for name, text in OLD.items():
            (root / name).write_text(text)
    assert {("interrupted", False), ("interrupted", True)} <= seen


def test_verify_and_apply_say_what_was_cut_off(backplane_home: Path, order: tuple[Path, list[str]]) -> None:
    root, words = order
    says(*words)
    with Store.open(backplane_home, readonly=True) as store:
        run_id = store.list(1)[0].run_id
    assert killed(COMMAND, 9, "apply", run_id) == -signal.SIGKILL
    assert contents(root) not in (OLD, NEW)
    assert f"run {run_id}: putting its patch into" in says("receipts", "verify")[1]
    stdout, stderr = says("apply", run_id)
    assert "was cut off; all is as before: apply it again" in stderr
    assert "changed 3 files" in stdout
    assert contents(root) == NEW
    assert transaction.pending(backplane_home / "runs") == []
    assert os.listdir(backplane_home / "runs") == [run_id]


__all__ = ["patched"]
