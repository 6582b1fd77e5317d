"""Reads which layer must enforce each rule of an order, and refuses demands that the layers cannot meet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile
from backplane.errors import CapabilityError, PolicyError
from backplane.policy.rules import Layer, Rule, has_rules_of
from backplane.sandbox.probe import Probe

if TYPE_CHECKING:
    from backplane.sandbox.plan import Contained

_HOLDERS: Final = ("audit", "vendor", "host", "os")
_TOOLS: Final = frozenset({"allowed_tools", "disallowed_tools", "require_approval_for"})
_FUNCTION: Final = "a function of this process cannot be contained"
_NETWORK: Final = frozenset({"allow_network", "deny_network"})
_BESIDE_LISTS: Final = {
    "workspace": "workspace",
    "credentials": "the credential stores",
    "deny_read_outside": "deny_read outside the workspace",
}
"""Demands that an order may make in addition to the lists of a policy → how an error calls each."""

Demands = Mapping[str, Layer]
"""List of the policy, or a name of `_BESIDE_LISTS` → the weakest layer that may enforce its rules."""

STRICT: Final[Demands] = MappingProxyType({"credentials": "os", "deny_read_outside": "os"})
"""Demands of the shipped profiles `strict` and `ci`, and of each policy with all rules of `strict`."""

_UNCONTAINED: Final = (
    "--isolation off, with which the operating system keeps no file, credential or host of the network from the agent"
)
"""The alternative that a refusal offers, and all the protection that it gives up."""


def read_demands(asked: Json, profile: PolicyProfile, isolation: Isolation) -> Demands:
    """Return the policy's own demands, overridden by `config.vendor.abp.enforcement`.

    With isolation off, which only a user can choose, the policy itself demands nothing.

    Raises:
        PolicyError: `policy_invalid`, the order names an unknown list or layer.
    """
    own = STRICT if isolation != "off" and has_rules_of(profile, "strict") else {}
    if asked is None:
        return own
    if not isinstance(asked, dict):
        raise PolicyError("policy_invalid", "config.vendor.abp.enforcement is no object", hint='{"deny_read": "os"}')
    lists = (*PolicyProfile.__struct_fields__, *_BESIDE_LISTS)
    for name, holder in asked.items():
        if name not in lists or holder not in _HOLDERS:
            fact = f"config.vendor.abp.enforcement asks that {name[:40]!r} be held by {str(holder)[:40]!r}"
            raise PolicyError("policy_invalid", fact, hint=f"lists: {', '.join(lists)}; layers: {', '.join(_HOLDERS)}")
    return {**own, **cast(Demands, asked)}


def check_layers(isolation: Isolation, wanted: Demands, profile: PolicyProfile, found: Probe | None) -> None:
    """Refuse an order that demands more than the layers can enforce; called before any process starts.

    Args:
        found: the layers; None for a host that is a function of this process, which no layer contains.

    Raises:
        CapabilityError: `capability_unsupported`, with every missing layer and how to get it.
    """
    needed = [found.bubblewrap, found.landlock] if found is not None else []
    if found is not None and (profile.allow_network or profile.deny_network):
        needed.append(found.network)
    missing: list[str] = []
    if isolation == "required":
        unusable = [layer.fault for layer in needed if not layer.usable] if found is not None else [_FUNCTION]
        missing += [f"isolation 'required': {text}" for text in unusable]
    unheld = {name: _why_not(name, isolation, found) for name, holder in wanted.items() if holder == "os"}
    for reason in dict.fromkeys(filter(None, unheld.values())):
        names = [_BESIDE_LISTS.get(name, name) for name, why in unheld.items() if why == reason]
        missing.append(f"{' and '.join(names)} cannot be held by the operating system: {reason}")
    if missing:
        steps = "; ".join(dict.fromkeys(layer.fix for layer in needed if layer.fix)) or "run it as a program of its own"
        of_profile = isolation == "best_effort" and STRICT.keys() >= {name for name, why in unheld.items() if why}
        otherwise = _UNCONTAINED if of_profile else "ask for less"
        raise CapabilityError("capability_unsupported", "; ".join(missing), hint=f"{steps}, or {otherwise}")


def _why_not(name: str, isolation: Isolation, found: Probe | None) -> str:
    """Return why the operating system cannot enforce the rules `name`; empty if it can."""
    if name in _TOOLS:
        return "it knows no tools"
    if isolation == "off":
        return "isolation is off"
    if found is None:
        return _FUNCTION
    return (found.network if name in _NETWORK else found.bubblewrap).fault


def check_plan(isolation: Isolation, wanted: Demands, profile: PolicyProfile, planned: Contained) -> None:
    """Refuse a plan that enforces less than the order demands, because paths or links cannot be covered.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    names = [name for name, holder in wanted.items() if holder == "os" and getattr(profile, name, True)]
    lost = sorted(set(names) - {rule.name for rule in planned.gaps})
    if lost:
        named = " and ".join(_BESIDE_LISTS.get(name, name) for name in lost)
        fact = f"{named} cannot be held by the operating system: there are too many places to cover"
        raise CapabilityError("capability_unsupported", fact, hint="name whole folders, or exclude what is not needed")
    absent = [pattern for pattern in profile.deny_write if Rule("deny_write", pattern) not in planned.gaps]
    if absent and "deny_write" in names:
        fact = f"deny_write cannot be held by the operating system: {absent[0]!r} matches no existing file"
        raise CapabilityError("capability_unsupported", fact, hint="make it before the run, or demand 'audit'")
    if planned.uncovered and (isolation == "required" or wanted.get("deny_read") == "os"):
        link = planned.uncovered[0]
        fact = f"deny_read: {link!r} is a link to a folder around the workspace, or to too many files"
        raise CapabilityError("capability_unsupported", fact, hint="remove the link, or ask for less isolation")


def check_asks(wanted: Demands, extensions: tuple[str, ...]) -> None:
    """Refuse a host that requests no approval before a tool runs (`ask/1`), if the order demands approvals.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    names = sorted(name for name, holder in wanted.items() if holder in ("host", "vendor"))
    if names and "ask/1" not in extensions:
        fact = f"{', '.join(names)} must be held before a tool runs, and this host does not ask (ask/1)"
        raise CapabilityError("capability_unsupported", fact, hint="use a host that asks, or demand 'audit' or 'os'")
