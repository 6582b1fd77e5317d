"""The end of a run: what happens to its result, and what the receipt says of it."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import backplane
from backplane import host as sidecar
from backplane.contract.capability import NATIVE
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.host.link import serve as serve_host
from backplane.receipts.store import Store
from backplane.runtime.memory import MemoryBackend
from backplane.workspace import apply_patch

Edit = Callable[[Path], object]


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    (folder / "b.txt").write_text("two\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True, timeout=30)
    return folder


def run_with(
    edit: Edit,
    original: Path,
    config: RuntimeConfig | None = None,
    *,
    lane: str = "patch_first",
    home: Path | None = None,
    **spec: object,
) -> backplane.Run:
    """Run an order whose host does one thing to the folder it works in."""

    async def work(run: sidecar.HostRun) -> sidecar.Done:
        edit(Path(run.order.workspace.root))
        return sidecar.Done()

    typed: Callable[[sidecar.HostRun], Awaitable[sidecar.Done | sidecar.Written]] = work
    host = sidecar.Host(id="editor", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="editor", serve=functools.partial(serve_host, host, typed))
    workspace = WorkspaceSpec(root=str(original), **spec)  # type: ignore[arg-type]
    order = WorkOrder("edit", lane=lane, workspace=workspace, config=config or RuntimeConfig())  # type: ignore[arg-type]
    return backplane.run(order, backend=backend, home=home)


def receipt_of(run: backplane.Run) -> backplane.Receipt:
    return run.receipt


def test_patch_first_leaves_the_original_and_a_patch_that_lands(original: Path) -> None:
    run = run_with(lambda root: (root / "a.txt").write_text("changed\n"), original)
    assert receipt_of(run).outcome == "complete"
    assert (original / "a.txt").read_text() == "one\n"
    assert run.folder is not None
    apply_patch(run.folder)
    assert (original / "a.txt").read_text() == "changed\n"


def test_workspace_first_changes_the_original_at_once(original: Path) -> None:
    run = run_with(lambda root: (root / "a.txt").write_text("changed\n"), original, lane="workspace_first")
    assert receipt_of(run).outcome == "complete"
    assert receipt_of(run).backplane["lane"] == {"applied": 1}
    assert (original / "a.txt").read_text() == "changed\n"


def test_a_conflict_leaves_the_original_alone_and_lowers_the_outcome(original: Path) -> None:
    def edit_both(root: Path) -> None:
        (root / "a.txt").write_text("the agent's\n")
        (original / "a.txt").write_text("somebody else's\n")

    run = run_with(edit_both, original, lane="workspace_first")
    assert receipt_of(run).outcome == "partial"
    assert run.error is not None
    assert run.error.code == "execution_workspace_error"
    assert (original / "a.txt").read_text() == "somebody else's\n"
    assert "the agent's" in str(receipt_of(run).verification.git_diff)


def test_a_change_outside_the_selection_is_named_and_not_called_complete(original: Path) -> None:
    run = run_with(lambda root: (root / "b.txt").write_text("x\n"), original, include=("a.txt",))
    assert receipt_of(run).outcome == "partial"
    assert receipt_of(run).backplane["patch"]["left_out"] == ["b.txt"]
    assert run.error is not None
    assert "b.txt" in run.error.message


def test_a_patch_that_is_no_text_is_named_by_its_hash(original: Path) -> None:
    run = run_with(lambda root: (root / "a.txt").write_bytes(b"caf\xe9\n"), original)
    assert receipt_of(run).verification.git_diff is None
    assert run.patch is not None
    patch = run.patch.read_bytes()
    said = receipt_of(run).backplane["patch"]
    assert (said["bytes"], said["sha256"]) == (len(patch), hashlib.sha256(patch).hexdigest())


def test_a_setting_that_nobody_heard_is_named(original: Path) -> None:
    config = RuntimeConfig(vendor={"abp": {"isolat-1": 1, "mode": "mapped"}, "abp.fast": 1}, env={"A": "isolat-1"})
    run = run_with(lambda root: None, original, config)
    assert receipt_of(run).backplane["unheard"] == ["/config/vendor/abp/[redacted]", "/config/vendor/abp.fast"]
    assert "unheard" not in receipt_of(run_with(lambda root: None, original)).backplane


def test_files_changed_without_a_word_are_listed(original: Path) -> None:
    run = run_with(lambda root: (root / "new.txt").write_text("x"), original)
    assert receipt_of(run).backplane["reconciliation"] == {"unclaimed": ["new.txt"]}


@pytest.mark.parametrize("damage", ["gone", "a pipe", "a folder"])
def test_a_journal_that_was_changed_under_the_run_is_told_and_takes_no_result(
    original: Path, tmp_path: Path, damage: str
) -> None:
    home = tmp_path / "home"

    def spoil(root: Path) -> None:
        (root / "a.txt").write_text("changed\n")
        (trace,) = (home / "runs").glob("*/trace.jsonl")
        trace.unlink()
        if damage == "a pipe":
            os.mkfifo(trace)
        elif damage == "a folder":
            trace.mkdir()

    run = run_with(spoil, original, home=home)
    assert run.error is not None
    assert run.error.code == "receipt_store_failed"
    assert "trace.jsonl" in run.error.message
    assert run.patch is not None
    assert "+changed" in run.patch.read_text()
    receipt = receipt_of(run)
    assert (receipt.outcome, len(receipt.trace)) == ("failed", 0)
    assert receipt.backplane["end"] == {"reason": "store", "code": "receipt_store_failed"}
    assert receipt.backplane["patch"]["files"] == 1
    with Store.open(home) as store:
        assert store.rows() == []
        assert [orphan.run_id for orphan in store.orphans()] == [receipt.meta.run_id]
