"""The Python door: one order in a few lines, streamed or blocking.

`start` and `run` put together what a program would otherwise write itself: settings, a
control plane, a backend by name. For many runs over one control plane use `ControlPlane`.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import anyio
import anyio.from_thread

from backplane.config import Settings
from backplane.contract.events import AgentEvent
from backplane.contract.work import Lane, PolicyProfile, WorkOrder
from backplane.routing.driver import attempts_for
from backplane.runtime.backends import Backend
from backplane.runtime.functions import served
from backplane.runtime.hooks import Hook, taken
from backplane.runtime.inbound import OnAsk
from backplane.runtime.orders import make_order
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run

if TYPE_CHECKING:
    from backplane.routing.driver import Attempts


_OF_ORDER: Final = ("root", "model", "policy", "lane", "max_turns", "max_budget_usd")
"""Arguments that go over the order's members."""


@asynccontextmanager
async def start(
    order: WorkOrder | str,
    *,
    backend: str | Backend | None = None,
    root: str | os.PathLike[str] | None = None,
    model: str | None = None,
    policy: PolicyProfile | str | None = None,
    lane: Lane | None = None,
    max_turns: int | None = None,
    max_budget_usd: float | None = None,
    output: Any = None,
    on_ask: OnAsk | None = None,
    hooks: Sequence[Hook] = (),
    tools: Sequence[Callable[..., Any]] = (),
    settings: Settings | None = None,
    home: str | os.PathLike[str] | None = None,
) -> AsyncIterator[Run]:
    """Run one order: iterate over the run for its events, then read `run.receipt`.

    Leaving the block early cancels the run in order; nothing of it stays.

    Args:
        order: a work order, or just the task. What is given by name goes over its members.
        backend: a name, or a backend of your own; None takes the configured default, else the router's choice. Where
            that fails, `run` goes on with the next choice; a stream of events is one attempt.
        root: the folder to work on.
        policy: a profile, the name of a shipped one, or the path of a file; None takes the configured one.
        lane: `patch_first` keeps the original as it is until `apply`; `workspace_first` puts the patch in at the end.
        max_budget_usd: US dollars that the agent may spend.
        output: the shape of the answer, `run.value`: a msgspec struct, dataclass, TypedDict, pydantic model, or a
            JSON Schema.
        on_ask: answers what the policy leaves open, a plain or `async` function from `Approval` to `Decision`.
        hooks: asked before tools run and after, beside the configuration's and the order's own.
        tools: functions of yours that the agent may call, under the policy: their annotations are the schema, their
            docstrings the description. For hosts that take MCP servers; the others refuse the order.
        settings: None loads the configuration as the command line does.
        home: the state folder; None takes the usual one.

    Raises:
        ConfigError: `config_invalid`.
        PolicyError: `policy_invalid`.
        BackendError: `backend_not_found`, `backend_unavailable`, `rate_limit_exceeded`.
        CapabilityError: `capability_unsupported`, no backend was named and none is eligible.
    """
    given = _Given(
        backend=backend, root=root, model=model, policy=policy, lane=lane, max_turns=max_turns,
        max_budget_usd=max_budget_usd, output=output, on_ask=on_ask, hooks=hooks, tools=tools, settings=settings,
        home=home,
    )  # fmt: skip
    async with attempting(order, **given) as attempts, attempts.begin() as run:
        yield run


class _Given(TypedDict, total=False):
    """The arguments of `start` by name."""

    backend: str | Backend | None
    root: str | os.PathLike[str] | None
    model: str | None
    policy: PolicyProfile | str | None
    lane: Lane | None
    max_turns: int | None
    max_budget_usd: float | None
    output: Any
    on_ask: OnAsk | None
    hooks: Sequence[Hook]
    tools: Sequence[Callable[..., Any]]
    settings: Settings | None
    home: str | os.PathLike[str] | None


def run(
    order: WorkOrder | str,
    *,
    on_event: Callable[[AgentEvent], object] | None = None,
    **given: Unpack[_Given],
) -> Run:
    """Run one order to its end and return the run; all other arguments as `start`.

    Inside a running event loop (a notebook) the run has a thread with a loop of its own, and this call waits for it.

    Args:
        on_event: called for each event as it comes, a plain or `async` function.
    """
    whole = functools.partial(_run, order, on_event, given)
    if not _inside_a_loop():
        return anyio.run(whole)
    with _interruptible(), anyio.from_thread.start_blocking_portal() as portal:
        ended = portal.start_task_soon(whole)
        try:
            return ended.result()
        except BaseException:
            ended.cancel()  # Ctrl-C comes to this thread: the run ends in order before the portal does.
            raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in the main thread while it waits inside asyncio's loop.

    asyncio's handlers ask the loop to do something, and that cannot go on before this thread does. A program's own
    handler stays.
    """
    before = signal.getsignal(signal.SIGINT)
    module = getattr(getattr(before, "func", before), "__module__", None) or ""
    if threading.current_thread() is not threading.main_thread() or module.partition(".")[0] != "asyncio":
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _inside_a_loop() -> bool:
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


async def _run(order: WorkOrder | str, on_event: Callable[[AgentEvent], object] | None, given: _Given) -> Run:
    async with attempting(order, **given) as attempts:
        while True:
            async with attempts.begin() as run:
                async for event in run:
                    if on_event is not None and inspect.isawaitable(waits := on_event(event)):
                        await waits
            if not await attempts.goes_on(run):
                return run


class Attempting:
    """One order, and the runs that are made of it: one where its backend is named, else as the router goes on."""

    def __init__(
        self, plane: ControlPlane, attempts: Attempts | None, begun: Callable[..., AbstractAsyncContextManager[Run]]
    ) -> None:
        self._plane, self._attempts, self._begun = plane, attempts, begun

    def begin(self) -> AbstractAsyncContextManager[Run]:
        """Start the next run."""
        if self._attempts is None:
            return self._begun()
        return self._begun(self._attempts.order, self._attempts.backend, route=self._attempts.route)

    async def goes_on(self, run: Run) -> bool:
        """Whether there is to be another run after one that has ended."""
        return self._attempts is not None and await self._attempts.after(self._plane, run)


@asynccontextmanager
async def attempting(order: WorkOrder | str, **given: Unpack[_Given]) -> AsyncIterator[Attempting]:
    """Prepare the runs of one order; arguments and errors as `start`."""
    for name in given:
        if name not in _Given.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")
    backend, tools = given.get("backend"), given.get("tools", ())
    async with ControlPlane(given.get("settings"), given.get("home")) as plane:
        named: dict[str, Any] = {name: given.get(name) for name in _OF_ORDER}
        whole = make_order(order, **named)
        whole, own = taken(whole)
        async with AsyncExitStack() as opened:
            if tools:
                row = await opened.enter_async_context(served(tools, whole.config.env.values()))
                whole = whole.with_abp("mcp_servers", [*(whole.abp("mcp_servers") or ()), row])
            attempts, backend = None, backend if backend is not None else whole.abp("backend")
            if backend is None and plane.settings.default_backend is None:
                attempts = await attempts_for(plane, whole)
            hooks = (*own, *given.get("hooks", ()))
            start = functools.partial(plane.start, on_ask=given.get("on_ask"), hooks=hooks, output=given.get("output"))
            yield Attempting(plane, attempts, start if attempts else functools.partial(start, whole, backend))
