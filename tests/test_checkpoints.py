"""Checkpoints: what of a workspace is kept before tools, and the way back after the run's end."""

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

from backplane import Decision
from backplane.config import Settings
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.events import Approval, ApprovalAnswered, Carried, Warned
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.errors import CODES, WorkspaceError
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from backplane.workspace import Workspace
from backplane.workspace import checkpoints as kept
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


def auto(root: Path, *steps: dict[str, Any], mode: str = "staged", **members: Any) -> WorkOrder:
    return order(root, *steps, mode=mode, **members).with_abp("checkpoints", "auto")


async def test_a_tree_is_read_by_git(mock: Backend, backplane_home: Path, root: Path) -> None:
    work = auto(root, write("sub/b.txt", "b"), write("a.txt", "2"), {"delete": "keep.txt"})
    async with driven(backplane_home, work, mock) as run:
        names = [one["tree"] for one in told(run)["made"]]
    assert run.folder is not None
    repo = run.folder / "repo.git"
    assert git(repo, "ls-tree", "-r", "--name-only", names[1]) == "b/sub/b.txt"
    changes = git(repo, "diff", "--name-status", f"{names[2]}:a", f"{names[2]}:b")
    assert changes.split() == ["M", "a.txt", "A", "sub/b.txt"]
    assert len(list((repo / "objects/pack").glob("*.pack"))) == 1
    git(repo, "fsck", "--strict", "--full")


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


async def test_an_answer_that_waits_for_a_checkpoint_names_its_maker(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    def on_ask(_: Approval) -> Decision:
        return Decision(decision="allow", remember="run")

    work = auto(root, write("a.txt", "1"), write("a.txt", "2"), policy=PolicyProfile(require_approval_for=("*",)))
    async with plane(backplane_home) as control, control.start(work, mock, on_ask=on_ask) as run:
        answers = [event async for event in run if isinstance(event, ApprovalAnswered)]
    assert [answer.body["by"] for answer in answers] == ["caller", "caller"]


async def test_the_oldest_checkpoints_make_room(
    mock: Backend, backplane_home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "CHECKPOINTS_MAX", 3)

    steps = [write("a.txt", str(n) * 10_000) for n in range(4)]
    work = auto(root, *steps, *[write("b.txt", str(n)) for n in range(3)])
    async with driven(backplane_home, work, mock) as run:
        assert run.end_error is None
    made = told(run)["made"]
    assert [one["name"] for one in made] == ["c5", "c6", "c7"]
    assert told(run)["dropped"] == 4
    assert run.folder is not None
    kept_refs = git(run.folder / "repo.git", "for-each-ref", "--format=%(refname:lstrip=2)").split()
    assert kept_refs == ["c5", "c6", "c7", "end"]


async def test_a_checkpoint_that_cannot_be_made_is_told_and_holds_nothing_up(
    mock: Backend, backplane_home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Workspace.snapshot, iter(range(9))

    def full(self: Workspace, branch: str) -> Any:
        if next(calls) == 1:
            raise WorkspaceError("execution_workspace_error", "no room")
        return real(self, branch)

    monkeypatch.setattr(Workspace, "snapshot", full)
    async with driven(backplane_home, auto(root, write("a.txt", "x" * 100), write("b.txt", "y")), mock) as run:
        assert run.end_error is None
    assert told(run)["failed"] == 1
    words = [event.message for event in run.receipt.trace if isinstance(event, Warned | Carried)]
    assert any("no room" in text for text in words)
    assert [one["files"] for one in told(run)["made"]] == [0]


async def test_automatic_ones_are_refused_where_nobody_asks_and_a_wrong_word_is_named(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, "hello(); run = take(); put(final(run)); end()")
    async with driven(backplane_home, auto(root), backend) as run:
        assert ended(run) == ("refused", "capability_unsupported", "failed")
    for word in ("always", "named"):
        wrong = order(root).with_abp("checkpoints", word)
        async with driven(backplane_home, wrong, mock) as run:
            assert ended(run) == ("refused", "config_invalid", "failed")
    wanted = order(root, requirements=Requirements((Requirement("checkpointing", "emulated"),)))
    async with driven(backplane_home, wanted, backend) as run:
        assert ended(run) == ("refused", "capability_unsupported", "failed")
    async with driven(backplane_home, wanted, mock) as run:
        assert run.end_error is None, "for every host that asks"


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
    """A run with four checkpoints; at c2 only `a.txt` is changed."""
    steps = [write("a.txt", "1\n"), write("a.txt", "2\n"), write("b.txt", "b\n"), {"delete": "keep.txt"}]
    async with driven(home, auto(root, *steps, mode=mode), mock) as run:
        assert run.end_error is None
    return run


async def test_the_patch_as_of_a_checkpoint_is_applied_by_the_command_line(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    run = await three_states(backplane_home, root, mock, "staged")
    code, text = command("rewind", run.id)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["c1", "c2", "c3", "c4"]
    code, text = command("rewind", "--json", run.id)
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["tree"] for row in rows] == [one["tree"] for one in told(run)["made"]]
    code, text = command("apply", run.id, "--at", "c2", "--check")
    assert (code, text) == (0, f"would change 1 file in {root}\n  a.txt\n")
    assert (root / "a.txt").read_text() == "alpha\n"
    assert command("apply", run.id, "--at", "c2") == (0, f"changed 1 file in {root}\n  a.txt\n")
    assert tree(root) == {"a.txt": "1\n", "keep.txt": "keep\n"}


async def test_a_patch_whose_record_was_edited_is_found_by_verify_and_neither_applied_nor_rewound(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    run = await three_states(backplane_home, root, mock, "staged")
    before, folder = tree(root), backplane_home / "runs" / run.id
    assert command("receipts", "verify", run.id)[0] == 0
    record = json.loads((folder / "patch.json").read_text())
    record["tree"] = told(run)["made"][1]["tree"]
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
        code, text = command("rewind", run.id, "c2")
        assert code == 1, "its result is not there yet"
        assert "not as the run left it" in text
        assert command("apply", run.id)[0] == 0
    assert tree(root) == {"a.txt": "2\n", "b.txt": "b\n"}
    code, text = command("rewind", run.id, "c2")
    assert (code, text) == (0, f"changed 3 files in {root}\n  a.txt\n  b.txt\n  keep.txt\n")
    assert tree(root) == {"a.txt": "1\n", "keep.txt": "keep\n"}
    code, text = command("rewind", run.id, "c2")
    assert code == 1
    assert "in this state already" in text
    assert not list(run.folder.glob("*.joined")) if run.folder else True


async def test_wrong_words_after_the_end_are_named(mock: Backend, backplane_home: Path, root: Path) -> None:
    run = await three_states(backplane_home, root, mock, "pass_through")
    code, text = command("rewind", run.id, "second")
    assert code == 1
    assert "there is no checkpoint 'second'" in text
    assert "start, c1, c2" in text
    code, text = command("apply", run.id, "--at", "start")
    assert code == 1
    assert "had changed nothing" in text
    assert run.folder is not None
    (pack,) = (run.folder / "repo.git/objects/pack").glob("*.pack")
    pack.unlink()
    code, text = command("rewind", run.id, "c2")
    assert code == 1
    assert "is not in its repository as it was kept" in text
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
            if isinstance(event, backplane.CheckpointReported):
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
    assert text.startswith("c1 ")


async def test_prune_removes_checkpoints_with_the_rest(mock: Backend, backplane_home: Path, root: Path) -> None:
    run = await three_states(backplane_home, root, mock, "pass_through")
    assert run.folder is not None
    assert (run.folder / "repo.git").is_dir()
    assert command("prune", "--keep", "0")[0] == 0
    assert [path.name for path in run.folder.iterdir()] == ["link.json"]
