"""Applies a stored run's result to its folder, or undoes that, for the commands, the web page and Python.

All functions block. Each continues its own work that was cut off.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.contract.events import CheckpointReported
from backplane.contract.receipt import reasons_of
from backplane.errors import ConfigError, PolicyError, StoreError, WorkspaceError
from backplane.receipts.audit import patch_hash, record_hash
from backplane.receipts.store import Store
from backplane.runtime.state import StateFolder, refuse_unknown
from backplane.workspace import Applied, apply_bare, apply_patch, go_on
from backplane.workspace.checkpoints import START, Checkpoint, find, load, parse_checkpoints, rewind_original
from backplane.workspace.patch import RECORD_NAME

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Options for `apply_result`."""

    at: str | None = None
    """Name or id of a checkpoint; None for the state at the end."""
    root: Path | None = None
    """The folder to change; None for the one on which the run was made."""
    check: bool = False
    """If True, only check whether the result can be applied."""
    merge: bool = False
    """If True, merge files that have changed since the run began, instead of refusing them."""
    accept_violations: bool = False


_PLAIN: Final = Wish()


def apply_once(folder: StateFolder, run_id: str) -> tuple[str, ...]:
    """Apply a run's result unless the run's lane has applied it; return the files. Raises as `apply_result`."""
    with Store.open(folder.home, readonly=True) as store:
        is_applied = "lane" in store.load(run_id).backplane
    return () if is_applied else apply_result(folder, run_id).files


def apply_result(folder: StateFolder, run_id: str, wish: Wish = _PLAIN) -> Applied:
    """Apply a run's result; `Applied.files` is empty if the run changed nothing.

    Raises:
        WorkspaceError: `execution_workspace_error`: a file has changed meanwhile (named), a merge has conflicts
            (named), or a write failed.
        PolicyError: `policy_denied`, the result violates the run's policy.
        ConfigError: `config_invalid`, the folder of a run from another machine is not known.
        StoreError: there is no such run, or its receipt cannot be read.
    """
    with Store.open(folder.home, readonly=True) as store:
        row = store.find(run_id)
        receipt, run_dir, patch = store.load(row.run_id), store.folder(row.run_id), store.patch(row)
    if (applied := go_on(run_dir, wish.root, check=wish.check, merge=wish.merge)) is not None:
        return applied
    # The patch file is compared with the receipt when it is read.
    is_promised = any(artifact.kind == "patch" for artifact in receipt.artifacts)
    if wish.at is None and not is_promised and (patch is None or not patch.stat().st_size):
        refuse_unknown(folder, row.run_id)
        return Applied((), merged=False)
    enforcement = receipt.backplane.get("enforcement")
    reasons = reasons_of(enforcement.get("violations")) if isinstance(enforcement, dict) else []
    if reasons and not wish.accept_violations:
        hint = f"read the patch, then: backplane apply {row.run_id[:8]} --accept-violations"
        raise PolicyError("policy_denied", f"the run did not keep its policy: {'; '.join(reasons)}", hint=hint)
    if wish.at is None and patch is not None and not (run_dir / RECORD_NAME).exists():
        if wish.root is None:
            fact = "the run was made on another machine: the folder for its patch is not known"
            hint = f"--root DIR names it; or there: git apply {patch}"
            raise ConfigError("config_invalid", fact, hint=hint)
        return apply_bare(run_dir, patch_hash(receipt) or "", wish.root, check=wish.check, merge=wish.merge)
    checkpoint = find(kept(receipt), wish.at) if wish.at is not None else None
    if wish.at is not None and checkpoint is None:
        fact = "at the start the run had changed nothing"
        raise WorkspaceError("execution_workspace_error", fact, hint="to undo what was applied: backplane rewind")
    saved = load(run_dir, checkpoint) if checkpoint is not None else None
    return apply_patch(
        run_dir, record_sha256=record_hash(receipt), saved=saved, root=wish.root, check=wish.check, merge=wish.merge
    )


def rewind_result(folder: StateFolder, run_id: str, to: str = START, *, check: bool = False) -> Applied:
    """Restore a folder with a run's result to the state of one of the run's checkpoints.

    Raises:
        WorkspaceError: `execution_workspace_error`: no such checkpoint, or named files are not as the run left them.
        StoreError: there is no such run, or its receipt cannot be read.
    """
    with Store.open(folder.home, readonly=True) as store:
        receipt = store.load(run_id)
        run_dir = store.folder(receipt.meta.run_id)
    return rewind_original(run_dir, find(kept(receipt), to), record_sha256=record_hash(receipt), check=check)


def kept(receipt: Receipt) -> tuple[Checkpoint, ...]:
    """Return a run's checkpoints from its receipt, or from its events if the run was cut off.

    Raises:
        StoreError: `receipt_store_failed`, the receipt lists checkpoints in a wrong form.
    """
    named, end = receipt.backplane.get("checkpoints"), receipt.backplane.get("end")
    rows: Any = named.get("made") if isinstance(named, dict) else named
    if rows is None and isinstance(end, dict) and end.get("reason") == "interrupted":
        bodies = [event.body for event in receipt.trace if isinstance(event, CheckpointReported)]
        rows = [{name: body[name] for name in body if name != "what"} for body in bodies if body.get("what") == "made"]
    try:
        return parse_checkpoints(() if rows is None else rows)
    except ValueError as error:
        fact = f"the checkpoints in the receipt of run {receipt.meta.run_id} cannot be read: {error}"
        hint = f"nothing was changed; see where it comes from: backplane receipts show {receipt.meta.run_id}"
        raise StoreError("receipt_store_failed", fact, hint=hint) from error
