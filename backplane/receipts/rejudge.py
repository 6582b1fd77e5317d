"""Stored runs under another policy: order, events and patch of each, read from the store. Nothing here writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile
from backplane.errors import PolicyError, StoreError
from backplane.policy.backtest import Backtest, Redecided
from backplane.policy.rules import Policy, compile_policy
from backplane.receipts.audit import patch_claim
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import HeadOrder, read_head
from backplane.receipts.store import Store

POLICIES_MAX: Final = 64
"""Policies of stored runs kept ready; a user has a few."""


class Rejudged(msgspec.Struct, frozen=True, kw_only=True):
    """One stored run under the tried policy."""

    run_id: str
    decisions: int
    """Decisions that both policies made."""
    differing: tuple[Redecided, ...] = ()
    unjudged: str | None = None
    """Why the run, or a part of it, could not be judged; None when all of it was."""


class Rejudge:
    """The store's runs under one policy.

    Args:
        profile: the policy to try; one that says nothing is the shipped `default`, as in a run.
        files_of: paths of the files in a patch's text.

    Raises:
        PolicyError: `policy_invalid`.
    """

    def __init__(self, store: Store, profile: PolicyProfile, files_of: Callable[[str], Iterable[str]]) -> None:
        self._store = store
        self._after = compile_policy(profile)
        self._files_of = files_of
        self._before: dict[bytes, Policy] = {}

    def run(self, row: ReceiptRow) -> Rejudged:
        """Judge one run again; `unjudged` says which part of it cannot be read."""
        if row.reason == "refused" and not row.trace_count:
            return Rejudged(run_id=row.run_id, decisions=0)  # Nothing was started, so nothing was decided.
        try:
            order, profile = self._order(row)
            receipt = self._store.load(row.run_id)
            if "replay" in receipt.backplane:
                return Rejudged(run_id=row.run_id, decisions=0)  # The replayed run has its own line.
            test = Backtest(self._policy(profile), self._after, self._root(row.run_id, order))
            test.take(receipt.trace)
        except (StoreError, PolicyError) as error:
            return Rejudged(run_id=row.run_id, decisions=0, unjudged=error.message)
        diff = receipt.verification.git_diff
        if diff:
            test.take_files(self._files_of(diff))
        return Rejudged(
            run_id=row.run_id,
            decisions=test.decisions,
            differing=tuple(test.differing()),
            unjudged=_unread(receipt, diff),
        )

    def _order(self, row: ReceiptRow) -> tuple[HeadOrder, PolicyProfile]:
        cause: Exception | None = None
        try:
            order = read_head(self._store.folder(row.run_id)).order
            if order.policy is not None:
                return order, order.policy
        except (OSError, msgspec.MsgspecError) as error:
            cause = error
        fact = "its order is not kept here, so nobody knows its policy (pruned or imported)"
        raise StoreError("receipt_store_failed", fact) from cause

    def _policy(self, profile: PolicyProfile) -> Policy:
        key = msgspec.json.encode(profile)
        if key not in self._before:
            if len(self._before) >= POLICIES_MAX:
                self._before.clear()
            self._before[key] = compile_policy(profile)
        return self._before[key]

    def _root(self, run_id: str, order: HeadOrder) -> str:
        """Return the folder in which the agent worked: the copy's, which is gone by now, or the original's."""
        if order.workspace.mode == "staged":
            stages = self._store.home / "stage"
            stages = Path(os.path.realpath(stages)) if stages.is_symlink() else stages
            return str(stages / run_id / "tree")
        return os.path.realpath(order.workspace.root)


def _unread(receipt: Receipt, diff: str | None) -> str | None:
    if diff is None and patch_claim(receipt).get("bytes"):
        return "its patch is too long, binary or redacted, so files that no event names were not judged"
    return None
