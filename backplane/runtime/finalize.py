"""Finishes a run: takes its diff, applies the patch if the lane is `workspace_first`, seals and stores the receipt.

Everything here blocks; `runtime.drive` calls it in a worker thread.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.receipt import NAMES_MAX, Artifact, Receipt
from backplane.errors import BackplaneError, PolicyError, StoreError, WorkspaceError, unforeseen
from backplane.receipts import build
from backplane.receipts.enforcement import shortfalls, violations
from backplane.receipts.journal import Journal, applied_fact
from backplane.receipts.outcomes import End, cause
from backplane.receipts.pieces import canonical_parts, seal
from backplane.receipts.state import OWN_LINES_MAX, RunState
from backplane.receipts.trace import Trace
from backplane.runtime.state import StateFolder
from backplane.runtime.witness import judged
from backplane.workspace import Patch, Workspace, apply_patch

DIFF_BYTES_MAX: Final = 8 * 1024 * 1024
"""Size limit of a patch inside a receipt; of a larger patch, the receipt has only size and hash."""

_NO_TRACE: Final = Trace(b"", 0, 0)


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed run: its receipt, its end and its patch."""

    receipt: Receipt
    end: End
    error: BackplaneError | None
    """The error of patch, policy, lane or store while the run was sealed; None if there was none."""
    patch: Path | None


def seal_run(
    state_folder: StateFolder,
    facts: RunState,
    journal: Journal | None,
    workspace: Workspace | None,
    end: End,
    *,
    duration_s: float,
    cleaned: bool,
) -> Sealed:
    """Take the diff, apply it if the lane wants that, seal and store. Blocks; returns errors of the run, raises none.

    Args:
        journal: the run's journal; None if it could not be made.
        workspace: the run's workspace, which the caller closes; None if there is none to read.
        duration_s: duration of the run by a monotonic clock.
        cleaned: False if processes that the host left had to be killed or may still be alive.
    """
    patch: Patch | None = None
    error: BackplaneError | None = None
    added: dict[str, Json] = {}
    diff = status = None
    trace = journal.trace if journal is not None else _NO_TRACE
    try:
        if workspace is not None:
            patch = workspace.difference()
            added["reconciliation"] = build.reconcile(facts.claimed_paths, patch.paths)
            facts.found(patch.paths | set(patch.left_out))
            diff, status = _as_text(facts, patch, added)
            if not facts.replayed:
                added["claimed"] = facts.clean_json(_claimed(facts, trace, workspace, patch, diff))
            _refuse_loss(facts, workspace, patch)
            _refuse_violation(facts, workspace, patch, end)
            is_due = facts.order.lane == "workspace_first" and workspace.mode == "staged" and end.reason == "complete"
            if is_due and journal is not None and patch.bytes and not facts.failed_on(added.get("claimed")):
                # Noted in the journal at once, so that the receipt shows it even if we are killed afterwards.
                note = journal.note
                applied = apply_patch(
                    journal.folder, record_sha256=patch.record_sha256, done=lambda files: note(applied_fact(files))
                )
                facts.added["lane"] = {"applied": len(applied.files)}
    except Exception as caught:
        error = facts.redactor.error(unforeseen(caught))
        end = lowered(end, error)
        facts.added.setdefault("error", cause(error))  # The first cause counts, as in `Run.error`.
        if workspace is not None and patch is None:
            state_folder.close_workspace(workspace)  # On a full disk, the receipt needs the copy's space.
    files = patch.path if patch is not None and patch.bytes else None
    seen_through = patch is not None and (error is None or isinstance(error, PolicyError))
    make = functools.partial(
        _receipt,
        facts,
        duration_ms=max(0, int(duration_s * 1000)),
        git_diff=diff,
        git_status=status,
        artifacts=(Artifact("patch", "patch.diff"),) if files is not None else (),
        added=added,
    )
    lost: StoreError | None = None
    try:
        receipt = make(end, trace, harness_ok=facts.said_hello and seen_through and cleaned)
    except StoreError as caught:
        # The journal was changed from outside. The next start seals what is left of it; the caller gets the result.
        lost, end = caught, msgspec.structs.replace(end, reason="store", code=caught.code)
        receipt = make(end, _NO_TRACE, harness_ok=False)
    try:
        store = state_folder.store()
        # Sign first, so that a stored receipt is signed even if we are killed in between.
        state_folder.sign(receipt)
        store.append(receipt, journal)
    except BackplaneError as not_stored:
        error = lost or not_stored
        end = msgspec.structs.replace(end, reason="store", code=error.code)
    return Sealed(receipt=receipt, end=end, error=error, patch=files)


def _claimed(facts: RunState, trace: Trace, workspace: Workspace, patch: Patch, diff: str | None) -> dict[str, Json]:
    """Judge the host's claims; if the trace cannot be read back, return only the reason, as `failed`."""
    try:
        own_trace = None if facts.claimed_events is None else _compare_trace(facts, trace)
        inner = _inner_holds(facts, trace) if facts.plane else None
        return judged(facts, trace, workspace, patch, diff, own_trace=own_trace, inner=inner)
    except StoreError as error:
        return {"failed": error.message}


def _receipt(facts: RunState, end: End, trace: Trace, *, added: dict[str, Json], **seen: Any) -> Receipt:
    """Make the run's receipt. Raises StoreError if the trace cannot be read back."""
    if facts.claimed_events is not None and _compare_trace(facts, trace) != "same":
        count, digest = facts.claimed_events
        added = {**added, "claims": {"trace": {"count": count, "sha256": digest}}}
    inner, finished_ns = _inner_holds(facts, trace), time.time_ns()
    return seal(
        build.build(facts, end, trace=trace, finished_ns=finished_ns, added=added, inner_verified=inner, **seen)
    )


def lowered(end: End, error: BackplaneError) -> End:
    """Lower a run's end after an error in its result: `complete` becomes `partial`, and an internal error, `failed`."""
    if error.code == "internal":
        return End(reason="failed", code=error.code)
    reason = "partial" if end.reason == "complete" else end.reason
    return msgspec.structs.replace(end, reason=reason, code=end.code or error.code)


def _refuse_violation(facts: RunState, workspace: Workspace, patch: Patch, end: End) -> None:
    """Refuse the outcome `complete` if a rule was broken, or enforced more weakly than the order demands."""
    rows = violations(facts) + shortfalls(facts)
    if end.reason != "complete" or not rows:
        return
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    hint = f"what it did is in the receipt: backplane receipts show {facts.run_id[:8]}"
    if workspace.mode == "staged" and patch.bytes:
        hint = f"read the patch, then: backplane apply {facts.run_id[:8]} --accept-violations"
    raise PolicyError("policy_denied", f"the policy was not kept: {rows[0]['reason']}{more}", hint=hint)


def _refuse_loss(facts: RunState, workspace: Workspace, patch: Patch) -> None:
    """Refuse the outcome `complete` if the patch lacks changed files, which are removed with the copy."""
    if workspace.mode == "staged" and patch.left_out:
        # Redacted before `repr`, which may escape parts of a secret so that it is not found.
        named = ", ".join(repr(facts.redactor.text(path)[0]) for path in patch.left_out[:3])
        raise WorkspaceError(
            "execution_workspace_error",
            f"{len(patch.left_out)} changed files are not in the patch: {named}",
            hint="they are over 64 MiB, excluded, no regular files, or where git or we keep ours; see the receipt",
        )


def _as_text(facts: RunState, patch: Patch, added: dict[str, Json]) -> tuple[str | None, str | None]:
    """Return the patch and the workspace's status for the receipt; add the facts about the patch to `added`.

    The receipt has no text of a patch that is too long, is not UTF-8 or has a secret in it; the patch file has it.
    """
    fact: dict[str, Json] = {"bytes": patch.bytes, "sha256": patch.sha256, "files": len(patch.changes)}
    fact["record_sha256"] = patch.record_sha256
    added["patch"] = fact
    if patch.ignored_count:
        fact["ignored"] = patch.ignored_count
    if patch.left_out:
        fact["left_out"] = list(patch.left_out[:NAMES_MAX])
    try:
        data = patch.path.read_bytes() if 0 < patch.bytes <= DIFF_BYTES_MAX else b""
        diff = data.decode() if len(data) == patch.bytes else None
    except UnicodeDecodeError:
        diff = None
    except OSError as error:
        raise WorkspaceError("execution_workspace_error", f"the patch cannot be read back: {error}") from error
    if inside := facts.redactor.text(diff)[1] if diff is not None else 0:
        diff, fact["redacted"] = None, inside
    named, count = facts.redactor.json({"status": patch.status, **added})
    status = named.pop("status")
    added.update(named)
    facts.counts["redacted"] += inside + count
    return diff, status


def _compare_trace(facts: RunState, trace: Trace) -> Literal["same", "part", "other"]:
    """Compare the trace in a host's receipt with the events that the host streamed, except for their times.

    Returns:
        `part` if the receipt leaves out streamed events and has the others in the same order.
    """
    keys = iter(facts.claimed_keys)
    wanted, left_out = next(keys, None), False
    for line in _from_child(facts, trace):
        key = facts.event_key(line)
        if key and key == wanted:
            wanted = next(keys, None)
        else:
            left_out = left_out or bool(key)
    return "other" if wanted is not None else "part" if left_out else "same"


def _inner_holds(facts: RunState, trace: Trace) -> bool | None:
    """Check the hash of an inner control plane's receipt, with its events as streamed; None if that is impossible."""
    claim = facts.claim
    if claim is None or not isinstance(claim.usage_raw, dict) or "backplane" not in claim.usage_raw:
        return False
    if len(facts.own_lines) >= OWN_LINES_MAX:
        return None
    prefix, suffix = canonical_parts(msgspec.structs.replace(claim, receipt_sha256=None))
    whole, between = hashlib.sha256(prefix), b""
    for line in _from_child(facts, trace):
        whole.update(between + line)
        between = b","
    whole.update(suffix)
    return claim.receipt_sha256 == whole.hexdigest()


def _from_child(facts: RunState, trace: Trace) -> Iterator[bytes]:
    """Yield the lines of the host's own events, without those that this control plane added."""
    own = iter((*facts.own_lines, -1))
    skip = next(own)
    for number, line in enumerate(trace.lines()):
        if number == skip:
            skip = next(own)
        else:
            yield line
