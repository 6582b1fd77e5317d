"""The submitter's side: makes an order ready for a queue, and stores its verified result in the submitter's store."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, Approval, ApprovalAnswered, carried, read_event
from backplane.contract.unknown import check_settings
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError, StoreError
from backplane.receipts.bundle import check_patch, parse_receipt, read_bounded
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import PATCH, RECEIPT, head_fact
from backplane.receipts.store import Store
from backplane.scale.content import Contents
from backplane.scale.engine import (
    DEFAULT_LABEL,
    Batch,
    Job,
    OnLostWorker,
    OrderResult,
    Status,
    check_label,
    default_on_lost,
)
from backplane.workspace import Quota, archive, open_workspace
from backplane.workspace.tree import paths_below

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
RESULT_S: Final = 0.3
"""Seconds between two polls for an order's end."""
CHANGED_NS_MIN: Final = 100_000_000
"""Nanoseconds after a file's last change from which its time shows every later change."""


class Packer:
    """Puts copies of workspaces into a content store; a folder is packed again only after a change. Blocks.

    Args:
        home: the state folder, for temporary copies.
        quota: limits of a workspace.
    """

    def __init__(self, content: Contents, home: Path, quota: Quota) -> None:
        self.content, self.home, self.quota = content, home, quota
        self._last: tuple[object, str] = (None, "")

    def pack(self, order: WorkOrder, *, ignored: bool = False) -> str:
        """Return the SHA-256 of the archive of an order's workspace.

        Args:
            ignored: include files that git ignores.

        Raises:
            WorkspaceError: `workspace_init_failed`, `workspace_staging_failed`.
        """
        spec, state = order.workspace, _state_of(order.workspace.root)
        key = (spec.root, spec.include, spec.exclude, order.policy.deny_read, ignored, state)
        if state is None or self._last[0] != key:
            packed = self._packed(order, ignored)
            self._last = (key if _state_of(spec.root) == state else None, packed)
        return self._last[1]

    def _packed(self, order: WorkOrder, ignored: bool) -> str:
        spec = order.workspace
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        archive.sweep(self.home)
        with archive.incoming(self.home) as folder:
            run_dir, stage = folder / "run", folder / "stage"
            run_dir.mkdir()
            workspace = open_workspace(
                spec.root, mode="staged", include=spec.include, exclude=spec.exclude, run_dir=run_dir,
                stage_dir=stage, tree=stage / "tree", quota=self.quota, state=self.home,
                unread=order.policy.deny_read, travels=True,
            )  # fmt: skip
            try:
                if not ignored:
                    workspace.drop_ignored()
                # With build results in the copy, a build needs the files' times; without, an order that is submitted
                # twice must be the same job.
                return self.content.put(archive.pack(workspace.root, self.quota, times=ignored))
            finally:
                workspace.close()


def _state_of(root: str) -> str | None:
    """Return a hash over every file's name, size, mode and times; None if a change is too recent to rely on times."""
    whole, newest = hashlib.sha256(), 0
    for path in paths_below(root):
        try:
            found = os.lstat(path)
        except OSError:
            return None
        newest = max(newest, found.st_ctime_ns)
        facts = (found.st_mode, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        whole.update(os.fsencode(f"{path}\0{facts}\0"))
    return None if time.time_ns() - newest < CHANGED_NS_MIN else whole.hexdigest()


def make_job(
    order: WorkOrder,
    packer: Packer,
    *,
    backend: str | None = None,
    label: str = DEFAULT_LABEL,
    ignored: bool = False,
    asks: bool = False,
) -> Job:
    """Make a job of an order: its workspace goes into the content store. Blocks.

    Args:
        ignored: also send files that git ignores.
        asks: see `Job`.

    Raises:
        PolicyError: `policy_invalid`, a misspelt setting.
        ConfigError: `config_invalid`: the order contains a secret's value, a malformed setting, or a mode or lane that
            has no effect on a worker.
        WorkspaceError: as `Packer.pack`.
    """
    check_settings(order)
    check_secrets(order)
    check_label(label)
    if order.workspace.mode != "staged":
        fact = "an order of mode pass_through works in a folder of this machine, which a worker may not have"
        raise ConfigError("config_invalid", fact, hint="use the mode staged, which sends a copy; or `backplane run`")
    if order.lane != "patch_first":
        fact = "the lane workspace_first has no effect in a queue: a worker cannot write into your folder"
        hint = "leave it out, and apply the patch after `backplane queue show ORDER`"
        raise ConfigError("config_invalid", fact, hint=hint)
    tree = packer.pack(order, ignored=ignored)
    spec = msgspec.structs.replace(order.workspace, root=".", include=(), exclude=())
    order = msgspec.structs.replace(order, workspace=spec)
    on_lost: OnLostWorker = order.abp("on_lost_worker") or default_on_lost(order)
    return Job(order, on_lost, label, backend, tree, asks)


def secret_names(order: WorkOrder) -> tuple[str, ...]:
    """Return the variables that a worker must supply. Raises ConfigError `config_invalid` if one is not a name."""
    names: list[str] = order.abp("secrets") or []
    if not all(re.fullmatch(_NAME, name) for name in names):
        fact = "config.vendor.abp.secrets is not a list of names of variables"
        raise ConfigError("config_invalid", fact, hint='give names, as ["SERVICE_KEY"]; set the values on the workers')
    return tuple(names)


def servers_of(order: WorkOrder) -> list[dict[str, Any]]:
    """Return the MCP servers of an order."""
    return order.abp("mcp_servers") or []


def server_values(server: dict[str, Any]) -> list[tuple[str, str, Json]]:
    """Return the values that an MCP server of an order gets: `env` or `headers`, name and value."""
    kinds = [(kind, server.get(kind)) for kind in ("env", "headers")]
    return [(kind, name, value) for kind, values in kinds if isinstance(values, dict) for name, value in values.items()]


def check_secrets(order: WorkOrder) -> None:
    """Refuse an order that contains values of secrets, as many users can read the database.

    Raises:
        ConfigError: `config_invalid`, with the place, never the value.
    """
    secret_names(order)
    if order.config.env:
        fact = f"config.env has values ({', '.join(sorted(order.config.env))[:200]}); a queue stores no values"
        hint = "give only the name, --secret NAME (config.vendor.abp.secrets), and set the value on the workers"
        raise ConfigError("config_invalid", fact, hint=hint)
    for server in servers_of(order):
        for kind, name, value in server_values(server):
            if not isinstance(value, str) or not re.fullmatch(rf"\${_NAME}", value):
                fact = f"the MCP server {str(server.get('name'))!r} has a value in {kind}.{name}"
                hint = f'a queue stores no values: write "${name}"; the worker fills in its own variable'
                raise ConfigError("config_invalid", fact, hint=hint)


def events_of(batch: Batch) -> list[AgentEvent]:
    """Return the agent's events in a batch, each of its own kind."""
    return [carried(read_event(msgspec.json.decode(record), now=str)) for record in batch.records]


def asks_of(batch: Batch) -> list[Approval | ApprovalAnswered]:
    """Return the questions and answers in a batch."""
    if not any('"ask"' in record or '"answer"' in record for record in batch.records):
        return []
    return [event for event in events_of(batch) if isinstance(event, Approval | ApprovalAnswered)]


def open_asks(engine: DurableEngine, status: Status) -> dict[str, Approval]:
    """Return the open questions of the valid attempt, by their ids, oldest first. Blocks."""
    asks: dict[str, Approval] = {}
    for batch in engine.past(status.order_id):
        for event in asks_of(batch) if batch.attempt == status.attempts[-1] else ():
            id = str(event.body.get("id"))
            if isinstance(event, Approval):
                asks[id] = event
            else:
                asks.pop(id, None)
    return asks


async def followed(engine: DurableEngine, order_id: str) -> AsyncIterator[Batch]:
    """Yield the events of an order, past ones first, until its end."""
    batches = engine.batches(order_id, wait_s=RESULT_S)
    while (batch := await anyio.to_thread.run_sync(next, batches, "ended")) != "ended":
        if isinstance(batch, Batch):
            yield batch


async def ended(engine: DurableEngine, order_id: str) -> OrderResult:
    """Wait for an order's end. Raises as `DurableEngine.result`."""
    while (result := await anyio.to_thread.run_sync(engine.result, order_id)) is None:
        await anyio.sleep(RESULT_S)
    return result


def keep(home: Path, job: Job, result: OrderResult, content: Contents, root: str = "") -> ReceiptRow:
    """Store an order's receipt and patch in the submitter's own store, after both were verified. Blocks.

    Args:
        home: the submitter's state folder.
        root: the local folder of the order, if known.

    Raises:
        ContractError: `contract_invalid_receipt`.
        StoreError: `receipt_hash_mismatch`, also if it belongs to another order; `receipt_store_failed`.
        WorkspaceError: `workspace_staging_failed`, the content is missing.
    """
    order = msgspec.structs.replace(job.order, workspace=msgspec.structs.replace(job.order.workspace, root=root))
    with Store.open(home) as store, archive.incoming(home) as folder:
        data = (result.receipt or "").encode()
        if result.receipt_content is not None:
            content.fetch(result.receipt_content, folder / RECEIPT)
            data = read_bounded(folder / RECEIPT)
        receipt = parse_receipt(data, f"the receipt of order {order.id}")
        run_id = receipt.meta.run_id
        if receipt.meta.work_order_id != order.id or run_id != result.attempts[-1]:
            fact = f"the receipt stored for order {order.id} belongs to another order or attempt"
            raise StoreError("receipt_hash_mismatch", fact)
        if store.has(run_id):
            row = store.find(run_id)
            if row.sha256 != receipt.receipt_sha256:
                raise StoreError("receipt_hash_mismatch", f"run {run_id} is stored here with a different receipt")
            return row
        path, patch = folder / PATCH, (receipt.verification.git_diff or "").encode()
        if result.patch is not None:
            content.fetch(result.patch, path)
            patch = read_bounded(path)
        check_patch(receipt, path, patch)
        head = head_fact(order, run_id=run_id, started_at=receipt.meta.started_at, backend=job.backend)
        return store.adopt(receipt, patch, head)
