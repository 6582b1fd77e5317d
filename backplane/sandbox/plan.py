"""Plans the mounts and limits of one run's sandbox; `sandbox.sandbox` adds the rules of the policy."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from backplane import resources
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy, Rule
from backplane.process.launch import Cage, StartCommand
from backplane.sandbox.credentials import within
from backplane.sandbox.mounts import Masks

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

DEVICES: Final = tuple(
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
)
"""Devices that a host may write to."""

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


def limits(*, counted: bool) -> tuple[tuple[int, int], ...]:
    """Return a host's limits against core files and fork bombs; each is at most our own limit."""
    wanted = {resource.RLIMIT_CORE: 0} | ({resource.RLIMIT_NPROC: PROCESSES_MAX} if counted else {})
    hard = {number: resource.getrlimit(number)[1] for number in wanted}
    return tuple(
        (number, most if hard[number] == resource.RLIM_INFINITY else min(most, hard[number]))
        for number, most in wanted.items()
    )


def private_folders(taken: set[str]) -> tuple[str, ...]:
    """Return the folders of `PRIVATE` that exist, with links followed, and that are not in `taken`."""
    places = dict.fromkeys(os.path.realpath(path) for path in PRIVATE)
    return tuple(path for path in places if os.path.isdir(path) and path not in taken)


def mount_options(
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


def hidden_servers(
    place: RunFolders, servers: ServerFiles, own: tuple[str, ...], covered: Masks
) -> Iterator[tuple[str, str]]:
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
