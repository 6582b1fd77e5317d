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
from backplane.workspace import apply_patch, collect, slim, writing
from tests.all.doors.test_workspace_kill import APPLY, CHANGES_MAX, KILLER, contents, kill_at, killed, patched
from tests.test_workspace import Place, snapshot

COMMAND: Final = KILLER + "from backplane.cli import main; sys.exit(main(sys.argv[1:]))\n"


def test_a_kill_before_any_step_of_apply_leaves_old_or_new_files(patched: Place) -> None:
    kill_at(patched, range(CHANGES_MAX))


def test_a_kill_at_every_step_of_going_on_still_ends(patched: Place) -> None:
    script = APPLY + "armed = True; apply_patch(Path(sys.argv[1]))"
    for step in range(CHANGES_MAX):
        # Each try goes on where the last was killed, and gets a step further.
        if killed(script, step, str(patched.run_dir)) == 0:
            break
    assert step > 15
    assert writing.cut_off(patched.base) == []
    with pytest.raises(WorkspaceError, match="applied already"):
        apply_patch(patched.run_dir)
    assert not list(patched.original.rglob(".backplane-*"))


STAGE: Final = (
    KILLER
    + """
from pathlib import Path
from backplane.workspace import Quota, open_workspace
from backplane.workspace.checkpoints import Checkpoints
base = Path(sys.argv[1])
armed = True
found = open_workspace(
    base / "ws", mode="staged", include=(), exclude=(), run_dir=base / "run", stage_dir=base / "stage",
    tree=base / "stage/tree", quota=Quota(bytes_max=1 << 20, files_max=100),
)
(found.root / "edited").write_text("E")
(found.root / "new").write_text("n")
Checkpoints(found).make("2026-01-01T00:00:00Z")
(found.root / "edited").write_text("EE")
found.difference()
found.close()
"""
)


def test_a_kill_at_any_step_of_a_run_leaves_a_whole_patch_or_none(tmp_path: Path) -> None:
    for step in range(CHANGES_MAX):
        place = Place(tmp_path / str(step))
        place.write({"edited": "e\n", "same": "s\n"})
        code = killed(STAGE, step, str(place.base))
        slim(place.run_dir)
        collect(place.stage_dir)
        assert (place.original / "edited").read_text() == "e\n"
        if (place.run_dir / "patch.json").exists() and "tree" in (place.run_dir / "patch.json").read_text():
            assert apply_patch(place.run_dir).files == ("edited", "new")
            assert (place.original / "edited").read_text() == "EE"
        if code == 0:
            break
    assert 50 < step < CHANGES_MAX - 1


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
    assert told.value.hint == "nothing was changed"
    assert snapshot(place.original) == before
    assert writing.cut_off(place.base) == []
    assert apply_patch(place.run_dir).files == ("a", "gone/f", "m/q/z")


@pytest.mark.needs("mount")
def test_a_patch_reaches_another_disk_in_the_workspace(tmp_path: Path) -> None:
    place = below_a_mount(tmp_path)
    with mounted(place.original / "m"):
        assert apply_patch(place.run_dir).files == ("a", "gone/f", "m/q/z")
        assert (place.original / "m/q/z").read_text() == "z\n"


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


def test_a_kill_in_the_lane_is_named_by_the_next_run_and_apply_goes_on(
    backplane_home: Path, order: tuple[Path, list[str]]
) -> None:
    root, words = order
    seen = set()
    for step in range(3, CHANGES_MAX, 4):
        code = killed(COMMAND, step, *words, "--apply")
        if code == 0:
            break
        half = {name: text for name, text in contents(root).items() if not name.startswith(".backplane-")}
        assert all(text in ("old\n", "new\n") for text in half.values())
        _, told = says("receipts", "verify")
        said_cut = "was cut off, and some files may be written" in told
        assert said_cut or half in (OLD, NEW)
        if said_cut:
            run_id = told.split("putting its patch into")[0].split("run ")[-1].split(":")[0]
            says("run", "do", "--root", str(root.parent), "--sidecar", words[-1])
            says("apply", run_id)
            assert contents(root) == NEW
            assert "putting its patch into" not in says("receipts", "verify")[1]
        seen.add((said_cut, half == NEW))
        for name, text in OLD.items():
            (root / name).write_text(text)
    assert (True, False) in seen


def test_verify_and_apply_say_what_was_cut_off(backplane_home: Path, order: tuple[Path, list[str]]) -> None:
    root, words = order
    says(*words)
    with Store.open(backplane_home, readonly=True) as store:
        run_id = store.rows(1)[0].run_id
    assert killed(COMMAND, 6, "apply", run_id) == -signal.SIGKILL
    assert contents(root) not in (OLD, NEW)
    assert f"run {run_id}: putting its patch into" in says("receipts", "verify")[1]
    assert "changed 3 files" in says("apply", run_id)[0]
    assert contents(root) == NEW
    assert writing.cut_off(backplane_home / "runs") == []
    assert os.listdir(backplane_home / "runs") == [run_id]


__all__ = ["patched"]
