"""Makes the unsealed receipt of an ended run from what is known of it. Pure; it is sealed and stored elsewhere."""

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
"""Longest text that a child claims beside ours; of a longer one the receipt has the size and the hash."""

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
    """Build the unsealed receipt of a run.

    Args:
        finished_ns: since 1970; a clock that went back is not believed.
        added: members for `usage_raw.backplane` that were worked out after the run.
        inner_verified: the hash in the child's receipt holds for that receipt with the events that were seen; None
            when that cannot be told.
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
    claims = {**own.get("claims", {}), **_claims(facts, meta, outcome, git_diff)}
    if claims:
        own["claims"] = claims
    raw = {} if claim is None else claim.usage_raw
    usage_raw = dict(raw) if isinstance(raw, dict) else {"value": raw}
    if claim is not None and "backplane" in usage_raw:
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
    """Return everything of `usage_raw.backplane` that was learnt while the run went on."""
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
    """Return what was used, and the source of each number: the service, the host's final, or its reports on the way.

    Tokens in the final below those reported before cannot be, so the reported ones count. A lower cost or number of
    requests can: the earlier one may have been an estimate.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    claimed = facts.claim.usage if facts.claim else None
    words = {"seen": facts.usage_seen, "claimed": claimed, "reported": facts.folded.usage}
    for name in Usage.__struct_fields__:
        found = {whose: getattr(said, name, None) for whose, said in words.items()}
        if name.endswith("_tokens") and (found["reported"] or 0) > (found["claimed"] or 0):
            del found["claimed"]
        sources[name] = next((whose for whose, value in found.items() if value is not None), "unknown")
        values[name] = found.get(sources[name])
    return Usage(**values), sources


def _claims(facts: RunState, meta: RunMetadata, outcome: Outcome, git_diff: str | None) -> dict[str, Json]:
    """Return the members of the child's receipt that differ from what was seen, or that the contract does not have."""
    claim = facts.claim
    if claim is None:
        return {}
    claims: dict[str, Json] = {
        name: getattr(claim.meta, name)
        for name in RunMetadata.__struct_fields__
        if getattr(claim.meta, name) != getattr(meta, name)
    }
    if claim.backend != facts.backend:
        claims["backend"] = msgspec.to_builtins(claim.backend)
    if claim.receipt_sha256 is not None:
        claims["receipt_sha256"] = claim.receipt_sha256
    if claim.outcome != outcome:
        claims["outcome"] = claim.outcome
    counters = (
        (name, getattr(claim.usage, name), getattr(facts.usage_seen, name, None)) for name in Usage.__struct_fields__
    )
    if other := {name: told for name, told, seen in counters if None not in (told, seen) and told != seen}:
        claims["usage"] = other
    if claim.verification.git_diff not in (None, git_diff):
        claims["git_diff"] = _brief(claim.verification.git_diff)
    if claim.verification.git_status is not None and claim.verification.git_diff != git_diff:
        claims["git_status"] = _brief(claim.verification.git_status)
    fields = {name: value for name, value in facts.claim_raw.items() if name not in _TYPED_FIELDS}
    if fields:
        claims["fields"] = fields
    return claims


def _brief(text: str) -> Json:
    """A claimed text, or its size and hash where nobody would read it."""
    if len(text) <= CLAIM_CHARS_MAX:
        return text
    return {"bytes": len(text.encode()), "sha256": canonical.sha256_hex(text.encode())}


def reconcile(claimed: Set[str], changed: set[str]) -> dict[str, Json]:
    """Compare the files the events named with the files the patch changes; empty when they agree."""
    lists = {"claimed_only": sorted(claimed - changed), "unclaimed": sorted(changed - claimed)}
    return {
        name: paths[:NAMES_MAX] if len(paths) <= NAMES_MAX else [*paths[:NAMES_MAX], f"… {len(paths) - NAMES_MAX} more"]
        for name, paths in lists.items()
        if paths
    }
