"""A backend on another machine, and hostile archives.

The far side is `backplane serve` under another root: bubblewrap gives it a `/tmp` of its own, so that
nothing of this side's folders can be seen there.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.config import Limits, Settings
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import WorkspaceError
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.workspace import Quota
from backplane.workspace import archive as parcel
from tests.peers import ROOT
from tests.served import SERVE

QUOTA = Quota(bytes_max=100 << 20, files_max=1000)
bwrapped = pytest.mark.needs("bwrap")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "near"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.txt").write_text("old\n")
    (folder / "deep" / "er" / "b.txt").write_text("below\n")
    (folder / "link").symlink_to("a.txt")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def far(tmp_path: Path, *settings: str) -> ProcessBackend:
    """A backend whose far side sees the system, a folder of its own, and nothing else below /tmp."""
    folder = tmp_path / "far"
    (folder / "state").mkdir(parents=True, exist_ok=True)
    (folder / "project").mkdir(exist_ok=True)
    words = (
        *("bwrap", "--dev-bind", "/", "/", "--tmpfs", "/tmp", "--bind", str(folder), "/tmp/far", "--unshare-pid"),
        *("--proc", "/proc"),
        # The program itself, which a checkout below /tmp would hide with everything else there.
        *(word for path in dict.fromkeys((str(ROOT), sys.prefix)) for word in ("--ro-bind", path, path)),
    )
    variables = ("BACKPLANE_HOME=/tmp/far/state", "TMPDIR=/tmp/far", "HOME=/tmp/far", *settings)
    return ProcessBackend(
        id="far", argv=(*words, "--chdir", "/", "env", *variables, *SERVE), remote=True, limits=Limits(hello_s=20)
    )


def order(root: Path, task: str, *, lane: Any = "patch_first", mode: Any = "staged", **abp: Any) -> WorkOrder:
    config = RuntimeConfig(vendor={"abp": {"backend": "shell", **abp}})
    return WorkOrder(task, lane=lane, workspace=WorkspaceSpec(str(root), mode), config=config)


async def go(home: Path, asked: WorkOrder, backend: ProcessBackend, cancel_at: str | None = None) -> Run:
    with anyio.fail_after(60):
        async with ControlPlane(Settings(), home, os.environ) as plane, plane.start(asked, backend) as run:
            async for event in run:
                if cancel_at is not None and cancel_at in str(event):
                    await run.cancel("enough")
    return run


def result(home: Path, asked: WorkOrder, backend: ProcessBackend, **how: Any) -> tuple[Run, Any]:
    run = anyio.run(lambda: go(home, asked, backend, **how))
    return run, run.receipt


def nothing_left(tmp_path: Path) -> None:
    for name in ("incoming", "stage"):
        folder = tmp_path / "far" / "state" / name
        assert not folder.exists() or list(folder.iterdir()) == []


@bwrapped
def test_the_work_and_the_lane_have_their_effect_in_the_folder_there(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = far(tmp_path)
    project = tmp_path / "far" / "project"
    (project / "a.txt").write_text("far old\n")
    asked = order(root, "cat a.txt; echo far new > a.txt", lane="workspace_first", remote_root="/tmp/far/project")
    run, receipt = result(backplane_home, asked, backend)
    assert run.end_error is None
    assert (root / "a.txt").read_text() == "old\n"
    assert (project / "a.txt").read_text() == "far new\n"
    assert receipt.verification.git_diff is None, "nothing was seen of it from here"
    assert "+far new" in receipt.backplane["claims"]["git_diff"]
    assert not receipt.verification.harness_ok
    assert receipt.backplane["inner"]["verified"] is True


@bwrapped
def test_a_run_there_is_cancelled_from_here(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    asked = order(root, "echo new > a.txt; echo be''gun; sleep 60", remote_root="/tmp/far/project")
    _, receipt = result(backplane_home, asked, far(tmp_path), cancel_at="begun")
    assert receipt.outcome == "partial"
    assert receipt.backplane["inner"]["backplane"]["end"]["reason"] == "cancelled"
    assert "+new" in receipt.backplane["claims"]["git_diff"]
    nothing_left(tmp_path)


def test_a_remote_backend_whose_host_is_no_control_plane_is_refused(backplane_home: Path, root: Path) -> None:
    host = Path(__file__).parents[3] / "hosts" / "mock.py"
    backend = ProcessBackend(id="far", argv=(*SERVE[:1], str(host)), remote=True)
    run, receipt = result(backplane_home, order(root, "x", remote_root="/x"), backend)
    assert run.error is not None
    assert run.error.code == "backend_unavailable"
    assert "stage/1" in run.error.message
    assert receipt.outcome == "failed"


def test_an_order_that_names_no_folder_there_is_refused(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    run, _ = result(backplane_home, order(root, "x"), far(tmp_path))
    assert run.end is not None
    assert run.end.reason == "refused"
    assert run.error is not None
    assert run.error.code == "config_invalid"
    assert "remote_root" in (run.error.hint or "")


# Archives ---------------------------------------------------------------------------------------------------------


def archive(*entries: tuple[str, bytes, Any], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of entries `(name, type, content or target)`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o6777
            if kind == tarfile.REGTYPE:
                entry.size = len(content)
            else:
                entry.linkname = content or ""
            tar.addfile(entry, io.BytesIO(content) if kind == tarfile.REGTYPE else None)
    return made.getvalue()


def with_size(field: bytes) -> bytes:
    """An archive of one entry, whose header says its size in these twelve bytes."""
    header = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    header[124:136], header[148:156] = field, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"y" * 2048 + bytes(1024)


FILE = ("./a.txt", tarfile.REGTYPE, b"old\n")


HOSTILE: dict[str, tuple[tuple[str, bytes, Any], ...]] = {
    "a path upwards": (("a/../../x", tarfile.REGTYPE, b""),),
    "an absolute path": (("/tmp/backplane-escaped", tarfile.REGTYPE, b""),),
    "through a link": (("l", tarfile.SYMTYPE, "/tmp"), ("l/x", tarfile.REGTYPE, b"")),
    "a hard link": (FILE, ("h", tarfile.LNKTYPE, "/etc/passwd")),
    "a device": (("d", tarfile.CHRTYPE, None),),
    "a hook": ((".git/hooks/x", tarfile.REGTYPE, b""),),
    "a file twice": (FILE, FILE),
    "too many files": tuple((f"{n}", tarfile.REGTYPE, b"") for n in range(40)),
    "too many bytes": (("x", tarfile.REGTYPE, b"x" * 70_000),),
}
WRONG: dict[str, bytes] = {
    "no archive": b"x" * 2048,
    "a size below nothing": with_size(b"-0000001000\0"),
    "cut in the middle": archive(FILE)[:700],
    **{name: archive(*made) for name, made in HOSTILE.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_archive_that_is_wrong_or_hostile_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree.tar").write_bytes(WRONG[name])
    with pytest.raises(WorkspaceError) as caught:
        parcel.unpack(tmp_path / "tree.tar", tmp_path / "tree", Quota(bytes_max=65_536, files_max=30))
    assert caught.value.code == "workspace_staging_failed"
    assert not Path("/tmp/backplane-escaped").exists()


@pytest.mark.parametrize(
    ("entries", "fact"),
    [
        (
            [("l", tarfile.SYMTYPE, "/tmp"), ("l/x", tarfile.REGTYPE, b"")],
            "'l' of the archive is a folder and something else",
        ),
        ([FILE, FILE], "'a.txt' comes twice in the archive"),
        ([FILE, ("h", tarfile.LNKTYPE, "a.txt")], "'h' is no file, folder or symbolic link"),
        ([("p", tarfile.FIFOTYPE, None)], "'p' is no file, folder or symbolic link"),
    ],
)
def test_a_refused_archive_is_told_what_is_wrong_with_it(
    entries: list[tuple[str, bytes, Any]], fact: str, tmp_path: Path
) -> None:
    (tmp_path / "tree.tar").write_bytes(archive(*entries))
    with pytest.raises(WorkspaceError) as caught:
        parcel.unpack(tmp_path / "tree.tar", tmp_path / "tree", Quota(bytes_max=65_536, files_max=10))
    assert fact in caught.value.message
    assert caught.value.hint is not None
    assert "try again" not in caught.value.hint


def test_a_parcel_arrives_as_it_left(tmp_path: Path, root: Path) -> None:
    raw = os.fsencode(root) + b"/\xff\xfe"
    Path(os.fsdecode(raw)).write_bytes(b"odd")
    (root / ("é" * 100)).write_text("long name")
    (root / "sparse").write_bytes(b"")
    os.truncate(root / "sparse", 1_000_001)
    (root / "empty").mkdir()
    (root / "locked").write_text("x")
    (root / "locked").chmod(0o400)
    (tmp_path / "spool").write_bytes(b"".join(parcel.pack(root, QUOTA)))
    parcel.unpack(tmp_path / "spool", tmp_path / "there", QUOTA)
    same = subprocess.run(
        ["diff", "-r", "--no-dereference", root, tmp_path / "there"], capture_output=True, check=False
    )
    assert (same.returncode, same.stdout) == (0, b"")
    assert (tmp_path / "there" / "run.sh").stat().st_mode & 0o777 == 0o755


def test_set_id_bits_do_not_travel(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(archive(FILE, ("d", tarfile.DIRTYPE, None)))
    parcel.unpack(spool, tmp_path / "there", QUOTA)
    for name in ("a.txt", "d"):
        assert (tmp_path / "there" / name).stat().st_mode & 0o7000 == 0
