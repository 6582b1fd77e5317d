"""A backend on another machine: the tree that travels, the patch that comes back, and hostile archives.

The far side is `backplane serve` under another root: bubblewrap gives it a `/tmp` of its own, so that
nothing of this side's folders can be seen there.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.config import Limits, Settings
from backplane.contract import envelope as wire
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import WorkspaceError
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.workspace import Quota, apply_patch
from backplane.workspace import archive as parcel
from tests.peers import ROOT
from tests.served import SERVE, ends, holds, mock, serve, until_ended

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


CHANGE = """
set -e
test ! -e '{near}'
cat deep/er/b.txt link
./run.sh
printf 'new\\n' > a.txt
printf '\\000\\001' > bytes.bin
mkdir fresh; printf 'x' > fresh/x
rm deep/er/b.txt
chmod -x run.sh
ln -s a.txt other
"""


@bwrapped
def test_the_tree_travels_and_the_patch_comes_back(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    run, receipt = result(backplane_home, order(root, CHANGE.format(near=root)), far(tmp_path))
    assert run.end_error is None, receipt.usage_raw
    assert receipt.outcome == "complete"
    assert (root / "a.txt").read_text() == "old\n"
    for line in ("+new", "deleted file mode", "GIT binary patch", "new mode 100644", "+x"):
        assert line in receipt.verification.git_diff
    inner = receipt.backplane["inner"]
    assert inner["verified"] is True
    assert inner["backplane"]["patch"]["sha256"] == receipt.backplane["patch"]["sha256"]
    # A far side that is slow to leave is killed here, and then the clean-up was not its own.
    assert receipt.verification.harness_ok or receipt.backplane.get("swept")
    assert str(root) not in json.dumps(inner), "this side's folders are nobody's business there"
    nothing_left(tmp_path)
    assert run.folder is not None
    apply_patch(run.folder)
    assert (root / "a.txt").read_text() == "new\n"
    assert not (root / "deep" / "er" / "b.txt").exists()
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) & 0o111 == 0
    assert (root / "other").readlink() == Path("a.txt")


@bwrapped
@pytest.mark.parametrize(("lane", "mode"), [("workspace_first", "staged"), ("patch_first", "pass_through")])
def test_the_lane_has_its_effect_on_this_side(
    backplane_home: Path, root: Path, tmp_path: Path, lane: str, mode: str
) -> None:
    run, receipt = result(backplane_home, order(root, "echo new > a.txt", lane=lane, mode=mode), far(tmp_path))
    assert run.end_error is None
    assert (root / "a.txt").read_text() == "new\n"
    assert "+new" in receipt.verification.git_diff


@bwrapped
def test_an_agent_that_fails_there_changes_nothing_here(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    asked = order(root, "echo new > a.txt; exit 3", lane="workspace_first")
    _, receipt = result(backplane_home, asked, far(tmp_path))
    assert receipt.outcome == "failed"
    assert "+new" in receipt.verification.git_diff, "what it did is known all the same"
    assert (root / "a.txt").read_text() == "old\n"


@bwrapped
def test_what_is_ignored_or_tracked_here_is_so_there(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(root))
    (root / ".gitignore").write_text("*.log\n")
    (root / "kept.log").write_text("1\n")
    (root / "other.log").write_text("1\n")
    for words in (("init", "-q"), ("add", "-f", "kept.log", "a.txt"), ("commit", "-qm", "x")):
        subprocess.run([*git, *words], check=True)
    (root / ".git" / "info" / "exclude").write_text("*.tmp\n")
    task = (
        "test ! -e .git/hooks/x; echo 2 > kept.log; echo 2 > other.log; echo 2 > more.log; echo 2 > x.tmp; echo y > y"
    )
    _, receipt = result(backplane_home, order(root, task), far(tmp_path))
    names = {line.split(" ")[-1] for line in receipt.verification.git_diff.splitlines() if line.startswith("diff ")}
    assert names == {"b/kept.log", "b/y"}


@bwrapped
def test_a_patch_beyond_the_receipt_comes_in_chunks_checked_by_its_hash(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    task = "head -c 7000000 /dev/urandom | base64 > big.txt"
    run, receipt = result(backplane_home, order(root, task, lane="workspace_first"), far(tmp_path))
    assert run.end_error is None
    assert receipt.verification.git_diff is None
    assert receipt.backplane["patch"]["bytes"] > 8 << 20
    assert receipt.backplane["inner"]["backplane"]["patch"]["sha256"] == receipt.backplane["patch"]["sha256"]
    assert (root / "big.txt").stat().st_size > 9_000_000
    assert run.folder is not None
    assert not (run.folder / "remote.diff").exists()


@bwrapped
def test_with_a_root_there_nothing_travels_and_the_lane_has_its_effect_there(
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
    asked = order(root, "echo new > a.txt; echo be''gun; sleep 60")
    _, receipt = result(backplane_home, asked, far(tmp_path), cancel_at="begun")
    assert receipt.outcome == "partial"
    assert receipt.backplane["inner"]["backplane"]["end"]["reason"] == "cancelled"
    assert "+new" in receipt.verification.git_diff
    nothing_left(tmp_path)


def test_a_remote_backend_whose_host_is_no_control_plane_is_refused(backplane_home: Path, root: Path) -> None:
    host = Path(__file__).parents[3] / "hosts" / "mock.py"
    backend = ProcessBackend(id="far", argv=(*SERVE[:1], str(host)), remote=True)
    run, receipt = result(backplane_home, order(root, "x"), backend)
    assert run.error is not None
    assert run.error.code == "backend_unavailable"
    assert "stage/1 and tree/1" in run.error.message
    assert receipt.outcome == "failed"


# A far side that lies -------------------------------------------------------------------------------------------------

LIAR = r"""
import base64, hashlib, json, sys
NOW = "2026-01-15T12:00:00Z"
DIFF = open(sys.argv[1], "rb").read()
def say(**message): sys.stdout.write(json.dumps(message) + "\n"); sys.stdout.flush()
say(t="hello", contract_version="abp/v0.1", backend={"id": "liar"}, capabilities={},
    extensions=["cancel/1", "stage/1", "tree/1"])
run = json.loads(sys.stdin.readline())
while "end" not in json.loads(sys.stdin.readline()): pass
patch = {"bytes": len(DIFF), "sha256": hashlib.sha256(DIFF + sys.argv[2].encode()).hexdigest()}
if sys.argv[3] == "chunks":
    data = base64.b64encode(DIFF).decode()
    say(t="patch", ref_id=run["id"], seq=int(sys.argv[4]), data=data, end=patch)
say(t="final", ref_id=run["id"], receipt={
    "meta": {"run_id": run["id"], "work_order_id": run["work_order"]["id"], "contract_version": "abp/v0.1",
             "started_at": NOW, "finished_at": NOW, "duration_ms": 1},
    "backend": {"id": "liar"}, "capabilities": {}, "usage_raw": {"backplane": {"patch": patch}}, "usage": {},
    "trace": [], "artifacts": [], "outcome": "complete",
    "verification": {"harness_ok": True, "git_diff": DIFF.decode() if sys.argv[3] == "inline" else None}})
sys.stdin.read()
"""

OUTSIDE = (
    "diff --git a/../out.txt b/../out.txt\nnew file mode 100644\n--- /dev/null\n+++ b/../out.txt\n@@ -0,0 +1 @@\n+x\n"
)
THROUGH = OUTSIDE.replace("../out.txt", "gate/out.txt")
GOOD = OUTSIDE.replace("../out.txt", "fresh.txt")


@pytest.mark.parametrize("way", ["inline", "chunks"])
@pytest.mark.parametrize(
    ("diff", "salt", "seq", "code"),
    [
        (GOOD, "", 0, None),
        (GOOD, "x", 0, "execution_workspace_error"),
        (GOOD, "", 1, "contract_schema_violation"),
        (OUTSIDE, "", 0, "execution_workspace_error"),
        (THROUGH, "", 0, "execution_workspace_error"),
        ("nonsense", "", 0, "execution_workspace_error"),
    ],
    ids=["good", "other hash", "wrong order", "leaves the root", "through a link", "no patch"],
)
def test_a_patch_from_there_is_not_believed(
    backplane_home: Path, root: Path, tmp_path: Path, way: str, diff: str, salt: str, seq: int, code: str | None
) -> None:
    if way == "inline" and seq:
        return
    (root / "gate").symlink_to(tmp_path)
    script, file = tmp_path / "liar.py", tmp_path / "diff"
    script.write_text(LIAR)
    file.write_text(diff)
    backend = ProcessBackend(id="far", argv=(SERVE[0], str(script), str(file), salt, way, str(seq)), remote=True)
    run, receipt = result(backplane_home, order(root, "x", lane="workspace_first"), backend)
    assert not (tmp_path / "out.txt").exists()
    assert not (root / ".git").exists()
    assert (root / "fresh.txt").exists() == (code is None)
    # A chunk's own end is wrong before the receipt could be.
    expected = "contract_schema_violation" if salt and way == "chunks" else code
    assert (run.end_error.code if run.end_error else None) == expected
    assert receipt.outcome == ("complete" if code is None else "failed" if "contract" in str(expected) else "partial")


# Serve's side ---------------------------------------------------------------------------------------------------------


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


def travel(run_id: str, data: bytes, size: int = 300, **changed: Any) -> list[dict[str, Any]]:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    messages: list[dict[str, Any]] = [
        {"t": "tree", "ref_id": run_id, "seq": seq, "data": base64.b64encode(piece).decode()}
        for seq, piece in enumerate(pieces)
    ]
    messages[-1]["end"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    messages[-1] |= changed
    return messages


REMOTE = ("cancel/1", "stage/1", "tree/1")
FILE = ("./a.txt", tarfile.REGTYPE, b"old\n")


def test_any_client_can_send_a_tree(backplane_home: Path) -> None:
    long = "/".join(["folder"] * 20) + "/file"
    data = archive(("./", tarfile.DIRTYPE, None), FILE, (long, tarfile.REGTYPE, b"x" * 1000), form=tarfile.USTAR_FORMAT)
    steps = ({"read": "a.txt"}, {"read": long}, {"write": {"path": "b.txt", "content": "new\n"}})
    with serve() as child:
        child.read(10)
        child.send(mock("r1", Path("/nowhere"), *steps, extensions=REMOTE), *travel("r1", data))
        told = until_ended(child, "r1")
        final = ends(told)["r1"]
        assert (final["t"], final["receipt"]["outcome"]) == ("final", "complete"), final
        assert "+new" in final["receipt"]["verification"]["git_diff"]
        assert holds(child.lines[-1], child.lines)
        outputs = [event["event"]["output"] for event in told[:-1] if event["event"]["type"] == "tool_result"]
        assert outputs[:2] == ["old\n", "x" * 1000]
    assert list((backplane_home / "incoming").iterdir()) == []


def _bad(change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    messages = travel("r1", archive(FILE))
    change(messages)
    return messages


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
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a chunk left out": (_bad(lambda m: m.pop(3)), "contract_schema_violation"),
    "another hash": (_bad(lambda m: m[-1]["end"].update(sha256="0" * 64)), "contract_schema_violation"),
    "no base64": (_bad(lambda m: m[0].update(data="?")), "contract_schema_violation"),
    "no archive": (travel("r1", b"x" * 2048), "workspace_staging_failed"),
    "a size below nothing": (travel("r1", with_size(b"-0000001000\0")), "workspace_staging_failed"),
    "cut in the middle": (travel("r1", archive(FILE)[:700]), "workspace_staging_failed"),
    **{name: (travel("r1", archive(*made), 30_000), "workspace_staging_failed") for name, made in HOSTILE.items()},
}


def test_a_tree_that_is_wrong_or_hostile_is_one_fatal_with_a_receipt_and_the_rest_goes_on(
    backplane_home: Path,
) -> None:
    with serve(BACKPLANE_WORKSPACE_FILES_MAX=30, BACKPLANE_WORKSPACE_BYTES_MAX=65536) as child:
        child.read(10)
        for name, (messages, code) in WRONG.items():
            child.send(mock("r1", Path("/nowhere"), extensions=REMOTE), *messages)
            fatal = ends(until_ended(child, "r1"))["r1"]
            assert (fatal["t"], fatal.get("error_code")) == ("fatal", code), (name, fatal)
            assert holds(child.lines[-1], child.lines), name
        child.send(mock("good", Path("/nowhere"), extensions=REMOTE), *travel("good", archive(FILE)))
        assert ends(until_ended(child, "good"))["good"]["t"] == "final"
        assert list((backplane_home / "incoming").iterdir()) == []
    assert not Path("/tmp/backplane-escaped").exists()


@pytest.mark.parametrize(
    ("entries", "fact"),
    [
        ([("l", tarfile.SYMTYPE, "/tmp"), ("l/x", tarfile.REGTYPE, b"")], "'l/x' of the archive has a file or a link"),
        ([FILE, FILE], "'a.txt' of the archive comes twice"),
        ([FILE, ("h", tarfile.LNKTYPE, "a.txt")], "'h' is a hard link: only files, folders and symbolic links travel"),
        ([("p", tarfile.FIFOTYPE, None)], "'p' is a named pipe: only files"),
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


def test_a_tree_that_stops_coming_ends_with_its_sender(backplane_home: Path) -> None:
    with serve(BACKPLANE_IDLE_S=0.3) as child:
        child.read(10)
        child.send(mock("r1", Path("/nowhere"), extensions=REMOTE), *travel("r1", archive(FILE))[:-1])
        assert ends(until_ended(child, "r1"))["r1"]["error_code"] == "backend_timeout"
    with serve() as child:
        child.read(10)
        child.send(mock("r2", Path("/nowhere"), extensions=("stage/1", "tree/1")), *travel("r2", archive(FILE))[:-1])
        child.close_stdin()
        assert ends(until_ended(child, "r2"))["r2"]["error_code"] == "stream_closed"
        assert child.wait() == 0
    with serve() as child:
        child.read(10)
        child.send(mock("r3", Path("/nowhere"), extensions=REMOTE), *travel("r3", archive(FILE))[:-1])
        child.send({"t": "cancel", "ref_id": "r3", "reason": "enough"})
        final = ends(until_ended(child, "r3"))["r3"]
        assert final["receipt"]["usage_raw"]["backplane"]["cancel_reason"] == "enough"
        incoming = backplane_home / "incoming"
        child.send(
            mock("r4", Path("/nowhere"), extensions=REMOTE), *travel("r4", archive(FILE))[:-1], {"t": "ping", "seq": 1}
        )
        child.until("pong")
        child.process.kill()
        child.wait()
        assert len(list(incoming.iterdir())) == 1
    with serve() as child:
        child.read(10)
        assert list(incoming.iterdir()) == [], "the next one clears up"
    with Store.open(backplane_home, readonly=True) as store:
        assert store.verify_all().findings == ()


# Parcels --------------------------------------------------------------------------------------------------------------


def test_a_parcel_arrives_as_it_left(tmp_path: Path, root: Path) -> None:
    raw = os.fsencode(root) + b"/\xff\xfe"
    Path(os.fsdecode(raw)).write_bytes(b"odd")
    (root / ("é" * 100)).write_text("long name")
    (root / "sparse").write_bytes(b"")
    os.truncate(root / "sparse", 1_000_001)
    (root / "empty").mkdir()
    (root / "locked").write_text("x")
    (root / "locked").chmod(0o400)
    arriving = parcel.Arriving(tmp_path / "spool", lambda size: None)
    for chunk in parcel.chunks(parcel.pack(root, QUOTA), 10_000):
        assert len(chunk.data) <= 9_000
        arriving.take(wire.TreeChunk(ref_id="r", seq=chunk.seq, data=chunk.data, end=chunk.end))
    parcel.unpack(arriving.path, tmp_path / "there", QUOTA)
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
