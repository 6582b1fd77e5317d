"""What is asked of the layers, and the refusal where it cannot be had. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, cast

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile
from backplane.errors import CapabilityError, PolicyError
from backplane.policy.rules import Layer, Rule
from backplane.sandbox import seccomp
from backplane.sandbox.probe import Probe, Probed

_HOLDERS: Final = ("audit", "vendor", "host", "os")
_TOOLS: Final = frozenset({"allowed_tools", "disallowed_tools", "require_approval_for"})
_FILES: Final = frozenset({"deny_read", "deny_write", "workspace"})
NETWORK: Final = frozenset({"allow_network", "deny_network"})

Demands = Mapping[str, Layer]
"""List of the policy (or `workspace`) → the weakest layer that may hold its rules."""


def demands(asked: Json) -> Demands:
    """Read `config.vendor.abp.enforcement`.

    Raises:
        PolicyError: `policy_invalid`, a list or a layer that there is not.
    """
    if asked is None:
        return {}
    if not isinstance(asked, dict):
        raise PolicyError("policy_invalid", "config.vendor.abp.enforcement is no object", hint='{"deny_read": "os"}')
    lists = (*PolicyProfile.__struct_fields__, "workspace")
    for name, holder in asked.items():
        if name not in lists or holder not in _HOLDERS:
            fact = f"config.vendor.abp.enforcement asks that {name[:40]!r} be held by {str(holder)[:40]!r}"
            raise PolicyError("policy_invalid", fact, hint=f"lists: {', '.join(lists)}; layers: {', '.join(_HOLDERS)}")
    return cast(Demands, asked)


def refuse(
    isolation: Isolation, wanted: Demands, profile: PolicyProfile, found: Probe | None, *, filtered: bool = False
) -> None:
    """Refuse before anything is started what these layers cannot give.

    Args:
        found: None where nothing contains the host: a function of this process.
        filtered: the order asks for a filter on system calls.

    Raises:
        CapabilityError: `capability_unsupported`, with every missing layer and how to get it.
    """
    networked = bool(profile.allow_network or profile.deny_network)
    missing: list[str] = []
    if isolation == "required":
        missing += [f"isolation 'required': {text}" for text in _missing(found, networked)]
        if filtered and seccomp.program() is None:
            missing.append("isolation 'required': seccomp: the system calls of this machine are not known")
    for name, holder in wanted.items():
        if holder == "os":
            reason = _not_by_system(name, isolation, found)
            if reason:
                missing.append(f"{name} held by 'os': {reason}")
    if missing:
        layers = found.layers() if found is not None else ()
        fixes = dict.fromkeys(layer.fix for layer in layers if layer.fix and layer.name != "cgroup")  # never needed
        hint = "; ".join(fixes) or "run it as a program of its own, or ask for less"
        raise CapabilityError("capability_unsupported", "; ".join(missing), hint=hint)


def _missing(found: Probe | None, networked: bool) -> list[str]:
    if found is None:
        return ["a function of this process cannot be contained"]
    needed = [found.bubblewrap, found.landlock, *([found.network] if networked else [])]
    return [_says(layer) for layer in needed if not layer.usable]


def _not_by_system(name: str, isolation: Isolation, found: Probe | None) -> str:
    """Why the operating system cannot hold these rules; empty when it can."""
    if name in _TOOLS:
        return "the operating system knows no tools"
    if isolation == "off":
        return "isolation is off"
    if found is None:
        return "a function of this process cannot be contained"
    needed = found.bubblewrap if name in _FILES else found.network
    return "" if needed.usable else _says(needed)


def _says(layer: Probed) -> str:
    return f"{layer.name}: {layer.why}"


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
        fact = f"{', '.join(lost)} held by 'os': too many places to cover in this workspace"
        raise CapabilityError("capability_unsupported", fact, hint="name whole folders, or exclude what is not needed")
    absent = [pattern for pattern in profile.deny_write if Rule("deny_write", pattern) not in held]
    if absent and "deny_write" in names:
        fact = f"deny_write held by 'os': {absent[0]!r} names nothing that is there to cover"
        raise CapabilityError("capability_unsupported", fact, hint="make it before the run, or demand 'audit'")


def check_asks(wanted: Demands, extensions: tuple[str, ...]) -> None:
    """Refuse a host that does not ask first, where the order demands that its rules be held before the fact.

    Raises:
        CapabilityError: `capability_unsupported`.
    """
    names = sorted(name for name, holder in wanted.items() if holder in ("host", "vendor"))
    if names and "ask/1" not in extensions:
        fact = f"{', '.join(names)} must be held before a tool runs, and this host does not ask (ask/1)"
        raise CapabilityError("capability_unsupported", fact, hint="use a host that asks, or demand 'audit' or 'os'")
