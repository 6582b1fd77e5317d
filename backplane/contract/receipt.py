"""The receipt: the sealed record of one run, with the members of the wire.

Everything we add is in `usage_raw.backplane`. The room `receipts` seals and stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import read_level
from backplane.contract.events import AgentEvent, carried, normal
from backplane.contract.unknown import explain
from backplane.contract.version import CONTRACT_VERSION as CONTRACT_VERSION

NAMES_MAX: Final = 1000
"""Maximum number of paths or members in one list of a receipt; further ones are only counted."""

Counter = Annotated[int, msgspec.Meta(ge=0)]
"""An unsigned 64-bit number; the upper bound is checked where the struct is made."""
Outcome = Literal["complete", "partial", "failed"]


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    work_order_id: str
    contract_version: str
    started_at: str
    finished_at: str
    duration_ms: Counter
    """Milliseconds by a monotonic clock; need not equal the difference of the two times."""

    def __post_init__(self) -> None:
        for name, form in (
            ("run_id", canonical.uuid_text),
            ("work_order_id", canonical.uuid_text),
            ("started_at", canonical.timestamp),
            ("finished_at", canonical.timestamp),
        ):
            canonical.print_anew(self, name, form)
        _check_counters(self, "duration_ms")


class BackendIdentity(msgspec.Struct, frozen=True):
    id: str
    backend_version: str | None = None
    adapter_version: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the run; None is unknown, never zero."""

    input_tokens: Counter | None = None
    output_tokens: Counter | None = None
    cache_read_tokens: Counter | None = None
    cache_write_tokens: Counter | None = None
    request_units: Counter | None = None
    estimated_cost_usd: float | None = None

    def __post_init__(self) -> None:
        _check_counters(
            self, "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "request_units"
        )
        if self.estimated_cost_usd is not None and not 0 <= self.estimated_cost_usd < float("inf"):
            raise ValueError(f"estimated_cost_usd is {self.estimated_cost_usd}, and no cost is below 0 or infinite")


def _check_counters(value: msgspec.Struct, *names: str) -> None:
    for name in names:
        counter = getattr(value, name)
        if counter is not None and counter > canonical.INT_MAX:
            raise ValueError(f"{name} does not fit 64 bits")


class Artifact(msgspec.Struct, frozen=True):
    kind: str
    path: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    harness_ok: bool
    """True if the control plane completed the hello, the trace, the diff and the clean-up."""
    git_diff: str | None = None
    git_status: str | None = None


FINDINGS: Final = ("denied", "false-claims", "violations")
"""Words of an order's `fail_on`: findings that make a door report a complete run as failed."""


class RunFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run's problems that its outcome may not show."""

    denied: int = 0
    """Calls of tools and patches that a policy, a hook or an answer refused."""
    false_claims: int = 0
    """Claims of the host that proved to be false."""
    violations: int = 0
    """Calls and changes that were made although a rule forbids them."""
    errors: int = 0
    """Errors that the host reported itself."""

    def named(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the given words of `FINDINGS` whose count is not 0."""
        return tuple(word for word in words if getattr(self, word.replace("-", "_"), 0))


def findings_of(added: Mapping[str, Json]) -> RunFindings:
    """Read the findings from `usage_raw.backplane`."""
    calls, claimed, held, errors = (
        part if isinstance(part := added.get(name), dict) else {}
        for name in ("calls", "claimed", "enforcement", "errors")
    )
    counts, violations = claimed.get("counts"), held.get("violations")
    rows = counts.values() if isinstance(counts, dict) else ()
    return RunFindings(
        denied=_count(calls.get("denied")),
        false_claims=sum(_count(row.get("false")) for row in rows if isinstance(row, dict)),
        violations=len(violations) if isinstance(violations, list) else 0,
        errors=_count(errors.get("count")),
    )


REASONS_MAX: Final = 5
"""Maximum number of reasons in one text; the receipt has all."""


def reasons_of(rows: Json) -> list[str]:
    """Return why each call or file of `enforcement.violations` (or a list like it) was forbidden, each reason once."""
    found = (
        [row.get("reason") or row.get("rule") for row in rows if isinstance(row, dict)]
        if isinstance(rows, list)
        else []
    )
    once = list(dict.fromkeys(map(str, found)))
    more = [f"and {len(once) - REASONS_MAX} more, see the receipt"] if len(once) > REASONS_MAX else []
    return once[:REASONS_MAX] + more


def _count(value: Json) -> int:
    return value if isinstance(value, int) else 0


def failed_on(added: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the findings for which doors report a complete run as failed; none if its order names none of them."""
    words = added.get("fail_on")
    return findings_of(added).named([str(word) for word in words]) if isinstance(words, list) else ()


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The sealed record of one run: what was asked, what happened, and how it ended.

    Attributes:
        meta: Ids, times and duration.
        backend: Name and versions of the backend.
        capabilities: What the host said that it can do.
        usage_raw: Usage as the host reported it; its member `backplane` is the control plane's own part.
        usage: Tokens and cost; None is unknown.
        trace: All events in order. A stored receipt reads them from its journal on demand; `run.receipt` has them as a
            list, unless they are longer than 4 MiB.
        artifacts: Files that the run kept.
        verification: What the control plane saw itself: git's diff and status.
        outcome: `complete`, `partial` or `failed`.
        mode: `passthrough` if the vendor's own messages were handed on, else `mapped`.
        receipt_sha256: SHA-256 of the canonical receipt without this member.
    """

    meta: RunMetadata
    backend: BackendIdentity
    capabilities: dict[str, Any]
    usage_raw: Json
    usage: Usage
    trace: Sequence[AgentEvent]
    artifacts: tuple[Artifact, ...]
    verification: Verification
    outcome: Outcome
    mode: Literal["passthrough", "mapped"] = "mapped"
    receipt_sha256: str | None = None

    def to_json(self) -> bytes:
        """Return the receipt as canonical JSON, trace included: the same bytes as `receipt.json`, of any length."""
        return canonical.encode(msgspec.structs.replace(self, trace=list(self.trace)))

    @property
    def backplane(self) -> dict[str, Any]:
        """The control plane's own part: end, claims, enforcement, counts, patch and the like."""
        added = self.usage_raw.get("backplane") if isinstance(self.usage_raw, dict) else None
        return added if isinstance(added, dict) else {}

    @property
    def findings(self) -> RunFindings:
        """Counts of denied calls, false claims, violations and reported errors."""
        return findings_of(self.backplane)

    @property
    def failed_on(self) -> tuple[str, ...]:
        """The findings for which doors report the run as failed though it is complete, by the order's `fail_on`."""
        return failed_on(self.backplane)


def read_receipt(value: Json) -> Receipt:
    """Read a receipt from plain JSON as typed peers do: drop unknown members, and convert times to the contract's form.

    Raises:
        ValueError: a value is wrong; mostly a `msgspec.ValidationError` with the value's path.
    """
    try:
        receipt = msgspec.convert(value, Receipt)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(explain(error, Receipt)) from error
    levels = {name: read_level(level) for name, level in receipt.capabilities.items()}
    return msgspec.structs.replace(
        receipt,
        trace=[carried(normal(event)) for event in receipt.trace],
        capabilities={
            name: receipt.capabilities[name] if level is None else level.to_wire() for name, level in levels.items()
        },
    )


def receipt_hash(receipt: Receipt) -> str:
    """Return the SHA-256 of the canonical receipt with null in place of its hash, in lower-case hex."""
    bare = msgspec.structs.replace(receipt, receipt_sha256=None, trace=list(receipt.trace))
    return canonical.sha256_hex(canonical.encode(bare))


def verify_bytes(data: bytes) -> str | None:
    """Check the hash inside a receipt file; return None if it is right, else the fault.

    If a number has more digits than a float holds, the file is read a second time as the public implementation reads
    it, which makes the hash before it writes the number.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: not a receipt.
    """
    receipt = read_receipt(canonical.decode(data))
    if receipt.receipt_sha256 is None:
        return "the receipt has no hash"
    computed = receipt_hash(receipt)
    if receipt.receipt_sha256 == computed:
        return None
    if receipt.receipt_sha256 == receipt_hash(read_receipt(canonical.decode_inexact(data))):
        return None
    return f"the receipt says {receipt.receipt_sha256}, its content hashes to {computed}"
