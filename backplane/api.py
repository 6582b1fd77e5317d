"""Runs orders from Python in a few lines: `start` streams events, `run` blocks, `TaskRouter` asks the router.

`start` and `run` load the settings, make a control plane and find the backend. Use `ControlPlane` for many runs.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import anyio
import anyio.from_thread
import anyio.to_thread
from msgspec.structs import replace

from backplane.config import Settings
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError, require_type
from backplane.routing.driver import World, attempts_for, look_around
from backplane.routing.router import RoutingDecision
from backplane.routing.task import Strategy, TaskDescriptor, read_strategy
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import taken
from backplane.runtime.options import (
    OPTIONS,
    OnEvent,
    OrderOptions,
    WaitOptions,
    check_callbacks,
    check_names,
    hand_event,
)
from backplane.runtime.orders import log_without_effect, order_of
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run

if TYPE_CHECKING:
    from backplane.providers import Provider, Session, SessionConfig
    from backplane.routing.driver import Attempts


class StartOptions(OrderOptions, total=False):
    """Keyword arguments of `start` and `run` other than `output`; the docstring of `start` describes each."""

    backend: str | Backend | None
    settings: Settings | None
    home: str | os.PathLike[str] | None


ValueT = TypeVar("ValueT")


@overload
def start(
    order: WorkOrder | str, *, output: type[ValueT], **given: Unpack[StartOptions]
) -> AbstractAsyncContextManager[Run[ValueT]]: ...
@overload
def start(
    order: WorkOrder | str, *, output: Any = None, **given: Unpack[StartOptions]
) -> AbstractAsyncContextManager[Run]: ...
@asynccontextmanager
async def start(order: WorkOrder | str, **given: Any) -> AsyncIterator[Run[Any]]:
    """Run one order: iterate over the run for its events, then read `run.receipt`.

    Leaving the block early cancels the run cleanly: it leaves no process.

    Args:
        order: a work order, or just the task. Keyword arguments replace its members.

    Keyword Args:
        backend: a name, or a backend of your own; None takes the configured default, else the router's choice. If this
            choice fails, `run` takes the next one; `start` makes one attempt.
        root: the folder to work on; `~` is the home folder.
        model: the model that the agent asks; None takes the backend's own choice.
        policy: a profile, the name of a shipped one, or the path of a file; None takes the configured one.
        lane: `patch_first` leaves the original unchanged until `apply`; `workspace_first` applies the patch at the end.
        max_turns: maximum number of the model's answers.
        max_budget_usd: maximum cost of the agent in US dollars.
        wait_for_limit: maximum seconds to wait for limits of the model's service, all waits together (default: none).
        output: the shape of the answer, `run.value`: a msgspec struct, dataclass, TypedDict, pydantic model, or a
            JSON Schema.
        on_ask: plain or `async` function from `Approval` to `Decision`, for calls that the policy leaves open.
        hooks: called before or after tools run, in addition to those of the configuration and the order.
        tools: your functions that the agent may call, under the policy: their annotations become the schema, their
            docstrings the description. A host that takes no MCP servers refuses the order. A plain function is called
            in its own thread, an `async` one in the loop of the run.
        timeout: maximum seconds for the whole run; replaces `run_s` of the limits.
        limits: limits that replace those of the backend and of the settings.
        type: wish for the router, see `RouteOptions`; so are `preference`, `priority`, `strategy`,
            `max_cost_usd_micros`, `max_latency_ms`, `allow_unknown`, `input_tokens`, `output_tokens` and `seed`.
        settings: settings to use; None loads the configuration, like the command line.
        home: the state folder; None takes the usual one.

    Raises:
        ConfigError: `config_invalid`.
        PolicyError: `policy_invalid`.
        BackendError: `backend_not_found`, `backend_unavailable`, `rate_limit_exceeded`.
        CapabilityError: `capability_unsupported`, no backend was named and none is eligible.
    """
    async with attempting(order, given) as attempts, attempts.begin() as run:
        yield run


@overload
def run(
    order: WorkOrder | str, *, output: type[ValueT], on_event: OnEvent | None = None, **given: Unpack[StartOptions]
) -> Run[ValueT]: ...
@overload
def run(
    order: WorkOrder | str, *, output: Any = None, on_event: OnEvent | None = None, **given: Unpack[StartOptions]
) -> Run: ...
def run(order: WorkOrder | str, *, on_event: OnEvent | None = None, **given: Any) -> Run[Any]:
    """Run one order to its end and return the run.

    Inside a running event loop, as in a notebook, the run gets its own thread with its own loop.

    Args:
        order: a work order, or just the task. Keyword arguments replace its members.
        on_event: a plain or `async` function that is called with each event in the loop of the run, which is in the
            caller's thread unless a loop is running there.
        given: as in `start`: `backend`, `root`, `model`, `policy`, `lane`, `max_turns`, `max_budget_usd`,
            `wait_for_limit`, `output`, `on_ask`, `hooks`, `tools`, `timeout`, `limits`, `settings`, `home`, and the
            wishes for the router: `type`, `preference`, `priority`, `strategy`, `max_cost_usd_micros`,
            `max_latency_ms`, `allow_unknown`, `input_tokens`, `output_tokens`, `seed`.

    Raises:
        ConfigError, PolicyError, BackendError, CapabilityError: like `start`; the run's own error is `run.error`.
    """

    async def whole() -> Run[Any]:
        async with attempting(order, given) as attempts:
            return await attempts.last(on_event)

    if not _inside_a_loop():
        return anyio.run(whole)
    with anyio.from_thread.start_blocking_portal() as portal:
        ended: Future[Run[Any]] = portal.start_task_soon(whole)
        try:
            return ended.result()
        except BaseException:
            ended.cancel()  # Ctrl-C is raised in this thread; the run must end cleanly before the portal closes.
            raise


def _inside_a_loop() -> bool:
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


class Attempting:
    """Makes the runs of one order: one run if its backend is named, else a run for each choice of the router."""

    def __init__(
        self, plane: ControlPlane, attempts: Attempts | None, begun: Callable[..., AbstractAsyncContextManager[Run]]
    ) -> None:
        self._plane, self._attempts, self._begun = plane, attempts, begun

    def begin(self) -> AbstractAsyncContextManager[Run]:
        """Start the next run."""
        chosen = self._attempts
        return self._begun(chosen.order, chosen.backend, route=chosen.route) if chosen else self._begun()

    async def goes_on(self, run: Run) -> bool:
        """Return True if another run follows one that has ended."""
        return self._attempts is not None and await self._attempts.after(self._plane, run)

    async def last(self, on_event: OnEvent | None) -> Run:
        """Make all attempts and return the run of the last one. Raises ConfigError: `on_event` is no function."""
        require_type(on_event, Callable | None, "`on_event`", "a function from an event")
        while True:
            async with self.begin() as run:
                async for event in run:
                    if on_event is not None:
                        await hand_event(on_event, event)
            if not await self.goes_on(run):
                return run


@asynccontextmanager
async def attempting(
    order: WorkOrder | str, given: Mapping[str, Any], router: TaskRouter | None = None
) -> AsyncIterator[Attempting]:
    """Prepare the runs of one order; `given` has the arguments of `start`, whose errors are raised.

    Args:
        router: chooses the backend on its control plane, even if the caller names one.
    """
    check_names(given, *(StartOptions.__annotations__ if router is None else ()))
    options: Any = {name: value for name, value in given.items() if name in OPTIONS}
    hooks = options.get("hooks", ())
    check_callbacks(options.get("on_ask"), hooks)
    async with AsyncExitStack() as opened:
        settings, home = given.get("settings"), given.get("home")
        plane = router.plane if router else await opened.enter_async_context(ControlPlane(settings, home))
        whole, own = taken(await order_of(order, opened, **options))
        log_without_effect(whole, (*own, *hooks))
        backend, attempts = given.get("backend"), None
        backend = backend if backend is not None else whole.abp("backend")
        if router is not None or (backend is None and plane.settings.default_backend is None):
            attempts = await attempts_for(plane, whole, router.strategy if router is not None else None)
        of_run = {name: options[name] for name in ("on_ask", "output", "timeout", "limits") if name in options}
        start = functools.partial(plane.start, hooks=(*own, *hooks), **of_run)
        yield Attempting(plane, attempts, start if attempts else functools.partial(start, whole, backend))


class TaskRouter:
    """Runs orders on the backends that the router chooses; if a backend fails, the next is tried, as by `run`.

    Args:
        plane: provides the configured backends, and the receipts from which they are measured.
        strategy: a name, or a function from the task and the eligible options to the index of one; None takes the
            order's own strategy, else the configured one.

    Raises:
        ConfigError: `config_invalid`, there is no strategy of this name, or the function is `async`.
    """

    def __init__(self, plane: ControlPlane, strategy: Strategy | None = None) -> None:
        if inspect.iscoroutinefunction(strategy):
            fact, hint = f"the strategy {strategy.__name__} is an async function", "make it a plain function"
            raise ConfigError("config_invalid", fact, hint=f"{hint}: it chooses among options that it is given")
        self.plane = plane
        self.strategy = read_strategy(strategy) if isinstance(strategy, str) else strategy

    def select_provider(self, task: TaskDescriptor) -> RoutingDecision:
        """Choose a backend without starting it. Blocks.

        Raises:
            CapabilityError: `capability_unsupported`, no backend is eligible.
            ConfigError, StoreError: as `look_around`.
        """
        return self._choose(task)[1]

    def _choose(self, task: TaskDescriptor) -> tuple[World, RoutingDecision]:
        world = look_around(self.plane.settings, self.plane.environ, self.plane.home)
        decision = world.choose(task, strategy=self.strategy)
        decision.chosen()
        return world, decision

    @overload
    async def run(
        self, order: WorkOrder | str, *, output: type[ValueT], **given: Unpack[WaitOptions]
    ) -> Run[ValueT]: ...
    @overload
    async def run(self, order: WorkOrder | str, *, output: Any = None, **given: Unpack[WaitOptions]) -> Run: ...
    async def run(self, order: WorkOrder | str, **given: Any) -> Run[Any]:
        """Run an order to its end and return the run of the last attempt.

        Args:
            given: options of `start` except `backend`, `settings` and `home`; and `on_event`, which is called for each
                event of each attempt.

        Raises:
            CapabilityError, ConfigError, StoreError: as `start`, before anything is started.
        """
        on_event = given.pop("on_event", None)
        async with attempting(order, given, self) as attempts:
            return await attempts.last(on_event)

    async def create_session_for_task(
        self, task: TaskDescriptor, config: SessionConfig | None = None
    ) -> tuple[Session, Provider]:
        """Choose a backend for a task and begin a conversation with it; the caller must close the session.

        Raises:
            BackplaneError: as `select_provider` and `Provider.create_session`.
        """
        from backplane.providers import Provider, SessionConfig  # Most programs begin no conversation.

        world, decision = await anyio.to_thread.run_sync(self._choose, task)
        config, model = config or SessionConfig(), world.model_for(decision.chosen())
        if model is not None and config.model is None:
            config = replace(config, model=model)
        provider = Provider(self.plane, decision.chosen().backend)
        return await provider.create_session(config), provider
