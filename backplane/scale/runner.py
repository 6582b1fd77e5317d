"""Runs one order on a worker: fetches its workspace, runs it on this machine's control plane, stores the result.

A fault of the order ends in a receipt. Only a fenced attempt raises: its receipt stays in this worker's store, unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, Approval, RetryReported
from backplane.contract.receipt import Usage
from backplane.contract.work import OF_QUEUE, WorkOrder
from backplane.errors import BackendError, BackplaneError, ConfigError, PolicyError, WorkspaceError
from backplane.routing.driver import backend_for
from backplane.runtime.backends import Backend, from_command
from backplane.runtime.budgets import ANSWERS, COUNTED, after_run, amount_of
from backplane.runtime.door import AsyncOnAsk
from backplane.runtime.place import incoming, quota_of
from backplane.runtime.plane import ControlPlane, Run
from backplane.scale.content import Contents
from backplane.scale.engine import LOST_MAX, Attempt, Control, Emit, Job, LimitPause, OrderResult
from backplane.scale.orders import check_secrets, secret_names, server_values, servers_of
from backplane.workspace import archive

LOOK_S: Final = 0.1
"""Seconds between two checks whether the attempt must end."""
FENCED_GRACE_S: Final = 0.2
"""Seconds for the host of a fenced attempt to end; another attempt may be running already."""
KEEP_AGAIN_S: Final = 5.0
"""Seconds between two tries to store a result in the content store."""
KEEP_TRIES_MAX: Final = 180
"""Tries to store a result, for 15 minutes; then the order ends as `broken`, with the reason."""
DEFER_MS_MIN: Final = 60_000
"""Shortest wait in milliseconds for a limit of the model's service that gives the slot to another order.

For a shorter one, a new start of the agent and of the workspace would take as long.
"""
RECEIPT_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of a receipt in the engine's database; a longer one goes into the content store."""


class Runner:
    """Run attempts on one control plane; see `engine.RunJob`.

    Args:
        content: the store of workspaces and patches.
        log: called with a line when an attempt begins or has ended, and when its result cannot be stored.
    """

    def __init__(self, plane: ControlPlane, content: Contents, log: Callable[[str], object] = str) -> None:
        self._plane, self._content, self._log = plane, content, log

    async def __call__(self, job: Job, attempt: Attempt, emit: Emit, control: Control) -> OrderResult | LimitPause:
        """Run one attempt to its receipt, or until it has to wait for a limit before its agent has done anything.

        Raises:
            BackendError: `stream_closed`, the attempt was fenced.
            BackplaneError: the engine could not store events.
        """
        order, why = job.order, attempt.notes.cancelled
        for name in OF_QUEUE:
            order = order.without_abp(name)
        number, lost = len(attempt.all), list[Json](attempt.lost)
        place: Json = {"attempt": number, "lost": lost, "on_lost_worker": job.on_lost_worker, "label": job.label}
        added = {"queue": place}
        self._log(f"{job.order.id}  begins, attempt {number}: run {attempt.id}")
        async with incoming(self._plane.home) as folder:
            try:
                if why is None:
                    ready, backend, route = await self._prepared(job, attempt, order, folder)
            except BackplaneError as error:
                return await self._unstarted(job, attempt, order, error, added)
            if why is not None:
                return await self._unstarted(job, attempt, order, why, added)
            on_ask = _asking(control) if job.asks else None
            starting = self._plane.start(ready, backend, on_ask=on_ask, run_id=attempt.id, route=route, added=added)
            async with starting as run, anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, run, control)
                pause = await _forward(run, ready, emit)
                tasks.cancel_scope.cancel()
            if control.fenced is not None:
                raise BackendError("stream_closed", control.fenced)
            if pause is not None and control.why is None:
                self._log(f"{job.order.id}  waits {pause.wait_ms // 1000} s for a limit of the model's service")
                return pause
            return await self._result(run, attempt)

    async def _prepared(
        self, job: Job, attempt: Attempt, order: WorkOrder, folder: Path
    ) -> tuple[WorkOrder, Backend, Json]:
        """Return the order for this machine, its backend and its route. Raises an error if the order must not begin."""
        _check(job, attempt)
        order = await anyio.to_thread.run_sync(self._left, order, attempt)
        order = await anyio.to_thread.run_sync(self._arrived, job, order, folder)
        return await backend_for(order, self._plane, job.backend)

    async def _unstarted(
        self, job: Job, attempt: Attempt, order: WorkOrder, why: str | BackplaneError, added: dict[str, Json]
    ) -> OrderResult:
        """Return the result of an attempt that ends before its run."""
        named = job.order.abp("backend")
        name = job.backend or (named if isinstance(named, str) else None)
        try:
            backend = self._plane.find_backend(name)
        except BackplaneError:
            # It is never started: the receipt of the error needs its name.
            backend = from_command((name or "none",), cwd=self._plane.home, limits=self._plane.settings.limits)
        run = await self._plane.end_unstarted(order, backend, why, run_id=attempt.id, added=added)
        return await self._result(run, attempt)

    def _left(self, order: WorkOrder, attempt: Attempt) -> WorkOrder:
        """Return the order with its budget and wait reduced by void attempts. Raises PolicyError `policy_denied`."""
        for void, usage in zip(attempt.notes.void, attempt.reported, strict=False):
            if void.why == "lost":  # The others were refused by the service, which is not billed.
                order = after_run(self._plane.state_folder.store(), order, void.id, amount_of(usage))
        if attempt.notes.waited_ms:
            left_ms = max(_allowed_ms(order) - attempt.notes.waited_ms, 0)
            order = order.with_abp("wait_for_limit_s", left_ms // 1000)
        return order

    def _arrived(self, job: Job, order: WorkOrder, folder: Path) -> WorkOrder:
        """Return the order for this machine: its workspace unpacked, its secrets filled in."""
        root = folder / "tree"
        if job.tree is None:
            root.mkdir(mode=0o700)
        else:
            packed = folder / "tree.tar"
            self._content.fetch(job.tree, packed)
            archive.unpack(packed, root, quota_of(self._plane.settings.limits))
            packed.unlink()
        spec = msgspec.structs.replace(order.workspace, root=str(root), mode="staged", include=(), exclude=())
        return _filled(msgspec.structs.replace(order, workspace=spec), job, self._plane.environ)

    async def _result(self, run: Run, attempt: Attempt) -> OrderResult:
        """Store a run's result; retry for a while, as a full disk may have room again.

        Raises:
            WorkspaceError: `workspace_staging_failed`, it cannot be stored.
        """
        for tries_left in reversed(range(KEEP_TRIES_MAX)):
            try:
                result = await anyio.to_thread.run_sync(self._gathered, run, attempt)
                break
            except WorkspaceError as error:
                step = "the next try follows" if tries_left else f"get it here: backplane receipts export {attempt.id}"
                if tries_left in (0, KEEP_TRIES_MAX - 1):
                    self._log(f"{attempt.order_id}  its result cannot be stored: {error.message}; {step}")
                if not tries_left:
                    raise
            await anyio.sleep(KEEP_AGAIN_S)
        fault = run.end_error
        self._log(f"{attempt.order_id}  {run.stored.outcome}{f' ({fault.code})' if fault is not None else ''}")
        return result

    def _gathered(self, run: Run, attempt: Attempt) -> OrderResult:
        patch = None
        if run.patch is not None and run.stored.verification.git_diff is None and run.patch.is_file():
            patch = self._content.put(archive.read_pieces(run.patch))
        data = b"".join(run.receipt_chunks())
        is_short = len(data) <= RECEIPT_BYTES_MAX
        receipt, kept = (data.decode(), None) if is_short else (None, self._content.put(iter((data,))))
        return OrderResult(attempt.all, receipt, kept, patch, _cost_usd_micros(run), run.stored.outcome)


def _check(job: Job, attempt: Attempt) -> None:
    """Raise an error if this attempt must not begin."""
    if attempt.lost and job.on_lost_worker == "fail":
        fact = f"lost worker: attempt {attempt.lost[-1]} ended with its worker, and the order forbids another"
        raise BackendError("backend_crashed", fact, hint="allow one: queue submit --on-lost-worker rerun")
    if attempt.share.denied is not None:
        hint = "raise the budget: backplane queue limit --budget-usd USD"
        raise PolicyError("policy_denied", attempt.share.denied, hint=hint)
    if len(attempt.lost) >= LOST_MAX:
        raise BackendError("backend_crashed", f"lost worker: {LOST_MAX} attempts ended with their workers")
    check_secrets(job.order)


async def _forward(run: Run, order: WorkOrder, emit: Emit) -> LimitPause | None:
    """Store a run's events until its end; cancel it for a long wait for a limit that precedes any answer.

    Returns:
        The wait; None if there was none.
    """
    has_answered, pause = False, None
    async for batch in run.batches():
        await emit(batch.records)
        has_answered = has_answered or any(isinstance(event, ANSWERS) for event in batch.events)
        if pause is None and not has_answered and run.facts.folded.usage == Usage():
            pause = _pause(batch.events, order)
            if pause is not None:
                await run.cancel("the order waits in the queue for a limit of the model's service")
    return pause


def _pause(events: Sequence[AgentEvent], order: WorkOrder) -> LimitPause | None:
    """Return the wait for a limit of the model's service that these events report, if it is long and allowed."""
    for event in events:
        body = event.body if isinstance(event, RetryReported) else {}
        after_ms = body.get("retry_after_ms") if "until" in body else None
        if isinstance(after_ms, int) and DEFER_MS_MIN <= after_ms <= _allowed_ms(order):
            return LimitPause(after_ms)
    return None


def _allowed_ms(order: WorkOrder) -> int:
    return int(order.abp("wait_for_limit_s") or 0) * 1000


def _cost_usd_micros(run: Run) -> int | None:
    """Return the cost of a run, or None if it did not report all of it."""
    reason = run.end.reason if run.end is not None else None
    if reason == "refused" or not run.was_sent:
        return 0
    used = amount_of(run.stored.usage, run.facts.folded.usage).usd_micros
    return used if reason in COUNTED else None


def _asking(control: Control) -> AsyncOnAsk:
    """Return a callback that waits for the submitter's answer; the limit of asks bounds the wait."""

    async def on_ask(ask: Approval) -> Decision:
        while (decision := control.answers.get(str(ask.body.get("id")))) is None:
            await anyio.sleep(LOOK_S)
        return decision

    return on_ask


async def _watch(run: Run, control: Control) -> None:
    """End a run that is cancelled or fenced."""
    while control.why is None and control.fenced is None:
        await anyio.sleep(LOOK_S)
    if control.fenced is None:
        await run.cancel(control.why or "cancelled")
        while control.fenced is None:
            await anyio.sleep(LOOK_S)
    await run.cancel(control.fenced, grace_s=FENCED_GRACE_S)


def _filled(order: WorkOrder, job: Job, environ: Mapping[str, str]) -> WorkOrder:
    """Return the order with this worker's values of its secrets, also in the order's environment.

    Values in the environment count as secrets, so those of MCP servers never enter the receipt.

    Raises:
        ConfigError: `config_invalid`, this worker has no such variable.
    """
    named = list(servers_of(order))
    names = {*secret_names(job.order), *(str(value)[1:] for one in named for _, _, value in server_values(one))}
    if missing := sorted(names - set(environ)):
        fact = f"the order needs the variable {missing[0]}, and this worker does not have it"
        raise ConfigError("config_invalid", fact, hint="set it in the worker's environment, or use another label")
    for place, server in enumerate(named):
        filled: dict[str, Any] = dict(server)
        for kind, name, value in server_values(server):
            filled[kind] = {**filled[kind], name: environ[str(value)[1:]]}
        named[place] = filled
    if named:
        order = order.with_abp("mcp_servers", named)
    env = {name: environ[name] for name in sorted(names)}
    return msgspec.structs.replace(order, config=msgspec.structs.replace(order.config, env=env))
