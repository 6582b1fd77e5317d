"""Compares an order's requirements with a backend's manifest.

It returns one finding for each requirement, with its reason, and the smallest change to the order that this backend
would accept. It neither supplies missing capabilities, nor chooses another backend, nor asks the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import (
    CAPABILITIES,
    EMULATED,
    UNSUPPORTED,
    Level,
    Manifest,
    Requirement,
    Requirements,
    Threshold,
)
from backplane.contract.unknown import nearest_name
from backplane.errors import CapabilityError

Verdict = Literal["native", "emulated", "restricted", "missing"]
"""Support by the backend; `missing` if the capability is absent, unsupported, or unknown to the contract."""

_DOWNWARDS: Final[tuple[Threshold, ...]] = ("native", "emulated", "any")
"""Thresholds from the most to the least demanding."""


class RequirementCheck(msgspec.Struct, frozen=True):
    """One requirement, and whether the manifest satisfies it."""

    capability: str
    min_support: Threshold
    verdict: Verdict
    satisfied: bool
    reason: str
    """One line for the user, also if the requirement is satisfied."""


class RequirementChange(msgspec.Struct, frozen=True):
    """A change of an order by which a manifest satisfies one more requirement: lower its threshold, or drop it."""

    capability: str
    min_support: Threshold
    to: Threshold | None
    """The threshold that the manifest meets; None to drop the requirement."""

    def to_wire(self) -> Json:
        wire: dict[str, Json] = {"capability": self.capability, "from": self.min_support}
        return wire | ({"drop": True} if self.to is None else {"to": self.to})

    def __str__(self) -> str:
        return f"drop {self.capability}" if self.to is None else f"lower {self.capability} to {self.to}"


class Negotiation(msgspec.Struct, frozen=True):
    """The findings on one order's requirements and one manifest, in the order of the requirements."""

    findings: tuple[RequirementCheck, ...]
    smallest_change: tuple[RequirementChange, ...]
    """The changes after which the manifest satisfies the order; empty if it does already."""

    @property
    def satisfied(self) -> bool:
        return all(finding.satisfied for finding in self.findings)

    @property
    def unmet(self) -> tuple[RequirementCheck, ...]:
        return tuple(finding for finding in self.findings if not finding.satisfied)

    @property
    def smallest_change_text(self) -> str:
        """The smallest change as one sentence without a full stop; empty if none is needed."""
        return "; ".join(str(change) for change in self.smallest_change)

    def to_wire(self) -> Json:
        """Return the receipt's `usage_raw.backplane.negotiation`."""
        return {
            "satisfied": self.satisfied,
            "findings": [msgspec.to_builtins(finding) for finding in self.findings],
            "smallest_change": [change.to_wire() for change in self.smallest_change],
        }


def supplied(manifest: Manifest, names: Iterable[str]) -> Manifest:
    """Return the manifest with these capabilities as emulated, by the control plane, if the backend lacks them."""
    missing = {name: EMULATED for name in names if manifest.levels.get(name, UNSUPPORTED).name == "unsupported"}
    return msgspec.structs.replace(manifest, levels={**manifest.levels, **missing}) if missing else manifest


def negotiate(requirements: Requirements, *offers: Manifest) -> Negotiation:
    """Check every requirement; a capability that is not in the manifest satisfies no threshold, not even `any`.

    Args:
        offers: manifests; the result is for the first that satisfies all requirements, else for the first.
    """
    judged = [_judge_all(requirements, offer) for offer in offers]
    return next((found for found in judged if found.satisfied), judged[0])


def _judge_all(requirements: Requirements, manifest: Manifest) -> Negotiation:
    findings = tuple(_judge(requirement, manifest) for requirement in requirements.required)
    return Negotiation(findings, tuple(_changes(findings, manifest)))


def refusal(negotiation: Negotiation, backend_id: str, kept_since: str | None = None) -> CapabilityError:
    """Return the `capability_unsupported` error with every unmet requirement and the smallest change.

    Args:
        kept_since: time of the cached hello with the manifest; None if the host was asked just now.
    """
    unmet = "; ".join(finding.reason for finding in negotiation.unmet)
    kept = f"; known from its hello of {kept_since}: any order it does not refuse asks it anew" if kept_since else ""
    return CapabilityError(
        "capability_unsupported",
        f"backend '{backend_id}' does not satisfy the order: {unmet}",
        hint=f"{negotiation.smallest_change_text}, or choose another backend" + kept,
    )


def _judge(requirement: Requirement, manifest: Manifest) -> RequirementCheck:
    name, wanted = requirement.capability, requirement.min_support
    level = manifest.levels.get(name)
    if level is not None:
        satisfied = level.satisfies(wanted)
        verdict: Verdict = "missing" if level.name == "unsupported" else level.name
        return RequirementCheck(name, wanted, verdict, satisfied, _level_reason(name, wanted, level, satisfied))
    if name not in CAPABILITIES:
        return RequirementCheck(
            name, wanted, "missing", False, f"{name}: the contract has no such capability{_nearest(name)}"
        )
    if name not in manifest.unknown:
        return RequirementCheck(
            name, wanted, "missing", False, f"{name}: the order wants {wanted}, the backend does not name it"
        )
    reason = f"{name}: the order wants {wanted}, the backend gives it a level that the contract does not have"
    return RequirementCheck(name, wanted, "missing", wanted == "any", reason)


def _level_reason(name: str, wanted: Threshold, level: Level, satisfied: bool) -> str:
    because = f" ({level.reason})" if level.reason else ""
    turn = "and" if satisfied else "but"
    return f"{name}: the order wants {wanted}, {turn} the backend has {level.name}{because}"


def _nearest(name: str) -> str:
    nearest = nearest_name(name, CAPABILITIES)
    return f"; the nearest name is {nearest}" if nearest else ""


def _changes(findings: Iterable[RequirementCheck], manifest: Manifest) -> Iterable[RequirementChange]:
    seen: set[tuple[str, Threshold]] = set()
    for finding in findings:
        key = (finding.capability, finding.min_support)
        if not finding.satisfied and key not in seen:
            seen.add(key)
            yield RequirementChange(*key, _best_threshold(finding.capability, manifest))


def _best_threshold(name: str, manifest: Manifest) -> Threshold | None:
    """Return the most demanding threshold that this manifest meets for a capability; None if it meets none."""
    for threshold in _DOWNWARDS:
        if _judge(Requirement(name, threshold), manifest).satisfied:
            return threshold
    return None
