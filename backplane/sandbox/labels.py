"""Describes in words what the layers enforce in a run, with a label for each kind of access. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile
from backplane.policy.rules import Rule
from backplane.sandbox.credentials import Covered
from backplane.sandbox.landlock import NETWORK_SINCE, SCOPES_SINCE
from backplane.sandbox.mounts import TOO_MANY, Masks
from backplane.sandbox.probe import Probe, Probed

GUARD: Final = "guard"
"""Name of the subreaper that kills all descendants; not probed, because a start without it fails."""

_OTHERS: Final = "limits, priority and processors of this user's other processes, ours too, can be changed"
"""The gap if there is no pid namespace: system calls that open no file and send no signal, so Landlock ignores them."""

TUNNELS: Final = "what is asked for inside an encrypted connection to an allowed host is not seen"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The layers around a host, and the rules and paths that they cover."""

    isolation: Isolation
    found: Probe
    profile: PolicyProfile
    writable: tuple[str, ...]
    missing: tuple[str, ...]
    masks: Masks
    stores: Covered = Covered()
    private: bool
    state_open: bool = False
    """True if the state folder lies in a folder that the host may write."""
    processes_max: int | None = None
    """Limit of the host's processes and threads; None for no limit."""

    @property
    def networked(self) -> bool:
        return bool(self.profile.allow_network or self.profile.deny_network)

    @property
    def port_only(self) -> bool:
        """True if Landlock limits TCP to the proxy's port, and no namespace limits the rest of the network."""
        return not self.found.network.usable and self.found.landlock_version >= NETWORK_SINCE

    def shortfall(self) -> tuple[str, str]:
        """Return why enforcement is weaker than possible, and the next step; two empty texts if it is not.

        If bubblewrap is usable, a missing Landlock does not count: it would only enforce the same rules again.
        """
        if not self.found.bubblewrap.usable:
            return _unusable(self.found.bubblewrap)
        if not (self.masks.complete and self.masks.covers_outside):
            return TOO_MANY, "name whole folders, or exclude what is not needed"
        return _unusable(self.found.network) if self.networked and not self.found.network.usable else ("", "")

    def gaps(self) -> Mapping[Rule, str]:
        """Return the rules that the operating system enforces, each with its gaps in words or ''."""
        rules: dict[Rule, str] = {}
        if self.found.bubblewrap.usable or self.found.landlock.usable:
            rules[Rule("workspace")] = "; ".join(_write_gaps(self))
        if self.found.bubblewrap.usable:
            rules[Rule("credentials")] = ""
            rules |= {Rule("deny_read_outside"): self.masks.read_gap} if self.masks.covers_outside else {}
        if self.found.bubblewrap.usable and self.masks.complete:
            rules |= {Rule("deny_read", pattern): self.masks.read_gap for pattern in self.profile.deny_read}
            held = (pattern for pattern in self.profile.deny_write if pattern not in self.masks.unmatched)
            rules |= {Rule("deny_write", pattern): self.masks.write_gap for pattern in held}
        if self.found.network.usable or self.port_only:
            for name in ("allow_network", "deny_network"):
                for pattern in getattr(self.profile, name):
                    rules[Rule(name, pattern)] = "; ".join(_network_gaps(self, pattern))
        return rules


def _unusable(layer: Probed) -> tuple[str, str]:
    return f"{layer.name} is unusable ({layer.why})", layer.fix


def label(held: Held) -> dict[str, Json]:
    """Return the members of `enforcement` that describe the host's sandbox."""
    kinds = {
        "files": _files(held),
        "credentials": _credentials(held),
        "sockets": _sockets(held),
        "network": _network(held),
        "processes": _processes(held),
        "syscalls": _none("nothing filters them"),
        "limits": _limits(held),
        "environment": _environment(held),
    }
    unused = None if held.networked else held.found.network
    layers = [
        {
            "name": layer.name,
            "state": "missing" if not layer.usable else "usable" if layer is unused else "used",
            **_non_empty({"version": layer.version, "why": layer.why}),
        }
        for layer in held.found.layers()
    ]
    # Without a mount namespace, the host can reach its run's approval socket through other programs of this user.
    approvals = "protected" if held.found.bubblewrap.usable else "unprotected"
    return {"isolation": held.isolation, "layers": layers, "kinds": kinds, "approvals": approvals}


def _files(held: Held) -> dict[str, Json]:
    by = [_by(layer) for layer in (held.found.bubblewrap, held.found.landlock) if layer.usable]
    if not by:
        return _none("neither bubblewrap nor Landlock")
    gaps = _write_gaps(held)
    profile = held.profile
    if profile.deny_read:
        gaps.append(f"reading: {held.masks.read_gap or 'the rules are not held'}")
    if profile.deny_write and held.masks.write_gap:
        gaps.append(f"deny_write: {held.masks.write_gap}")
    covers = "writing outside of " + ", ".join(("the workspace", "temporary files", *held.writable[1:]))
    covers += "; reading by the rules" if profile.deny_read else ""
    return _state(by, gaps, covers=covers, not_there=list(held.missing))


def _credentials(held: Held) -> dict[str, Json]:
    if not held.found.bubblewrap.usable:
        return _none("no bubblewrap to cover them with")
    gaps = [f"left open to this host: {', '.join(held.stores.left_open)}"] if held.stores.left_open else []
    covers = ", ".join(held.stores.names) or "none of the stores we know is here"
    return _state([_by(held.found.bubblewrap, "mount namespace")], gaps, covers=covers)


def _write_gaps(held: Held) -> list[str]:
    gaps = []
    if not held.found.bubblewrap.usable:
        gaps.append("modes, owners, times and attributes (as of chattr) of files outside the workspace")
        gaps.append("this user's terminals and shared memory (/dev/pts, /dev/shm)")
        if held.state_open:
            gaps.append("the state folder, receipts and all, as it lies where the host works")
        if held.profile.deny_read or held.profile.deny_write:
            gaps.append("rules on single files of the workspace")
    return gaps


def _sockets(held: Held) -> dict[str, Json]:
    """Describe the sockets of other programs; rules on files do not apply to data that a host sends through them."""
    by, covers = [], []
    gap = "those with a path"
    if held.found.bubblewrap.usable:
        by.append(_by(held.found.bubblewrap, "mount namespace"))
        covers.append("those in /run" + (", /tmp and /var/tmp" if held.private else ""))
        gap = "those with a path elsewhere, in the home folder say"
    if held.found.landlock_version >= SCOPES_SINCE:
        by.append(_by(held.found.landlock))
        covers.append("abstract ones")
    else:
        gap += ", and abstract ones"
    return _state(by, [gap], covers="; ".join(covers)) if by else _none("neither bubblewrap nor Landlock")


def _limits(held: Held) -> dict[str, Json]:
    if held.processes_max is None:
        return _none("no limit on memory or processes was set")
    return _state(["limits of the user namespace"], ["memory"], covers=f"{held.processes_max} processes and threads")


def _network(held: Held) -> dict[str, Json]:
    if not held.networked:
        return _none("the policy has no rules on the network")
    if not (held.found.network.usable or held.port_only):
        return {"state": "advisory", "gap": "tools that ask, and what they did is looked at; commands connect freely"}
    patterns = (*held.profile.allow_network, *held.profile.deny_network)
    gaps = dict.fromkeys(gap for pattern in patterns for gap in _network_gaps(held, pattern))
    layer = held.found.network if held.found.network.usable else held.found.landlock
    return _state([_by(layer), "proxy by names"], list(gaps), note=TUNNELS)


def _network_gaps(held: Held, pattern: str) -> list[str]:
    gaps = []
    if held.port_only:
        gaps.append("all but TCP, and every host on the proxy's port")
    host = pattern.partition("://")[2] or pattern
    if "/" in host.rstrip("/*"):
        gaps.append("the path of an encrypted request")
    return gaps


def _processes(held: Held) -> dict[str, Json]:
    if held.found.bubblewrap.usable:
        return _state([_by(held.found.bubblewrap, "pid namespace"), GUARD], [])
    stays = "if the guard itself is killed, who has left the session stays"
    return _state([GUARD], [stays, _OTHERS])


def _environment(held: Held) -> dict[str, Json]:
    # Landlock does not count: it keeps an ordinary user's host from reading other environments, but not root's.
    hidden = held.found.bubblewrap.usable
    return _state(["allow list"], [] if hidden else ["what /proc shows of this user's other processes, ours too"])


def _by(layer: Probed, name: str = "") -> str:
    return " ".join(word for word in (name or layer.name, f"({layer.name})" if name else "", layer.version) if word)


def _state(by: list[str], gaps: list[str], **more: Json) -> dict[str, Json]:
    members: dict[str, Json] = {"gap": "; ".join(gaps), **more}
    return {"state": "partial" if gaps else "enforced", "by": list(by), **_non_empty(members)}


def _non_empty(members: dict[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in members.items() if value}


def _none(why: str) -> dict[str, Json]:
    return {"state": "none", "why": why}
