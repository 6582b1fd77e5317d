"""Runs orders on backends, a bounded number at once, and keeps their receipts.

`admit` decides about an order before its run is made, and `drive` executes the run up to its receipt.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, overload

import anyio
import anyio.to_thread

from backplane import config
from backplane.config import Settings
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackplaneError, ConfigError, require_type, unforeseen
from backplane.process.aio import LoopTask
from backplane.runtime import backends
from backplane.runtime.admit import admit, id_of, keep_result
from backplane.runtime.backends import Backend
from backplane.runtime.options import OrderOptions, RunOptions, check_callbacks, check_names, limits_of
from backplane.runtime.orders import order_of
from backplane.runtime.places import Places, rank_of
from backplane.runtime.replay import find_replay
from backplane.runtime.results import apply_once
from backplane.runtime.run import Run
from backplane.runtime.state import StateFolder, signer_of
from backplane.runtime.warm import WarmHosts

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from backplane.sandbox.probe import Probe
    from backplane.telemetry.sender import Sender

__all__ = ["ControlPlane", "Run"]

TIDIERS: Final = 2
"""Threads that remove the folders of ended runs; a copy is removed several times as fast as it is made."""

NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})


def _sender(environ: Mapping[str, str]) -> Sender | None:
    """Return the sender of runs to a collector; None if the environment names none, or the extra is not installed."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in environ):
        return None
    from importlib.util import find_spec

    from backplane.telemetry.context import is_wanted

    if not is_wanted(environ) or any(find_spec(name) is None for name in ("opentelemetry", "opentelemetry.exporter")):
        return None
    from backplane.telemetry.sender import Sender

    return Sender(environ)


ValueT = TypeVar("ValueT")


class Closing(Protocol):
    """Something that uses a control plane and is closed before it."""

    async def close(self) -> None: ...


@contextmanager
def _known_errors() -> Iterator[None]:
    """Raise every exception of the block as a BackplaneError."""
    try:
        yield
    except Exception as error:
        raise unforeseen(error) from error


class ControlPlane:
    """Runs orders on backends, a bounded number at once, and keeps their receipts.

    Use it as an async context manager; any number of tasks may share it. A closed control plane starts nothing.

    Args:
        settings: settings to use; None loads the configuration as the command line does.
        home: the state folder; None takes the usual one (see `config.home`).
        environ: variables from which a child's environment is chosen; None takes those of this process.

    Raises:
        ConfigError: `config_invalid`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        home: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        require_type(home, str | os.PathLike | None, "`home`", "the path of the state folder")
        self.environ = os.environ if environ is None else environ
        given = config.checked(settings) if settings is not None else None
        self.settings = given or config.load(None, self.environ, Path.cwd())
        self.home = Path(os.path.expanduser(home)).absolute() if home is not None else config.home(self.environ)
        self._slots = Places(self.settings.limits.runs_max)
        self.state_folder = StateFolder(self.home, signer_of(self.settings.signing_key))
        self.warm: WarmHosts | None = None
        """Hosts that wait for an order; None if the limits allow none, or outside the `async with` block."""
        self.above: weakref.WeakSet[Closing] = weakref.WeakSet()
        """Sessions on this control plane; they are closed before it."""
        self._closed = self._is_entered = False
        self._tidier: ThreadPoolExecutor | None = None
        """Removes the folders of ended runs; None before the first run has ended."""
        self.sender = _sender(self.environ)
        """Sends ended runs to a collector, if not None; code that replaces the sender must call its `leave`."""
        self.layers: Probe | None = None
        """Which sandbox layers this machine has; None if they are to be probed once they are needed."""

    async def __aenter__(self) -> ControlPlane:
        self._closed, self._is_entered = False, True
        with _known_errors():
            self.keep_warm()
        return self

    def keep_warm(self) -> None:
        """Keep hosts waiting for later orders, within the limits, until the control plane or the loop is closed."""
        limits = self.settings.limits
        # With telemetry, a host's environment names its run, so the host cannot wait for another run.
        self.warm = WarmHosts(limits.warm_max) if limits.warm_max and self.sender is None else None

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        with _known_errors():
            await LoopTask(self._close).wait()

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._tidied()
            async with AsyncExitStack() as closing:  # The stack runs every close, even if one raises.
                if self.sender is not None:
                    closing.push_async_callback(anyio.to_thread.run_sync, self.sender.leave)
                closing.push_async_callback(anyio.to_thread.run_sync, self.state_folder.close)
                if self.warm is not None:
                    closing.push_async_callback(self.warm.close)
                for one in self.above:
                    closing.push_async_callback(one.close)

    def tidy(self, remove: Callable[[], None]) -> None:
        """Call a function that removes an ended run's folders, in a thread.

        Only the end of this control plane waits for it or, without an `async with` block, the end of the run.
        """
        try:
            if self._tidier is None:
                from concurrent.futures import ThreadPoolExecutor  # The first run's start need not wait for it.

                self._tidier = ThreadPoolExecutor(TIDIERS)
            self._tidier.submit(remove)
        except (ImportError, OSError, RuntimeError):  # Too few descriptors, or no further thread.
            remove()

    async def _tidied(self) -> None:
        """Wait until all folders of ended runs are removed."""
        tidier, self._tidier = self._tidier, None
        if tidier is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(tidier.shutdown)

    def require_open(self) -> None:
        """Refuse to start anything on a closed control plane. Raises ConfigError: `config_invalid`."""
        if self._closed:
            fact = "the control plane is closed"
            raise ConfigError("config_invalid", fact, hint="start orders and sessions inside its `async with` block")

    @overload
    def start(
        self,
        order: WorkOrder | str,
        backend: Backend | str | None = None,
        *,
        output: type[ValueT],
        run_id: str | None = None,
        **given: Unpack[OrderOptions],
    ) -> AbstractAsyncContextManager[Run[ValueT]]: ...
    @overload
    def start(
        self,
        order: WorkOrder | str,
        backend: Backend | str | None = None,
        *,
        run_id: str | None = None,
        route: Json = None,
        added: Mapping[str, Json] = NOTHING,
        **given: Unpack[RunOptions],
    ) -> AbstractAsyncContextManager[Run]: ...
    @asynccontextmanager
    async def start(
        self,
        order: WorkOrder | str,
        backend: Backend | str | None = None,
        *,
        run_id: str | None = None,
        route: Json = None,
        added: Mapping[str, Json] = NOTHING,
        **given: Unpack[RunOptions],
    ) -> AsyncIterator[Run[Any]]:
        """Run one order; leaving the block early cancels the run cleanly.

        Errors of a host are not raised: `run.error` and `run.receipt` show how the run ended.

        Args:
            order: a work order, or just the task.
            backend: a name, or a backend of your own; None takes the one that the order names, else the default.
            run_id: a UUID for the run; None, or the id of an earlier run, makes a new one.
            route: why this backend was chosen, for the receipt.
            added: the caller's members for `usage_raw.backplane` in the receipt.
            given: `RunOptions`, as `backplane.start` takes them.

        Raises:
            BackendError: `rate_limit_exceeded` when too many runs are waiting already; `backend_not_found`.
            ConfigError: `config_invalid`, a member of the order has a wrong type or is not one of its choices; or the
                order is declared pure and works in place; or `run_id` is no UUID; or the control plane is closed.
        """
        async with AsyncExitStack() as opened:
            with _known_errors():
                check_names(given)
                self.require_open()
                check_callbacks(given.get("on_ask"), given.get("hooks", ()))
                whole = await order_of(order, opened, self.settings.policy, **given)
                asked = settings_of(whole.config.vendor)
                named = backend if backend is not None else asked.get("backend")
                chosen = await self._find(named)
                limits = limits_of(given.get("limits"), chosen.limits or self.settings.limits, given.get("timeout"))
                await self._slots.acquire(rank_of(asked.get("route")))
            try:
                with _known_errors():
                    more = added if route is None else {**added, "route": route}
                    run = await admit(self, whole, chosen, limits, given, run_id, more)
                    task = LoopTask(run.drive.run)
            except BaseException:
                self._slots.release()
                raise
            try:
                await run.drive.started.wait()
                yield run
            finally:
                await self._end(run, task)

    async def _find(self, named: Backend | str | None) -> Backend:
        if named is None or isinstance(named, str):  # Finding it may read a stored run, or load a plug-in.
            return await anyio.to_thread.run_sync(self.find_backend, named)
        return self.find_backend(named)

    def find_backend(self, named: Backend | str | None) -> Backend:
        """Return the backend of this name; None stands for the configured default.

        Raises:
            ConfigError: `config_invalid`, there is no default, or `named` is neither a name nor a backend.
            BackendError: `backend_not_found`.
        """
        require_type(named, str | Backend | None, "the backend", "give a name, or a Backend")
        if isinstance(named, Backend):
            return named
        name = named or self.settings.default_backend
        if name is None:
            fact = "no backend was named and none is the default"
            hint = "name one (--backend shell, backend='shell'), or set default_backend"
            raise ConfigError("config_invalid", fact, hint=hint)
        if name.startswith(REPLAY):
            return find_replay(name, self.home)
        return backends.find(name, self.settings, self.environ)

    async def _end(self, run: Run, driving: LoopTask) -> None:
        try:
            async with AsyncExitStack() as ending:  # Ends each of them, even if another raises.
                ending.callback(self._slots.release)
                ending.push_async_callback(keep_result, self.home, run)
                if not self._is_entered:
                    ending.push_async_callback(self._tidied)
                ending.push_async_callback(driving.wait)
                ending.callback(run.drive.leave)
            if self.sender is not None and run.is_sealed:
                from backplane.telemetry.spans import RunAbout

                model, task = run.order.config.model, run.order.task
                about = RunAbout(backend=run.backend_id, model=model, task=task, is_remote=run.drive.backend.remote)
                self.sender.send(run.stored, about)
        except Exception as error:
            run.fail(error)

    def environ_of(self, run_id: str) -> Mapping[str, str]:
        """Return the variables from which a host's environment is chosen; with telemetry, they name the run's span."""
        if self.sender is None:
            return self.environ
        from backplane.telemetry.context import TRACEPARENT, traceparent

        return {**self.environ, TRACEPARENT: traceparent(run_id)}

    async def end_unstarted(
        self,
        order: WorkOrder,
        backend: Backend,
        why: str | BackplaneError,
        *,
        run_id: str | None = None,
        added: Mapping[str, Json] = NOTHING,
    ) -> Run:
        """Store the receipt of a run that ended while it waited, before anything was started.

        Args:
            why: the reason of a cancellation as text, or the error that ended the run.
            added: as in `start`.
        """
        limits, run_id = backend.limits or self.settings.limits, await id_of(self.state_folder, run_id)
        run = Run(self, order, backend, None, limits, run_id)
        run.facts.added.update(added)
        await run.drive.end_unstarted(why)
        return run

    async def apply(self, run_id: str) -> tuple[str, ...]:
        """Apply the result of an ended run to the folder that was copied for it; return the changed files.

        Runs that worked in place, changed nothing or are already applied change no files.

        Raises:
            WorkspaceError: `execution_workspace_error`, a file has changed meanwhile, or a write failed.
            PolicyError: `policy_denied`, the result violates the run's policy.
            StoreError: there is no such run.
        """
        return await anyio.to_thread.run_sync(apply_once, self.state_folder, run_id)
