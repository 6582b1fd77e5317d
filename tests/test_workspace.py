"""Workspaces: what is staged, what the patch says, and that nothing else is touched, run or left behind."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backplane.errors import PolicyError, WorkspaceError
from backplane.workspace import Patch, Quota, Workspace, apply_patch, collect, open_workspace, writing
from backplane.workspace.patch import load
from backplane.workspace.repo import Repo
from tests.receipt_writer import memory_of

BIG = Quota(bytes_max=1 << 30, files_max=100_000)
NOBODY = 65534


def tool(*argv: str, cwd: Path, check: bool = True, env: dict[str, str] | None = None) -> bytes:
    """Run a program as a user would; only tests do this directly."""
    clean = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **(env or {})}
    done = subprocess.run(argv, cwd=cwd, env=clean, capture_output=True, check=False, timeout=60)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def git(*words: str, cwd: Path, check: bool = True) -> bytes:
    return tool("git", "-c", "user.name=u", "-c", "user.email=u@h", *words, cwd=cwd, check=check)


class Place:
    """An original, and the folders of a run beside it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.original = base / "ws"
        self.run_dir = base / "run"
        self.stage_dir = base / "stage"
        self.original.mkdir(parents=True)

    def write(self, files: dict[str, str | bytes], root: Path | None = None) -> None:
        for name, content in files.items():
            path = (root or self.original) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def open(self, **changes: Any) -> Workspace:
        given: dict[str, Any] = {
            "mode": "staged", "include": [], "exclude": [], "run_dir": self.run_dir, "stage_dir": self.stage_dir,
            "tree": self.stage_dir / "tree", "quota": BIG,
        }  # fmt: skip
        return open_workspace(changes.pop("root", self.original), **(given | changes))

    @contextlib.contextmanager
    def staged(self, **changes: Any) -> Iterator[Workspace]:
        found = self.open(**changes)
        try:
            yield found
        finally:
            found.close()
            assert not self.stage_dir.exists()

    def patch_of(self, changes: Sequence[tuple[str, str | bytes | None]]) -> Patch:
        """Stage, write (None removes), and take the difference."""
        with self.staged() as found:
            for name, content in changes:
                if content is None:
                    (found.root / name).unlink()
                else:
                    self.write({name: content}, found.root)
            return found.difference()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def snapshot(root: Path) -> dict[bytes, tuple[int, bytes]]:
    """Every file, link and folder below a root but `.git`: mode and content."""
    found: dict[bytes, tuple[int, bytes]] = {}
    for base, folders, files in os.walk(os.fsencode(root)):
        folders[:] = [name for name in folders if name != b".git"]
        for name in [*folders, *files]:
            path = os.path.join(base, name)
            facts = os.lstat(path)
            key = os.path.relpath(path, os.fsencode(root))
            if name == b".git":
                continue
            if stat.S_ISLNK(facts.st_mode):
                found[key] = (0, os.readlink(path))
            elif stat.S_ISREG(facts.st_mode):
                with open(path, "rb") as file:
                    found[key] = (facts.st_mode, file.read())
            else:
                found[key] = (facts.st_mode, b"")
    return found


def files_of(root: Path) -> dict[bytes, tuple[int, bytes]]:
    return {path: (mode & 0o100, data) for path, (mode, data) in snapshot(root).items() if not stat.S_ISDIR(mode)}


# Staging.


def test_a_staged_copy_has_every_file_mode_time_and_link_but_no_git(place: Place) -> None:
    place.write({"a/b.txt": "one", ".hidden": "h", "a/.git/config": "x", ".git/HEAD": "y"})
    place.write({"empty": "", "bin": b"\0\xff"})
    (place.original / "run.sh").write_text("#!/bin/sh\n")
    (place.original / "run.sh").chmod(0o755)
    (place.original / "locked").mkdir(mode=0o555)
    (place.original / "out").symlink_to("/etc/passwd")
    (place.original / "loop").symlink_to("loop")
    os.utime(place.original / "a", ns=(5_000_000_001, 6_000_000_002))
    os.utime(place.original / "bin", ns=(7_000_000_003, 8_000_000_004))
    os.link(place.original / "bin", place.original / "bin2")
    with place.staged() as found:
        assert snapshot(found.root) == snapshot(place.original)
        assert (found.root / "bin").stat().st_mtime_ns == 8_000_000_004
        assert (found.root / "a").stat().st_mtime_ns == 6_000_000_002
        assert not (found.root / "a/.git").exists()
        assert (found.root / "bin").stat().st_ino != (place.original / "bin").stat().st_ino
        assert found.original == place.original
        assert found.difference().bytes == 0


def test_the_agent_gets_a_sound_repository_of_one_commit(place: Place) -> None:
    place.write({"a.txt": "a\n", "d/e/f.txt": "f\n", "d.txt": "x", "big": b"q" * 200_000})
    place.write({".gitignore": "*.log\n", "x.log": "l"})
    (place.original / "link").symlink_to("a.txt")
    with place.staged() as found:
        assert git("status", "--porcelain", cwd=found.root) == b""
        assert git("fsck", "--strict", "--full", cwd=found.root) is not None
        assert git("rev-list", "--count", "HEAD", cwd=found.root) == b"1\n"
        listed = git("ls-files", cwd=found.root).split()
        assert listed == [b".gitignore", b"a.txt", b"big", b"d.txt", b"d/e/f.txt", b"link"]
        (found.root / "a.txt").write_text("changed\n")
        git("commit", "-qam", "mine", cwd=found.root)
        git("gc", "-q", cwd=found.root)
        patch = found.difference()
        assert [(change.path, change.kind) for change in patch.changes] == [("a.txt", "modified")]


def test_an_empty_folder_can_be_staged(place: Place) -> None:
    with place.staged() as found:
        assert git("status", "--porcelain", cwd=found.root) == b""
        place.write({"new": "n"}, found.root)
        assert found.difference().status == "A  new\n"


def test_include_and_exclude_select_what_is_staged(place: Place) -> None:
    place.write({"src/a.py": "a", "src/b.js": "b", "docs/c.py": "c", "node_modules/d/e.py": "e", "f.py": "f"})
    (place.original / "hollow").mkdir()
    with place.staged(include=["**/*.py"], exclude=["node_modules", "docs/**"]) as found:
        assert sorted(files_of(found.root)) == [b"f.py", b"src/a.py"]
        assert not (found.root / "hollow").exists()
    with place.staged(exclude=["**/*.py"]) as found:
        assert sorted(files_of(found.root)) == [b"src/b.js"]
        assert (found.root / "hollow").is_dir()


def test_what_was_not_staged_cannot_be_overwritten_by_the_patch(place: Place) -> None:
    place.write({"src/a.py": "a", "secret.env": "s", "notes.txt": "n"})
    with place.staged(include=["src/**"], exclude=["**/*.env"]) as found:
        place.write({"secret.env": "forged", "notes.txt": "forged", "fresh.txt": "new", "src/b.py": "b"}, found.root)
        patch = found.difference()
    assert [change.path for change in patch.changes] == ["fresh.txt", "src/b.py"]
    assert patch.left_out == ("notes.txt", "secret.env")
    git("init", "-q", cwd=place.original)
    git("apply", "--check", str(patch.path), cwd=place.original)


def test_names_that_git_takes_for_its_own_are_left_out_and_the_rest_can_be_applied(place: Place) -> None:
    place.write({"a": "a\n", ".GIT/kept": "k\n", ".GIT/changed": "c\n", ".GIT/gone": "g\n", "b/Git~1/same": "s\n"})
    with place.staged() as found:
        new: dict[str, str | bytes] = {
            ".Git/hooks/x": "x\n",
            "b/.git ./x": "x\n",
            "GIT~1": "x\n",
            ".gitmodules": "m\n",
            ".gitx/y": "y\n",
        }
        place.write(new | {"a": "A\n", ".GIT/changed": "C\n"}, found.root)
        (found.root / ".GIT/gone").unlink()
        patch = found.difference()
    assert [change.path for change in patch.changes] == [".gitmodules", ".gitx/y", "a"]
    assert patch.left_out == (".GIT/changed", ".GIT/gone", ".Git/hooks/x", "GIT~1", "b/.git ./x")
    git("init", "-q", cwd=place.original)
    git("apply", "--check", str(patch.path), cwd=place.original)
    assert apply_patch(place.run_dir).files == (".gitmodules", ".gitx/y", "a")


def test_a_bad_glob_is_refused_before_anything_is_made(place: Place) -> None:
    with pytest.raises(PolicyError):
        place.open(include=["{a"])
    assert not place.stage_dir.exists()


def test_special_files_are_counted_and_never_opened(place: Place) -> None:
    os.mkfifo(place.original / "fifo")
    os.mkfifo(place.original / ".gitignore")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        os.chdir(place.original)
        server.bind("socket")
        os.chdir("/")
        with place.staged() as found:
            assert found.special_count == 3
            assert files_of(found.root) == {}
            os.mkfifo(found.root / "other")
            (found.root / "fifo").write_text("a file now")
            patch = found.difference()
    assert patch.left_out == ("fifo", "other")
    assert patch.bytes == 0


def test_a_sparse_terabyte_keeps_its_holes_and_costs_no_quota(place: Place) -> None:
    size = 1 << 40
    with (place.original / "sparse").open("wb") as file:
        file.truncate(size)
        file.seek(1 << 30)
        file.write(b"island")
    os.utime(place.original / "sparse", ns=(0, 0))
    with place.staged(quota=Quota(bytes_max=1 << 20, files_max=10)) as found:
        copy = (found.root / "sparse").stat()
        assert copy.st_size == size
        assert copy.st_blocks * 512 < 1 << 20
        with (found.root / "sparse").open("r+b") as file:
            file.seek(1 << 30)
            assert file.read(6) == b"island"
            file.seek(1 << 30)
            file.write(b"ISLAND")
        assert git("status", "--porcelain", cwd=found.root) == b""
        patch = found.difference()
    assert patch.left_out == ("sparse",)
    assert patch.bytes == 0


@pytest.mark.parametrize("quota", [Quota(bytes_max=999, files_max=9), Quota(bytes_max=10_000, files_max=3)])
def test_over_the_quota_nothing_is_left_behind(place: Place, quota: Quota) -> None:
    place.write({f"f{number}": b"x" * 250 for number in range(4)})
    with pytest.raises(WorkspaceError, match=r"more than (999 bytes|3 files)") as caught:
        place.open(quota=quota)
    assert caught.value.code == "workspace_staging_failed"
    assert not place.stage_dir.exists()
    with place.staged(quota=Quota(bytes_max=64_000, files_max=4)):
        pass


def test_changes_over_the_quota_are_an_error_that_leaves_no_half_patch(place: Place) -> None:
    with place.staged(quota=Quota(bytes_max=5000, files_max=4)) as found:
        place.write({"a": b"x" * 4000, "b": b"y" * 4000}, found.root)
        with pytest.raises(WorkspaceError) as caught:
            found.difference()
    assert caught.value.code == "execution_workspace_error"
    assert list(place.run_dir.iterdir()) == []


def test_a_missing_root_is_workspace_init_failed(place: Place) -> None:
    place.write({"file": ""})
    for root in ("none", "file"):
        with pytest.raises(WorkspaceError) as caught:
            place.open(root=place.original / root)
        assert caught.value.code == "workspace_init_failed"


def test_staging_can_be_stopped(place: Place) -> None:
    place.write({f"f{number}": "x" for number in range(50)})
    asked = iter(range(100))
    with pytest.raises(WorkspaceError, match="stopped"):
        place.open(stopped=lambda: next(asked) > 20)
    assert not place.stage_dir.exists()


def test_a_workspace_that_contains_our_own_folders_does_not_copy_them(place: Place) -> None:
    place.write({"a": "a", "state/note": "n"})
    place.run_dir, place.stage_dir = place.original / "state/run", place.original / "state/stage"
    place.run_dir.mkdir()
    (place.run_dir / "journal").write_text("ours")
    with place.staged() as found:
        assert sorted(files_of(found.root)) == [b"a", b"state/note"]


def test_a_stage_folder_in_use_is_refused_and_kept(place: Place) -> None:
    place.write({"keep": "k"}, place.stage_dir)
    with pytest.raises(WorkspaceError):
        place.open()
    assert (place.stage_dir / "keep").exists()


def test_a_stage_left_by_a_killed_control_plane_is_collected(place: Place) -> None:
    place.write({"a/b/c": "c", "d": "d"})
    found = place.open()
    (found.root / "a/b").chmod(0)
    (found.root / "a").chmod(0o555)
    (found.root / "out").symlink_to(place.original)
    collect(place.stage_dir)
    assert not place.stage_dir.exists()
    assert (place.original / "a/b/c").exists()
    collect(place.stage_dir)
    place.stage_dir.symlink_to(place.original)
    collect(place.stage_dir)
    assert (place.original / "d").exists()


@contextlib.contextmanager
def as_nobody(base: Path) -> Iterator[None]:
    """Be a user for whom rights count. Root is not; another user is already one."""
    if os.geteuid():
        yield
        return
    for path in [base, *base.parents][:4]:
        if path != Path("/") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    for top, folders, files in os.walk(base):
        for name in [top, *(os.path.join(top, each) for each in folders + files)]:
            os.lchown(name, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_without_rights_a_file_is_named_and_the_stage_is_removed_whatever_its_modes(place: Place) -> None:
    place.write({"a/secret": "s", "b": "b"})
    with as_nobody(place.base):
        (place.original / "a/secret").chmod(0)
        with pytest.raises(WorkspaceError, match=r"'a/secret': EACCES") as caught:
            place.open()
        assert caught.value.code == "workspace_staging_failed"
        assert not place.stage_dir.exists()
        (place.original / "a/secret").chmod(0o400)
        (place.original / "a").chmod(0o555)
        with place.staged() as found:
            assert stat.S_IMODE((found.root / "a").stat().st_mode) == 0o555
            (found.root / "new").mkdir()
            (found.root / "new/x").write_text("x")
            (found.root / "new/x").chmod(0)
            (found.root / "new").chmod(0)
            assert found.difference().status == "A  new/x\n"
            (found.root / "new").chmod(0)
        assert not place.stage_dir.exists()


# The patch.

ODD = ["-dash", "a b", 'quo"te', "tab\there", "new\nline", "\udcff\udcfe", "é", "back\\slash", ":magic", "*", "~", " "]


def test_a_patch_of_everything_applies_with_plain_git(place: Place) -> None:
    long = "".join(f"line {number}\n" for number in range(40))
    before: dict[str, str | bytes] = {
        "gone": "g\n", "old name": long, "binary": bytes(range(256)), "mode": "m\n", "crlf": "a\r\nb\r\n", "noeol": "x",
        "dir/one": "1", "file": "f", "kept": "k", ".gitattributes": "*.x text eol=crlf\n", "t.x": "1\r\n2\r\n",
        **{f"odd/{name}": "before\n" for name in ODD},
    }  # fmt: skip
    place.write(before)
    (place.original / "link").symlink_to("kept")
    git("init", "-q", cwd=place.original)
    with place.staged() as found:
        root = found.root
        (root / "gone").unlink()
        (root / "old name").rename(root / "new name")
        place.write({"binary": bytes(range(255, -1, -1)), "crlf": "a\r\nc\r\n", "noeol": "y", "empty": ""}, root)
        place.write({"t.x": "1\r\n3\r\n"}, root)
        place.write({"new/file": "n", "new/bin": b"\0\1", **{f"odd/{name}": "after" for name in ODD}}, root)
        place.write({f"fresh {name}": "z\n" for name in ODD}, root)
        (root / "mode").chmod(0o755)
        (root / "link").unlink()
        (root / "link").symlink_to("/elsewhere")
        (root / "points").symlink_to("a b\nc")
        shutil.rmtree(root / "dir")
        (root / "dir").write_text("a file now\n")
        (root / "file").unlink()
        place.write({"file/inside": "i\n"}, root)
        (root / "kept").unlink()
        (root / "kept").symlink_to("mode")
        patch = found.difference()
        wanted = files_of(root)
    kinds = {change.path: change.kind for change in patch.changes}
    assert kinds["new name"] == "renamed"
    assert [change.old_path for change in patch.changes if change.kind == "renamed"] == ["old name"]
    assert kinds["mode"] == "mode"
    assert kinds["gone"] == "deleted"
    assert kinds["empty"] == "added"
    assert kinds["odd/\\xff\\xfe"] == "modified"
    assert [change.path for change in patch.changes if change.binary] == ["binary", "new/bin"]
    assert patch.bytes == patch.path.stat().st_size
    copy = place.base / "copy"
    shutil.copytree(place.original, copy, symlinks=True)
    git("apply", "--check", str(patch.path), cwd=copy)
    git("apply", str(patch.path), cwd=copy)
    assert files_of(copy) == wanted
    assert apply_patch(place.run_dir, check=True).merged is False
    assert files_of(place.original) != wanted
    assert len(apply_patch(place.run_dir).files) == len(patch.changes) + 1
    assert files_of(place.original) == wanted


def test_status_has_one_line_a_change(place: Place) -> None:
    place.write({"a": "a" * 100, "b": "b", "c": "c"})
    patch = place.patch_of([("a", None), ("a\n2", "a" * 100), ("b", None), ("c", "C"), ("d e", "d")])
    assert patch.status == 'R  a -> "a\\n2"\nD  b\nM  c\nA  "d e"\n'


def test_ignored_files_are_counted_and_not_patched(place: Place) -> None:
    place.write({".gitignore": "*.log\nbuild/\n", "old.log": "o", "build/x": "x", "a": "a", "forced.log": "f"})
    git("init", "-q", cwd=place.original)
    git("add", "-f", "forced.log", "a", cwd=place.original)
    with place.staged() as found:
        assert (found.root / "old.log").read_text() == "o"
        place.write({"old.log": "changed", "build/y": "y", "new.log": "n"}, found.root)
        place.write({"sub/.gitignore": "s\n", "sub/s": "", "forced.log": "changed", "a": "changed"}, found.root)
        (found.root / "build/x").unlink()
        patch = found.difference()
    assert [change.path for change in patch.changes] == ["a", "forced.log", "sub/.gitignore"]
    assert patch.ignored_count == 5


def test_a_file_changed_within_one_tick_of_the_clock_is_noticed(place: Place) -> None:
    place.write({"a": "aaaa"})
    with place.staged() as found:
        facts = (found.root / "a").stat()
        with (found.root / "a").open("r+") as file:
            file.write("bbbb")
        os.utime(found.root / "a", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert found.difference().status == "M  a\n"


@pytest.mark.parametrize("attack", ["remove", "rewrite", "file", "link"])
def test_the_difference_does_not_depend_on_the_agents_repository(place: Place, attack: str) -> None:
    place.write({"a": "a\n", "b": "b\n"})
    with place.staged() as found:
        (found.root / "a").write_text("changed\n")
        if attack == "rewrite":
            git("commit", "-qam", "hidden", cwd=found.root)
            git("update-ref", "-d", "HEAD", cwd=found.root)
        else:
            shutil.rmtree(found.root / ".git")
        if attack == "file":
            (found.root / ".git").write_text("gitdir: /nonexistent\n")
        if attack == "link":
            (found.root / ".git").symlink_to(place.original)
        assert found.difference().status == "M  a\n"


@pytest.mark.parametrize("attack", ["link", "folder", "gone"])
def test_a_stage_that_was_replaced_is_not_compared(place: Place, attack: str) -> None:
    place.write({"a": "a"})
    place.write({"secret": "s"}, place.base / "elsewhere")
    with place.staged() as found:
        found.root.rename(place.stage_dir / "moved")
        if attack == "link":
            found.root.symlink_to(place.base / "elsewhere")
        if attack == "folder":
            found.root.mkdir()
        with pytest.raises(WorkspaceError) as caught:
            found.difference()
        assert caught.value.code == "execution_workspace_error"
    assert (place.base / "elsewhere/secret").exists()


def test_in_place_the_patch_is_the_difference_from_the_start(place: Place) -> None:
    place.write({"a": "a\n", "b": "b\n", ".gitignore": "*.log\n"})
    git("init", "-q", cwd=place.original)
    git("add", ".", cwd=place.original)
    git("commit", "-qm", "x", cwd=place.original)
    place.write({"b": "mine, not the agent's\n"})
    before = {path: path.stat().st_mtime_ns for path in (place.original / ".git").rglob("*")}
    with place.staged(mode="pass_through") as found:
        assert found.root == place.original
        place.write({"a": "changed\n", "new": "n\n", "x.log": "l"})
        patch = found.difference()
    assert patch.status == "M  a\nA  new\n"
    assert patch.ignored_count == 1
    assert (place.original / "a").read_text() == "changed\n"
    assert {path: path.stat().st_mtime_ns for path in (place.original / ".git").rglob("*")} == before
    with pytest.raises(WorkspaceError, match="in place"):
        apply_patch(place.run_dir)


# What must not run.

HOOKS = ["post-index-change", "pre-commit", "post-checkout", "reference-transaction", "fsmonitor-watchman"]
TRAP = '#!/bin/sh\necho "$0" >> {log}\ncat\n'


def test_no_program_of_either_tree_is_ever_run(place: Place) -> None:
    log, trap = place.base / "ran", place.base / "trap"
    trap.write_text(TRAP.format(log=log))
    trap.chmod(0o755)
    config = "".join(
        f"[{section}]\n\t{key} = {trap}\n"
        for section, key in [
            ("core", "fsmonitor"), ("core", "hooksPath"), ("core", "pager"), ("core", "sshCommand"),
            ("diff", "external"), ('diff "evil"', "textconv"), ('diff "evil"', "command"), ('filter "evil"', "clean"),
            ('filter "evil"', "smudge"), ('filter "evil"', "process"), ('merge "evil"', "driver"), ("include", "path"),
        ]
    )  # fmt: skip
    attributes = "* filter=evil diff=evil merge=evil text eol=crlf ident\n"

    def set_traps(root: Path) -> None:
        place.write({".gitattributes": attributes, ".gitconfig": config, ".gitmodules": "[submodule]\n"}, root)
        for repository in (root, root / "nested"):
            repository.mkdir(exist_ok=True)
            if not (repository / ".git").exists():
                git("init", "-q", cwd=repository)
            (repository / ".git/config").write_text("[core]\n\trepositoryformatversion = 0\n" + config)
            (repository / ".git/info").mkdir(exist_ok=True)
            (repository / ".git/info/attributes").write_text(attributes)
            for hook in HOOKS:
                place.write({f".git/hooks/{hook}": TRAP.format(log=log)}, repository)
                (repository / ".git/hooks" / hook).chmod(0o755)
        place.write({"pointer/.git": f"gitdir: {root / 'nested/.git'}\n", "pointer/f": "f"}, root)

    place.write({"a.txt": "a\n", "b.txt": "line\n" * 20, "nested/n.txt": "n\n"})
    set_traps(place.original)
    for mode in ("staged", "pass_through"):
        with place.staged(mode=mode) as found:
            set_traps(found.root)
            place.write({"a.txt": "a\nb\n", "nested/n.txt": "N\n", "nested/new": "x"}, found.root)
            (found.root / "b.txt").rename(found.root / "c.txt")
            patch = found.difference()
        assert {"a.txt", "nested/n.txt", "nested/new"} <= {change.path for change in patch.changes}
        if mode == "staged":
            place.write({"a.txt": "0\na\n"})
            assert apply_patch(place.run_dir, merge=True).merged
            assert (place.original / "a.txt").read_text() == "0\na\nb\n"
            place.write({"a.txt": "a\n", "nested/n.txt": "n\n"})
            (place.original / "nested/new").unlink()
            (place.original / "c.txt").rename(place.original / "b.txt")
    assert not log.exists(), log.read_text()


def test_the_users_git_settings_play_no_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place.base / "home"
    place.write({".gitconfig": "[diff]\n\tnoprefix = true\n\tmnemonicPrefix = true\n[core]\n\tautocrlf = true\n"}, home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(home / "nowhere"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    monkeypatch.setenv("PATH", f".:relative:{os.environ['PATH']}")
    place.write({"a": "a\r\n"})
    patch = place.patch_of([("a", "b\r\n")])
    assert b"--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\r\n+b\r\n" in patch.path.read_bytes()


# Applying.


def test_a_moved_base_is_refused_and_named(place: Place) -> None:
    place.write({"a": "a\n", "b": "b\n"})
    place.patch_of([("a", "A\n"), ("b", "B\n"), ("c", "C\n")])
    place.write({"b": "mine\n", "c": "mine\n"})
    before = snapshot(place.original)
    for check in (True, False):
        with pytest.raises(WorkspaceError, match=r"'b', 'c'") as caught:
            apply_patch(place.run_dir, check=check)
        assert caught.value.code == "execution_workspace_error"
        assert "--merge" in (caught.value.hint or "")
    assert snapshot(place.original) == before


def test_a_patch_is_applied_once(place: Place) -> None:
    place.write({"a": "a\n"})
    place.patch_of([("a", "A\n")])
    apply_patch(place.run_dir)
    with pytest.raises(WorkspaceError, match="applied already"):
        apply_patch(place.run_dir)
    assert apply_patch(place.run_dir, merge=True).files == ()


def test_changes_in_different_lines_are_merged(place: Place) -> None:
    lines = [f"{number}\n" for number in range(20)]
    text = "".join(lines)
    place.write({"a": text, "b": "b\n", "moved": text + "end\n", "script": "s\n"})
    place.patch_of([("a", text.replace("2\n", "two\n", 1)), ("b", "B\n"), ("moved", None), ("to", text + "end\n"),
                    ("script", "S\n")])  # fmt: skip
    place.write({"a": text + "mine\n", "moved": "mine\n" + text + "end\n"})
    (place.original / "script").chmod(0o755)
    (place.original / "a").chmod(0o640)
    assert apply_patch(place.run_dir, check=True, merge=True).merged
    applied = apply_patch(place.run_dir, merge=True)
    assert applied.files == ("a", "b", "moved", "script", "to")
    assert (place.original / "a").read_text() == text.replace("2\n", "two\n", 1) + "mine\n"
    assert stat.S_IMODE((place.original / "a").stat().st_mode) == 0o640
    assert (place.original / "to").read_text() == "mine\n" + text + "end\n"
    assert not (place.original / "moved").exists()
    assert (place.original / "script").stat().st_mode & 0o111


def test_conflicts_are_listed_and_nothing_is_changed(place: Place) -> None:
    place.write({"a": "a\n", "gone": "g\n", "edited": "e\n", "bin": b"\0a", "fine": "f\n"})
    place.patch_of([("a", "A\n"), ("gone", None), ("edited", "E\n"), ("bin", b"\0b"), ("new", "N\n"), ("fine", "F\n")])
    place.write({"a": "mine\n", "gone": "mine\n", "bin": b"\0c", "new": "mine\n"})
    (place.original / "edited").unlink()
    before = snapshot(place.original)
    with pytest.raises(WorkspaceError, match="'a', 'bin', 'edited', 'gone', 'new'; nothing was changed"):
        apply_patch(place.run_dir, merge=True)
    assert snapshot(place.original) == before


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_a_write_that_failed_in_the_middle_goes_on(place: Place, fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [f"d{number}/f" for number in range(5)]
    place.write({name: name for name in files})
    place.patch_of([*((name, None if name[1] in "13" else "new\n") for name in files), ("x/y/z", "z\n")])
    left = fail_at
    for name in ("rename", "unlink"):

        def move(*args: Any, real: Callable[..., None], **kwargs: Any) -> None:
            nonlocal left
            counts = str(args[0]).startswith(str(place.original))
            left -= counts
            if counts and left == 0:
                raise OSError(errno.EIO, "made to fail")
            real(*args, **kwargs)

        monkeypatch.setattr(os, name, functools.partial(move, real=getattr(os, name)))
    if fail_at <= 6:
        with pytest.raises(WorkspaceError, match=r"was cut off, and some files may be written.*made to fail"):
            apply_patch(place.run_dir)
        assert len(writing.cut_off(place.base)) == 1
        with pytest.raises(WorkspaceError, match="was cut off"):
            apply_patch(place.run_dir, root=place.base)
        assert len(apply_patch(place.run_dir, check=True).files) == 6
    assert len(apply_patch(place.run_dir).files) == 6
    assert writing.cut_off(place.base) == []
    assert files_of(place.original).keys() == {b"d0/f", b"d2/f", b"d4/f", b"x/y/z"}


def test_a_disk_that_refuses_a_new_file_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write({"a": "a\n", "b": "b\n", "gone": "g\n"})
    place.patch_of([("a", "A\n"), ("b", "B\n"), ("gone", None)])
    before, real, left = snapshot(place.original), os.fsync, 3

    def sync(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, "no space")
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(WorkspaceError, match="ENOSPC") as caught:
        apply_patch(place.run_dir)
    assert caught.value.hint == "nothing was changed"
    assert snapshot(place.original) == before
    assert writing.cut_off(place.base) == []
    assert apply_patch(place.run_dir).files == ("a", "b", "gone")


def test_what_was_changed_after_a_cut_is_refused_merged_or_given_up(place: Place) -> None:
    text = "".join(f"{number}\n" for number in range(20))
    place.write({"a": text, "b": "b\n"})
    place.patch_of([("a", text.replace("2\n", "two\n", 1)), ("b", "B\n")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.FileWriter, "put", lambda *_: failing())
        with pytest.raises(WorkspaceError, match="was cut off"):
            apply_patch(place.run_dir)
    place.write({"a": text + "mine\n"})
    with pytest.raises(WorkspaceError, match="changed since the run began: 'a'") as caught:
        apply_patch(place.run_dir)
    assert str(writing.mark_of(place.run_dir)) in (caught.value.hint or "")
    applied = apply_patch(place.run_dir, merge=True)
    assert (applied.files, applied.merged) == (("a", "b"), True)
    assert (place.original / "a").read_text() == text.replace("2\n", "two\n", 1) + "mine\n"


def failing() -> None:
    raise OSError(errno.EIO, "made to fail", "a")


OUTSIDE = ["../evil", "/tmp/evil", "a/../../evil", ".git/hooks/x", "sub/.GIT/config", "a//b", "./a", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_patch_that_would_leave_the_root_is_refused(place: Place, name: str) -> None:
    place.write({"a": "a\n"})
    place.patch_of([("b", "B\n")])
    leaf = [0o100644, git("hash-object", "--stdin", cwd=place.base).decode().strip()]
    mark = {"command": "apply", "root": str(place.original), "token": "t", "targets": [[name, None, leaf]]}
    writing.mark_of(place.run_dir).write_text(json.dumps(mark) + "\n")
    with pytest.raises(WorkspaceError, match="not a file of the workspace"):
        apply_patch(place.run_dir)
    assert not (place.base / "evil").exists()


def test_a_state_that_would_leave_the_root_is_refused(place: Place) -> None:
    place.write({"a": "a\n"})
    place.patch_of([("b", "B\n")])
    repo, record = Repo(place.run_dir / "repo.git"), place.run_dir / "patch.json"
    (leaf,) = [target.after for target in load(place.run_dir).targets.values() if target.after is not None]
    with repo.storing() as objects:
        state = objects.state({}, {"../evil": leaf})
    record.write_text(json.dumps(json.loads(record.read_text()) | {"tree": state}))
    with pytest.raises(WorkspaceError, match="not a file of the workspace"):
        apply_patch(place.run_dir)


def test_a_link_in_the_original_is_never_followed(place: Place) -> None:
    outside = place.base / "ws-evil"
    place.write({"dir/f": "f\n"})
    place.write({"f": "f\n"}, outside)
    place.patch_of([("dir/f", "F\n"), ("dir/new", "N\n")])
    shutil.rmtree(place.original / "dir")
    (place.original / "dir").symlink_to(outside)
    for merge in (False, True):
        with pytest.raises(WorkspaceError):
            apply_patch(place.run_dir, merge=merge)
    assert files_of(outside) == {b"f": (0, b"f\n")}


def test_a_hard_link_in_the_original_does_not_carry_a_change_outside(place: Place) -> None:
    place.write({"outside": "o\n"}, place.base)
    os.link(place.base / "outside", place.original / "inside")
    place.patch_of([("inside", "changed\n")])
    assert (place.base / "outside").read_text() == "o\n"
    apply_patch(place.run_dir)
    assert (place.original / "inside").read_text() == "changed\n"
    assert (place.base / "outside").read_text() == "o\n"


def test_an_edited_patch_is_refused(place: Place) -> None:
    place.write({"a": "a\n"})
    patch = place.patch_of([("a", "A\n")])
    text = patch.path.read_bytes()
    patch.path.write_bytes(text.replace(b"A", b"B"))
    with pytest.raises(WorkspaceError, match="not what the run left"):
        apply_patch(place.run_dir)
    patch.path.write_bytes(text)
    with pytest.raises(WorkspaceError, match="no patch"):
        apply_patch(place.base)


def test_a_record_is_checked_where_the_receipt_names_it(place: Place) -> None:
    place.write({"a": "a\n"})
    patch = place.patch_of([("a", "A\n")])
    with pytest.raises(WorkspaceError, match="not the one that the receipt names"):
        apply_patch(place.run_dir, record_sha256="0" * 64)
    assert (place.original / "a").read_text() == "a\n"
    assert apply_patch(place.run_dir, record_sha256=patch.record_sha256).files == ("a",)


@pytest.mark.parametrize("damage", ["forged", "short", "gone"])
def test_contents_that_are_not_as_they_were_kept_change_nothing_and_leave_nothing(place: Place, damage: str) -> None:
    place.write({"a": "a\n", "b": "b\n", "gone": "g\n"})
    place.patch_of([("a", "A\n"), ("b", os.urandom(3_000_000)), ("gone", None)])
    (pack,) = (place.run_dir / "repo.git/objects/pack").glob("*.pack")
    data = pack.read_bytes()
    half = len(data) // 2
    pack.unlink()
    if damage != "gone":
        pack.write_bytes(data[:half] + (b"C" * 99 + data[half + 99 :] if damage == "forged" else b""))
    before = snapshot(place.original)
    for check in (True, False):
        with pytest.raises(WorkspaceError):
            apply_patch(place.run_dir, check=check)
    assert snapshot(place.original) == before
    assert writing.cut_off(place.base) == []


def test_a_patch_of_large_files_is_applied_and_merged_with_little_memory(place: Place) -> None:
    place.write({"large": b"f" * 24_000_000})
    place.patch_of([("large", b"F" * 24_000_000)])
    (place.original / "large").chmod(0o755)
    with memory_of(20 << 20):
        assert apply_patch(place.run_dir, check=True, merge=True).files == ("large",)
        assert apply_patch(place.run_dir, merge=True).files == ("large",)
    assert (place.original / "large").stat().st_size == 24_000_000
    assert stat.S_IMODE((place.original / "large").stat().st_mode) == 0o755


def test_a_patch_can_be_applied_to_another_folder(place: Place) -> None:
    place.write({"a": "a\n"})
    place.patch_of([("a", "A\n")])
    other = place.base / "other"
    place.write({"a": "a\n"}, other)
    apply_patch(place.run_dir, root=other)
    assert (other / "a").read_text() == "A\n"
    assert (place.original / "a").read_text() == "a\n"


def test_without_git_a_workspace_is_an_error_that_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write({"a": "a\n"})
    monkeypatch.setenv("PATH", str(place.base))
    with pytest.raises(WorkspaceError) as caught:
        place.open()
    assert caught.value.hint == "install git"
    assert not place.stage_dir.exists()


NAMES = st.sampled_from(["a", "b", "c d", "é", "d/x", "d/y", "d/e/z", "\udcff", "-o"])
CONTENTS = st.one_of(st.binary(max_size=40), st.sampled_from([b"same\n" * 9, b"x\n", b"x\r\n", b"\0", b""]))
ENTRIES = st.dictionaries(NAMES, st.tuples(CONTENTS, st.booleans(), st.booleans()), max_size=6)


def lay(root: Path, entries: dict[str, tuple[bytes, bool, bool]]) -> None:
    for name, (data, runs, is_link) in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_link and data.strip(b"\0") and b"\0" not in data:
            path.symlink_to(os.fsdecode(data))
        else:
            path.write_bytes(data)
            path.chmod(0o755 if runs else 0o644)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=ENTRIES, after=ENTRIES)
def test_any_change_is_carried_over_by_git_apply_and_by_ours(
    tmp_path: Path, before: dict[str, tuple[bytes, bool, bool]], after: dict[str, tuple[bytes, bool, bool]]
) -> None:
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    place = Place(base)
    lay(place.original, before)
    with place.staged() as found:
        for path in found.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                if path.name != ".git":
                    shutil.rmtree(path)
            else:
                path.unlink()
        lay(found.root, after)
        patch = found.difference()
        wanted = files_of(found.root)
    copy = base / "copy"
    shutil.copytree(place.original, copy, symlinks=True)
    if patch.bytes:
        git("init", "-q", cwd=copy)
        git("apply", "--check", str(patch.path), cwd=copy)
        git("apply", "--whitespace=nowarn", str(patch.path), cwd=copy)
        apply_patch(place.run_dir)
    assert files_of(copy) == wanted
    assert files_of(place.original) == wanted
