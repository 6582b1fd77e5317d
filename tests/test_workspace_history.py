"""The history of a staged copy: what git shows in it is what it shows in the original, or one line says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.contract.events import AssistantDelta, Warned
from backplane.contract.work import PolicyProfile
from backplane.workspace import history, repo
from tests.all.doors.test_contain import cell, control
from tests.runs import go, order
from tests.test_workspace import Place, git, place

__all__ = ["place"]

pytestmark = pytest.mark.anyio


def commit(root: Path, message: str) -> None:
    git("add", "-A", cwd=root)
    git("commit", "-qm", message, "--allow-empty", cwd=root)


def repository(place: Place, *init: str) -> Path:
    """A repository of two commits, with a tag and a branch beside."""
    place.write({"a.txt": "one\n", "sub/b.txt": "b\n", ".gitignore": "*.log\n", "x.log": "l\n"})
    root = place.original
    git("init", "-q", "-b", "trunk", *init, ".", cwd=root)
    commit(root, "first")
    git("tag", "v1", cwd=root)
    git("branch", "side", cwd=root)
    place.write({"a.txt": "one\ntwo\n"})
    commit(root, "second")
    return root


ASKED = (
    ("log", "--format=%H %an %s", "--all"), ("status", "--porcelain=v2", "--branch"), ("for-each-ref",),
    ("diff",), ("diff", "--cached"), ("ls-files", "--stage"), ("ls-files", "-v"), ("show", "HEAD"),
    ("blame", "HEAD", "--", "a.txt"), ("describe", "--tags", "--always"), ("symbolic-ref", "-q", "HEAD"),
    ("rev-parse", "HEAD"),
)  # fmt: skip


def answers(root: Path) -> list[bytes]:
    return [git(*words, cwd=root, check=False) for words in ASKED]


def trace_of(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in (root / ".git").rglob("*")}


def unchanged(root: Path) -> None:
    pass


def modified(root: Path) -> None:
    (root / "a.txt").write_text("mine\n")
    (root / "new.txt").write_text("new\n")
    (root / "sub/b.txt").unlink()


def in_the_index(root: Path) -> None:
    (root / "a.txt").write_text("staged\n")
    git("add", "a.txt", cwd=root)
    (root / "a.txt").write_text("staged, and more\n")
    (root / "later").write_text("x\n")
    git("add", "-N", "later", cwd=root)


def detached(root: Path) -> None:
    git("checkout", "-q", "--detach", "HEAD~1", cwd=root)


def unborn(root: Path) -> None:
    git("checkout", "-q", "--orphan", "fresh", cwd=root)


def packed(root: Path) -> None:
    git("gc", "-q", cwd=root)
    (root / "a.txt").write_text("three\n")
    commit(root, "third")


def stashed(root: Path) -> None:
    (root / "a.txt").write_text("for later\n")
    git("stash", "-q", cwd=root)


def conflict(root: Path) -> None:
    git("checkout", "-q", "side", cwd=root)
    (root / "a.txt").write_text("other\n")
    commit(root, "other")
    git("merge", "-q", "trunk", cwd=root, check=False)


def split_index(root: Path) -> None:
    git("config", "splitIndex.maxPercentChange", "100", cwd=root)
    git("update-index", "--split-index", cwd=root)
    (root / "more").write_text("m\n")
    git("add", "more", cwd=root)


def index_of_version_4(root: Path) -> None:
    git("update-index", "--index-version", "4", cwd=root)


def sparse(root: Path) -> None:
    git("sparse-checkout", "set", "--cone", "none", cwd=root)


def filtered(root: Path) -> None:
    """As LFS does it: the index has another content than the folder, and only the user's git knows how."""
    git("config", "filter.up.clean", "tr a-z A-Z", cwd=root)
    (root / ".gitattributes").write_text("*.up filter=up\n")
    (root / "f.up").write_text("small\n")
    os.utime(root / "f.up", (1_700_000_000, 1_700_000_000))  # Git looks again at files of the index's own second.
    commit(root, "filtered")


def line_ends(root: Path) -> None:
    git("config", "core.autocrlf", "true", cwd=root)
    (root / "dos.txt").write_bytes(b"a\r\nb\r\n")
    commit(root, "dos")
    (root / "dos.txt").write_bytes(b"a\r\nb\r\nc\r\n")


def odd_names(root: Path) -> None:
    (root / "ä ü\n\"'").write_text("x")
    (root / os.fsdecode(b"\xff")).write_text("x")
    commit(root, "odd")


def remote_refs(root: Path) -> None:
    git("update-ref", "refs/remotes/origin/trunk", "HEAD~1", cwd=root)
    git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/trunk", cwd=root)


def assumed(root: Path) -> None:
    git("update-index", "--assume-unchanged", "a.txt", cwd=root)
    (root / "a.txt").write_text("local\n")


CHANGES = (
    unchanged, modified, in_the_index, detached, unborn, packed, stashed, conflict, split_index,
    index_of_version_4, sparse, filtered, line_ends, odd_names, remote_refs, assumed,
)  # fmt: skip


@pytest.mark.parametrize(("change", "form"), [*((change, "sha1") for change in CHANGES), (packed, "sha256")])
def test_git_says_in_a_copy_what_it_says_in_the_original(
    place: Place, change: Callable[[Path], None], form: str
) -> None:
    root = repository(place, f"--object-format={form}")
    change(root)
    git("status", cwd=root)
    expected, before = answers(root), trace_of(root)
    with place.staged() as found:
        assert found.no_history == ""
        for words, said, told in zip(ASKED, answers(found.root), expected, strict=True):
            assert said == told, words
        assert trace_of(root) == before
        (found.root / "agent.txt").write_text("the agent's\n")
        git("add", "-A", cwd=found.root)
        git("commit", "-qm", "mine", cwd=found.root)
        git("gc", "-q", cwd=found.root)
        patch = found.difference()
    assert [each.path for each in patch.changes] == ["agent.txt"]
    # Outside of a cage, git itself sets the time of an object that it would write and finds there.
    assert {path: size for path, (_, size) in trace_of(root).items()} == {
        path: size for path, (_, size) in before.items()
    }


def test_an_empty_repository_has_an_empty_history(place: Place) -> None:
    place.write({"a": "a\n"})
    git("init", "-q", "-b", "trunk", ".", cwd=place.original)
    with place.staged() as found:
        assert found.no_history == ""
        assert git("status", "--porcelain", "-b", cwd=found.root) == b"## No commits yet on trunk\n?? a\n"
        git("add", "a", cwd=found.root)
        git("commit", "-qm", "mine", cwd=found.root)


def test_a_folder_without_a_repository_lacks_none(place: Place) -> None:
    place.write({"a": "a\n"})
    with place.staged() as found:
        assert found.no_history == ""
        assert git("log", "--format=%B", cwd=found.root).split() == [b"baseline"]


def test_a_linked_worktree_has_its_own_head_and_the_common_history(place: Place) -> None:
    root = repository(place)
    git("worktree", "add", "-q", "../tree", "-b", "w", cwd=root)
    other = place.base / "tree"
    (other / "a.txt").write_text("in the worktree\n")
    expected = answers(other)
    with place.staged(root=other) as found:
        assert answers(found.root) == expected


def test_a_submodule_as_workspace_has_its_history(place: Place) -> None:
    part = place.base / "part"
    part.mkdir()
    git("init", "-q", ".", cwd=part)
    (part / "a.txt").write_text("s\n")
    commit(part, "of the part")
    root = repository(place)
    git("-c", "protocol.file.allow=always", "submodule", "add", "-q", "../part", "lib", cwd=root)
    commit(root, "with a part")
    with place.staged(root=root / "lib") as found:
        assert git("log", "--format=%s", cwd=found.root) == b"of the part\n"
    with place.staged() as found:
        assert git("log", "--format=%s", cwd=found.root).startswith(b"with a part\n")
        assert git("status", "--porcelain", cwd=found.root) == b""


def test_a_shallow_clone_ends_where_the_original_ends(place: Place) -> None:
    root = repository(place)
    git("clone", "-q", "--depth", "1", f"file://{root}", "../shallow", cwd=root)
    other = place.base / "shallow"
    expected = answers(other)
    with place.staged(root=other, exclude=["nothing"]) as found:
        assert found.no_history == ""
        assert git("log", "--format=%s", cwd=found.root) == b"second\n"
        assert [answers(found.root)[place] for place in (2, 5, 7)] == [expected[place] for place in (2, 5, 7)]


def test_objects_that_the_original_borrows_are_found_too(place: Place) -> None:
    root = repository(place)
    git("clone", "-q", "--shared", str(root), "../borrower", cwd=root)
    with place.staged(root=place.base / "borrower") as found:
        assert git("log", "--format=%s", cwd=found.root) == b"second\nfirst\n"
        assert found.object_folders == (str(place.base / "borrower/.git/objects"), str(root / ".git/objects"))


# No history, and one line that says why ------------------------------------------------------------------------------


def partial(root: Path) -> Path:
    git("config", "uploadpack.allowFilter", "true", cwd=root)
    git("clone", "-q", "--filter=blob:none", f"file://{root}", "../partial", cwd=root)
    return root.parent / "partial"


def below_the_top(root: Path) -> Path:
    return root / "sub"


def without_head(root: Path) -> Path:
    (root / ".git/HEAD").unlink()
    return root


def of_a_sparse_index(root: Path) -> Path:
    git("sparse-checkout", "set", "--cone", "--sparse-index", "none", cwd=root)
    return root


def of_a_broken_configuration(root: Path) -> Path:
    (root / ".git/config").write_text("[core\n")
    return root


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial, "partial clone"),
        (below_the_top, "the folder 'sub/' of a larger repository"),
        (without_head, "no HEAD"),
        (of_a_sparse_index, "index is sparse"),
        (of_a_broken_configuration, "cannot be read"),
    ],
)
def test_a_repository_whose_history_cannot_be_shared_says_why(
    place: Place, make: Callable[[Path], Path], words: str
) -> None:
    with place.staged(root=make(repository(place))) as found:
        assert words in found.no_history
        assert found.object_folders == ()
        assert words.encode() in git("log", "--format=%B", cwd=found.root)
        assert git("rev-list", "--count", "--all", cwd=found.root) == b"1\n"
        assert git("fsck", "--strict", "--full", cwd=found.root) is not None


def test_a_copy_that_travels_needs_no_other_folder(place: Place) -> None:
    repository(place)
    with place.staged(travels=True) as found:
        assert "machine" in found.no_history
        assert not (found.root / ".git/objects/info/alternates").exists()


# What a history may not have ------------------------------------------------------------------------------------------


def committed(root: Path) -> None:
    (root / "keys").mkdir()
    (root / "keys/.env").write_text("TOKEN=hunter2\n")
    commit(root, "with a key")


def removed_since(root: Path) -> None:
    committed(root)
    (root / "keys/.env").unlink()
    commit(root, "without")


def on_another_branch(root: Path) -> None:
    git("checkout", "-q", "side", cwd=root)
    committed(root)
    git("checkout", "-q", "trunk", cwd=root)


def under_a_tag(root: Path) -> None:
    removed_since(root)
    git("tag", "old", "HEAD~1", cwd=root)
    git("reset", "-q", "--hard", "HEAD~2", cwd=root)


def in_the_stash(root: Path) -> None:
    (root / ".env").write_text("TOKEN=hunter2\n")
    git("add", "-f", ".env", cwd=root)
    git("stash", "-q", cwd=root)


def in_the_index_alone(root: Path) -> None:
    (root / ".env").write_text("TOKEN=hunter2\n")
    git("add", ".env", cwd=root)


def as_a_rename_of_the_same(root: Path) -> None:
    (root / "plain").write_text("TOKEN=hunter2\n")
    commit(root, "open")
    git("mv", "plain", ".env", cwd=root)
    git("commit", "-qm", "closed", cwd=root)
    (root / ".env").unlink()
    (root / "plain").write_text("nothing\n")
    commit(root, "open again")


def in_a_merge_alone(root: Path) -> None:
    git("checkout", "-q", "side", cwd=root)
    (root / "s").write_text("s\n")
    commit(root, "side")
    git("merge", "-q", "--no-commit", "trunk", cwd=root)
    (root / ".env").write_text("TOKEN=hunter2\n")
    commit(root, "merge with a key")
    (root / ".env").unlink()
    commit(root, "without")


def behind_a_replacement(root: Path) -> None:
    committed(root)
    git("replace", "HEAD", "HEAD~1", cwd=root)


@pytest.mark.parametrize(
    "make",
    [
        committed, removed_since, on_another_branch, under_a_tag, in_the_stash, in_the_index_alone,
        as_a_rename_of_the_same, in_a_merge_alone, behind_a_replacement,
    ],
)  # fmt: skip
@pytest.mark.parametrize("rule", ["unread", "exclude"])
def test_a_history_with_a_path_that_may_not_be_read_is_not_shared(
    place: Place, make: Callable[[Path], None], rule: str
) -> None:
    make(repository(place))
    with place.staged(**{rule: ["**/.env*"]}) as found:
        assert ".env'" in found.no_history
        assert git("rev-list", "--count", "--all", cwd=found.root) == b"1\n"
        assert b"hunter2" not in git("cat-file", "--batch-all-objects", "--batch", cwd=found.root) or rule == "exclude"


@pytest.mark.parametrize(("rules", "words"), [(["sub"], "sub/b.txt"), (["**/.git/**"], "git's own"), (["**"], "git's")])
def test_rules_on_folders_and_on_git_itself_keep_the_history_away(place: Place, rules: list[str], words: str) -> None:
    repository(place)
    with place.staged(unread=rules) as found:
        assert words in found.no_history


def test_rules_that_name_nothing_of_the_history_leave_it(place: Place) -> None:
    root = repository(place)
    place.write({".env": "TOKEN=hunter2\n"})
    expected = git("log", "--all", cwd=root)
    with place.staged(unread=["**/.env*"], exclude=["**/*.log"]) as found:
        assert found.no_history == ""
        assert git("log", "--all", cwd=found.root) == expected
        assert git("status", "--porcelain", cwd=found.root) == b""
    with place.staged(include=["sub/**"]) as found:
        assert "which is not copied" in found.no_history


def test_a_history_that_takes_too_long_is_not_shared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(place)
    monkeypatch.setattr(history, "LOG_S_MAX", 0.0)
    with place.staged(unread=["**/.env*"]) as found:
        assert "git log" in found.no_history


def test_nothing_of_the_original_is_run(place: Place) -> None:
    root = repository(place)
    mark = place.base / "ran"
    for name in ("fsmonitor", "hooksPath", "sshCommand", "pager", "editor", "gitProxy", "askPass"):
        git("config", f"core.{name}", f"touch {mark}", cwd=root)
    for name in ("filter.x.clean", "filter.x.smudge", "diff.x.textconv", "alias.log", "uploadpack.packObjectsHook"):
        git("config", name, f"touch {mark}", cwd=root)
    (root / ".git/info/attributes").write_text("* filter=x diff=x\n")
    for name in ("post-index-change", "reference-transaction", "pre-commit"):
        hook = root / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
        hook.chmod(0o755)
    with place.staged(unread=["**/.env*"]) as found:
        assert found.no_history == ""
        git("status", cwd=found.root)
        git("log", "-p", cwd=found.root)
    assert not mark.exists()
    assert repo.GIT_S_MAX > history.LOG_S_MAX


# In a run ------------------------------------------------------------------------------------------------------------

LOOK = """(lambda run: [run("git log --format=%s"), run("git show HEAD --stat"), write(OBJECTS + "/x")])(
lambda words: __import__("subprocess").run(words, shell=True, capture_output=True, text=True).stdout)"""


async def seen_in(
    place: Place, root: Path, objects: Path, mode: str = "staged", exclude: tuple[str, ...] = (), **members: Any
) -> tuple[list[str], list[str], dict[str, Any]]:
    """What git shows an agent in its cage, the warnings of its run, and the receipt's own part."""
    host = cell(place.base / "host", LOOK.replace("OBJECTS", repr(str(objects))))
    async with control(place.base / "home") as plane:
        asked = order(root, mode=mode, **members)
        asked = msgspec.structs.replace(asked, workspace=msgspec.structs.replace(asked.workspace, exclude=exclude))
        run, events = await go(plane, asked, host)
    assert run.error is None, (run.error, run.error.evidence)
    said = json.loads(next(event.text for event in events if isinstance(event, AssistantDelta)))
    return said, [event.message for event in events if type(event) is Warned], dict(run.receipt.backplane)


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("selection", [{}, {"exclude": ("**/nothing",)}])
async def test_a_caged_agent_reads_the_history_and_cannot_write_it(place: Place, selection: dict[str, Any]) -> None:
    root = repository(place)
    git("gc", "-q", cwd=root)
    before = trace_of(root)
    said, warnings, receipt = await seen_in(place, root, root / ".git/objects", **selection)
    assert said[0] == "second\nfirst\n"
    assert "a.txt | 1 +" in said[1]
    assert said[2] != "ok"
    assert (warnings, receipt.get("no_history")) == ([], None)
    assert trace_of(root) == before


@pytest.mark.needs("bwrap")
async def test_a_history_that_is_not_shared_is_one_warning_and_one_line_of_the_receipt(place: Place) -> None:
    root = repository(place)
    committed(root)
    policy = PolicyProfile(deny_read=("**/.env*",))
    said, warnings, receipt = await seen_in(place, root, root / ".git/objects", policy=policy)
    assert said[0] == "baseline\n"
    assert len(warnings) == 1
    assert "'keys/.env' is in it, which the agent may not have" in warnings[0]
    assert receipt["no_history"] in warnings[0]
    # The folder is not shown to the agent for the sake of a history that it does not get.
    assert said[2] == "ENOENT"


@pytest.mark.needs("bwrap")
async def test_in_place_the_objects_that_a_repository_borrows_are_seen(place: Place) -> None:
    root = repository(place)
    git("clone", "-q", "--shared", str(root), "../borrower", cwd=root)
    said, _, _ = await seen_in(place, place.base / "borrower", root / ".git/objects", mode="pass_through")
    assert said[0] == "second\nfirst\n"
    assert said[2] != "ok"
