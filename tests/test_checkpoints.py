"""Checkpoints: what of a workspace is kept while a run goes on, and the way back during the run and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import backplane
from backplane import Decision, Hook, HookCall
from backplane.config import Settings
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.events import Approval, CheckpointReported, TurnEnded
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import CODES, WorkspaceError
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from backplane.workspace import checkpoints as kept
from backplane.workspace.pack import blob_id
from tests.runs import QUICK, backplane_of, check, ended, order, plane, script

pytestmark = pytest.mark.anyio

SETTINGS = Settings(limits=QUICK, isolation="off")
APPROVAL = PolicyProfile(require_approval_for=("pause",))
PAUSE: dict[str, Any] = {"tool": {"name": "pause"}}
"""An ask that waits for the test: while it does, the agent rests."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    (folder / "keep.txt").write_text("keep\n")
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, but for `.git`."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or path.is_symlink()) and ".git" not in path.relative_to(folder).parts
    }


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", *words], cwd=folder, check=True, env=env, timeout=30, capture_output=True, text=True)
    return done.stdout.strip()


def write(path: str, content: str) -> dict[str, Any]:
    return {"write": {"path": path, "content": content}}


Step = Callable[[Run, Path], Awaitable[None]]


@asynccontextmanager
async def driven(home: Path, work: WorkOrder, backend: Backend, *steps: Step) -> AsyncIterator[Run]:
    """A run whose pauses are used one after the other, checked at its end."""
    left = list(steps)
    holder: list[Run] = []
    failures: list[Exception] = []

    async def on_ask(_: Approval) -> Decision:
        try:
            await left.pop(0)(holder[0], Path(holder[0].facts.root))
        except Exception as error:
            failures.append(error)
        return Decision(decision="allow")

    events: list[Any] = []
    async with plane(home) as control, control.start(work, backend, on_ask=on_ask) as run:
        holder.append(run)
        async for event in run:
            events.append(event)
    check(run, events)
    if failures:
        raise failures[0]
    assert not left
    yield run


def told(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = backplane_of(run)["checkpoints"]
    return found


def paused(root: Path, *steps: dict[str, Any], **members: Any) -> WorkOrder:
    return order(root, *steps, policy=APPROVAL, **members)


def auto(root: Path, *steps: dict[str, Any], mode: str = "staged") -> WorkOrder:
    work = order(root, *steps, mode=mode)
    vendor = {**work.config.vendor, "abp": {"checkpoints": "auto"}}
    return WorkOrder(work.task, workspace=work.workspace, config=RuntimeConfig(vendor=vendor))


# By name, while it runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_a_workspace_goes_back_to_a_named_state_whatever_changed_it(
    mode: str, mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[dict[str, str]] = []

    async def keep(run: Run, place: Path) -> None:
        seen.append(tree(place))
        made = await run.checkpoint("good")
        assert (made.name, made.files, made.why) == ("good", 2, "asked")
        assert run.checkpoints() == (made,)

    async def spoil_and_rewind(run: Run, place: Path) -> None:
        # As a command would: what no tool of the host has said.
        (place / "keep.txt").unlink()
        (place / "a.txt").chmod(0o755)
        (place / "deep/er").mkdir(parents=True)
        (place / "deep/er/new.txt").write_text("new")
        (place / "link").symlink_to("/etc/passwd")
        (place / "b.txt").unlink()
        (place / "b.txt").mkdir()
        (place / "b.txt/inside").write_text("x")
        back = await run.rewind("good")
        assert back is not None
        seen.append(tree(place))
        assert not os.access(place / "a.txt", os.X_OK) or os.geteuid() == 0
        assert not (place / "a.txt").stat().st_mode & 0o111
        assert not (place / "deep").exists()

    work = paused(root, write("a.txt", "beta\n"), write("b.txt", "b\n"), PAUSE, PAUSE, {"say": "on"}, mode=mode)
    async with driven(backplane_home, work, mock, keep, spoil_and_rewind) as run:
        assert run.end_error is None
    assert seen[0] == seen[1] == {"a.txt": "beta\n", "b.txt": "b\n", "keep.txt": "keep\n"}
    (made,) = told(run)["made"]
    assert (made["id"], made["name"], made["files"]) == ("c1", "good", 2)
    (back,) = told(run)["rewound"]
    assert (back["name"], back["tree"]) == ("good", made["tree"])
    assert run.receipt.capabilities["checkpointing"] == "emulated"
    reported = [event.body["what"] for event in run.receipt.trace if isinstance(event, CheckpointReported)]
    assert reported in ([], ["made", "rewound"])
    diff = run.receipt.verification.git_diff
    assert diff is not None
    assert "new.txt" not in diff
    assert "+beta" in diff


async def test_the_start_is_always_there_to_go_back_to(mock: Backend, backplane_home: Path, root: Path) -> None:
    before = tree(root)

    async def back(run: Run, place: Path) -> None:
        assert await run.rewind("start") is None
        assert tree(place) == before

    work = paused(root, write("a.txt", "x"), write("n.txt", "n"), {"delete": "keep.txt"}, PAUSE, mode="staged")
    async with driven(backplane_home, work, mock, back) as run:
        assert run.end_error is None
    assert run.patch is None
    assert told(run)["made"] == []


async def test_a_tree_is_named_as_git_names_it(mock: Backend, backplane_home: Path, root: Path) -> None:
    names: list[str] = []

    async def keep(run: Run, place: Path) -> None:
        made = await run.checkpoint()
        git(place, "add", "-A")
        names.extend((made.tree, git(place, "write-tree")))
        assert made.name == made.id == "c1"

    work = paused(root, write("sub/b.txt", "b"), write("a.txt", "2"), PAUSE, mode="staged")
    async with driven(backplane_home, work, mock, keep):
        assert names[0] == names[1]


async def test_what_git_ignores_stays_as_it_is_by_the_rules_of_the_checkpoint(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    (root / ".gitignore").write_text("build/\n")

    async def keep(run: Run, place: Path) -> None:
        await run.checkpoint("good")
        (place / "build").mkdir()
        (place / "build/out").write_text("1")
        (place / "hidden.txt").write_text("hidden by a later rule")
        (place / ".gitignore").write_text("build/\nhidden.txt\na.txt\n")
        (place / "a.txt").write_text("changed, though ignored now")
        await run.rewind("good")
        assert tree(place) == {
            ".gitignore": "build/\n",
            "a.txt": "alpha\n",
            "build/out": "1",
            "keep.txt": "keep\n",
        }

    async with driven(backplane_home, paused(root, PAUSE, mode="staged"), mock, keep) as run:
        assert run.end_error is None


async def test_a_link_in_the_way_is_replaced_and_never_followed(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.txt").write_text("not yours")
    (root / "sub").mkdir()
    (root / "sub/b.txt").write_text("mine")

    async def swap(run: Run, place: Path) -> None:
        (place / "sub/b.txt").unlink()
        (place / "sub").rmdir()
        (place / "sub").symlink_to(outside)
        await run.rewind("start")
        assert (place / "sub/b.txt").read_text() == "mine"
        assert not (place / "sub").is_symlink()

    async with driven(backplane_home, paused(root, PAUSE, mode="staged"), mock, swap) as run:
        assert run.end_error is None
    assert (outside / "b.txt").read_text() == "not yours"


# Not under the hands of an agent at work ------------------------------------------------------------------------------


async def test_nobody_goes_back_while_the_agent_is_at_work(
    anyio_backend: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put(event(run, "a"))
put({"t": "ask", "ref_id": run["id"], "id": "q", "kind": "input", "question": "go on?"}); take()
put(event(run, type="tool_call", tool_name="bash", input={}))
put({"t": "ask", "ref_id": run["id"], "id": "q2", "kind": "input", "question": "go on?"}); take()
put(event(run, type="tool_result", tool_name="bash", output="", is_error=False))
put(event(run, type="warning", message="turn", ext={"turn": {"stop_reason": "end"}}))
put({"t": "ask", "ref_id": run["id"], "id": "q3", "kind": "input", "question": "go on?"}); take()
put(final(run)); end()
"""
    seen: list[str] = []

    async def go_back(run: Run, place: Path) -> None:
        try:
            await run.rewind("start")
        except WorkspaceError as error:
            seen.append(f"{error.code}: at work" if "at work" in error.message else error.message)
        else:
            seen.append("rewound")

    work = order(root, mode="staged")
    async with driven(backplane_home, work, script(tmp_path, body), go_back, go_back, go_back) as run:
        assert run.end_error is None
    # A question to the user says nothing of whether the agent rests; the end of a turn does.
    assert seen == ["execution_workspace_error: at work"] * 2 + ["rewound"]


async def test_before_the_beginning_and_after_the_end_there_is_nothing_to_keep(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        async with control.start(order(root, {"say": "x"}), mock) as run:
            with pytest.raises(WorkspaceError, match="has not begun"):
                await run.checkpoint("early")
            async for event in run:
                assert not isinstance(event, TurnEnded)
        with pytest.raises(WorkspaceError, match="has ended"):
            await run.checkpoint("late")
        with pytest.raises(WorkspaceError, match="has ended"):
            await run.rewind("start")
    assert "checkpoints" not in backplane_of(run)


async def test_wrong_names_are_refused_with_what_would_be_right(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[str] = []

    async def ask_for_nonsense(run: Run, place: Path) -> None:
        await run.checkpoint("good")
        for name in ("good", "c1", "start", "", "a/b", "x" * 65, "näme"):
            with pytest.raises(WorkspaceError) as caught:
                await run.checkpoint(name)
            seen.append(caught.value.code)
        with pytest.raises(WorkspaceError) as caught:
            await run.rewind("bad")
        assert caught.value.hint == "there are: start, good"

    async with driven(backplane_home, paused(root, PAUSE), mock, ask_for_nonsense) as run:
        assert run.end_error is None
    assert set(seen) == {"execution_workspace_error"}
    assert len(told(run)["made"]) == 1


# Before tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_before_each_tool_that_may_write_the_state_is_kept_once(
    mode: str, mock: Backend, backplane_home: Path, root: Path
) -> None:
    odd = {"tool": {"name": "odd"}}
    steps = [write("a.txt", "1"), {"read": "a.txt"}, write("a.txt", "2"), odd, odd]
    async with driven(backplane_home, auto(root, *steps, mode=mode), mock) as run:
        assert run.end_error is None
    made = told(run)["made"]
    assert [(one["why"], one["files"]) for one in made] == [("tool", 0), ("tool", 1), ("tool", 1)]
    assert len({one["tree"] for one in made}) == 3
    assert run.receipt.capabilities["checkpointing"] == "emulated"


async def test_the_shell_host_has_checkpoints_too_and_a_hook_may_go_back(backplane_home: Path, root: Path) -> None:
    """A command's changes are undone by a hook that looks at its result."""
    holder: list[Run] = []

    async def undo(call: HookCall) -> None:
        await holder[0].rewind("c1")

    work = WorkOrder(
        "echo more >> a.txt; rm keep.txt; mkdir new; echo n > new/n.txt",
        workspace=WorkspaceSpec(root=str(root)),
        config=RuntimeConfig(vendor={"abp": {"checkpoints": "auto"}}),
    )
    hooks = [Hook("post_tool", undo)]
    async with backplane.start(work, backend="shell", hooks=hooks, settings=SETTINGS, home=backplane_home) as run:
        holder.append(run)
        async for _ in run:
            pass
    assert run.end_error is None
    assert run.patch is None, "what was undone is not in the patch"
    assert [row["files"] for row in told(run)["rewound"]] == [3]


async def test_the_oldest_automatic_ones_make_room_and_named_ones_stay(
    mock: Backend, backplane_home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "CHECKPOINTS_MAX", 3)
    monkeypatch.setattr(kept, "BYTES_MAX", 40_000)

    async def keep(run: Run, place: Path) -> None:
        await run.checkpoint("mine")

    steps = [write("a.txt", str(n) * 10_000) for n in range(4)]
    work = auto(root, steps[0], PAUSE, *steps[1:], *[write("b.txt", str(n)) for n in range(3)])
    work = WorkOrder(work.task, workspace=work.workspace, config=work.config, policy=APPROVAL)
    async with driven(backplane_home, work, mock, keep) as run:
        assert run.end_error is None
    made = told(run)["made"]
    assert len(made) == 3
    assert "mine" in [one["name"] for one in made]
    assert told(run)["dropped"] >= 3
    assert run.folder is not None
    blobs = list((run.folder / "checkpoints/blobs").iterdir())
    assert sum(path.stat().st_size for path in blobs) <= 40_000
    assert len(list((run.folder / "checkpoints").glob("*.json"))) == 3


async def test_a_checkpoint_that_cannot_be_made_is_told_and_holds_nothing_up(
    mock: Backend, backplane_home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "BYTES_MAX", 10)
    async with driven(backplane_home, auto(root, write("a.txt", "x" * 100), write("b.txt", "y")), mock) as run:
        assert run.end_error is None
    assert told(run)["failed"] == 1
    assert "10 bytes at most" in told(run)["failures"][0]["reason"]
    assert [one["files"] for one in told(run)["made"]] == [0]


async def test_automatic_ones_are_refused_where_nobody_asks_and_a_wrong_word_is_named(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, "hello(); run = take(); put(final(run)); end()")
    async with driven(backplane_home, auto(root), backend) as run:
        assert ended(run) == ("refused", "capability_unsupported", "failed")
    wrong = order(root, config=RuntimeConfig(vendor={"abp.checkpoints": "always"}))
    async with driven(backplane_home, wrong, mock) as run:
        assert ended(run) == ("refused", "config_invalid", "failed")
    wanted = order(root, requirements=Requirements((Requirement("checkpointing", "emulated"),)))
    async with driven(backplane_home, wanted, backend) as run:
        assert run.end_error is None, "for every host"


# After the end --------------------------------------------------------------------------------------------------------


def finished(*words: str) -> tuple[str, str]:
    env = {**os.environ, "BACKPLANE_ISOLATION": "off"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=env)
    return done.stdout.strip(), done.stderr


def command(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "backplane", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


async def three_states(home: Path, root: Path, mock: Backend, mode: str) -> Run:
    async def first(run: Run, place: Path) -> None:
        await run.checkpoint("first")

    steps = [write("a.txt", "1\n"), PAUSE, write("a.txt", "2\n"), write("b.txt", "b\n"), {"delete": "keep.txt"}]
    async with driven(home, paused(root, *steps, mode=mode), mock, first) as run:
        assert run.end_error is None
    return run


async def test_the_patch_as_of_a_checkpoint_is_applied_by_the_command_line(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    run = await three_states(backplane_home, root, mock, "staged")
    code, text = command("rewind", run.id)
    assert code == 0
    assert " first " in text
    code, text = command("rewind", "--json", run.id)
    (row,) = [json.loads(line) for line in text.splitlines()]
    assert row["record_sha256"] == told(run)["made"][0]["record_sha256"]
    code, text = command("apply", run.id, "--at", "first", "--check")
    assert (code, text) == (0, f"would change 1 file in {root}\n  a.txt\n")
    assert (root / "a.txt").read_text() == "alpha\n"
    assert command("apply", run.id, "--at", "first") == (0, f"changed 1 file in {root}\n  a.txt\n")
    assert tree(root) == {"a.txt": "1\n", "keep.txt": "keep\n"}


async def test_a_patch_whose_record_was_edited_is_found_by_verify_and_neither_applied_nor_rewound(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    run = await three_states(backplane_home, root, mock, "staged")
    before, folder = tree(root), backplane_home / "runs" / run.id
    assert command("receipts", "verify", run.id)[0] == 0
    evil = blob_id(b"evil\n").hex()
    (folder / "patch.blobs" / evil).write_bytes(b"evil\n")
    record = json.loads((folder / "patch.json").read_text())
    record["files"].append({"path": "evil.sh", "before": None, "after": {"mode": "100755", "blob": evil}})
    (folder / "patch.json").write_text(json.dumps(record))
    for words in (["apply", run.id], ["apply", run.id, "--check"], ["rewind", run.id, "start"]):
        code, text = command(*words)
        assert (code, text.partition(":")[0]) == (1, "execution_workspace_error")
        assert "'patch.json' is not the one that the receipt names" in text
    assert tree(root) == before
    assert command("receipts", "verify", run.id)[0] == CODES["receipt_hash_mismatch"].exit_code


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_a_workspace_with_a_runs_result_is_rewound_by_the_command_line(
    mode: str, mock: Backend, backplane_home: Path, root: Path
) -> None:
    run = await three_states(backplane_home, root, mock, mode)
    if mode == "staged":
        code, text = command("rewind", run.id, "first")
        assert code == 1, "its result is not there yet"
        assert "not as the run left it" in text
        assert command("apply", run.id)[0] == 0
    assert tree(root) == {"a.txt": "2\n", "b.txt": "b\n"}
    code, text = command("rewind", run.id, "first")
    assert (code, text) == (0, f"changed 3 files in {root}\n  a.txt\n  b.txt\n  keep.txt\n")
    assert tree(root) == {"a.txt": "1\n", "keep.txt": "keep\n"}
    code, text = command("rewind", run.id, "first")
    assert code == 1
    assert "in this state already" in text
    assert not list(run.folder.glob("*.joined")) if run.folder else True


async def test_wrong_words_after_the_end_are_named(mock: Backend, backplane_home: Path, root: Path) -> None:
    run = await three_states(backplane_home, root, mock, "pass_through")
    code, text = command("rewind", run.id, "second")
    assert code == 1
    assert "there is no checkpoint 'second'" in text
    assert "start, first" in text
    code, text = command("apply", run.id, "--at", "start")
    assert code == 1
    assert "had changed nothing" in text
    assert run.folder is not None
    record = run.folder / "checkpoints/c1.json"
    record.write_text(record.read_text().replace("a.txt", "../a.txt"))
    code, text = command("rewind", run.id, "first")
    assert code == 1
    assert "is not what was kept" in text
    assert tree(root) == {"a.txt": "2\n", "b.txt": "b\n"}


async def test_the_checkpoints_of_a_run_whose_control_plane_was_killed_are_still_there(
    backplane_home: Path, root: Path
) -> None:
    program = """
import os, signal, sys, anyio, backplane
async def main():
    config = backplane.RuntimeConfig(vendor={"abp": {"checkpoints": "auto"}})
    order = backplane.WorkOrder("echo x > a.txt; sleep 60", config=config)
    async with backplane.start(order, backend="shell", root=sys.argv[1]) as run:
        async for event in run:
            if run.checkpoints():
                await run.checkpoint("mine")
                print(run.id, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""
    run_id, said = finished(sys.executable, "-c", program, str(root))
    assert run_id, said
    with Store.open(backplane_home) as store:
        assert [row.run_id for row in store.recover().rows] == [run_id]
    code, text = command("rewind", run_id)
    assert code == 0
    assert " mine " in text


async def test_prune_removes_checkpoints_with_the_rest(mock: Backend, backplane_home: Path, root: Path) -> None:
    run = await three_states(backplane_home, root, mock, "pass_through")
    assert run.folder is not None
    assert (run.folder / "checkpoints").is_dir()
    assert command("prune", "--keep", "0")[0] == 0
    assert not run.folder.exists()
