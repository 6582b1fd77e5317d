"""What a run does to the files: staged or in place, patch first or at once, and what the events claimed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.contract.work import PolicyProfile
from backplane.errors import ConfigError
from backplane.runtime import backends
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from backplane.workspace import apply_patch
from tests.runs import backplane_of, go, is_empty, order, plane, script

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "sub" / "b.txt").write_text("b\n")
    return folder


STEPS: tuple[dict[str, Any], ...] = (
    {"write": {"path": "a.txt", "content": "one\n2\nthree\n"}},
    {"write": {"path": "new.txt", "content": "new\n"}},
    {"delete": "sub/b.txt"},
)


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def commit(root: Path) -> None:
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)


BEFORE = {"a.txt": "one\ntwo\nthree\n", "sub/b.txt": "b\n"}
AFTER = {"a.txt": "one\n2\nthree\n", "new.txt": "new\n"}


def diff_of(run: Run) -> str:
    assert run.receipt.verification.git_diff is not None
    return run.receipt.verification.git_diff


async def test_patch_first_leaves_the_original_and_the_patch_applies(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, *STEPS, mode="staged"), mock)
    assert run.end_error is None
    assert tree(root) == BEFORE
    assert run.patch is not None
    assert run.patch.read_text() == diff_of(run)
    assert [(item.kind, item.path) for item in run.receipt.artifacts] == [("patch", "patch.diff")]
    patch = backplane_of(run)["patch"]
    assert (patch["bytes"], patch["files"]) == (len(diff_of(run).encode()), 3)
    assert backplane_of(run)["reconciliation"] == {}
    assert run.folder is not None
    apply_patch(run.folder)
    assert tree(root) == AFTER


async def test_workspace_first_changes_the_original_when_the_run_is_complete(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, *STEPS, mode="staged", lane="workspace_first"), mock)
    assert run.end_error is None
    assert tree(root) == AFTER
    assert backplane_of(run)["lane"]["applied"] == 3
    assert "+new" in diff_of(run)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("lane", ["patch_first", "workspace_first"])
async def test_a_change_that_a_rule_forbids_is_a_violation_and_is_not_applied(
    root: Path, tmp_path: Path, backplane_home: Path, lane: str, told: bool
) -> None:
    said = "event(run, type='file_changed', path='sub/b.txt', summary='')"
    body = f"""
hello(); run = take(); os.chdir(run["work_order"]["workspace"]["root"])
os.remove("sub/b.txt"); open("new.txt", "w").write("new"); open("~", "w").write("no home")
put(*[{said}] * {told:d}, final(run)); end()
"""
    asked = order(root, mode="staged", lane=lane, policy=PolicyProfile(deny_write=("sub/**", "nowhere/**")))
    # Nothing holds the rule here, so only looking at the result is left.
    async with plane(backplane_home) as control:
        run, _ = await go(control, asked, script(tmp_path, body))
    reason = "writing 'sub/b.txt' is forbidden by 'sub/**'"
    enforcement = run.receipt.backplane["enforcement"]
    assert enforcement["violations"] == [{"rule": "deny_write", "reason": reason}]
    assert {
        (row["layer"], "git ignores" in row["gap"]) for row in enforcement["rules"] if row["rule"] == "deny_write"
    } == {("audit", True)}
    assert tree(root) == BEFORE
    assert run.error is not None
    assert (run.receipt.outcome, run.error.code, reason in run.error.message) == ("partial", "policy_denied", True)
    assert run.folder is not None
    apply_patch(run.folder)
    assert sorted(tree(root)) == ["a.txt", "new.txt", "~"]


@pytest.mark.parametrize("last", [{"outcome": "partial"}, {"outcome": "failed"}, {"fail": {"message": "no"}}])
async def test_workspace_first_leaves_the_original_when_the_run_is_not_complete(
    last: dict[str, Any], mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, *STEPS, last, mode="staged", lane="workspace_first"), mock)
    assert tree(root) == BEFORE
    assert "+new" in diff_of(run)


async def test_a_conflict_leaves_the_original_untouched_and_says_so(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        wanted = order(root, *STEPS, {"say": "done"}, {"sleep_s": 0.5}, mode="staged", lane="workspace_first")
        async with control.start(wanted, mock) as run:
            async for event in run:
                if getattr(event, "text", "") == "done":
                    (root / "a.txt").write_text("one\nTWO of somebody else\nthree\n")
    assert tree(root) == {**BEFORE, "a.txt": "one\nTWO of somebody else\nthree\n"}
    assert run.error is not None
    assert run.end is not None
    assert run.error.code == "execution_workspace_error"
    assert (run.end.reason, run.receipt.outcome) == ("partial", "partial")
    assert not run.receipt.verification.harness_ok
    assert "+new" in diff_of(run), "the work is not lost"


async def test_pass_through_works_in_place_and_shows_only_the_runs_own_changes(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    commit(root)
    (root / "mine.txt").write_text("the user's own change\n")
    head = (root / ".git" / "HEAD").read_bytes(), (root / ".git" / "index").read_bytes()
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, *STEPS, mode="pass_through", lane="workspace_first"), mock)
    assert run.end_error is None
    assert tree(root) == {**AFTER, "mine.txt": "the user's own change\n"}
    assert "mine.txt" not in diff_of(run)
    assert "+new" in diff_of(run)
    assert ((root / ".git" / "HEAD").read_bytes(), (root / ".git" / "index").read_bytes()) == head


@pytest.mark.parametrize("selection", [{"exclude": ("hidden.txt",)}, {"include": ("*.py",)}])
async def test_an_order_in_place_that_would_hide_changes_is_refused(
    mock: Backend, backplane_home: Path, root: Path, selection: dict[str, tuple[str, ...]]
) -> None:
    asked = order(root, {"write": {"path": "hidden.txt", "content": "x"}}, mode="pass_through")
    asked = msgspec.structs.replace(asked, workspace=msgspec.structs.replace(asked.workspace, **selection))
    async with plane(backplane_home) as control:
        with pytest.raises(ConfigError) as refused:
            await go(control, asked, mock)
    assert (refused.value.code, refused.value.hint) == (
        "config_invalid", "leave them out, or work in a copy (mode staged)"
    )  # fmt: skip
    assert not (root / "hidden.txt").exists()


async def test_what_the_events_did_not_say_or_said_wrongly_is_told(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    (root / "same.txt").write_text("same\n")
    steps = (
        {"write": {"path": "said.txt", "content": "x"}},
        {"write": {"path": "same.txt", "content": "same\n"}},
    )
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, *steps, mode="staged"), mock)
        silent = order(root, task="echo x > unsaid.txt", mode="staged")
        unsaid, _ = await go(control, silent, backends.find("shell", control.settings, {}))
    assert run.end_error is None
    assert backplane_of(run)["reconciliation"] == {"claimed_only": ["same.txt"]}
    assert backplane_of(unsaid)["reconciliation"] == {"unclaimed": ["unsaid.txt"]}


async def test_a_run_that_changes_nothing_has_an_empty_patch(mock: Backend, backplane_home: Path, root: Path) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, {"say": "x"}, mode="staged", lane="workspace_first"), mock)
    assert run.patch is None
    assert diff_of(run) == ""
    assert run.receipt.artifacts == ()
    assert run.receipt.verification.harness_ok


async def test_a_staged_run_that_is_cancelled_still_has_its_patch(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        wanted = order(root, *STEPS, {"say": "x"}, {"sleep_s": 60}, mode="staged", lane="workspace_first")
        async with control.start(wanted, mock) as run:
            async for event in run:
                if getattr(event, "text", "") == "x":
                    await run.cancel()
    assert tree(root) == BEFORE
    assert "+new" in diff_of(run)
    assert is_empty(backplane_home / "stage")
