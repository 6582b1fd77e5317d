"""Makes the receipt of an ended run from its `RunState`, still without a hash. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import (
    CONTRACT_VERSION,
    NAMES_MAX,
    Artifact,
    Outcome,
    Receipt,
    RunMetadata,
    Usage,
    Verification,
)
from backplane.receipts.enforcement import enforcement_of
from backplane.receipts.outcomes import CAUSE_CHARS_MAX, End, outcome_of
from backplane.receipts.state import RunState

CLAIM_CHARS_MAX: Final = 64 << 10
"""Maximum length of a host's text that the receipt repeats; of a longer one, it has the size and the hash."""

_TYPED_FIELDS: Final = frozenset(Receipt.__struct_fields__)


def build(
    facts: RunState,
    end: End,
    *,
    trace: Sequence[AgentEvent],
    finished_ns: int,
    duration_ms: int,
    git_diff: str | None = None,
    git_status: str | None = None,
    artifacts: tuple[Artifact, ...] = (),
    harness_ok: bool,
    added: dict[str, Json],
    inner_verified: bool | None = False,
) -> Receipt:
    """Return the receipt of a run, which is not sealed yet.

    Args:
        finished_ns: end of the run in nanoseconds since 1970; a time before the start counts as the start.
        added: members for `usage_raw.backplane` that were computed after the run.
        inner_verified: True if the hash in the host's receipt is correct for the events that were seen; None if that is
            unknown.
    """
    claim = facts.claim
    meta = RunMetadata(
        run_id=facts.run_id,
        work_order_id=facts.order.id,
        contract_version=CONTRACT_VERSION,
        started_at=canonical.timestamp_at(facts.started_ns),
        finished_at=canonical.timestamp_at(max(finished_ns, facts.started_ns)),
        duration_ms=duration_ms,
    )
    outcome = outcome_of(end, claimed=claim.outcome if claim else None, accepted=facts.accepted)
    usage, sources = _usage(facts)
    own = {**_members(facts), **added, "end": end.to_wire(), "usage": sources, "start": facts.start}
    raw = {} if claim is None else claim.usage_raw
    usage_raw = dict(raw) if isinstance(raw, dict) else {"value": raw}
    if claim is not None:
        if claims := {**own.get("claims", {}), **_claims(facts, claim, meta, outcome, git_diff)}:
            own["claims"] = claims
        if "backplane" in usage_raw:
            inner = {"backplane": usage_raw.pop("backplane"), "receipt_sha256": claim.receipt_sha256}
            own["inner"] = {**inner, "verified": inner_verified}
    return Receipt(
        meta=meta,
        backend=facts.backend,
        capabilities=facts.manifest.to_wire(),
        usage_raw={**usage_raw, "backplane": own},
        usage=usage,
        trace=trace,
        artifacts=(*(claim.artifacts if claim else ()), *artifacts),
        verification=Verification(harness_ok=harness_ok, git_diff=git_diff, git_status=git_status),
        outcome=outcome,
        mode="passthrough" if facts.mode == "passthrough" else "mapped",
    )


def _members(facts: RunState) -> dict[str, Json]:
    """Return the members of `usage_raw.backplane` that were known before the run ended."""
    session, (errors, last_error) = facts.folded.session, facts.reported
    is_kept = isinstance(session, dict) and isinstance(session.get("id"), str) and facts.settings.get("session")
    noise = facts.noise.decode("utf-8", "replace").removesuffix("\n")
    tail = facts.stderr.decode("utf-8", "replace")
    members: dict[str, Json] = {
        "noise": noise and {"lines": facts.counts["noise_lines"], "text": noise},
        "stderr": tail and {"tail": tail, "dropped_bytes": facts.stderr_dropped},
        "swept": facts.swept,
        "inner": facts.inner,
        "capabilities": facts.manifest.unknown,
        "session": {"id": session["id"]} if is_kept else None,
        "parent": facts.settings.get("parent"),
        "losses": list(facts.losses),
        "calls": facts.book.to_wire() if facts.book is not None and facts.book.asked else None,
        "errors": errors and {"count": errors, "last": last_error[:CAUSE_CHARS_MAX]},
        "fail_on": facts.fail_on,
    }
    members = {name: value for name, value in members.items() if value}
    if facts.folded.retry_after_ms is not None:
        members["retry_after_ms"] = facts.folded.retry_after_ms
    members["counts"] = {name: count for name, count in sorted(facts.counts.items()) if count}
    return {**facts.added, **members, "enforcement": enforcement_of(facts)}


def _usage(facts: RunState) -> tuple[Usage, dict[str, str]]:
    """Return the usage, and the source of each number: the model's service, the host's receipt, or its reports.

    If the host's receipt has fewer tokens than were reported before, the reported ones count. A lower cost or number of
    requests in it counts, because the earlier one may have been an estimate.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    claimed = facts.claim.usage if facts.claim else None
    usages = {"seen": facts.usage_seen, "claimed": claimed, "reported": facts.folded.usage}
    for name in Usage.__struct_fields__:
        found = {source: getattr(usage, name, None) for source, usage in usages.items()}
        if name.endswith("_tokens") and (found["reported"] or 0) > (found["claimed"] or 0):
            del found["claimed"]
        sources[name] = next((source for source, value in found.items() if value is not None), "unknown")
        values[name] = found.get(sources[name])
    return Usage(**values), sources


def _claims(
    facts: RunState, claim: Receipt, meta: RunMetadata, outcome: Outcome, git_diff: str | None
) -> dict[str, Json]:
    """Return the members of the host's receipt that differ from what was seen, or that the contract does not have."""
    theirs, counted = claim.verification, facts.usage_seen
    usage = {name: (getattr(claim.usage, name), getattr(counted, name, None)) for name in Usage.__struct_fields__}
    members: dict[str, Json] = {
        "backend": msgspec.to_builtins(claim.backend) if claim.backend != facts.backend else None,
        "receipt_sha256": claim.receipt_sha256,
        "outcome": claim.outcome if claim.outcome != outcome else None,
        "usage": {name: told for name, (told, seen) in usage.items() if None not in (told, seen) and told != seen},
        "git_diff": _brief(theirs.git_diff) if theirs.git_diff != git_diff else None,
        "git_status": _brief(theirs.git_status) if theirs.git_diff != git_diff else None,
        "fields": {name: value for name, value in facts.claim_raw.items() if name not in _TYPED_FIELDS},
    }
    ours = msgspec.structs.asdict(meta)
    differing = {name: value for name, value in msgspec.structs.asdict(claim.meta).items() if value != ours[name]}
    return differing | {name: value for name, value in members.items() if value}


def _brief(text: str | None) -> Json:
    """Return a claimed text, or size and hash of a long one."""
    if text is None or len(text) <= CLAIM_CHARS_MAX:
        return text
    return {"bytes": len(text.encode()), "sha256": canonical.sha256_hex(text.encode())}


def reconcile(claimed: Set[str], changed: set[str]) -> dict[str, Json]:
    """Compare the files that events named with the files that the patch changes; empty if they are the same."""
    lists = {"claimed_only": sorted(claimed - changed), "unclaimed": sorted(changed - claimed)}
    return {
        name: paths[:NAMES_MAX] if len(paths) <= NAMES_MAX else [*paths[:NAMES_MAX], f"… {len(paths) - NAMES_MAX} more"]
        for name, paths in lists.items()
        if paths
    }
