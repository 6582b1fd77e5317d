"""What ended runs left: their results into the folders that they were copied from."""

from __future__ import annotations

from backplane.errors import PolicyError
from backplane.receipts.audit import record_hash
from backplane.runtime.state import Keeper
from backplane.workspace import apply_patch


def apply_result(keeper: Keeper, run_id: str) -> tuple[str, ...]:
    """Do what `ControlPlane.apply` says; blocks."""
    store = keeper.store()
    receipt, row = store.load(run_id), store.find(run_id)
    patch = store.patch(row)
    if "lane" in receipt.backplane or patch is None or not patch.stat().st_size:
        return ()
    enforcement = receipt.backplane.get("enforcement")
    if isinstance(enforcement, dict) and enforcement.get("violations"):
        fact = f"the result of run {run_id[:8]} is not what its policy allows"
        raise PolicyError("policy_denied", fact, hint=f"backplane apply {run_id[:8]} --accept-violations")
    keeper.settle()
    return apply_patch(store.folder(run_id), record_sha256=record_hash(receipt)).files
