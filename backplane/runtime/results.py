"""What ended runs left: their results into the folders that they were copied from."""

from __future__ import annotations

from backplane.errors import PolicyError, WorkspaceError
from backplane.receipts.audit import record_hash
from backplane.runtime.state import StateFolder
from backplane.workspace import apply_patch


def refuse_unknown(state_folder: StateFolder, run_id: str) -> None:
    """Refuse to take a run that was cut off at work for one that changed nothing. Raises WorkspaceError."""
    tree = state_folder.kept_of(run_id)
    if tree is not None:
        fact = f"what it changed is not known, as it was cut off; its copy is {tree}"
        hint = f"look there, and take what you need; `backplane receipts show {run_id[:8]}` tells what it did"
        raise WorkspaceError("execution_workspace_error", fact, hint=hint)


def apply_result(state_folder: StateFolder, run_id: str) -> tuple[str, ...]:
    """Do what `ControlPlane.apply` says; blocks."""
    store = state_folder.store()
    receipt, row = store.load(run_id), store.find(run_id)
    patch = store.patch(row)
    if "lane" in receipt.backplane:
        return ()
    if patch is None or not patch.stat().st_size:
        refuse_unknown(state_folder, run_id)
        return ()
    enforcement = receipt.backplane.get("enforcement")
    if isinstance(enforcement, dict) and enforcement.get("violations"):
        fact = f"the result of run {run_id[:8]} is not what its policy allows"
        raise PolicyError("policy_denied", fact, hint=f"backplane apply {run_id[:8]} --accept-violations")
    state_folder.settle()
    return apply_patch(store.folder(run_id), record_sha256=record_hash(receipt)).files
