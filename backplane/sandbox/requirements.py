"""What is asked of the layers, and the refusal where it cannot be had. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile
from backplane.errors import CapabilityError, PolicyError
from backplane.policy.rules import Layer, Rule, has_rules_of
from backplane.sandbox.probe import Probe, Probed

_HOLDERS: Final = ("audit", "vendor", "host", "os")
_TOOLS: Final = frozenset({"allowed_tools", "disallowed_tools", "require_approval_for"})
_FUNCTION: Final = "a function of this process cannot be contained"
_NETWORK: Final = frozenset({"allow_network", "deny_network"})
_BESIDE_LISTS: Final = {
    "workspace": "workspace",
    "credentials": "the credential stores",
    "deny_read_outside": "deny_read outside the workspace",
}
"""Names that can be demanded beside the lists of a policy → their words in an error."""

Demands = Mapping[str, Layer]
"""List of the policy, or a name of `_BESIDE_LISTS` → the weakest layer that may hold its rules."""

STRICT: Final[Demands] = MappingProxyType({"credentials": "os", "deny_read_outside": "os"})
"""Demands of the shipped profiles `strict` and `ci`, and of each policy with all their rules."""


_UNCONTAINED: Final = (
    "--isolation off, with which the operating system keeps no file, credential or host of the network from the agent"
)
"""The other way out of a refusal; not only what was missing is given up by it."""


def demands_of(profile: PolicyProfile, isolation: Isolation) -> Demands:
    """Return what a policy demands by itself; nothing with isolation off, which the user has to ask for."""
    return STRICT if isolation != "off" and has_rules_of(profile, "strict") else {}


def demands(asked: Json) -> Demands:
    """Read `config.vendor.abp.enforcement`.

    Raises:
        PolicyError: `policy_invalid`, a list or a layer that there is not.
    """
    if asked is None:
        return {}
    if not isinstance(asked, dict):
        raise PolicyError("policy_invalid", "config.vendor.abp.enforcement is no object", hint='{"deny_read": "os"}')
    lists = (*PolicyProfile.__struct_fields__, *_BESIDE_LISTS)
    for name, holder in asked.items():
        if name not in lists or holder not in _HOLDERS:
            fact = f"config.vendor.abp.enforcement asks that {name[:40]!r} be held by {str(holder)[:40]!r}"
            raise PolicyError("policy_invalid", fact, hint=f"lists: {', '.join(lists)}; layers: {', '.join(_HOLDERS)}")
    return cast(Demands, asked)


def refuse(isolation: Isolation, wanted: Demands, profile: PolicyProfile, found: Probe | None) -> None:
    """Refuse before anything is started what these layers cannot give.

    Args:
        found: None where nothing contains the host: a function of this process.

    Raises:
        CapabilityError: `capability_unsupported`, with every missing layer and how to get it.
    """
    networked = bool(profile.allow_network or profile.deny_network)
    missing: list[str] = []
    if isolation == "required":
        missing += [f"isolation 'required': {text}" for text in _missing(found, networked)]
    unheld = {name: _not_by_system(name, isolation, found) for name, holder in wanted.items() if holder == "os"}
    for reason in dict.fromkeys(filter(None, unheld.values())):
        names = [_BESIDE_LISTS.get(name, name) for name, why in unheld.items() if why == reason]
        missing.append(f"{' and '.join(names)} cannot be held by the operating system: {reason}")
    if missing:
        steps = "; ".join(_steps(found, networked)) or "run it as a program of its own"
        of_profile = isolation == "best_effort" and STRICT.keys() >= {name for name, why in unheld.items() if why}
        otherwise = _UNCONTAINED if of_profile else "ask for less"
        raise CapabilityError("capability_unsupported", "; ".join(missing), hint=f"{steps}, or {otherwise}")


def _missing(found: Probe | None, networked: bool) -> list[str]:
    if found is None:
        return [_FUNCTION]
    return [unusable(layer) for layer in _needed(found, networked) if not layer.usable]


def _needed(found: Probe, networked: bool) -> list[Probed]:
    return [found.bubblewrap, found.landlock, *([found.network] if networked else [])]


def _steps(found: Probe | None, networked: bool) -> list[str]:
    """Return what makes the missing layers usable, each step once."""
    needed = _needed(found, networked) if found is not None else []
    return list(dict.fromkeys(layer.fix for layer in needed if layer.fix))


def _not_by_system(name: str, isolation: Isolation, found: Probe | None) -> str:
    """Why the operating system cannot hold these rules; empty when it can."""
    if name in _TOOLS:
        return "it knows no tools"
    if isolation == "off":
        return "isolation is off"
    if found is None:
        return _FUNCTION
    needed = found.network if name in _NETWORK else found.bubblewrap
    return "" if needed.usable else unusable(needed)


def unusable(layer: Probed) -> str:
    """Say which layer is missing and why."""
    return f"{layer.name} is unusable: {layer.why}"


def check_held(wanted: Demands, held: Collection[Rule], profile: PolicyProfile) -> None:
    """Refuse, the cage worked out, a list whose rules turned out too many or too odd for it.

    Args:
        held: rules that the operating system holds.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    names = [name for name, holder in wanted.items() if holder == "os" and getattr(profile, name, True)]
    lost = sorted(set(names) - {rule.name for rule in held})
    if lost:
        named = " and ".join(_BESIDE_LISTS.get(name, name) for name in lost)
        fact = f"{named} cannot be held by the operating system: there are too many places to cover"
        raise CapabilityError("capability_unsupported", fact, hint="name whole folders, or exclude what is not needed")
    absent = [pattern for pattern in profile.deny_write if Rule("deny_write", pattern) not in held]
    if absent and "deny_write" in names:
        fact = f"deny_write cannot be held by the operating system: {absent[0]!r} matches no existing file"
        raise CapabilityError("capability_unsupported", fact, hint="make it before the run, or demand 'audit'")


def check_links(uncovered: Sequence[str]) -> None:
    """Refuse links that `deny_read` names and whose target no mount can cover.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    if uncovered:
        fact = f"deny_read: {uncovered[0]!r} is a link to a folder around the workspace, or to too many files"
        raise CapabilityError("capability_unsupported", fact, hint="remove the link, or ask for less isolation")


def check_asks(wanted: Demands, extensions: tuple[str, ...]) -> None:
    """Refuse a host that does not ask first, where the order demands that its rules be held before the fact.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    names = sorted(name for name, holder in wanted.items() if holder in ("host", "vendor"))
    if names and "ask/1" not in extensions:
        fact = f"{', '.join(names)} must be held before a tool runs, and this host does not ask (ask/1)"
        raise CapabilityError("capability_unsupported", fact, hint="use a host that asks, or demand 'audit' or 'os'")
