"""The Python door: one order in a few lines, streamed or blocking.

`start` and `run` put together what a program would otherwise write itself: settings, a
control plane, a backend by name. For many runs over one control plane use
`runtime.ControlPlane`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from backplane import config
from backplane.config import Settings
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError
from backplane.runtime import backends
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hook, taken
from backplane.runtime.inbound import OnAsk
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run


@asynccontextmanager
async def start(
    order: WorkOrder | str,
    *,
    backend: str | Backend | None = None,
    root: str | os.PathLike[str] | None = None,
    on_ask: OnAsk | None = None,
    hooks: Sequence[Hook] = (),
    settings: Settings | None = None,
    home: Path | None = None,
) -> AsyncIterator[Run]:
    """Run one order: iterate over the run for its events, then read `run.receipt`.

    Leaving the block early cancels the run in order; nothing of it stays.

    Args:
        order: a work order, or just the task.
        backend: a name, or a backend of your own; None takes the configured default.
        root: the folder to work on, over the order's own.
        on_ask: answers what the policy leaves open.
        hooks: asked before tools run and after, beside the configuration's and the order's own.
        settings: None loads the configuration as the command line does.
        home: the state folder; None takes the usual one.

    Raises:
        ConfigError: `config_invalid`.
        BackendError: `backend_not_found`, `backend_unavailable`, `rate_limit_exceeded`.
    """
    whole = WorkOrder(order) if isinstance(order, str) else order
    if root is not None:
        workspace = msgspec.structs.replace(whole.workspace, root=os.fspath(root))
        whole = msgspec.structs.replace(whole, workspace=workspace)
    chosen = settings or config.load(None, os.environ, Path.cwd())
    whole, own = taken(whole)
    async with (
        ControlPlane(chosen, home or config.home(os.environ), os.environ) as plane,
        plane.start(whole, _backend(backend, chosen), on_ask=on_ask, hooks=(*own, *hooks)) as run,
    ):
        yield run


def _backend(named: str | Backend | None, settings: Settings) -> Backend:
    name = named if named is not None else settings.default_backend
    if name is None:
        raise ConfigError(
            "config_invalid", "no backend was named and none is the default", hint="pass backend=…, for example 'shell'"
        )
    return backends.find(name, settings, os.environ) if isinstance(name, str) else name


def run(
    order: WorkOrder | str,
    *,
    backend: str | Backend | None = None,
    root: str | os.PathLike[str] | None = None,
    on_event: Callable[[AgentEvent], object] | None = None,
    settings: Settings | None = None,
    home: Path | None = None,
) -> Run:
    """The same, blocking: give back the run when it has ended. Arguments as `start`.

    Args:
        on_event: called for each event as it comes.
    """
    return anyio.run(
        functools.partial(_run, order, backend=backend, root=root, on_event=on_event, settings=settings, home=home)
    )


async def _run(
    order: WorkOrder | str,
    *,
    backend: str | Backend | None,
    root: str | os.PathLike[str] | None,
    on_event: Callable[[AgentEvent], object] | None,
    settings: Settings | None,
    home: Path | None,
) -> Run:
    async with start(order, backend=backend, root=root, settings=settings, home=home) as run:
        async for event in run:
            if on_event is not None:
                on_event(event)
    return run
