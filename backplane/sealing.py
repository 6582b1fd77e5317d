"""The blocking ends of a run: preparing its place to work, and sealing what came of it.

Called in worker threads by `runtime`. The store and the staged tree are opened while the host
starts; at the end come the diff, the lane's effect, the seal and the store, in this order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane import record
from backplane.config import Limits
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.receipt import Artifact, Receipt
from backplane.errors import BackplaneError, StoreError, WorkspaceError
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.manifests import keep_manifest, kept_manifest
from backplane.receipts.recovery import Orphan, is_live
from backplane.receipts.seal import seal
from backplane.receipts.store import Store
from backplane.receipts.trace import Trace
from backplane.record import End, Facts
from backplane.workspace import Patch, Quota, Workspace, apply_patch, collect, open_workspace

DIFF_BYTES_MAX: Final = 8 * 1024 * 1024
"""Longest patch written into a receipt; a longer one is named by size and hash, and lies beside it."""


class Keeper:
    """The state folder of a control plane: its store, journals, kept manifests and staged trees."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.problems: tuple[str, ...] = ()
        """What a killed control plane left behind and could not be sealed, a line each."""
        self._store: Store | None = None
        self._opening = threading.Lock()

    def store(self) -> Store:
        """The open store; the first caller opens it and seals what a killed control plane left behind.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        with self._opening:
            if self._store is None:
                store = Store.open(self.home)
                self.problems = store.recover(self._clean).problems
                self._sweep_stages()
                self._store = store
            return self._store

    def _sweep_stages(self) -> None:
        """Remove staged trees of runs that were sealed, but killed before they were cleaned up."""
        stages = self.home / "stage"
        for stage in stages.iterdir() if stages.is_dir() else ():
            if not is_live(self.home, stage.name):
                collect(stage)

    def _clean(self, orphan: Orphan) -> None:
        collect(self.stage_of(orphan.run_id))

    def stage_of(self, run_id: str) -> Path:
        return self.home / "stage" / run_id

    def journal(self, facts: Facts) -> Journal:
        started_at = canonical.timestamp_at(facts.started_ns)
        head = head_fact(facts.order, run_id=facts.run_id, started_at=started_at, backend=facts.backend.id)
        return Journal.create(self.home, facts.run_id, facts.redactor.json(head)[0])

    def kept_manifest(self, key: str) -> dict[str, Any] | None:
        return kept_manifest(self.home, key)

    def keep_manifest(self, key: str, capabilities: dict[str, Any]) -> None:
        """Keep what a host just said; a cache, so a failing disk is left for the receipt to report."""
        if self.kept_manifest(key) != capabilities:
            with suppress(StoreError):
                keep_manifest(self.home, key, capabilities)

    def close(self) -> None:
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None


class Preparation:
    """Opens store and workspace in a worker thread while the host starts."""

    def __init__(self, keeper: Keeper, facts: Facts, limits: Limits, stopped: Callable[[], bool]) -> None:
        self.workspace: Workspace | None = None
        self._keeper = keeper
        self._facts = facts
        self._limits = limits
        self._stopped = stopped
        self._error: BackplaneError | None = None
        self._done = anyio.Event()

    async def run(self, folder: Path) -> None:
        try:
            with anyio.CancelScope(shield=True):
                self.workspace = await anyio.to_thread.run_sync(self._open, folder)
        except BackplaneError as error:
            self._error = error
        finally:
            self._done.set()

    async def settled(self) -> None:
        """Wait until nothing of it runs any more, however it ended."""
        await self._done.wait()

    async def wait(self) -> Workspace:
        """Wait for the place to work in.

        Raises:
            BackplaneError: of the store or the workspace.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        assert self.workspace is not None
        return self.workspace

    def _open(self, folder: Path) -> Workspace:
        self._keeper.store()
        spec = self._facts.order.workspace
        return open_workspace(
            os.path.abspath(spec.root),
            mode=spec.mode,
            include=spec.include,
            exclude=spec.exclude,
            run_dir=folder,
            stage_dir=self._keeper.stage_of(self._facts.run_id),
            quota=Quota(bytes_max=self._limits.workspace_bytes_max, files_max=self._limits.workspace_files_max),
            stopped=self._stopped,
        )


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a run gives back."""

    receipt: Receipt
    end: End
    error: BackplaneError | None
    """A failure of the ending itself: patch, lane or store."""
    patch: Path | None


def seal_run(
    keeper: Keeper,
    facts: Facts,
    journal: Journal | None,
    workspace: Workspace | None,
    end: End,
    *,
    duration_s: float,
    cleaned: bool,
) -> Sealed:
    """Take the diff, let the lane have its effect, seal and store. Blocks; never raises for what the run did.

    Args:
        journal: None for a run that was refused before anything was started.
        workspace: None when the order was never sent; its temporary parts are removed here.
        duration_s: by a monotonic clock.
        cleaned: nothing of the host was left that had to be killed or could not be found.
    """
    patch: Patch | None = None
    error: BackplaneError | None = None
    added: dict[str, Json] = {}
    try:
        if workspace is not None:
            patch = workspace.difference()
            added["reconciliation"] = record.reconcile(facts.claimed_paths, _paths(patch))
            _apply_lane(facts, journal, workspace, patch, end)
    except BackplaneError as caught:
        error = caught
        end = lowered(end, caught)
    diff, status = _as_text(patch, added)
    receipt = seal(
        record.build(
            facts,
            end,
            trace=journal.trace if journal is not None else Trace(b"", 0, 0),
            finished_ns=time.time_ns(),
            duration_ms=max(0, int(duration_s * 1000)),
            git_diff=diff,
            git_status=status,
            artifacts=(Artifact("patch", "patch.diff"),) if patch is not None and patch.bytes else (),
            harness_ok=facts.said_hello and patch is not None and error is None and cleaned,
            added=added,
        )
    )
    try:
        keeper.store().append(receipt, journal)
    except BackplaneError as caught:
        error = caught
        end = msgspec.structs.replace(end, reason="store", code=caught.code)
    finally:
        if workspace is not None:
            workspace.close()
        if journal is not None:
            journal.close()
    return Sealed(
        receipt=receipt, end=end, error=error, patch=patch.path if patch is not None and patch.bytes else None
    )


def lowered(end: End, error: BackplaneError) -> End:
    """A complete run whose result was lost or could not be applied is a partial one."""
    reason = "partial" if end.reason == "complete" else end.reason
    return msgspec.structs.replace(end, reason=reason, code=end.code or error.code)


def _apply_lane(facts: Facts, journal: Journal | None, workspace: Workspace, patch: Patch, end: End) -> None:
    """`workspace_first`: the patch of a complete run goes to the original at once."""
    wanted = facts.order.lane == "workspace_first" and workspace.mode == "staged" and end.reason == "complete"
    if not wanted or not patch.bytes or journal is None:
        return
    applied = apply_patch(journal.folder)
    facts.added["lane"] = {"applied": len(applied.files)}


def _paths(patch: Patch) -> set[str]:
    return {path for change in patch.changes for path in (change.path, change.old_path) if path is not None}


def _as_text(patch: Patch | None, added: dict[str, Json]) -> tuple[str | None, str | None]:
    """The patch as the receipt has it: whole while it is short and text, else by size and hash."""
    if patch is None:
        return None, None
    added["patch"] = {"bytes": patch.bytes, "sha256": patch.sha256, "files": len(patch.changes)}
    if patch.ignored_count:
        added["patch"]["ignored"] = patch.ignored_count
    if patch.bytes > DIFF_BYTES_MAX:
        return None, patch.status
    try:
        return patch.path.read_bytes().decode(), patch.status
    except UnicodeDecodeError:
        return None, patch.status
    except OSError as error:
        raise WorkspaceError("execution_workspace_error", f"the patch cannot be read back: {error}") from error
