"""A control plane: orders come in and are run on backends, a bounded number at once; receipts stay.

What a run is, from its order to its receipt, is in `run`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, overload

import anyio
import anyio.lowlevel
import anyio.to_thread

from backplane import config
from backplane.config import Limits, Settings
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackendError, BackplaneError, ConfigError, require_type, unforeseen
from backplane.process.aio import LoopTask
from backplane.runtime import backends
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hook
from backplane.runtime.memory import ReplayBackend
from backplane.runtime.options import OrderOptions, RunOptions, check_callbacks, check_names, limits_of, order_of
from backplane.runtime.replay import find_replay
from backplane.runtime.results import apply_once
from backplane.runtime.run import Run
from backplane.runtime.state import StateFolder
from backplane.runtime.warm import WarmHosts

if TYPE_CHECKING:
    from backplane.receipts.signatures import Signer
    from backplane.sandbox.probe import Probe
    from backplane.telemetry.sender import Sender

__all__ = ["ControlPlane", "Run"]

NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})

WAITING_MAX: Final = 1024
"""Runs that wait for a place: a caller with more than that has a queue of its own."""

NORMAL: Final = 1
"""Rank of the priority `normal`, as `routing.task.RANKS` has it."""


def rank_of(route: Json) -> int:
    """The rank of an order's priority, by its `config.vendor.abp.route`; that of `normal` where it names none."""
    if not isinstance(route, dict):
        return NORMAL
    from backplane.routing.task import RANKS  # Most orders name none, and the way to a first run is short.

    return next((rank for name, rank in RANKS.items() if name == route.get("priority")), NORMAL)


class Places:
    """So many places; a place is taken by `acquire` and given back by `release`.

    Args:
        count: places there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    async def acquire(self, rank: int) -> None:
        """Wait for a place.

        Args:
            rank: the higher goes first.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        # Whoever has to wait is counted at once: orders that come together are refused together.
        if self._free:
            self._free -= 1
            return
        turn = (-rank, next(self._numbers), anyio.Event())
        heapq.heappush(self._waiting, turn)
        try:
            await turn[2].wait()
        except BaseException:
            if turn[2].is_set():  # It was given a place at the moment at which it was given up.
                self.release()
            else:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
            raise

    def release(self) -> None:
        """Give a place to whoever is next."""
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._free += 1


def signer_of(key: str | None) -> Signer | None:
    """Return what signs receipts with a key; None for none.

    Raises:
        ConfigError: `config_invalid`, the key cannot be read, or the extra is missing.
    """
    if key is None:
        return None
    from backplane.receipts.signatures import Signer  # Needs a library that most do without.

    return Signer(key)


def _sender(environ: Mapping[str, str]) -> Sender | None:
    """What sends runs to a collector; None where the environment names none, or the extra is not installed."""
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
    """What works over a control plane, and ends before it."""

    async def close(self) -> None: ...


class ControlPlane:
    """Runs orders on backends, a bounded number at once, and keeps their receipts.

    Use it as an async context manager; it may be shared by any number of tasks. One that is closed starts nothing.

    Args:
        settings: None loads the configuration as the command line does.
        home: the state folder; None takes the usual one (see `config.home`).
        environ: what a child's environment is chosen from; None takes this process's own.

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
        self.home = config.absolute(home, "`home`") if home is not None else config.home(self.environ)
        settings, home = self.settings, self.home
        self._slots = Places(settings.limits.runs_max)
        self.state_folder = StateFolder(home, signer_of(settings.signing_key))
        self.warm: WarmHosts | None = None
        """Hosts that wait for an order; None where none shall, or where nobody would end them."""
        self.above: weakref.WeakSet[Closing] = weakref.WeakSet()
        """What is closed before this: the sessions over it."""
        self._closed = False
        self.sender = _sender(self.environ)
        """Sends ended runs to a collector; None for none. Who takes it away waits for it to `leave` in our stead."""
        self.layers: Probe | None = None
        """What contains hosts on this machine; None finds out when it is needed."""

    async def __aenter__(self) -> ControlPlane:
        self._closed = False
        try:
            self.keep_warm()
        except Exception as error:
            raise unforeseen(error) from error
        return self

    def keep_warm(self) -> None:
        """Have hosts wait for later orders, as the limits say; the end of the block ends them, or that of the loop."""
        limits, is_traced = self.settings.limits, self.sender is not None  # A traced host's environment has its run.
        self.warm = WarmHosts(limits.warm_max, limits.warm_s) if limits.warm_max and not is_traced else None

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        try:
            await LoopTask(self._close).wait()
        except Exception as error:
            raise unforeseen(error) from error

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as closing:  # Each of them, whatever another raises.
                if self.sender is not None:
                    closing.push_async_callback(anyio.to_thread.run_sync, self.sender.leave)
                closing.push_async_callback(anyio.to_thread.run_sync, self.state_folder.close)
                if self.warm is not None:
                    closing.push_async_callback(self.warm.close)
                for one in self.above:
                    closing.push_async_callback(one.close)

    def require_open(self) -> None:
        """Raises ConfigError: `config_invalid`, the control plane was closed: nobody would end what it starts."""
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
        """Run one order; leaving the block early cancels the run in order.

        The run never raises for what a host does: `run.error` and `run.receipt` say how it ended.

        Args:
            order: a work order, or just the task.
            backend: a name, or a backend of your own; None takes the one that the order names, else the default.
            run_id: a UUID for the run, taken unless a run has it already; None makes one.
            route: why this backend was chosen, for the receipt.
            added: members for the receipt's own part, `usage_raw.backplane`, from whoever stands above.
            given: `RunOptions`, as `backplane.start` takes them.

        Raises:
            BackendError: `rate_limit_exceeded` when too many runs are waiting already; `backend_not_found`.
            ConfigError: `config_invalid`, a member of the order has a wrong type or is none of its choices; or it is
                declared pure and works in place; or `run_id` is no UUID; or the control plane is closed.
        """
        on_ask, hooks, output = given.get("on_ask"), given.get("hooks", ()), given.get("output")
        async with AsyncExitStack() as opened:
            try:
                check_names(given)
                self.require_open()
                run_id = run_id if run_id is None else _uuid_of(run_id)
                check_callbacks(on_ask, hooks)
                whole = await order_of(order, opened, self.settings.policy, **given)
                asked = settings_of(whole.config.vendor)
                named = backend if backend is not None else asked.get("backend")
                if named is None or isinstance(named, str):  # It may read a stored run, or load a plug-in.
                    chosen = await anyio.to_thread.run_sync(self.find_backend, named)
                else:
                    chosen = self.find_backend(named)
                limits = limits_of(given.get("limits") or chosen.limits, self.settings.limits, given.get("timeout"))
                self._check_room()
                await self._slots.acquire(rank_of(asked.get("route")))
            except Exception as error:
                raise unforeseen(error) from error
            try:
                run = await self._made(whole, chosen, on_ask, hooks, limits, run_id, output, added)
                if route is not None:
                    run.facts.added["route"] = run.facts.clean_json(route)
                task = LoopTask(partial(run.drive.run, hooks))
            except Exception as error:
                self._slots.release()
                raise unforeseen(error) from error
            except BaseException:
                self._slots.release()
                raise
            try:
                await run.drive.started.wait()
                yield run
            finally:
                await self._end(run, task)

    async def _made(
        self,
        order: WorkOrder,
        backend: Backend,
        on_ask: OnAsk | None,
        hooks: Sequence[Hook],
        limits: Limits,
        run_id: str | None,
        output: Any,
        added: Mapping[str, Json],
    ) -> Run:
        """Make the run of an order that has its place: from the store if it is pure, with its share of a budget."""
        asked = settings_of(order.config.vendor)
        told: Mapping[str, Json] = NOTHING
        share: Mapping[str, Json] | BackplaneError = NOTHING
        if asked.get("pure") is not None:
            backend, told = await self._from_store(order, backend, limits, hooks)
        # A turn of a conversation names its session in `parent`, and a replay costs nothing.
        if not isinstance(asked.get("parent"), dict | None) and not isinstance(backend, ReplayBackend):
            order, run_id, share = await self._take_share(order, run_id)
        run = await self._run(order, backend, on_ask, limits, run_id, output, {**added, **told})
        if isinstance(share, BackplaneError):
            run.drive.ending.decide("refused", share)
        elif share:
            run.facts.added["budget"] = dict(share)
        return run

    async def _from_store(
        self, order: WorkOrder, backend: Backend, limits: Limits, hooks: Sequence[Hook]
    ) -> tuple[Backend, dict[str, Json]]:
        """A stored run in place of the backend, where a pure order was answered before; its key for the receipt."""
        from backplane.runtime import cache

        if not cache.is_pure(order) or hooks:
            return backend, {}
        key = await anyio.to_thread.run_sync(cache.key_of, order, backend, self.settings, limits)
        if key is None:
            return backend, {}
        found = await anyio.to_thread.run_sync(cache.find_cached, self.home, key)
        return found or backend, {"cache": {"key": key, "hit": found is not None}}

    async def _keep_result(self, run: Run) -> None:
        """Have a pure order's complete result served the next time."""
        told = run.facts.added.get("cache")
        if isinstance(told, dict) and not told["hit"] and run.is_sealed and run.stored.outcome == "complete":
            from backplane.runtime import cache

            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(cache.keep, self.home, told["key"], run.id)

    async def _take_share(
        self, order: WorkOrder, run_id: str | None
    ) -> tuple[WorkOrder, str, Mapping[str, Json] | BackplaneError]:
        """Take a child's share of its parent's budget, under the id that its run will have; or return why not."""
        from backplane.runtime.budgets import reserve

        if run_id is None or not await anyio.to_thread.run_sync(self.state_folder.is_new, run_id):
            run_id = str(uuid.uuid4())
        try:
            order, share = await anyio.to_thread.run_sync(lambda: reserve(self.state_folder.store(), order, run_id))
        except BackplaneError as error:
            return order, run_id, error
        return order, run_id, share

    def find_backend(self, named: Backend | str | None) -> Backend:
        """Return a backend by its name; None is the configured default.

        Raises:
            ConfigError: `config_invalid`, there is no default, or this is neither a name nor a backend.
            BackendError: `backend_not_found`.
        """
        if named is not None and not isinstance(named, str):
            if not callable(getattr(named, "open", None)):
                require_type(named, str, "the backend", "give a name, or a Backend")
            return named
        name = named or self.settings.default_backend
        if name is None:
            fact = "no backend was named and none is the default"
            raise ConfigError(
                "config_invalid", fact, hint="name one (--backend shell, backend='shell'), or set default_backend"
            )
        if name.startswith(REPLAY):
            return find_replay(name, self.home)
        return backends.find(name, self.settings, self.environ)

    def _check_room(self) -> None:
        if self._slots.waiting >= WAITING_MAX:
            fact = f"{WAITING_MAX} runs wait for one of {self.settings.limits.runs_max} places"
            raise BackendError("rate_limit_exceeded", fact, hint="try again later, or raise runs_max")

    async def _end(self, run: Run, task: LoopTask) -> None:
        try:
            async with AsyncExitStack() as ending:  # Each of them, whatever another raises.
                ending.callback(self._slots.release)
                ending.push_async_callback(self._keep_result, run)
                ending.push_async_callback(task.wait)
                ending.callback(run.drive.leave)
            if self.sender is not None and run.is_sealed:
                self._send(self.sender, run)
        except Exception as error:
            run.fail(error)

    def _send(self, sender: Sender, run: Run) -> None:
        from backplane.telemetry.spans import RunAbout

        about = RunAbout(
            backend=run.backend_id, model=run.order.config.model, task=run.order.task, is_remote=run.is_remote
        )
        sender.send(run.stored, about)

    def environ_of(self, run_id: str) -> Mapping[str, str]:
        """What a run's host has its environment chosen from: with telemetry, the run is its parent."""
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
        """Give the receipt of a run that ended while it waited for its place: nothing of it was started.

        Args:
            why: in words when it was cancelled, else what went wrong.
            added: as in `start`.
        """
        run = await self._run(order, backend, None, None, run_id, added=added)
        await run.drive.end_unstarted(why)
        return run

    async def apply(self, run_id: str) -> tuple[str, ...]:
        """Put the result of an ended run into the folder that it was copied from; return the files.

        Nothing is to be done for a run that worked in place, changed nothing, or is applied already.

        Raises:
            WorkspaceError: `execution_workspace_error`, a file has changed meanwhile, or a write failed.
            PolicyError: `policy_denied`, the result violates the run's policy.
            StoreError: there is no such run.
        """
        return await anyio.to_thread.run_sync(apply_once, self.state_folder, run_id)

    async def _run(
        self,
        order: WorkOrder,
        backend: Backend,
        on_ask: OnAsk | None,
        limits: Limits | None,
        run_id: str | None,
        output: Any = None,
        added: Mapping[str, Json] = NOTHING,
    ) -> Run:
        if run_id is None or not await anyio.to_thread.run_sync(self.state_folder.is_new, run_id):
            run_id = str(uuid.uuid4())
        limits = limits_of(limits or backend.limits, self.settings.limits, None)
        run = Run(self, order, backend, on_ask, limits, run_id, output)
        run.facts.added.update(added)
        return run


def _uuid_of(run_id: str) -> str:
    """Return a run's id as the contract prints it."""
    try:
        return canonical.uuid_text(run_id)
    except ValueError:
        fact = f"run_id is {run_id[:80]!r}, which is no UUID"
        raise ConfigError("config_invalid", fact, hint="pass `str(uuid.uuid4())`, or leave it out") from None
