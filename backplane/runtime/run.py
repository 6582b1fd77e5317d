"""One run, from its order to its stored receipt.

An order comes in, events are handed on as they are pulled, and one receipt is sealed however
the run ends. The consumer pulls: nothing is read from the child faster than it is taken, and
what is handed on was journalled before. No vendor's name is known here.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import msgspec

from backplane.config import Limits, tighter
from backplane.contract import envelope as wire
from backplane.contract.capability import read_manifest
from backplane.contract.events import AgentEvent, AssistantMessage, Failed
from backplane.contract.receipt import BackendIdentity, Receipt
from backplane.contract.unheard import check_settings
from backplane.contract.work import Mode, WorkOrder
from backplane.errors import (
    BackendError,
    BackplaneError,
    ConfigError,
    ContractError,
    RunCancelledError,
    StoreError,
    from_code,
    unforeseen,
)
from backplane.policy.rules import compile_policy
from backplane.process.aio import OwnTask, Readable, TaskRef, in_order
from backplane.process.launch import READ_BYTES_MAX
from backplane.protocol.control import ControlEnd, Sent
from backplane.protocol.messages import Events, version_compatible
from backplane.receipts.build import OWN_LINES_MAX, End, RunState, cause, failure_of
from backplane.receipts.manifests import keep_manifest, kept_manifest, kept_since
from backplane.receipts.pieces import canonical_chunks, unheard_facts
from backplane.receipts.trace import listed
from backplane.redact.cuts import HOLD_S_MAX
from backplane.redact.secrets import NO_SECRETS, Redactor
from backplane.runtime import finalize
from backplane.runtime.backends import Backend, Link, ProcessBackend, ReplayBackend
from backplane.runtime.environment import HostStart, RunEnvironment
from backplane.runtime.hooks import Hook, Hooks, above, configured
from backplane.runtime.inbound import Inbound, OnAsk, now
from backplane.runtime.limits import LOOK_S, Deadlines
from backplane.runtime.orders import answer_of, without_effect
from backplane.runtime.requirements import EXTENSIONS, RunRequirements, check_place
from backplane.runtime.writer import WRITE_S, LineWriter

if TYPE_CHECKING:
    import typing_extensions

    from backplane.runtime.finalize import Sealed
    from backplane.runtime.plane import ControlPlane
    from backplane.runtime.remote import Remote
    from backplane.workspace import Workspace

READER_LOOK_S: Final = 0.01
"""Seconds between two looks of a task that waits while another one reads the host's output."""

EXIT_WAIT_S: Final = 1.0
"""How long a child whose output has ended may take to exit before the stop ladder begins."""

RESULT_S_MAX: Final = 20.0
"""For what a run left to be read once its time is up; more than a change by hand or by a model needs."""

HURRIED_S_MAX: Final = 1.0
"""The same where somebody waits for the end; most often it takes a tenth of that."""

LADDER_S_MAX: Final = 8.0
"""For the stop ladder beyond its grace: more than all its steps may take; then the host is killed without it."""

_NEVER: Final = float("inf")

_BY_HAND: Final = "it said nothing on stderr: `backplane conform -- COMMAND…` shows how far it gets"
"""What helps where a host ended without a word."""


EventT = TypeVar("EventT", AssistantMessage, Failed)

if TYPE_CHECKING:
    ValueT = typing_extensions.TypeVar("ValueT", default=Any)
else:
    ValueT = TypeVar("ValueT")


class Run(Generic[ValueT]):
    """One execution of an order. Iterate over it for its events, or `await run.wait()`; then it has its receipt.

    Only one task at a time may iterate over it; any number may wait for its end meanwhile.

    Attributes:
        id: the run's id, also its `ref_id` on the wire.
        order: what was asked for.
        end: how it ended; None until then.
        patch: the file with the run's patch; None when there is none.
    """

    def __init__(
        self,
        plane: ControlPlane,
        order: WorkOrder,
        backend: Backend,
        on_ask: OnAsk | None,
        limits: Limits,
        run_id: str,
        output: Any = None,
    ) -> None:
        self.id = run_id
        self.order = order
        self._output = output
        self._receipt: Receipt | None = None
        self.end_error: BackplaneError | None = None
        """The error with which this control plane ended the run; None where its host or its caller ended it."""
        self.end: End | None = None
        self.patch: Path | None = None
        identity = BackendIdentity(backend.id)
        self.facts = RunState(run_id=self.id, order=order, backend=identity, started_ns=time.time_ns())
        if isinstance(backend, ReplayBackend):
            self.facts.replays(backend.replays)
        if isinstance(backend, ProcessBackend) and backend.plugin is not None:
            self.facts.added["plugin"] = dict(backend.plugin)
        self.more = False
        """Another order like this one will come."""
        self._plane = plane
        self._backend = backend
        self._backend_key = ""
        """Names the host's program as it is now: it is looked at once."""
        self._limits = limits
        self._deadlines = Deadlines(
            limits,
            backend.id,
            self._decide,
            passed_over=lambda: self._inbound.passed_over(),
            open_call=lambda: self._inbound.open_call(),
        )
        secrets = (*order.config.env.values(), *backend.secrets)
        redactor = self.facts.redactor = Redactor(secrets) if secrets else NO_SECRETS
        self.facts.added.update(self.facts.clean_json(unheard_facts(order.config.vendor)))
        self._line = ControlEnd(now=now, line_bytes_max=limits.line_bytes_max, redactor=redactor)
        self._queue: list[Events] = []
        self._rest: Iterator[AgentEvent] = iter(())
        start = HostStart(backend, plane.environ_of(run_id), plane.settings.isolation, plane.layers)
        self._environment = RunEnvironment(plane.state_folder, self.facts, limits, start, self._is_given_up)
        self._requirements: RunRequirements | None = None
        self._opened: OwnTask[Link] | None = None
        self._link: Link | None = None
        self._readable: Readable | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._writer: LineWriter | None = None
        self._due = anyio.Event()
        """The deadlines are to be kept now, and not when the next of them runs out."""
        self._exited: float | None = None
        """When the child's end was seen, by a monotonic clock."""
        self._inbound = Inbound(
            self.id,
            self.facts,
            limits,
            self._line,
            on_ask=on_ask,
            decide=self._decide,
            fail=self.fail,
            hand_on=self._hand_in,
        )
        self._environment.on_spent = self._inbound.keep_limit
        self._remote: Remote | None = None
        self._begun = False
        self._readers: weakref.WeakSet[_RunReader] = weakref.WeakSet()
        """Iterators over the events that are still referenced."""
        self._pulls = False
        """True while a task begins the run, reads its next events or ends it."""
        self._reads = False
        """A task waits for the host's output."""
        self._fault: BackplaneError | None = None
        """What nobody foresaw; it outranks every other end."""
        self._sent = False
        self._gone = anyio.Event()
        """The ladder has ended: nothing of the host is alive."""
        self._drained = False
        self._stopping = False
        self._finished = False
        self._sealing_since = _NEVER
        """When everything of the host was gone, and what it left was begun to be read; by a monotonic clock."""
        self._hurried_at = _NEVER
        self._sealed = anyio.Event()

    def __repr__(self) -> str:
        state = self._receipt.outcome if self._receipt is not None else "ending" if self._finished else "running"
        return f"<Run {self.id} on {self.backend_id!r}: {state}>"

    @property
    def is_sealed(self) -> bool:
        """Whether the run has ended and its receipt is stored."""
        return self._receipt is not None

    @property
    def was_sent(self) -> bool:
        """True once the order was sent to the host."""
        return self._sent

    @functools.cached_property
    def receipt(self) -> Receipt:
        """The sealed receipt. Raises RuntimeError until the run has ended."""
        stored = self.stored
        return msgspec.structs.replace(stored, trace=listed(stored.trace))

    @property
    def stored(self) -> Receipt:
        """The sealed receipt, with a trace that stays on disk. Raises as `receipt`."""
        if self._receipt is None:
            raise RuntimeError(f"run {self.id} has not ended: iterate over it to its end, or `await run.wait()`")
        return self._receipt

    @property
    def text(self) -> str:
        """The last message of the agent, its answer; empty when it said none. Raises as `receipt`."""
        last = self._last(AssistantMessage)
        return last.text if last is not None else ""

    def _last(self, kind: type[EventT]) -> EventT | None:
        last = None
        for event in self.receipt.trace:
            if isinstance(event, kind):
                last = event
        return last

    @property
    def value(self) -> ValueT:
        """The structured answer, as the `output` type that was asked for; None when none was given.

        Raises:
            RuntimeError: as `receipt`.
            ConfigError: `validation_failed`, the answer is none of that type.
        """
        value: ValueT = answer_of(self.stored, self._output)
        return value

    @property
    def error(self) -> BackplaneError | None:
        """Why the run did not complete, with a code and a next step; None while it goes on, and when it completed."""
        if self.end_error is not None or self._receipt is None:
            return self.end_error
        if (failure := failure_of(self._receipt)) is not None or self._receipt.outcome == "complete":
            return failure
        fact, hint = f"the run ended as {self._receipt.outcome}", f"backplane why {self.id}"
        if self.end is not None and self.end.reason == "cancelled":
            reason = self.facts.added.get("cancel_reason")
            return RunCancelledError("run_cancelled", f"{fact}: {reason or 'cancelled'}", hint=hint)
        return from_code("execution_tool_failed", f"{fact}, and its host did not say why", hint=hint)

    def check(self) -> Run[ValueT]:
        """Return this run if it ended as complete.

        Raises:
            BackplaneError: `run.error`.
            RuntimeError: as `receipt`.
        """
        if self.error is not None:
            raise self.error
        _ = self.stored
        return self

    def _repr_html_(self) -> str | None:
        """Return the table that a notebook shows of an ended run; None, which means `repr`, while it goes on."""
        from backplane.runtime.notebook import table  # Loads `html`, which no other run needs.

        return table(self._receipt, self.error, self.patch) if self._receipt is not None else None

    async def wait(self) -> Receipt:
        """Wait until the run has ended and return its receipt; without a reader in another task, drop its events."""
        while not self._sealed.is_set():
            if self._is_read_elsewhere():
                await anyio.sleep(READER_LOOK_S)
            else:
                self._drop_events()
                await self._pull()
        if not self._is_read_elsewhere():
            self._drop_events()
        return self.receipt

    def _drop_events(self) -> None:
        self._queue.clear()
        self._rest = iter(())

    @property
    def backend_id(self) -> str:
        """The name of what the run is on, as it is known here."""
        return self._backend.id

    @property
    def is_remote(self) -> bool:
        """Whether it works on another machine."""
        return self._remote is not None

    @property
    def folder(self) -> Path | None:
        """The run's own folder in the state directory; None before something of it is, or could not be, kept."""
        journal = self._environment.journal
        return journal.folder if journal is not None else None

    # Iterators and not generators: one that is left half-way would be finalized by the collector, with a warning.

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Iterate over the events. Raises ConfigError: `config_invalid`, another task does so already."""
        return _EventReader(self)

    def batches(self) -> AsyncIterator[Events]:
        """Iterate over the events in groups as they arrived, each with its canonical bytes. Raises as `__aiter__`."""
        return _Batches(self)

    def _is_read_elsewhere(self) -> bool:
        """Return True if a task that still runs, and is not this one, iterates over the run."""
        return bool(self._readers) and any(reader.task.is_another() for reader in self._readers)

    async def _next_batch(self) -> Events | None:
        """The next events; None when the run has ended, which it then has with its receipt."""
        while not self._queue and not self._sealed.is_set():
            await self._pull()
        return self._queue.pop(0) if self._queue else None

    async def _pull(self) -> None:
        """Begin the run, take in its next events, or end it; while another task does so, wait a little."""
        if self._pulls:
            await anyio.sleep(READER_LOOK_S)
            return
        self._pulls = True
        try:
            await self._pull_alone()
        except Exception as error:
            self.fail(error)
            await self._finish()
        finally:
            self._pulls = False

    async def _pull_alone(self) -> None:
        if not self._begun and self._environment.prepared and not self._stopping:
            await self._begin()
            self._begun = True
        elif self._drained or self._inbound.over.is_set() or self._link is None:
            await self._finish()
        else:
            await self._advance()

    def receipt_chunks(self) -> Any:
        """The sealed receipt in canonical bytes, in pieces; the run must have ended."""
        return canonical_chunks(self.stored)

    async def cancel(self, reason: str = "cancelled by the caller", *, grace_s: float | None = None) -> None:
        """End the run in order; go on iterating for its last events, or leave the block.

        Where its end has begun already, that is hurried.

        Args:
            grace_s: in place of the limit `cancel_grace_s`, for whoever has to end in time himself.
        """
        if grace_s is not None and not self._stopping:
            self._limits = msgspec.structs.replace(self._limits, cancel_grace_s=grace_s)
        if self._finished:
            self.hurry()
        self._decide("cancelled", None, note=reason)

    def fail(self, error: Exception) -> None:
        """End the run as failed for an exception that nobody foresaw, whatever else was said of its end.

        After the receipt is stored nothing changes it any more: the error is then a problem of the control plane's.
        """
        fault = unforeseen(error)
        if self._receipt is not None:
            self._note_problem(fault)
        elif self._fault is None:
            self._fault = self.end_error = fault
            self.end = End(reason="failed", code=fault.code)
            self._environment.abandon()
            self._inbound.close()
            self._stop()

    def _note_problem(self, fault: BackplaneError) -> None:
        line = f"run {self.id}, after its receipt was stored: {self._without_secrets(fault)}"
        self._plane.state_folder.problems.append(line)

    @property
    def is_ending(self) -> bool:
        """Whether there is nothing more to be stopped: the run is about to be sealed, or is."""
        return self._finished

    def hurry(self) -> None:
        """Have the end wait no longer than `HURRIED_S_MAX` for the difference; without it the run is partial."""
        self._hurried_at = min(self._hurried_at, time.monotonic())

    def input(self, text: str) -> None:
        """Give the agent more words of the user while it works.

        Raises:
            ProtocolError: `protocol_unexpected_message`, the host did not announce `input/1`.
        """
        self._send(wire.Input(ref_id=self.id, text=text))

    def interrupt(self) -> None:
        """Stop the agent's turn: unless words of the user wait, the run ends, and its conversation can be gone on with.

        Raises:
            CapabilityError: `capability_unsupported`, the host did not announce `interrupt/1`.
            ProtocolError: `protocol_unexpected_message`, the host has not said its hello yet.
        """
        self._send(wire.Interrupt(ref_id=self.id))

    # What a control plane does with it.

    async def start(self, hooks: Sequence[Hook]) -> None:
        """Start the host, unless the run is refused; `leave` has to follow in the same task, however this ends.

        Args:
            hooks: the caller's own.
        """
        if self.end is None and self._admit(hooks):
            # Here, as it has to be left in the same task.
            self._tasks = await anyio.create_task_group().__aenter__()
            await in_order(self._start_host)

    def refuse(self, error: BackplaneError) -> None:
        """End the run before anything of it is started; `start` then starts nothing."""
        self._decide("refused", error)

    def _start_soon(self, work: Callable[..., Awaitable[object]], *given: object) -> None:
        """Start a task of the run's: what it raises ends the run, and not the task that is in the block."""
        assert self._tasks is not None
        self._tasks.start_soon(self._guarded, work, *given)

    async def _guarded(self, work: Callable[..., Awaitable[object]], *given: object) -> None:
        try:
            await work(*given)
        except Exception as error:
            self.fail(error)

    async def _start_host(self) -> None:
        try:
            opening = await self._open()
            if self._environment.holds_host:
                self._environment.prepare(self._start_soon, self._mode())
            await self._enter(opening)
            self._environment.prepare(self._start_soon, self._mode())
            if self._link is not None:
                self._environment.note_host(self._link.pid, self._link.start)
        except BackplaneError as error:
            self._fail(await self._environment.cause(error))

    async def _enter(self, opening: AbstractAsyncContextManager[Link]) -> None:
        # A task of its own, as it is left in another one than it is entered in; a warm host brings the one it lives in.
        opened = opening if isinstance(opening, OwnTask) else OwnTask(opening)
        link = await opened.__aenter__()
        self._opened = opened
        self._connect(link)

    async def leave(self) -> None:
        """End and seal the run, unless it has ended; then leave its host, and what is still at work for that."""
        try:
            await self._finish()
        finally:
            try:
                if self._opened is not None:
                    await self._opened.__aexit__(None, None, None)
                self._environment.unlock()
            finally:
                if self._tasks is not None:
                    self._tasks.cancel_scope.cancel()
                    await self._tasks.__aexit__(None, None, None)

    async def end_unstarted(self, why: str | BackplaneError) -> None:
        """End and seal a run of which nothing was started.

        Args:
            why: in words when it was cancelled, else what went wrong.
        """
        if isinstance(why, BackplaneError):
            self._fail(why)
        else:
            await self.cancel(why)
        await self._finish()

    # Before the order is sent.

    def _admit(self, given: Sequence[Hook]) -> bool:
        """Everything that can be decided without starting anything; False when the run is refused."""
        try:
            check_settings(self.order)
            check_place(self.facts.settings, remote=self._backend.remote, routed="route" in self.facts.added)
            self.facts.policy = compile_policy(self.order.policy)
            self._backend_key = self._backend.key
            requirements = self._requirements = self._attach(given)
            kept = kept_manifest(self._plane.home, self._backend_key)
            if kept is not None:
                since = kept_since(self._plane.home, self._backend_key)
                requirements.check(requirements.supply(read_manifest(kept), EXTENSIONS), kept_since=since)
        except BackplaneError as error:
            self._decide("refused", error)
            return False
        return True

    def _attach(self, given: Sequence[Hook]) -> RunRequirements:
        """The hooks of the configuration, the caller and the order, and when to keep the workspace's state.

        Raises:
            ConfigError, PolicyError, CapabilityError: something of it is wrong, or nobody would answer.
        """
        inbound, remote = self._inbound, self._backend.remote
        rows, asked, hooks = self._plane.settings.hooks, self.facts.settings.get("hooks"), tuple(given)
        if rows or asked is not None:
            hooks = (*configured(rows), *given, *above(asked))
        if hooks:
            inbound.hooks = Hooks(hooks, self.id, self._plane.environ, self.facts.redactor, inbound.put_above)
            inbound.note_hooks = self._environment.note_hooks
        requirements = RunRequirements(self.facts, self.backend_id, hooks, remote=remote)
        if remote:
            # Who runs everything here shall not pay for loading it.
            from backplane.runtime.remote import Remote

            isolation = tighter(self._plane.settings.isolation, self.facts.settings.get("isolation"))
            self._remote = Remote(requirements.order, self.backend_id, isolation)
        return requirements

    async def _open(self) -> AbstractAsyncContextManager[Link]:
        """The way to start the host. Raises as `RunEnvironment.open`."""
        plane = self._plane
        if self._remote is not None:
            # Here is only the way there: what has to hold the agent holds it where it works.
            return self._backend.open(self.order, plane.environ)
        kind, warm = self._kind(), None
        if plane.warm is not None and kind is not None:
            warm = await plane.warm.take(kind)
        opening = await self._environment.open(warm)
        if plane.warm is not None and warm is not None and self.facts.start != "warm":
            plane.warm.misfit(kind)
        return opening

    def _kind(self) -> Hashable:
        """Which warm host would do; None for none. With telemetry each host's environment names its own run."""
        plane = self._plane
        if plane.sender is not None or plane.warm is None:
            return None
        return self._environment.kind(self._backend_key)

    def _expect_more(self) -> None:
        """Have a host wait for the next order like this one."""
        kind = self._kind()
        if self._plane.warm is not None and kind is not None:
            self._plane.warm.expect(kind, self._environment, more=self.more)

    def _fail(self, error: BackplaneError) -> None:
        """End a run that did not come to its order."""
        # What was given up as its time was up is told by that.
        self._deadlines.judge_run()
        refused = error.facts.exit_code == 4
        self._decide("store" if error.code == "receipt_store_failed" else "refused" if refused else "failed", error)

    def _connect(self, link: Link) -> None:
        self._link = link
        self._readable = Readable(link.stdout)
        self._writer = LineWriter(
            link,
            self._start_soon,
            on_stuck=self._input_unread,
            on_closed=self._input_closed,
        )
        self._inbound.connect(self._writer, self._start_soon)
        self._start_soon(self._watch)
        link.call_on_exit(lambda: self._due.set())

    def _mode(self) -> Mode | None:
        """How the place to work in is made; None when it is not here."""
        return self.order.workspace.mode if self._remote is None else None

    async def _begin(self) -> None:
        """Hear the hello, check it, and send the order once its place to work in is there."""
        try:
            await self._await_hello()
            if self._line.hello is None or self._stopping:
                return
            self._check_hello(self._line.hello)
            workspace = await self._environment.workspace()
            if not self._stopping:
                self._send_order(workspace)
        except BackplaneError as error:
            self._fail(error)

    async def _await_hello(self) -> None:
        self._deadlines.hello_since = time.monotonic()
        while self._line.hello is None and not self._drained and not self._stopping:
            await self._advance()
        self._deadlines.hello_since = None

    def _check_hello(self, hello: wire.Hello) -> None:
        assert self._requirements is not None
        assert self._environment.journal is not None
        manifest = self._requirements.supply(read_manifest(hello.capabilities), hello.extensions)
        self.facts.hello(hello, manifest)
        self._environment.journal.note({"fact": "hello", "hello": msgspec.to_builtins(hello)})
        if not version_compatible(hello.contract_version):
            raise ContractError(
                "contract_version_mismatch",
                f"{self.backend_id!r} speaks {hello.contract_version[:40]!r}, this control plane abp/v0.1",
                hint="use a host of the same major version",
            )
        with suppress(StoreError):  # Only a cache: the run can do without.
            keep_manifest(self._plane.home, self._backend_key, hello.capabilities)
        self._environment.check_asks(hello.extensions)
        if self._remote is not None:
            self._remote.check(hello)
        self._requirements.check_hello(hello, manifest)
        self._requirements.give_servers(hello, self._backend, self._limits)
        if self._inbound.hooks is not None:
            self._inbound.hooks.check_asks(hello.extensions, self.backend_id)

    def _send_order(self, workspace: Workspace | None) -> None:
        """The order, whole, with the place to work in: here, or on another machine."""
        assert self._requirements is not None
        assert self._environment.journal is not None
        folder = self._environment.journal.folder
        if self._remote is not None:
            self.facts.root = "/"  # Its folder there is not known here; paths are judged there, by the same policy.
            self._send_run(self._remote.order(), (*EXTENSIONS, *self._remote.extensions))
        elif workspace is not None:
            if self._requirements.checkpoints:
                self._inbound.open_checkpoints(workspace, folder)
            self.facts.root = str(workspace.root)
            self._send_run(self._requirements.at(self.facts.root), EXTENSIONS)
            if workspace.no_history:
                fact = f"the copy has one commit and not the history of its original: {workspace.no_history}"
                self.facts.added["no_history"] = workspace.no_history
                self._inbound.report("no_history", workspace.no_history, f"{fact}; --in-place works in the original")
            self._expect_more()

    def _send_run(self, order: WorkOrder, extensions: tuple[str, ...]) -> None:
        self._send(wire.RunMessage(id=self.id, work_order=order, extensions=extensions))
        self._sent = True
        assert self._environment.journal is not None
        self._environment.journal.note({"fact": "sent"})
        self._deadlines.restart()
        self._report_unheard()

    def _report_unheard(self) -> None:
        """Warn of what has no effect: members of the order or the hello, rules, tools of hooks, MCP servers that
        the cage hides."""
        if unheard := self._line.hello_unheard:
            shown = ", ".join(f"`{name}` is {text}" for name, text in unheard.items())
            self._inbound.report("unheard_hello", dict(unheard), f"without effect in the host's hello: {shown} (S9)")
        hooked = [tool for hook in self._inbound.hooks.all for tool in hook.tools] if self._inbound.hooks else ()
        for name, value, fact in without_effect(
            self.order, self.facts.added.get("unheard", ()), hooked, self.facts.root
        ):
            self._inbound.report(name, value, fact)
        if servers := self._environment.hidden_servers:
            shown = ", ".join(f"{name} ({path})" for name, path in servers.items())
            fact = f"MCP servers whose files are hidden, by deny_read or as they lie in the state folder: {shown}"
            self._inbound.report("hidden_servers", dict(servers), f"{fact}; keep them elsewhere, or off the rule")

    # While it runs.

    async def _advance(self) -> None:
        """Wait for the child's next output and take it in; until something carries progress, that is its silence."""
        if self._reads:
            # Another task reads this run: what it finds is found for both.
            await anyio.sleep(READER_LOOK_S)
            return
        self._reads = True
        try:
            self._deadlines.reading_since = time.monotonic()
            assert self._readable is not None
            if self._gone.is_set():
                self._take_in()
                await anyio.lowlevel.checkpoint()
            elif self._inbound.holding:
                await self._hold()
            else:  # Woken by the end of the ladder or an event of ours as well.
                await self._readable.until(self._take_in)
        finally:
            self._reads = False
            self._deadlines.end_read()

    def _note_progress(self) -> None:
        """Begin to count the child's silence anew when something came, and all the while an ask is open."""
        if self._inbound.progressed or self._inbound.asks_open:
            self._inbound.progressed = False
            self._deadlines.restart()

    async def _hold(self) -> None:
        assert self._readable is not None
        with anyio.move_on_after(HOLD_S_MAX) as holding:
            await self._readable.until(self._take_in)
        if holding.cancelled_caught:
            self._hand_on(self._inbound.let_go())

    def _take_in(self) -> bool:
        """One read; whether somebody should be woken for what it brought."""
        assert self._link is not None
        try:
            data = os.read(self._link.stdout, READ_BYTES_MAX)
        except BlockingIOError:
            self._drained = self._gone.is_set()
            return self._drained
        if data:
            self._hand_on(self._inbound.take(self._line.receive(data)))
            self._note_progress()
            return bool(self._queue) or not self._begun or self._inbound.holding or self._inbound.over.is_set()
        self._drained = True
        self._hand_on(self._inbound.take(self._line.end()))
        if not self._inbound.over.is_set():
            self._decide("host_exit", None)
        return True

    def _hand_on(self, batches: list[Events]) -> None:
        """Journal what came, then put it where the consumer finds it."""
        journal = self._environment.journal
        if journal is None or not batches:
            return
        lines, count, at = b"", 0, journal.count
        for batch in batches:  # Most often it is one; one of all would be the same bytes twice.
            lines += batch.lines
            count += len(batch.events)
        if not lines:
            return
        try:
            journal.append(lines, count)
        except BackplaneError as error:
            # Even after a good final: events that are not kept make another run of it.
            self.end = self.end or End(reason="store", code=error.code)
            self.end_error = self.end_error or error
            self._inbound.close()
            self._stop()
            return
        # What is kept is handed on, whatever raises afterwards; all of a batch may be held back as part of a secret.
        for batch in batches:
            if batch.events:
                self._queue.append(batch)
        for batch in batches:
            if batch.ours and len(self.facts.own_lines) < OWN_LINES_MAX:
                self.facts.own_lines.append(at)
            self.facts.fold_claims(batch.events, at, ours=batch.ours)
            at += len(batch.events)

    def _hand_in(self, batches: list[Events]) -> None:
        """What did not come from the child: whoever waits for the child's output is to see it at once."""
        self._hand_on(batches)
        if self._readable is not None:
            self._readable.wake()

    def _send(self, message: Sent) -> None:
        line = self._line.send(message)
        assert self._writer is not None
        self._writer.write(line)

    def _input_unread(self) -> None:
        text = f"{self.backend_id!r} did not read its input for {WRITE_S:g} s"
        self._decide("idle", BackendError("backend_timeout", text))

    def _input_closed(self) -> None:
        """A line found no reader: with the order not taken there will be no result."""
        if self._writer is not None and self._writer.written == 0 and self._tasks is not None:
            self._start_soon(self._order_not_taken)

    async def _order_not_taken(self) -> None:
        # A host that has ended, or says why it ends, is told by that and not by the broken pipe.
        with anyio.move_on_after(EXIT_WAIT_S):
            await self._inbound.over.wait()
        text = f"{self.backend_id!r} closed its input before it had taken the order"
        self._decide("protocol", BackendError("stream_closed", text, hint="a host reads its standard input to the end"))

    # Ending.

    def _is_given_up(self) -> bool:
        """Whether nobody waits for the copy that is being made, or for the difference at the end. From any thread."""
        if not self._sent:
            return self._stopping or self._environment.left or time.monotonic() > self._deadlines.ends
        since = self._sealing_since
        hurried_s, late_s = max(since, self._hurried_at), max(since, self._deadlines.ends)
        return time.monotonic() > min(hurried_s + HURRIED_S_MAX, late_s + RESULT_S_MAX)

    def _decide(self, reason: str, error: BackplaneError | None, *, note: str | None = None) -> None:
        """Fix how the run ends, the first word counts, and begin to stop the host."""
        if self.end is None and not self._inbound.over.is_set():
            self.end = End(reason=reason, code=error.code if error is not None else None)
            self.end_error = error
            if note is not None:
                self.facts.added["cancel_reason"] = note
        self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        walks = False
        try:
            self._due.set()
            if self._link is not None and self._tasks is not None:
                # Whoever waits for the child's output looks again: there may be nothing more to wait for.
                self._start_soon(self._ladder)
                walks = True
        finally:
            if not walks:
                self._gone.set()
                self._drained = True

    async def _ladder(self) -> None:
        assert self._link is not None
        link = self._link
        # Whoever is cancelled above, the child is stopped in order.
        try:
            with anyio.CancelScope(shield=True):
                await self._walk_down(link)
        finally:
            self._gone.set()
            if self._readable is not None:
                self._readable.wake()

    async def _walk_down(self, link: Link) -> None:
        asks_first = "cancel/1" in self._line.extensions and self._sent and not self._inbound.over.is_set()
        if self.end is not None and self.end.reason == "host_exit":
            await link.wait(EXIT_WAIT_S)
        await link.stop(grace_s=self._limits.cancel_grace_s, cancel=self._say_cancel if asks_first else None)

    async def _say_cancel(self, grace_s: float) -> None:
        reason = self.facts.added.get("cancel_reason") or (self.end.reason if self.end else "")
        self._send(wire.Cancel(ref_id=self.id, reason=str(reason), grace_ms=int(grace_s * 1000)))
        await self._inbound.over.wait()

    async def _watch(self) -> None:
        """Keep the deadlines, and notice the child's end: another may hold its output open when it says no more."""
        while (left_s := self._keep_deadlines()) is not None:
            with anyio.move_on_after(left_s):
                await self._due.wait()
            self._due = anyio.Event()

    def _keep_deadlines(self) -> float | None:
        assert self._link is not None
        if self._stopping:
            return None
        if self._link.fault is not None:
            raise self._link.fault
        self._note_progress()
        expected = self._sent and not self._inbound.asks_open
        left_s = max(self._deadlines.left_s(expected=expected), 0.001)
        if self._link.exit is None:
            return left_s
        self._exited = self._exited or time.monotonic()
        # What lies in the pipe is read first, however slow the consumer: only then does the reader wait.
        since = self._deadlines.reading_since
        if since is not None and time.monotonic() - max(self._exited, since) > EXIT_WAIT_S:
            self._decide("host_exit", None)
        return min(left_s, LOOK_S)

    async def _finish(self) -> None:
        """End the run whatever state it is in, then seal and store; once, and whoever else comes waits."""
        if self._sealed.is_set():
            return
        try:
            await in_order(self._finish_once)
        except Exception as error:
            self.fail(error)
            if not self._finished:
                await self._finish_once()

    async def _finish_once(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._finished:
                await self._sealed.wait()
                return
            self._finished = True
            try:
                settled, tree = self._environment.settled, self._leave_tree
                for step in (self._stop_host, self._take_rest, settled, tree, self._seal, self._reseal):
                    try:
                        await step()
                    except Exception as error:  # The steps after it are due all the same.
                        self.fail(error)
            finally:
                self._sealed.set()
                if self._readable is not None:
                    self._readable.close()

    async def _stop_host(self) -> None:
        """Stop the host, and read what it left in its pipe."""
        if not self._inbound.over.is_set():
            self._decide("cancelled", None, note="the caller left the run")
        self._stop()
        with anyio.move_on_after(self._limits.cancel_grace_s + LADDER_S_MAX):
            try:
                while not self._drained:
                    await self._advance()
            finally:
                await self._gone.wait()

    async def _take_rest(self) -> None:
        """Hand on what was held back, with nothing of the host alive."""
        if self._link is not None and self._link.exit is None:
            # Its ladder was broken off, as the loop itself is being ended.
            await self._link.stop(grace_s=0.0)
        self._sealing_since = time.monotonic()
        self._hand_on(self._inbound.let_go())
        if not self._inbound.over.is_set():
            self._inbound.close()
        self._explain_exit()

    async def _leave_tree(self) -> None:
        """Wait until nobody looks at the tree."""
        if self._inbound.checkpoints is not None:
            await self._inbound.checkpoints.close()

    async def _seal(self) -> None:
        """Seal and store what was seen."""
        if self._link is not None and self._link.fault is not None:
            self.fail(self._link.fault)
        self._take_sealed(await anyio.to_thread.run_sync(self._seal_all))

    async def _reseal(self) -> None:
        """Seal and store by the journal alone, if sealing what was seen failed; what is stored already counts."""
        if self._receipt is not None:
            return

        assert self.end is not None
        journal = self._environment.journal
        seal = functools.partial(finalize.seal_journal, self._plane.state_folder, self.facts, journal, self.end)
        sealed = await anyio.to_thread.run_sync(seal)
        if self._fault is not None and sealed.end != self.end:
            self._note_problem(self._fault)
            self.end_error = from_code(sealed.end.code, "its receipt says more") if sealed.end.code else None
        self._take_sealed(sealed)

    def _take_sealed(self, sealed: Sealed) -> None:
        self.end_error = self.end_error or sealed.error
        if self.end_error is not None:
            self.end_error = self._without_secrets(self.end_error)
        self._receipt, self.patch, self.end = sealed.receipt, sealed.patch, sealed.end

    def _without_secrets(self, error: BackplaneError) -> BackplaneError:
        try:
            return self.facts.redactor.error(error)
        except Exception:
            return from_code(error.code, "what went wrong is not said, as it could not be searched for secrets")

    def _seal_all(self) -> Sealed:
        end = self.end = self.end or End(reason=self.facts.claimed_outcome)
        if self._link is not None:
            link = self._link
            if self._writer is not None:
                self.facts.counts["unwritten"] = self._writer.unwritten
            self.facts.counts["redacted"] += self._line.redacted
            self.facts.counts["unended_lines"] = self._line.unended
            self.facts.counts["prefixed_lines"] = self._line.prefixed
            self.facts.counts["unnamed_events"] = self._line.unnamed
            if self._inbound.hooks is not None:
                self.facts.added["hooks"] = self._inbound.hooks.to_wire()
            self.facts.ended(link.stderr_tail, link.stderr_dropped, link.swept)
            if link.guard_lost:
                self.facts.added["guard"] = "lost"
        if self.end_error is not None:
            self.facts.added["error"] = cause(self._without_secrets(self.end_error))
        if self._environment.journal is None and end.reason != "cancelled":
            # What an order asked is remembered although it could not begin. Where it cannot be, no receipt is stored
            # either, which is told.
            with suppress(StoreError):
                self._environment.journal = self._plane.state_folder.journal(self.facts)
        return finalize.seal_run(
            self._plane.state_folder,
            self.facts,
            self._environment.journal,
            self._environment.leave(self.facts.added, used=self._sent),
            end,
            duration_s=self._deadlines.run_s,
            cleaned=self._link is not None and not (self._link.swept or self._link.guard_lost or self._fault),
        )

    def _explain_exit(self) -> None:
        """Put the exit code or signal and the last words into the end of a run whose host went away."""
        if self.end is None or self._link is None or self.end.reason != "host_exit":
            return
        exit_ = self._link.exit
        said_hello = self._line.hello is not None
        how = exit_.describe() if exit_ is not None else "no known exit"
        self.end_error = from_code(
            "backend_crashed" if said_hello else "protocol_handshake_failed",
            f"{self.backend_id!r} ended before its {'final' if said_hello else 'hello'}: {how}"
            f"{self._inbound.passed_over()}",
            evidence=self.facts.last_words(self._link.stderr_tail),
            hint="its stderr is in the receipt" if self._link.stderr_tail else _BY_HAND,
        )
        self.end = End(
            reason="host_exit",
            code=self.end_error.code,
            exit_code=exit_.code if exit_ is not None else None,
            signal=exit_.signal if exit_ is not None else None,
        )


class _RunReader:
    """An iterator over a run's events, and the task that made it."""

    def __init__(self, run: Run) -> None:
        if run._is_read_elsewhere():
            fact = f"another task iterates over run {run.id}"
            raise ConfigError(
                "config_invalid", fact, hint="read it in one task; others may `await run.wait()` meanwhile"
            )
        self._run = run
        self.task = TaskRef()
        run._readers.add(self)


class _EventReader(_RunReader):
    def __aiter__(self) -> _EventReader:
        return self

    async def __anext__(self) -> AgentEvent:
        run = self._run
        while True:
            for event in run._rest:
                return event
            batch = await run._next_batch()
            if batch is None:
                raise StopAsyncIteration
            run._rest = iter(batch.events)


class _Batches(_RunReader):
    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> Events:
        batch = await self._run._next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch
