"""Plans the sandbox of one run: mounts, Landlock rules, variables, and a label that describes their effect."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from backplane import resources
from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy, Rule
from backplane.process.launch import Cage, StartCommand
from backplane.sandbox import credentials, landlock
from backplane.sandbox import mounts as masks
from backplane.sandbox.credentials import within
from backplane.sandbox.labels import Held, label
from backplane.sandbox.mounts import Masks
from backplane.sandbox.probe import MOUNTS, Probe

PRIVATE: Final = ("/tmp", "/var/tmp")
"""Folders of which each run has its own: other programs keep sockets there (displays, key agents, terminals)."""

SOCKETS: Final = "/run"
"""The folder of the system's sockets; some services behind them do anything that our user asks."""

_KEPT_OF_RUN: Final = (
    *("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"),  # names of hosts
    *("/run/current-system", "/run/booted-system", "/run/opengl-driver"),  # programs on NixOS
)

_EMPTY_BYTES_MAX: Final = "1048576"
"""Size limit in bytes of each empty folder that covers another one."""

PROCESSES_MAX: Final = 4096
"""Limit of processes and threads of one run, if the system counts them for a namespace. No agent has needed a tenth of
it, and it stops a fork bomb within a second."""

_DEVICES: Final = tuple(
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
)


ServerFiles = Mapping[str, tuple[str, ...]]
"""Name of an MCP server → the words of its configuration that may name files."""


class RunFolders(msgspec.Struct, frozen=True, kw_only=True):
    """The folders of one run, as absolute paths."""

    root: str
    """The workspace, which the host may write."""
    original: str | None
    """The folder that a staged root is a copy of; None if the run works in place."""
    state: str
    """The control plane's own folder: receipts, journals, other runs."""
    scratch: str
    """An empty folder for the run's temporary files."""
    objects: tuple[str, ...] = ()
    """Folders outside of the root from which the root's git repository reads objects."""


class Contained(msgspec.Struct, frozen=True, kw_only=True):
    """A planned sandbox."""

    cage: Cage = Cage()
    env: dict[str, str] = {}
    """Variables that override the command's own."""
    policy: Policy | None = None
    """The policy that the network's proxy applies; None for no proxy."""
    endpoints: tuple[str, ...] = ()
    interface: int = 0
    """Landlock's version; 0 for no Landlock."""
    writable: tuple[str, ...] = ()
    label: dict[str, Json] = {}
    """The receipt's members about isolation, layers and kinds of access."""
    hidden_servers: Mapping[str, str] = MappingProxyType({})
    """MCP server with a file that the agent cannot see, by `deny_read` or in the state folder → that file."""
    gaps: Mapping[Rule, str] = MappingProxyType({})
    """Rules that the operating system enforces, each with its gaps in words or ''."""
    uncovered: tuple[str, ...] = ()
    """Links that `deny_read` names and whose target no mount can cover."""
    shortfall: tuple[str, str] = ("", "")
    """Why rules are enforced more weakly than possible, and the next step."""


def plan(
    place: RunFolders,
    command: StartCommand,
    policy: Policy,
    found: Probe,
    *,
    isolation: Isolation,
    writable: tuple[str, ...] = (),
    endpoints: tuple[str, ...] = (),
    open_stores: Collection[str] = (),
    servers: ServerFiles = MappingProxyType({}),
    agent: str | None = None,
) -> Contained:
    """Plan the sandbox of a command. Blocking; searches the workspace if the policy has rules on files.

    Args:
        writable: absolute paths besides the workspace that the host may change, such as its own state.
        endpoints: targets to which the host may always connect, whatever the rules on the network.
        open_stores: names of credential stores that the host may read.
        servers: MCP servers that the host's agent is to start.
        agent: path of the program that the host is to start.
    """
    profile = policy.profile
    networked = bool(profile.allow_network or profile.deny_network)
    own = tuple(path for path in writable if os.path.exists(path))
    covered, stores = Masks(), credentials.Covered()
    wrapper: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    if found.bubblewrap.usable:
        private = _private({place.root, *own})
        originals = (place.original,) if place.original else ()
        homes = credentials.homes_of(command.env.get("HOME"))
        stores = credentials.cover(place.root, originals, own, homes, open_stores, set(command.env.values()))
        covered = masks.work_out(profile, place.root, originals, homes, stores)
        wrapper = (*found.command, *(("--unshare-net",) if networked and found.network.usable else ()))
        system = MOUNTS if "/" not in (place.root, *own) else ("--bind", *MOUNTS[1:])
        wrapper = (*wrapper, *system, *_mounts(place, command, servers, own, private, agent), *covered.options, "--")
    kept = (*_DEVICES, place.root, *own, *(private or (place.scratch,)), place.scratch)
    interface = found.landlock_version
    held = Held(
        isolation=isolation,
        found=found,
        profile=profile,
        writable=(place.root, *own),
        missing=tuple(path for path in writable if path not in own),
        masks=covered,
        stores=stores,
        private=bool(private),
        state_open=any(within(place.state, path) for path in (place.root, *own)),
        # The system counts processes for an ordinary user's namespace, but not for root.
        processes_max=PROCESSES_MAX if wrapper and os.geteuid() != 0 else None,
    )
    most = _limits(counted=held.processes_max is not None) if isolation != "off" else ()
    confined = landlock.rules(interface, list(kept)) if interface else None
    cage = Cage(wrapper=wrapper, landlock=confined, limits=most)
    controls_network = networked and (found.network.usable or interface >= landlock.NETWORK_SINCE)
    return Contained(
        cage=cage,
        env={"TMPDIR": PRIVATE[0] if PRIVATE[0] in private else place.scratch},
        policy=policy if controls_network else None,
        endpoints=endpoints,
        interface=interface,
        writable=kept,
        label=label(held),
        hidden_servers=dict(_hidden(place, servers, own, covered)) if wrapper else {},
        gaps=held.gaps(),
        uncovered=covered.uncovered,
        shortfall=held.shortfall(),
    )


def _limits(*, counted: bool) -> tuple[tuple[int, int], ...]:
    """Return a host's limits against core files and fork bombs; each is at most our own limit."""
    wanted = {resource.RLIMIT_CORE: 0} | ({resource.RLIMIT_NPROC: PROCESSES_MAX} if counted else {})
    hard = {number: resource.getrlimit(number)[1] for number in wanted}
    return tuple(
        (number, most if hard[number] == resource.RLIM_INFINITY else min(most, hard[number]))
        for number, most in wanted.items()
    )


def _private(taken: set[str]) -> tuple[str, ...]:
    places = dict.fromkeys(os.path.realpath(path) for path in PRIVATE)
    return tuple(path for path in places if os.path.isdir(path) and path not in taken)


def _mounts(
    place: RunFolders,
    command: StartCommand,
    servers: ServerFiles,
    own: tuple[str, ...],
    private: tuple[str, ...],
    agent: str | None,
) -> Iterator[str]:
    """Yield the mount options from the outermost to the innermost, so that no mount covers another by chance."""
    mounts: dict[str, tuple[str, ...]] = {}
    sockets = os.path.realpath(SOCKETS)
    covered = [path for path in (sockets, *private) if path != place.root and os.path.isdir(path)]
    for path in private:
        mounts[path] = ("--bind", place.scratch, path)
    if sockets in covered:
        mounts[sockets] = ("--size", _EMPTY_BYTES_MAX, "--tmpfs", sockets)
        mounts |= {path: ("--ro-bind", path, path) for path in _KEPT_OF_RUN if os.path.isdir(path)}
    for path in (*place.objects, *_needed(place, command, servers, agent, covered)):
        mounts.setdefault(path, ("--ro-bind", path, path))
    if os.path.isdir(place.state):
        state = os.path.realpath(place.state)
        mounts[state] = ("--size", _EMPTY_BYTES_MAX, "--tmpfs", state)
    if not private:
        mounts[place.scratch] = ("--bind", place.scratch, place.scratch)
    for path in {*own, place.root} - {"/"}:
        mounts[path] = ("--bind", path, path)
    for path in sorted(mounts, key=lambda path: (path.rstrip("/").count("/"), path)):
        yield from mounts[path]


def _needed(
    place: RunFolders, command: StartCommand, servers: ServerFiles, agent: str | None, covered: list[str]
) -> Iterator[str]:
    """Yield the paths in covered folders that the command, agent, environment or MCP servers need."""
    program = shutil.which(command.argv[0], path=command.env.get("PATH")) or command.argv[0]
    lists = (part for value in command.env.values() for part in value.split(os.pathsep))
    words = [program, *command.argv[1:], *lists, *([agent] if agent else ())]
    ours = [sys.executable, sys.prefix, sys.base_prefix, str(resources.PACKAGE), *map(str, resources.folders())]
    # An order names these words, so they must not open the state folder, which contains other runs.
    named = (word for row in servers.values() for word in row)
    theirs = (word for word in named if not within(os.path.realpath(word), place.state))
    for word in (*words, *theirs, *ours):
        for path in {word, os.path.realpath(word)} if word.startswith("/") and "\0" not in word else ():
            roof = next((roof for roof in covered if path.startswith(roof + "/")), None)
            if roof is not None and os.path.exists(path):
                yield _with_its_folder(path, roof)


def _hidden(place: RunFolders, servers: ServerFiles, own: tuple[str, ...], covered: Masks) -> Iterator[tuple[str, str]]:
    """Yield each server whose configuration names an existing file that the agent cannot see, with that file."""
    for name, words in servers.items():
        for word in words:
            path = os.path.realpath(os.path.join(place.root, word))
            ruled = any(within(path, folder) for folder in covered.hidden)
            closed = within(path, place.state) and not any(within(path, folder) for folder in (place.root, *own))
            if (ruled or closed) and os.path.exists(path):
                yield name, word
                break


def _with_its_folder(path: str, roof: str) -> str:
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    if "node_modules" in folder.parts:  # npm links a program into its package, which needs the packages beside it.
        folder = Path(*folder.parts[: folder.parts.index("node_modules") + 1])
    elif folder.name in ("bin", "sbin"):
        folder = folder.parent
    return path if str(folder) == roof else str(folder)
