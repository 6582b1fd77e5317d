"""Orders declared pure: the same on the same tree is served from the store, anything else is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane import host as sidecar
from backplane.contract.capability import NATIVE
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.errors import ConfigError
from backplane.host import Done, HostRun
from backplane.receipts.store import Store
from backplane.routing.driver import look_around
from backplane.runtime.hooks import Hook
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests.runs import backplane_of, go, memory, order, plane

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class Worker:
    """A host in this process that writes a file, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.count = 0
        self.outcome = "complete"
        self.backend = memory(
            self.work,
            sidecar.Host(id="worker", capabilities={"streaming": NATIVE, "tool_write": NATIVE}, heeds=("model",)),
        )

    async def work(self, run: HostRun) -> Done:
        self.count += 1
        (Path(run.order.workspace.root) / "made.txt").write_text(f"{run.order.task} {self.count}\n")
        await run.file_changed("made.txt", "made")
        await run.message(f"answer {self.count}")
        return Done(outcome=self.outcome)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    return folder


def pure(root: Path, task: str = "make it", **members: Any) -> WorkOrder:
    return order(root, task=task, mode="staged", **members).with_abp("pure", True)


async def ask(control: ControlPlane, worker: Worker, given: WorkOrder, **options: Any) -> Run:
    return (await go(control, given, worker.backend, **options))[0]


async def test_the_same_order_on_the_same_tree_is_served_with_its_patch_and_a_link(root: Path, tmp_path: Path) -> None:
    worker = Worker()
    async with plane(tmp_path / "home") as control:
        first = await ask(control, worker, pure(root, config=RuntimeConfig(model="m")))
        again = await ask(control, worker, pure(root, config=RuntimeConfig(model="m"), lane="patch_first"))
        assert worker.count == 1
        assert (again.text, again.receipt.outcome) == ("answer 1", "complete")
        assert again.receipt.verification.git_diff == first.receipt.verification.git_diff
        told, key = backplane_of(again), backplane_of(first)["cache"]["key"]
        assert told["replay"]["run"] == first.id
        assert told["replay"]["receipt_sha256"] == first.receipt.receipt_sha256
        assert (backplane_of(first)["cache"]["hit"], told["cache"]) == (False, {"key": key, "hit": True})
        assert again.receipt.usage.input_tokens is None
        # A hit is no measure of its backend, and is not what the next one is served from.
        assert (await ask(control, worker, pure(root, config=RuntimeConfig(model="m")))).id != again.id
        assert backplane_of(again)["replay"]["run"] == first.id
        world = look_around(control.settings, control.environ, control.home)
        assert not [one for one in world.measures.observations if one.backend.startswith("replay")]


async def test_whatever_is_another_order_tree_or_setting_is_done(root: Path, tmp_path: Path) -> None:
    worker = Worker()
    async with plane(tmp_path / "home") as control:
        await ask(control, worker, pure(root))
        others: list[tuple[WorkOrder, dict[str, Any]]] = [
            (pure(root, "another"), {}),
            (pure(root, config=RuntimeConfig(model="m")), {}),
            (order(root, task="make it", mode="staged"), {}),
        ]
        for count, (given, options) in enumerate(others, start=2):
            await ask(control, worker, given, **options)
            assert worker.count == count
        async with control.start(pure(root), worker.backend, hooks=(Hook("pre_tool", lambda call: None),)) as run:
            await run.wait()
        assert "cache" not in backplane_of(run)
        worker.count = 4
        for change in ("b.txt", "a.txt", "sub/c.txt"):
            (root / change).parent.mkdir(exist_ok=True)
            (root / change).write_text("other\n")
            await ask(control, worker, pure(root))
        (root / "a.txt").chmod(0o755)
        await ask(control, worker, pure(root))
        assert worker.count == 8
        await ask(control, worker, pure(root))
        assert worker.count == 8
    async with plane(tmp_path / "home", idle_s=7.0) as control:
        await ask(control, worker, pure(root))
        assert worker.count == 9
    async with plane(tmp_path / "another user's") as control:
        await ask(control, worker, pure(root))
        assert worker.count == 10


async def test_a_run_that_was_not_complete_or_is_pruned_is_done_again(root: Path, tmp_path: Path) -> None:
    worker = Worker()
    async with plane(tmp_path / "home") as control:
        worker.outcome = "partial"
        await ask(control, worker, pure(root))
        worker.outcome = "complete"
        await ask(control, worker, pure(root))
        assert worker.count == 2
    with Store.open(tmp_path / "home") as store:
        store.prune(keep=0)
    async with plane(tmp_path / "home") as control:
        await ask(control, worker, pure(root))
        assert worker.count == 3


async def test_a_pure_order_works_in_a_copy(root: Path, tmp_path: Path) -> None:
    async with plane(tmp_path / "home") as control:
        for given, words in ((order(root).with_abp("pure", True), "in a copy"),
                             (order(root).with_abp("pure", 1), "neither true nor false")):  # fmt: skip
            with pytest.raises(ConfigError, match=words):
                await ask(control, Worker(), msgspec.structs.replace(given))
