"""Drives an admitted run in one task, to its stored receipt.

The task starts the host, sends the order and reads the host's messages. However the run ends, the task then stops the
host, reads the rest of its output and seals one receipt. It reads the host's output only as fast as the run's reader
takes the events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from backplane.config import Limits
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.capability import read_manifest
from backplane.errors import BackendError, BackplaneError, ContractError, StoreError, from_code, unforeseen
from backplane.process.aio import Flag
from backplane.protocol.control import ControlEnd
from backplane.protocol.messages import version_compatible
from backplane.receipts.outcomes import End, cause
from backplane.receipts.state import RunState
from backplane.redact.cuts import HOLD_S_MAX
from backplane.runtime import finalize
from backplane.runtime.approvals import Approvals, OnAsk
from backplane.runtime.backends import Backend, Link
from backplane.runtime.channel import HostChannel
from backplane.runtime.checkpoints import RunCheckpoints
from backplane.runtime.ending import RunEnding
from backplane.runtime.events import EventStream, RunRecord, now
from backplane.runtime.inbound import Inbound
from backplane.runtime.orders import without_effect
from backplane.runtime.place import RunPlace
from backplane.runtime.requirements import RunRequirements
from backplane.runtime.setup import HostStart

if TYPE_CHECKING:
    from backplane.runtime.finalize import Sealed
    from backplane.runtime.plane import ControlPlane
    from backplane.workspace import Workspace

LADDER_S_MAX: Final = 8.0
"""Seconds, beyond the grace, for all steps of a host's stop; a host that takes longer is killed at once."""

_BY_HAND: Final = "it said nothing on stderr: `backplane conform -- COMMAND…` shows how far it gets"
"""Hint for a host that exited without writing to stderr."""


class Drive:
    """Drives one run; `run` is called once, in a task of its own."""

    def __init__(
        self,
        plane: ControlPlane,
        facts: RunState,
        backend: Backend,
        limits: Limits,
        on_ask: OnAsk | None,
    ) -> None:
        self.plane, self.facts, self.backend, self.limits = plane, facts, backend, limits
        self.grace_s = limits.cancel_grace_s
        self.sealed: Sealed | None = None
        self.ending = RunEnding(facts, limits.run_s)
        self.stream = EventStream()
        self.started = Flag()
        """Set once the host has started or will not."""
        environ = plane.environ_of(facts.run_id)
        start = HostStart(plane.state_folder, backend, environ, plane.settings.isolation, plane.layers)
        self.place = RunPlace(facts, limits, start, self.ending.is_given_up)
        self.record = RunRecord(facts, self.ending, self.place, self.stream)
        self.approvals = Approvals(facts, limits, self.ending, self.record, on_ask)
        self.inbound = Inbound(facts, self.ending, self.record, self.approvals)
        self.place.on_spent = self.inbound.keep_limit
        self.host: HostChannel | None = None
        self.requirements: RunRequirements
        """Set by `admit`, unless the order is refused."""

    # The run.

    async def run(self) -> None:
        """Run the order to its stored receipt; a failure ends the run, and nothing is raised."""
        ending = self.ending
        try:
            if self.limits.run_s is not None:
                ending.start.deadline = ending.talk.deadline = anyio.current_time() + self.limits.run_s - ending.run_s
            if not ending.is_decided:
                try:
                    await self._live()
                except anyio.get_cancelled_exc_class():  # asyncio cancels the task as it closes the loop.
                    ending.decide("cancelled", note="the event loop is being closed")
            await self._seal()
        except Exception as error:
            ending.fail(error)
            await self._reseal()
        finally:
            self.started.set()
            self.stream.close()
            self.plane.tidy(self.place.remove)

    def leave(self) -> None:
        """Cancel the run, unless it has ended, because its caller has left it."""
        self.ending.decide("cancelled", note="the caller left the run")
        self.stream.drop()

    async def end_unstarted(self, why: str | BackplaneError) -> None:
        """End and seal a run before anything is started for it.

        Args:
            why: the reason of a cancellation, or the error that ends the run.
        """
        if isinstance(why, BackplaneError):
            self._fail(why)
        else:
            self.ending.decide("cancelled", note=why)
        await self.run()

    async def _live(self) -> None:
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as observers:
                self.approvals.start_observer = self._starter(observers)
                await self._meet_host(self._starter(tasks))
                observers.cancel_scope.deadline = anyio.current_time() + self._hooks_s
            tasks.cancel_scope.cancel()

    def _starter(self, tasks: anyio.abc.TaskGroup) -> Callable[..., object]:
        """Return a function that starts a task of the run; an exception in the task ends the run."""
        return lambda work, *given: tasks.start_soon(self._guarded, work, *given)

    async def _guarded(self, work: Callable[..., Awaitable[object]], *given: object) -> None:
        try:
            await work(*given)
        except Exception as error:
            self.ending.fail(error)

    async def _meet_host(self, start_soon: Callable[..., object]) -> None:
        """Start the host, exchange messages with it, and stop it in any case."""
        ending = self.ending
        try:
            with ending.start, anyio.CancelScope() as started:
                mode = None if self.backend.remote else self.facts.order.workspace.mode
                async with self.place.open_host(mode, self.plane.warm) as link:
                    started.shield = True
                    await self._attend(link, start_soon)
        except Exception as error:
            self._fail(error)
        if not ending.is_decided and ending.is_late:
            self._be_late()

    async def _attend(self, link: Link, start_soon: Callable[..., object]) -> None:
        line = ControlEnd(now=now, line_bytes_max=self.limits.line_bytes_max, redactor=self.facts.redactor)
        host = self.host = HostChannel(link, line, self.backend, self.ending, start_soon)
        self.approvals.host, self.ending.line = host, line
        try:
            with self.ending.talk:
                self.started.set()
                await self._talk(host)
        except Exception as error:
            self._fail(error)
        finally:
            try:
                await self._stop(host)
            finally:
                host.close()

    async def _talk(self, host: HostChannel) -> None:
        """Read the hello, check it, send the order once the workspace is made, and read the run's messages."""
        ending, line = self.ending, host.line
        while line.hello is None and not ending.is_decided:
            await self._hear(host)
        if line.hello is None or ending.is_decided:
            return
        self._check_hello(line.hello)
        workspace = await self.place.workspace()
        if workspace is not None:
            await self.requirements.add_instructions(line.hello, workspace)
        await self.approvals.observe("run_start", {"task": self.facts.order.task, "backend": self.backend.id})
        self._send_order(host, workspace)
        while not ending.is_decided:
            await self._hear(host)
        if self.plane.warm is not None and self.place.setup is not None:
            self.plane.warm.expect(self.place.setup)  # Only now, as its start would slow down the start of this agent.

    async def _hear(self, host: HostChannel) -> None:
        """Process the next output of the host, and wait until the run's reader has taken the events."""
        pause_s = HOLD_S_MAX if self.inbound.holding else math.inf
        try:
            data = await host.receive(self._silence_s, pause_s)
        except TimeoutError:
            self._judge_silence()
            return
        if data is not None:
            self._take(host, data)
        else:
            self.record.add(self.inbound.flush())
        began = time.monotonic()
        await self.stream.taken()
        host.excuse(time.monotonic() - began)

    def _take(self, host: HostChannel, data: bytes) -> None:
        """Process the data of one read; no data means the end of the host's output."""
        self.record.add(self.inbound.take(host.line.receive(data) if data else host.line.end()))
        self.approvals.send()
        if self.inbound.progressed or self.approvals.open:
            self.inbound.progressed = False
            host.progressed()
        if not data and not self.ending.over.is_set():
            self.ending.decide("host_exit")

    def _silence_s(self) -> float:
        """Return the present limit of the host's silence."""
        if not self.ending.was_sent:
            return self.limits.hello_s
        if self.approvals.open:
            return math.inf
        return self.inbound.wait_s + (self.limits.tool_s if self.inbound.open_call() else self.limits.idle_s)

    def _judge_silence(self) -> None:
        limits, name, call = self.limits, self.backend.id, self.inbound.open_call()
        wrote = self.inbound.passed_over()
        if not self.ending.was_sent:
            text = f"no hello from {name!r} within {limits.hello_s:g} s (hello_s){wrote}"
            hint = "is this a program that speaks abp/v0.1? raise hello_s for a slow one"
            self.ending.decide("failed", BackendError("protocol_handshake_failed", text, hint=hint))
            return
        if call:
            silence = f"for {limits.tool_s:g} s while its call of {call!r} was open (tool_s)"
            hint = "end the command earlier, or raise tool_s of [limits] (BACKPLANE_TOOL_S)"
        else:
            silence, hint = f"for {limits.idle_s:g} s (idle_s)", "raise limits.idle_s (BACKPLANE_IDLE_S)"
        self.ending.decide(
            "idle", BackendError("backend_timeout", f"{name!r} sent nothing {silence}{wrote}", hint=hint)
        )

    # The order.

    def _check_hello(self, hello: wire.Hello) -> None:
        """Record the hello and check the order against it. Raises CapabilityError, ConfigError, ContractError."""
        requirements = self.requirements
        manifest = requirements.supply(read_manifest(hello.capabilities), hello.extensions)
        self.facts.hello(hello, manifest)
        self.place.note({"fact": "hello", "hello": msgspec.to_builtins(hello)})
        if not version_compatible(hello.contract_version):
            raise ContractError(
                "contract_version_mismatch",
                f"{self.backend.id!r} speaks {hello.contract_version[:40]!r}, this control plane abp/v0.1",
                hint="use a host of the same major version",
            )
        requirements.keep(self.plane.home, hello)
        self.place.check_asks(hello.extensions)
        requirements.check_hello(hello, manifest)
        requirements.add_servers(hello, self.limits)

    def _send_order(self, host: HostChannel, workspace: Workspace | None) -> None:
        """Send the order with the folder to work in, on this or another machine."""
        facts, requirements = self.facts, self.requirements
        # The folder on another machine is not known here; the control plane there judges paths by this policy.
        facts.root = "/" if workspace is None else str(workspace.root)
        if workspace is not None and requirements.checkpoints:
            self.approvals.checkpoints = RunCheckpoints(workspace, facts, self.record)
        order = requirements.order_at(facts.root)
        host.send(wire.RunMessage(id=facts.run_id, work_order=order, extensions=requirements.extensions))
        self.ending.was_sent = True
        self.place.note({"fact": "sent"})
        host.progressed()
        for name, value, fact in self._warnings(host, workspace):
            self.record.report(name, value, fact)

    def _warnings(self, host: HostChannel, workspace: Workspace | None) -> Iterator[tuple[str, Json, str]]:
        """Yield what has no effect in the order or the hello, and what the agent lacks, as name, values and text."""
        facts = self.facts
        if unheard := host.line.hello_unheard:
            shown = ", ".join(f"`{name}` is {text}" for name, text in unheard.items())
            yield "unheard_hello", dict(unheard), f"without effect in the host's hello: {shown} (S9)"
        hooked = [tool for hook in self.approvals.hooks.all for tool in hook.tools] if self.approvals.hooks else ()
        yield from without_effect(facts.order, facts.added.get("unheard", ()), hooked, facts.root)
        if servers := self.place.hidden_servers:
            shown = ", ".join(f"{name} ({path})" for name, path in servers.items())
            fact = f"MCP servers whose files are hidden, by deny_read or as they lie in the state folder: {shown}"
            yield "hidden_servers", dict(servers), f"{fact}; keep them elsewhere, or off the rule"
        if cut := [row["path"] for row in facts.added.get("project_instructions", ()) if "cut_from" in row]:
            fact = f"project instructions were cut, as they are too long: {', '.join(cut)}"
            yield "cut_instructions", cut, f"{fact}; shorten them, or name the files in the order's context"
        if workspace is not None and (why := workspace.no_history):
            facts.added["no_history"] = why
            fact = f"the copy has one commit and not the history of its original: {why}"
            yield "no_history", why, f"{fact}; --in-place works in the original"

    # The end.

    def _fail(self, error: Exception) -> None:
        """End the run because of an error, with the reason `refused`, `store` or `failed`."""
        if not isinstance(error, BackplaneError):
            self.ending.fail(error)
            return
        if self.ending.is_late:  # The error is then a consequence of the deadline.
            self._be_late()
        refused = error.facts.exit_code == 4
        reason = "store" if error.code == "receipt_store_failed" else "refused" if refused else "failed"
        self.ending.decide(reason, error)

    def _be_late(self) -> None:
        text = f"the run took longer than {self.limits.run_s:g} s (run_s)"
        hint = "raise --timeout (limits.run_s)"
        self.ending.decide("deadline", BackendError("backend_timeout", text, hint=hint))

    async def _stop(self, host: HostChannel) -> None:
        """Stop the host, and read the rest of its output."""
        ending, grace_s = self.ending, self.grace_s
        if not ending.is_decided and (data := host.read()):
            self._take(host, data)  # Output that came in time counts.
        if not ending.is_decided:
            self._be_late() if ending.is_late else ending.decide("cancelled", note="the caller left the run")
        reason = str(self.facts.added.get("cancel_reason") or (ending.end.reason if ending.end else ""))
        async with anyio.create_task_group() as stopping:
            stopping.start_soon(self._guarded, host.stop, self.facts.run_id, grace_s, reason, self.stream.wake)
            with anyio.move_on_after(grace_s + LADDER_S_MAX):
                try:
                    while data := await host.receive(lambda: math.inf):
                        self._take(host, data)
                        await self.stream.taken(host.gone.is_set)
                    self._take(host, b"")
                except Exception as error:
                    ending.fail(error)
                await host.gone.wait()
                while data := host.read():
                    self._take(host, data)
            stopping.cancel_scope.cancel()
        if host.link.exit is None:  # The host's stop was interrupted, as the event loop is ending.
            await host.link.stop(grace_s=0.0)

    @property
    def _hooks_s(self) -> float:
        """Seconds for hooks that observe the end; a person who pressed Ctrl-C waits for them."""
        return self.grace_s if self.ending.end is not None and self.ending.end.reason == "cancelled" else math.inf

    async def _seal(self) -> None:
        """Seal the run's receipt and store it."""
        ending = self.ending
        ending.begin_sealing()
        self.record.add(self.inbound.flush())
        ending.close()
        self._explain_exit()
        await self.place.settled()
        await self.approvals.close()
        if self.host is not None and self.host.link.fault is not None:
            ending.fail(self.host.link.fault)
        end = ending.end = ending.end or End(reason=self.facts.claimed_outcome)
        ending.hooks.deadline = min(ending.hooks.deadline, anyio.current_time() + self._hooks_s)
        await self.approvals.observe("run_end", {"reason": end.reason, "code": end.code}, ending.hooks)
        error, fault = ending.error, ending.fault
        sealed = await anyio.to_thread.run_sync(self._seal_all, end, error, fault)
        if ending.fault is not None and ending.fault is not fault:  # A new exception came during the sealing.
            self.note_problem(ending.fault)
            ending.error = error
        self._take_sealed(sealed)

    def _take_sealed(self, sealed: Sealed) -> None:
        ending, self.sealed = self.ending, sealed
        error = ending.error or sealed.error
        ending.error = self.without_secrets(error) if error is not None else None
        ending.end = sealed.end

    def _seal_all(self, end: End, error: BackplaneError | None, fault: BackplaneError | None) -> Sealed:
        ending, facts, host, plane = self.ending, self.facts, self.host, self.plane
        if host is not None:
            line, link = host.line, host.link
            facts.counts["unwritten"] = host.unwritten
            facts.counts["redacted"] += line.redacted
            facts.counts["unended_lines"] = line.unended
            facts.counts["prefixed_lines"] = line.prefixed
            facts.counts["unnamed_events"] = line.unnamed
            facts.ended(link.stderr_tail, link.stderr_dropped, link.swept)
            if link.guard_lost:
                facts.added["guard"] = "lost"
        if self.approvals.hooks is not None:
            facts.added["hooks"] = self.approvals.hooks.to_wire()
        if error is not None:
            facts.added["error"] = cause(self.without_secrets(error))
        if self.place.journal is None and end.reason != "cancelled":
            # A journal keeps the order of a run that could not begin. If no journal can be made, no receipt can be
            # stored either, which ends the run with an error.
            with suppress(StoreError):
                self.place.journal = plane.state_folder.journal(facts)
        self.place.report(facts.added)
        return finalize.seal_run(
            plane.state_folder,
            facts,
            self.place.journal,
            self.place.made if ending.was_sent else None,
            end,
            duration_s=ending.run_s,
            cleaned=host is not None and not (host.link.swept or host.link.guard_lost or fault),
        )

    async def _reseal(self) -> None:
        """Seal and store the run from its journal after an exception; if a receipt is already stored, use that one."""
        ending, folder = self.ending, self.plane.state_folder
        assert ending.end is not None
        code = ending.end.code or "internal"
        try:
            receipt = await anyio.to_thread.run_sync(folder.seal_failed, self.facts, self.place.journal, code)
        except Exception as error:  # The next start seals the run.
            self.note_problem(unforeseen(error))
            return
        end = msgspec.convert(receipt.backplane["end"], End)
        if ending.fault is not None and end != ending.end:
            self.note_problem(ending.fault)
            ending.error = from_code(end.code, "its receipt says more") if end.code else None
        self._take_sealed(finalize.Sealed(receipt=receipt, end=end, error=None, patch=None))

    def note_problem(self, fault: BackplaneError) -> None:
        """Add an error of the sealing to the problems of the state folder."""
        line = f"run {self.facts.run_id}, while its receipt was stored: {self.without_secrets(fault)}"
        self.plane.state_folder.add_problems(line)

    def without_secrets(self, error: BackplaneError) -> BackplaneError:
        """Return an error with the run's secrets redacted."""
        try:
            return self.facts.redactor.error(error)
        except Exception:
            return from_code(error.code, "what went wrong is not said, as it could not be searched for secrets")

    def _explain_exit(self) -> None:
        """Add exit code or signal, and the last lines of stderr, to the end of a run whose host exited early."""
        ending, host = self.ending, self.host
        if ending.end is None or host is None or ending.end.reason != "host_exit":
            return
        exit_, said_hello = host.link.exit, host.line.hello is not None
        how = exit_.describe() if exit_ is not None else "no known exit"
        ending.error = from_code(
            "backend_crashed" if said_hello else "protocol_handshake_failed",
            f"{self.backend.id!r} ended before its {'final' if said_hello else 'hello'}: {how}"
            f"{self.inbound.passed_over()}",
            evidence=self.facts.last_words(host.link.stderr_tail),
            hint="its stderr is in the receipt" if host.link.stderr_tail else _BY_HAND,
        )
        ending.end = End(
            reason="host_exit",
            code=ending.error.code,
            exit_code=exit_.code if exit_ is not None else None,
            signal=exit_.signal if exit_ is not None else None,
        )
