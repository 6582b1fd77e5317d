"""Finds out which backends are ready on this machine, and what makes the others ready. It starts no program."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.config import Settings
from backplane.errors import BackendError, ConfigError
from backplane.runtime import backends
from backplane.runtime.backends import ProcessBackend

PARENTS_MAX: Final = 4
"""Limit of folders between a program and the file that names its package's version."""


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a backend, as `backplane backends` shows it."""

    id: str
    ready: bool
    why: str = ""
    """Why the backend is not ready; empty if it is."""
    fix: str = ""
    """The next step if the backend is not ready, or if its agent is too old or has no key."""
    command: tuple[str, ...] = ()
    manifest: dict[str, Any] | None = None
    """Capabilities of the host's last stored hello; None if none is stored."""


def known(settings: Settings, environ: Mapping[str, str]) -> list[BackendStatus]:
    """Return the status of every backend, sorted by name; hosts that need options are listed once configured."""
    from backplane.runtime import plugins

    own = {*settings.backends, *backends.by_name()}
    return [_status(name, settings, environ) for name in sorted({*own, *plugins.names(own)})]


def _status(name: str, settings: Settings, environ: Mapping[str, str]) -> BackendStatus:
    command: tuple[str, ...] = ()
    try:
        backend = backends.find(name, settings, environ)
        command = backend.argv
        if (fault := missing_program(backend, environ)) is not None:
            raise fault
    except (BackendError, ConfigError) as error:
        return BackendStatus(id=name, ready=False, why=error.message, fix=error.hint or "", command=command)
    fix = _too_old(backend, environ) or _without_key(backend)
    return BackendStatus(id=name, ready=True, fix=fix, command=command)


def _too_old(backend: ProcessBackend, environ: Mapping[str, str]) -> str:
    """Return why an agent's program is too old, and the fix; empty if its version is new enough or unknown."""
    agent, path = backend.agent, backend.agent_path({**environ, **backend.env})
    version = version_at(path) if path is not None else None
    if agent is None or agent.oldest is None or version is None or not is_older(version, agent.oldest):
        return ""
    return f"{path} is {version}, older than {agent.oldest}; install it: {agent.install}"


def _without_key(backend: ProcessBackend) -> str:
    """Return the next step for an agent without its key; the backend is ready, as the agent may have another key."""
    agent = backend.agent
    if agent is None or agent.key_env is None or agent.own_state or agent.key_env in backend.env:
        return ""
    own = f"use your own login with options = {{ own_state = true }} in [backends.{backend.id}]"
    return f"no key: {agent.key_env} is not set; export it, or {own}"


def missing_program(backend: ProcessBackend, environ: Mapping[str, str]) -> BackendError | None:
    """Return the error for a program of the backend that is not on this machine; None if all are there."""
    env = {**environ, **backend.env}
    program, fix = backend.argv[0], f"install it, or correct the command of [backends.{backend.id}]"
    if shutil.which(program, path=env.get("PATH")) is not None:
        if backend.agent is None or backend.agent_path(env) is not None:
            return None
        program, install = backend.agent.program, backend.agent.install
        fix = f'name its path: options = {{ program = "PATH" }} in [backends.{backend.id}]'
        fix = f"install it: {install}; or {fix}" if install else fix
    return BackendError("backend_unavailable", f"{program} is not found or not executable", hint=fix)


def version_at(program: str) -> str | None:
    """Return the version of the npm package that holds a program; None if none does."""
    for folder in Path(os.path.realpath(program)).parents[:PARENTS_MAX]:
        with suppress(OSError, msgspec.MsgspecError):
            version = msgspec.json.decode((folder / "package.json").read_bytes(), type=_Package).version
            return version or None
    return None


class _Package(msgspec.Struct):
    version: str = ""


def is_older(version: str, oldest: str) -> bool:
    """Return True if a version's numbers come before another's."""

    def numbers(text: str) -> list[int]:
        return [int(part) if part.isdigit() else 0 for part in text.partition("-")[0].split(".")]

    return numbers(version) < numbers(oldest)
