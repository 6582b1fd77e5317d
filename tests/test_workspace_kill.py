"""A patch on its way into the original, its command killed with -9 before every single change of the disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from backplane.errors import WorkspaceError
from backplane.receipts.store import Store
from backplane.runtime.state import settle as settle_home
from backplane.workspace import apply_patch, transaction
from tests.receipt_writer import memory_of, puts
from tests.test_workspace import Place, git, snapshot

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
COMMAND: Final = KILLER + "from backplane.cli import main; sys.exit(main(sys.argv[1:]))\n"

SWAP: Final = (
    KILLER.replace("os.kill(os.getpid(), 9)", "swap()")
    + """
def swap():
    global armed, left
    armed, left = False, 1 << 30
    os.rename(FOLDER, FOLDER + ".aside")
    os.symlink(OUTSIDE, FOLDER)
FOLDER, OUTSIDE = sys.argv[2:]
from pathlib import Path; from backplane.errors import WorkspaceError; from backplane.workspace import apply_patch
try:
    apply_patch(Path(sys.argv[1]))
except WorkspaceError as error:
    print(error, error.hint)
"""
)
"""Puts a link in the place of a folder before the n-th change, as somebody else at work there may."""

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


def test_a_kill_before_any_step_of_apply_leaves_all_or_nothing(patched: Place) -> None:
    before, kept = snapshot(patched.original), patched.base / "kept"
    shutil.copytree(patched.original, kept, symlinks=True)
    told: list[bool] = []
    for step in range(CHANGES_MAX):
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


def test_what_somebody_has_changed_since_is_left_and_the_old_file_kept(patched: Place) -> None:
    for step in range(CHANGES_MAX):
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


class Remounted:
    """What `stat` said, with another device."""

    def __init__(self, facts: os.stat_result) -> None:
        self._facts = facts
        self.st_dev = facts.st_dev + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


def test_a_disk_that_is_mounted_again_as_another_device_is_put_back_all_the_same(
    patched: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(patched.original)
    for step in range(CHANGES_MAX):
        transaction.settle(transaction.pending(patched.base))
        killed(APPLY + "apply_patch(Path(sys.argv[1]))", step, str(patched.run_dir))
        if "E\n" in contents(patched.original).values():
            break
    real, real_f = os.stat, os.fstat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *a, **k: Remounted(real(*a, **k)))
        patch.setattr(os, "fstat", lambda *a, **k: Remounted(real_f(*a, **k)))
        (found,) = transaction.settle(transaction.pending(patched.base))
    assert (found.kept, found.problem) == ((), "")
    assert snapshot(patched.original) == before


def test_a_folder_swapped_for_a_link_before_any_step_loses_nothing_and_is_not_followed(tmp_path: Path) -> None:
    place, outside = Place(tmp_path), tmp_path / "outside"
    tree: dict[str, str | bytes] = {
        "d/edited": "e\n",
        "d/gone": "g\n",
        "d/s/edited": "e\n",
        "d/s/gone": "g\n",
        "z": "z\n",
    }
    place.write(tree)
    place.write(tree, outside)
    with place.staged() as found:
        place.write({"d/edited": "E\n", "d/new": "n\n", "d/s/edited": "E\n", "z": "Z\n"}, found.root)
        for name in ("d/gone", "d/s/gone"):
            (found.root / name).unlink()
        found.difference()
    before, theirs, told = snapshot(place.original), snapshot(outside), set[str]()
    kept = shutil.copytree(place.original, tmp_path / "kept")
    folder, aside = place.original / "d", place.original / "d.aside"
    for step in range(CHANGES_MAX):
        words = (str(place.run_dir), str(folder), str(outside / "d"))
        done = subprocess.run([sys.executable, "-c", SWAP, str(step), *words], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert snapshot(outside) == theirs
        if not folder.is_symlink():
            break  # All was in place before the step came.
        folder.unlink()
        aside.rename(folder)
        said = done.stdout.decode()
        depots = list(place.original.glob(".backplane-*"))
        if said:
            assert bool(depots) == ("what was there before lies in" in said), said
            transaction.settle(transaction.pending(place.base))
            assert snapshot(place.original) == before, (step, said)
            told.add("kept" if depots else "undone")
        else:
            told.add("applied")
            shutil.rmtree(place.original)
            shutil.copytree(kept, place.original)
    assert {"kept", "undone"} <= told
    assert (folder / "new").read_text() == "n\n"


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


def test_a_mark_whose_first_line_was_cut_off_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".run.begun").write_bytes(b'{"root": "/no')
    assert transaction.settle(transaction.pending(tmp_path)) == []
    assert transaction.pending(tmp_path) == []


def test_an_exchange_whose_old_files_are_being_removed_is_under_way_still(patched: Place) -> None:
    told: list[object] = []

    def meanwhile(files: int) -> None:
        assert len(transaction.pending(patched.base)) == 1
        told.extend(transaction.unsettled(patched.base))
        told.extend(transaction.settle(transaction.pending(patched.base)))

    assert apply_patch(patched.run_dir, done=meanwhile).files
    assert told == []
    assert transaction.pending(patched.base) == []
    assert list(patched.original.glob(".backplane-*")) == []


@pytest.mark.parametrize("moved", [False, True])
def test_an_exchange_that_ends_while_it_is_looked_at_is_not_told_as_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    mark = tmp_path / ".run.begun"

    def ends(fd: int) -> bool:
        mark.rename(mark.with_suffix(".done")) if moved else mark.unlink()
        return True

    for look in (transaction.settle, lambda marks: transaction.unsettled(tmp_path)):
        mark.write_text(json.dumps({"root": str(tmp_path), "depot": ".backplane-0123456789abcdef"}) + "\n")
        marks = transaction.pending(tmp_path)[:1]
        with monkeypatch.context() as patch:
            patch.setattr(transaction, "try_lock", ends)
            assert look(marks) == []
        for left in transaction.pending(tmp_path):
            left.unlink()


@pytest.mark.parametrize("kind", ["pipe", "hole", "/dev/zero", "deep"])
@pytest.mark.parametrize("name", ["patch.json", "patch.diff", "patch.blobs"])
def test_no_pipe_hole_or_link_in_place_of_a_kept_file_is_waited_at_or_read_whole(
    patched: Place, name: str, kind: str
) -> None:
    for path in [patched.run_dir / name] if name != "patch.blobs" else sorted((patched.run_dir / name).iterdir()):
        puts(path, kind) if kind != "deep" else path.write_bytes(b"[" * 100_000)
    with memory_of(256 << 20), pytest.raises(WorkspaceError, match="execution_workspace_error"):
        apply_patch(patched.run_dir)
    assert (patched.original / "edited").read_text() == "e\n"


@pytest.mark.needs("mount")
def test_an_apply_to_a_disk_that_cannot_be_written_leaves_no_mark(patched: Place) -> None:
    where = str(patched.original)
    bound = subprocess.run(["mount", "--bind", where, where], capture_output=True, check=False)
    if bound.returncode != 0:
        pytest.skip(f"needs mount: {bound.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
        with pytest.raises(WorkspaceError, match="EROFS"):
            apply_patch(patched.run_dir)
        assert transaction.pending(patched.base) == []
    finally:
        subprocess.run(["umount", "-l", where], check=True)
    assert apply_patch(patched.run_dir).files


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


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


def test_a_kill_in_the_lane_is_settled_and_told_by_the_next_run(
    backplane_home: Path, order: tuple[Path, list[str]]
) -> None:
    root, words = order
    seen = set()
    for step in range(3, CHANGES_MAX, 4):
        code = killed(COMMAND, step, *words, "--lane", "workspace_first")
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


def test_doctor_verify_and_apply_say_what_was_cut_off(backplane_home: Path, order: tuple[Path, list[str]]) -> None:
    root, words = order
    says(*words)
    with Store.open(backplane_home, readonly=True) as store:
        run_id = store.list(1)[0].run_id
    assert killed(COMMAND, 9, "apply", run_id) == -signal.SIGKILL
    assert contents(root) not in (OLD, NEW)
    doctor = subprocess.run([sys.executable, "-m", "backplane", "doctor"], capture_output=True, timeout=60, text=True)
    assert f"putting its patch into '{root}' was cut off" in doctor.stdout
    assert "the next run or `apply` here settles it" in doctor.stdout
    for command in ("verify", "list"):
        assert f"run {run_id}: putting its patch into" in says("receipts", command)[1]
    stdout, stderr = says("apply", run_id)
    assert "was cut off; all is as before: apply it again" in stderr
    assert "changed 3 files" in stdout
    assert contents(root) == NEW
    assert settle_home(backplane_home) == []
    assert os.listdir(backplane_home / "runs") == [run_id]
