"""A queue for Python programs: they submit work orders, workers on any machine run them, and receipts come back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
import msgspec

from backplane import config
from backplane.config import Settings
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.receipts.store import Store
from backplane.receipts.trace import listed
from backplane.runtime.faults import check_whole
from backplane.runtime.orders import make_order
from backplane.runtime.place import quota_of
from backplane.scale.engine import DEFAULT_LABEL, Status, check_priority
from backplane.scale.orders import Packer, ended, events_of, followed, keep, make_job
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

T = TypeVar("T")


class Queue:
    """A queue of work orders; use it as an async context manager.

    Args:
        url: `sqlite:///FILE`, or `postgresql://USER@HOST/DATABASE`; None takes the file in the state folder.
        content: folder or URL of the store of workspaces and patches, the same for submitters and workers; None takes
            a folder beside the file.
        settings: None loads the configuration as the command line does.
        home: the state folder, where receipts are stored; None takes the usual one.

    Raises:
        ConfigError: `config_invalid`: no such place, or the extra `scale` is not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        content: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        self._place = QueuePlace(url, None if content is None else os.fspath(content))
        self._settings = settings if settings is not None else config.load(None, os.environ, Path.cwd())
        self._home = Path(home).expanduser() if home is not None else config.home(os.environ)
        self._engine: DurableEngine | None = None

    async def __aenter__(self) -> Queue:
        def opened() -> DurableEngine:
            self._packer = Packer(self._place.contents(), self._home, quota_of(self._settings.limits))
            return self._place.open()

        self._engine = await anyio.to_thread.run_sync(opened)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._do(lambda engine: engine.close())
        self._engine = None

    @property
    def _opened(self) -> DurableEngine:
        if self._engine is None:
            raise RuntimeError("the queue is closed: use it inside its `async with` block")
        return self._engine

    async def _do(self, work: Callable[[DurableEngine], T]) -> T:
        """Call a function in a thread."""
        return await anyio.to_thread.run_sync(work, self._opened)

    async def submit(
        self,
        order: WorkOrder | str,
        *,
        backend: str | None = None,
        root: str | os.PathLike[str] | None = None,
        model: str | None = None,
        policy: PolicyProfile | str | None = None,
        max_turns: int | None = None,
        max_budget_usd: float | None = None,
        output: Any = None,
        label: str = DEFAULT_LABEL,
        priority: int | None = None,
        asks: bool = False,
    ) -> str:
        """Put an order into the queue, with a copy of its folder, and return its id; a repeated call adds nothing.

        Args:
            order: a work order, or just the task.
            backend: a backend of the worker; None leaves the choice to it.
            root: the folder that a worker gets a copy of.
            model: the model that the agent uses.
            policy: a profile, the name of a shipped one, or the path of a file.
            max_turns: answers of the model that the agent may use.
            max_budget_usd: US dollars that the agent may spend.
            output: the shape of the answer.
            label: label of the workers that may take the order.
            priority: 1 (first) to 2**31 - 1 (last); None precedes them all.
            asks: let approvals wait for `backplane queue answer`; else each ask's default decides.

        Raises:
            ConfigError, PolicyError, WorkspaceError: as `scale.orders.make_job`.
        """
        check_priority(priority)
        whole = make_order(
            order, root=root, model=model, policy=policy, max_turns=max_turns, max_budget_usd=max_budget_usd,
            output=output, configured_policy=self._settings.policy,
        )  # fmt: skip
        check_whole(whole)

        def submit(engine: DurableEngine) -> None:
            job = make_job(whole, self._packer, backend=backend, label=label, asks=asks)
            engine.submit(job, priority=priority)

        await self._do(submit)
        return whole.id

    async def result(self, order_id: str) -> Receipt:
        """Wait for an order's end, and return its verified receipt, which is then stored here.

        Raises:
            BackendError: `internal`, the engine ended the order without a receipt.
            ConfigError: `config_invalid`, no such order.
            StoreError: `receipt_store_failed`.
        """
        result = await ended(self._opened, order_id)

        def load(engine: DurableEngine) -> Receipt:
            row = keep(self._home, engine.job(order_id), result, self._packer.content)
            with Store.open(self._home, readonly=True) as store:
                receipt = store.load(row.run_id)
                return msgspec.structs.replace(receipt, trace=listed(receipt.trace))

        return await self._do(load)

    async def events(self, order_id: str) -> AsyncIterator[AgentEvent]:
        """Yield the events of an order as they come, until it ends; those of void attempts come first.

        Raises:
            ConfigError: `config_invalid`, no such order.
        """
        await self.status(order_id)
        async for batch in followed(self._opened, order_id):
            for event in events_of(batch):
                yield event

    async def status(self, order_id: str) -> Status:
        """Return the state of an order. Raises ConfigError: `config_invalid`, no such order."""
        return await self._do(lambda engine: engine.status(order_id))

    async def cancel(self, order_id: str, reason: str = "cancelled") -> bool:
        """Cancel an order; its receipt says so. Returns False if it has ended already.

        Raises:
            ConfigError: `config_invalid`, no such order.
        """
        return await self._do(lambda engine: engine.cancel(order_id, reason))
