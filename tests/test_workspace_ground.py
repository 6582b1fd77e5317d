"""What a workspace stands in: our own folders inside it, the repository above it, an exchange cut off in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from backplane.errors import WorkspaceError
from backplane.runtime.state import StateFolder
from backplane.workspace.checkpoints import Checkpoints
from backplane.workspace.workspace import Workspace
from tests.test_workspace import Place, git, place, snapshot

__all__ = ["place"]

# Our own state folder -------------------------------------------------------------------------------------------------


def inside(place: Place, state: str = "deep/.state") -> Path:
    """A state folder in the workspace, with the folders of a run in it."""
    home = place.original / state
    place.run_dir, place.stage_dir = home / "runs/r", home / "stage/r"
    home.mkdir(parents=True)
    place.write({"a.txt": "a\n", "deep/b.txt": "b\n", f"{state}/receipts.sqlite3": "db", f"{state}/runs/old/x": "x"})
    return home


def forge(workspace: Workspace, *paths: str) -> None:
    for path in paths:
        (workspace.root / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace.root / path).write_text("forged\n")


def test_the_state_folder_is_never_staged_and_never_written_by_a_patch(place: Place) -> None:
    home = inside(place)
    with place.staged(state=home) as found:
        assert sorted(path.decode() for path in snapshot(found.root)) == ["a.txt", "deep", "deep/b.txt"]
        forge(found, "a.txt", "deep/.state/runs/new/head.jsonl", "deep/.state/receipts.sqlite3")
        kept = Checkpoints(found).make("2026-01-01T00:00:00Z")
        assert kept is not None
        assert (kept.files, kept.left_out) == (1, 1)
        patch = found.difference()
    assert [change.path for change in patch.changes] == ["a.txt"]
    assert patch.left_out == ("deep/.state",)


def test_in_place_the_state_folder_is_no_part_of_the_patch(place: Place) -> None:
    home = inside(place)
    with place.staged(state=home, mode="pass_through") as found:
        forge(found, "a.txt", "deep/.state/runs/new/head.jsonl", "deep/.state/receipts.sqlite3")
        patch = found.difference()
    assert [change.path for change in patch.changes] == ["a.txt"]
    assert patch.left_out == ()


def test_a_link_that_leads_to_the_state_folder_cannot_be_turned_into_another(place: Place) -> None:
    home = place.base / "home"
    place.write({"a.txt": "a\n"})
    (place.original / "way").symlink_to(home)
    place.run_dir, place.stage_dir = home / "runs/r", home / "stage/r"
    home.mkdir()
    with place.staged(state=place.original / "way") as found:
        forge(found, "way/receipts.sqlite3")
        patch = found.difference()
    assert patch.changes == ()
    assert patch.left_out == ("way",)


@pytest.mark.parametrize("path", ["deep", "deep/.state"])
def test_no_file_takes_the_place_of_the_state_folder(place: Place, path: str) -> None:
    home = inside(place)
    (place.original / "deep/b.txt").unlink()
    with place.staged(state=home) as found:
        (found.root / "deep").rmdir()
        forge(found, path)
        patch = found.difference()
    assert (patch.changes, patch.left_out) == ((), (path,))


@pytest.mark.parametrize(
    ("below", "refused"), [("", True), ("runs/r", True), ("stage/r/tree", False), ("incoming/t", False)]
)
def test_nobody_works_in_the_state_folder_but_in_its_copies(tmp_path: Path, below: str, refused: bool) -> None:
    home = tmp_path / "home"
    (home / below).mkdir(parents=True)
    os.symlink(home, tmp_path / "other")
    root = tmp_path / "other" / below
    if refused:
        with pytest.raises(WorkspaceError, match="part of the state folder"):
            StateFolder(home).refuse_own(root)
    else:
        StateFolder(home).refuse_own(root)


# The repository that the workspace is of ------------------------------------------------------------------------------


def generated(place: Place, *init: str) -> None:
    place.write({".gitignore": "*.gen\n", "api.gen": "1\n", "a.txt": "a\n", "sub/x.gen": "1\n"})
    git("init", "-q", *init, ".", cwd=place.original)
    git("add", "-f", ".", cwd=place.original)
    git("commit", "-qm", "i", cwd=place.original)
    place.write({"new.gen": "n\n"})


def changed(place: Place, *paths: str, mode: str = "staged", root: Path | None = None) -> tuple[list[str], int]:
    """What the patch names after a change of these files, and how many others changed."""
    with place.staged(mode=mode, root=root or place.original) as found:
        forge(found, *paths)
        patch = found.difference()
    return [change.path for change in patch.changes], patch.ignored_count


@pytest.mark.parametrize("kind", ["sha1", "sha256", "split", "unreadable", "worktree", "link", "lost"])
def test_a_tracked_file_that_rules_ignore_is_in_the_patch(place: Place, kind: str) -> None:
    generated(place, *(["--object-format=sha256"] if kind == "sha256" else []))
    index = place.original / ".git/index"
    if kind == "split":
        git("update-index", "--split-index", cwd=place.original)
        assert list(place.original.glob(".git/sharedindex.*"))
    elif kind == "unreadable":
        index.write_bytes(b"no index")
    elif kind == "link":
        (place.original / ".git").rename(place.base / "aside")
        (place.original / ".git").symlink_to(place.base / "aside")
    elif kind == "lost":
        (place.original / ".git").rename(place.base / "aside")
        place.write({".git": "gitdir: /nowhere\n"})
    elif kind == "worktree":
        git("worktree", "add", "-q", "../tree", "-b", "w", cwd=place.original)
        place.original = place.base / "tree"
        place.write({"new.gen": "n\n"})
    unknown = kind in ("unreadable", "lost")
    named = ["api.gen", *(["new.gen"] if unknown else []), "sub/x.gen"]
    assert changed(place, "api.gen", "new.gen", "sub/x.gen") == (named, 0 if unknown else 1)


def test_a_submodules_tracked_files_are_in_the_patch(place: Place) -> None:
    (place.base / "part").mkdir()
    git("init", "-q", ".", cwd=place.base / "part")
    (place.base / "part/s").write_text("s")
    git("add", ".", cwd=place.base / "part")
    git("commit", "-qm", "s", cwd=place.base / "part")
    git("init", "-q", ".", cwd=place.original)
    git("-c", "protocol.file.allow=always", "submodule", "add", "-q", "../part", "sub", cwd=place.original)
    place.write({"sub/.gitignore": "*.gen\n", "sub/x.gen": "1\n", ".gitignore": "out/\n", "out/in/y.gen": "1\n"})
    git("add", "-f", "x.gen", cwd=place.original / "sub")
    git("init", "-q", ".", cwd=place.original / "out/in")
    git("add", ".", cwd=place.original / "out/in")
    place.write({"sub/new.gen": "n\n"})
    assert changed(place, "sub/x.gen", "sub/new.gen", "out/in/y.gen") == (["sub/x.gen"], 2)
    assert changed(place, "x.gen", root=place.original / "sub") == (["x.gen"], 0)


def test_rules_above_a_workspace_that_is_a_folder_of_a_repository_are_obeyed(place: Place) -> None:
    generated(place)
    place.write({".gitignore": "*.gen\n/sub/build/\n/out/\n", "sub/build/o": "o\n", "out/f": "f\n", "out/g.o": ""})
    sub, out = place.original / "sub", place.original / "out"
    assert changed(place, "x.gen", "y.gen", "build/o", "build/p", "b", root=sub) == (["b", "x.gen"], 3)
    with place.staged(root=sub) as found:
        assert b".gen" not in git("status", "--porcelain", cwd=found.root)
    # Whoever works in a folder that is ignored as a whole means it.
    assert changed(place, "f", root=out) == (["f"], 0)


# What may not be read ------------------------------------------------------------------------------------------------


def test_the_copys_repository_does_not_hold_what_may_not_be_read(place: Place) -> None:
    place.write({".env": "TOKEN=hunter2\n", "keys/id [1]": "PRIVATE\n", "a.txt": "a\n", "c.txt": "b\n"})
    with place.staged(unread=["**/.env*", "keys"]) as found:
        everything = git("cat-file", "--batch-all-objects", "--batch", cwd=found.root)
        assert b"hunter2" not in everything
        assert b"PRIVATE" not in everything
        assert git("ls-files", cwd=found.root) == b"a.txt\nc.txt\n"
        assert git("status", "--porcelain", cwd=found.root) == b""
        assert git("fsck", "--strict", cwd=found.root) == b""
        forge(found, ".env", "a.txt")
        (found.root / "keys/id [1]").unlink()
        patch = found.difference()
    assert patch.status == 'M  .env\nM  a.txt\nD  "keys/id [1]"\n'
    assert b"-TOKEN=hunter2" in patch.path.read_bytes()


# Disks and neighbours ------------------------------------------------------------------------------------------------


def test_a_file_that_is_removed_while_it_is_staged_is_not_part_of_the_start(place: Place) -> None:
    place.write({f"f{number}": "x" for number in range(20)})
    looks = iter(range(1000))

    def stopped() -> bool:
        if next(looks) == 10:
            (place.original / "f9").unlink()
        return False

    with place.staged(stopped=stopped) as found:
        assert not (found.root / "f9").exists()
        assert len(list(found.root.glob("f*"))) == 19
        assert found.difference().changes == ()


# What the user ignores everywhere


RULES = ".venv/\n.idea/\n*.swp\n!kept.swp\n"


def by_default(home: Path) -> dict[str, str]:
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/ignore").write_text(RULES)
    return {}


def by_the_users_configuration(home: Path) -> dict[str, str]:
    (home / ".gitconfig").write_text("[core]\n\texcludesFile = ~/my rules\n")
    (home / "my rules").write_text(RULES)
    return {}


@pytest.mark.parametrize("set_up", [by_default, by_the_users_configuration])
@pytest.mark.parametrize("mode", ["staged", "pass_through"])
def test_what_the_user_ignores_everywhere_is_not_in_the_patch(
    place: Place, monkeypatch: pytest.MonkeyPatch, set_up: Callable[[Path], dict[str, str]], mode: str
) -> None:
    home = place.base / "home"
    home.mkdir()
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name, value in {"HOME": str(home), **set_up(home)}.items():
        monkeypatch.setenv(name, value)
    place.write({"a": "a\n", ".venv/old": "o\n", "tracked.swp": "t\n"})
    git("init", "-q", cwd=place.original)
    git("add", "-f", "a", "tracked.swp", cwd=place.original)
    with (place.original / ".git/info/exclude").open("a") as file:
        file.write("!mine.swp\n")
    with place.staged(mode=mode) as found:
        changed = ".venv/x.py .idea/w.xml a b.swp kept.swp mine.swp tracked.swp"
        made: dict[str, str | bytes] = dict.fromkeys(changed.split(), "x\n")
        place.write(made, found.root)
        patch = found.difference()
        if mode == "staged":
            said = git("status", "--porcelain", "-uall", cwd=found.root)
            assert [line[3:].decode() for line in said.splitlines()] == ["a", "tracked.swp", "kept.swp", "mine.swp"]
    assert [change.path for change in patch.changes] == ["a", "kept.swp", "mine.swp", "tracked.swp"]
    assert patch.ignored_count == 3


@pytest.mark.parametrize(
    "text", [None, "[core\n", "[core]\n\texcludesFile = /dev/zero\n", "[core]\n\texcludesFile = /proc\n"]
)
def test_a_configuration_that_names_no_rules_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setenv("HOME", str(place.base))
    if text is not None:
        (place.base / ".gitconfig").write_text(text)
    place.write({"a": "a\n"})
    assert place.patch_of([("b", "b\n")]).status == "A  b\n"


def test_the_repositorys_own_configuration_names_no_rules(place: Place) -> None:
    place.write({"a": "a\n", "rules": "*.x\n"})
    git("init", "-q", cwd=place.original)
    git("config", "core.excludesFile", str(place.original / "rules"), cwd=place.original)
    assert place.patch_of([("b.x", "b\n")]).status == "A  b.x\n"
