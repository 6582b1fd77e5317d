"""The child's whole kit: say hello, take runs, stream events, end each run once.

A host is a `Host` (who it is, what it can) and a `work` coroutine that is given one run at a
time to emit events on. The kit owns stdin and stdout: stray prints go to stderr. What a vendor
says and how a model is reached are the host's own affair.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import stat
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json, timestamp_at, uuid_text
from backplane.contract.capability import Level, Manifest
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    RunCompleted,
    RunStarted,
    ToolCall,
    ToolResult,
    Warned,
    carry,
)
from backplane.contract.receipt import (
    CONTRACT_VERSION,
    Artifact,
    BackendIdentity,
    Receipt,
    RunMetadata,
    Usage,
    Verification,
    read_receipt,
)
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError

if TYPE_CHECKING:  # The hello does not wait for them to be loaded.
    import anyio.abc
    import anyio.lowlevel
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from backplane.policy import Policy
    from backplane.protocol import Broken, Received

GRACE_S: Final = 2.0
"""Time for an orderly end when the canceller named none; the control plane's own default."""

GRACE_MARGIN_S: Final = 0.3
"""Kept back from a named grace, so that nested ends finish inside one another."""

ASK_S: Final = 300.0
"""How long an ask waits for a person before its default decides."""

PEER_GONE_S: Final = 3.5
"""For all runs to end once the peer is gone: with the look before it, and the exit after, within 5 s."""

WRITE_STUCK_S: Final = 0.5
"""Once everything has to end: how long a reader may take nothing before nobody waits for it any more."""

PEER_GONE_POLL_S: Final = 1.0
"""How often a host looks whether anybody still reads: a dead peer ends it within 5 s, an idle host costs nothing."""

CHUNKS_HELD_MAX: Final = 4
"""Chunks of a run's tree that wait to be kept: a megabyte, and then nothing more is read."""

RUNS_END_POLL_S: Final = 0.01
"""How often an ending host looks whether its last run is over."""

ERROR_CHARS_MAX: Final = 8192
"""Longest text of an error on the line: more than anybody reads, far below what a line takes."""

EMITS_PER_YIELD: Final = 64
"""Events written between two looks at the loop, so that a cancel reaches a host that only emits."""

PREVIEW_BYTES_MAX: Final = 8192
"""Longest preview of a command's output, as the contract has it."""

EXTENSIONS: Final = ("cancel/1", "ping/1", "ask/1")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Who a host is and what it can."""

    id: str
    version: str | None = None
    """Version of the agent it drives; None when it drives none."""
    capabilities: dict[str, Level]
    extensions: tuple[str, ...] = EXTENSIONS
    backends: tuple[dict[str, Any], ...] | UnsetType = UNSET
    """Only of a host that is itself a control plane: `{id, ready, capabilities}` each."""

    def hello(self) -> wire.Hello:
        return wire.Hello(
            contract_version=CONTRACT_VERSION,
            backend=BackendIdentity(self.id, self.version),
            capabilities=Manifest(self.capabilities).to_wire(),
            extensions=self.extensions,
            backends=self.backends,
        )


class Told(msgspec.Struct, frozen=True):
    """The ending of a run whose last message was made elsewhere: its line, in pieces."""

    line: Iterable[bytes]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What `work` gives back when a run came to its end."""

    outcome: Literal["complete", "partial", "failed"] = "complete"
    usage: Usage = Usage()
    usage_raw: Json = {}
    artifacts: tuple[Artifact, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """The answer to an ask."""

    decision: Literal["allow", "deny", "modify"]
    reason: str = ""
    input: Json | UnsetType = UNSET
    """The tool input to use instead, with `modify`."""
    text: str | None = None
    """An answer in words, or the output to show instead of the tool's own."""
    remember: Literal["once", "run"] = "once"


class HostRun:
    """One run, seen from the host: the order, and the ways to say what happens."""

    def __init__(self, link: _Link, message: wire.Run) -> None:
        from backplane.policy import compile_policy

        self.id = message.id
        self.order: WorkOrder = message.work_order
        self.extensions = message.extensions
        self.policy: Policy = compile_policy(self.order.policy)
        self.grace_s = GRACE_S
        """Time the host's own clean-up may take once the run is cancelled."""
        self.cancelled_because: str | None = None
        self.on_cancel: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called when the run is cancelled, in place of cancelling `work`: for one that then ends by itself."""
        self.on_input: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Takes more words of the user while `work` runs; a host that sets it announces `input/1`."""
        self.on_interrupt: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Stops the agent's turn, and `work` ends by itself; a host that sets it announces `interrupt/1`."""
        self.emitted = 0
        self.scope = anyio.CancelScope()
        self.answers: dict[str, tuple[anyio.Event, list[wire.Answer]]] = {}
        self.tree: MemoryObjectReceiveStream[wire.Tree] | None = None
        """The workspace in chunks, when both ends speak `tree/1`; it ends early when stdin does."""
        self.tree_in: MemoryObjectSendStream[wire.Tree] | None = None
        if "tree/1" in message.extensions and "tree/1" in link.host.extensions:
            self.tree_in, self.tree = anyio.create_memory_object_stream(CHUNKS_HELD_MAX)
        self.started_ns = time.time_ns()
        self._started_monotonic = time.monotonic()
        self._link = link
        self._asked = 0

    async def emit(self, event: AgentEvent) -> None:
        """Send one event; waits while the reader is slow.

        Raises:
            BackplaneError: `stream_closed` when nobody reads any more.
        """
        self.emitted += 1
        await self._link.send(wire.Event(ref_id=self.id, event=event))
        if self.emitted % EMITS_PER_YIELD == 0:
            await anyio.lowlevel.checkpoint()

    async def delta(self, text: str) -> None:
        await self.emit(AssistantDelta(ts=self.now(), text=text))

    async def message(self, text: str) -> None:
        await self.emit(AssistantMessage(ts=self.now(), text=text))

    async def tool_call(self, name: str, input: Json, id: str | None = None, parent: str | None = None) -> None:
        await self.emit(ToolCall(ts=self.now(), tool_name=name, input=input, tool_use_id=id, parent_tool_use_id=parent))

    async def tool_result(self, name: str, output: Json, *, is_error: bool = False, id: str | None = None) -> None:
        await self.emit(ToolResult(ts=self.now(), tool_name=name, output=output, is_error=is_error, tool_use_id=id))

    async def file_changed(self, path: str, summary: str) -> None:
        await self.emit(FileChanged(ts=self.now(), path=path, summary=summary))

    async def command_executed(self, command: str, exit_code: int | None, preview: str) -> None:
        cut = preview.encode()[:PREVIEW_BYTES_MAX].decode(errors="ignore")
        await self.emit(CommandExecuted(ts=self.now(), command=command, exit_code=exit_code, output_preview=cut))

    async def warn(self, message: str) -> None:
        await self.emit(Warned(ts=self.now(), message=message))

    async def error(self, message: str, code: str | None = None) -> None:
        await self.emit(Failed(ts=self.now(), message=message, error_code=code if code else UNSET))

    async def carry(self, name: str, body: Json, message: str) -> None:
        """Send what the ten events have no word for (see `events.CARRIED`)."""
        await self.emit(carry(name, body, ts=self.now(), message=message))

    async def write_raw(self, data: bytes) -> None:
        """Bytes straight onto the line, unchecked: for passing on what another end wrote, and for scripted faults."""
        await self._link.write(data)

    async def patch(self, seq: int, data: str, end: wire.Parcel | UnsetType) -> None:
        """Send one chunk of a patch that is too long for the receipt (`tree/1`)."""
        await self._link.send(wire.Patch(ref_id=self.id, seq=seq, data=data, end=end))

    def close_tree(self) -> None:
        for stream in (self.tree_in, self.tree):
            if stream is not None:
                stream.close()

    async def may(self, tool: str, input: Json, *, command: str | None = None, cwd: str | None = None) -> Verdict:
        """Ask before a tool runs. Policy answers first, then whoever holds it at the other end.

        Returns:
            A verdict; `modify` carries the input to use. Denied is a tool result for the agent
            (`policy_denied`), not the end of the run.
        """
        local = self.policy.decide_tool_call(tool, input, root=self.order.workspace.root, cwd=cwd)
        if not self._link.can_ask(self):
            return Verdict("allow") if local.allowed == "allow" else Verdict("deny", local.reason)
        verdict = await self._ask(
            kind="tool", name=tool, input=input, command=_set(command), cwd=_set(cwd), default="deny"
        )
        # What the policy forbids is asked all the same: only so it is on record above that the call did not run.
        return Verdict("deny", local.reason) if local.allowed == "deny" else verdict

    async def shown(self, tool: str, input: Json, output: Json, *, is_error: bool = False) -> tuple[Json, bool]:
        """What the agent, and the `tool_result`, may have of a tool's output; asked only where an order has such hooks.

        Returns:
            The output and whether it is an error: as given, changed, or withheld (`policy_denied`, an error).
        """
        rows = self.order.abp("hooks")
        wanted = isinstance(rows, list | tuple) and any(
            isinstance(row, dict) and row.get("event") == "post_tool" for row in rows
        )
        if not wanted or not self._link.can_ask(self):
            return output, is_error
        verdict = await self._ask(kind="result", name=tool, input=input, output=output, is_error=is_error)
        if verdict.decision == "deny":
            return f"policy_denied: {verdict.reason or 'withheld'}", True
        return (output if verdict.text is None or verdict.decision == "allow" else verdict.text), is_error

    async def pass_on(self, ask: dict[str, Any]) -> Verdict | None:
        """Put an ask of somebody below to the control plane above; None where that cannot be asked."""
        if not self._link.can_ask(self):
            return None
        members = {name: value for name, value in ask.items() if name in wire.Ask.__struct_fields__}
        members.pop("id", None)
        members.pop("deadline_ms", None)
        return await self._ask(**members)

    async def ask_user(
        self, question: str, *, options: tuple[Any, ...] = (), schema: Json | UnsetType = UNSET, default: str = ""
    ) -> Verdict:
        """Ask a person; where nobody can be asked, the answer is `deny` with the default as its text."""
        if not self._link.can_ask(self):
            return Verdict("deny", "nobody can be asked", text=default)
        verdict = await self._ask(kind="input", question=question, options=options, schema=schema)
        if verdict.decision == "deny" and verdict.text is None:
            return Verdict("deny", verdict.reason, text=default)
        return verdict

    async def _ask(self, **members: Any) -> Verdict:
        self._asked += 1
        ask = wire.Ask(ref_id=self.id, id=f"ask-{self._asked}", deadline_ms=int(ASK_S * 1000), **members)
        arrived: anyio.Event = anyio.Event()
        answers: list[wire.Answer] = []
        self.answers[ask.id] = (arrived, answers)
        try:
            await self._link.send(ask)
            with anyio.move_on_after(ASK_S):
                await arrived.wait()
        finally:
            del self.answers[ask.id]
        if not answers:
            return Verdict(ask.default, "nobody answered in time")
        answer = answers[0]
        return Verdict(
            answer.decision,
            answer.reason if isinstance(answer.reason, str) else "",
            answer.input,
            answer.text if isinstance(answer.text, str) else None,
            answer.remember,
        )

    def now(self) -> str:
        return timestamp_at(time.time_ns())

    def receipt(self, done: Done) -> Receipt:
        """The host's own record; the control plane checks it against what it saw."""
        return Receipt(
            meta=RunMetadata(
                run_id=_uuid_or_new(self.id),
                work_order_id=self.order.id,
                contract_version=CONTRACT_VERSION,
                started_at=timestamp_at(self.started_ns),
                finished_at=timestamp_at(max(time.time_ns(), self.started_ns)),
                duration_ms=int((time.monotonic() - self._started_monotonic) * 1000),
            ),
            backend=BackendIdentity(self._link.host.id, self._link.host.version),
            capabilities=Manifest(self._link.host.capabilities).to_wire(),
            usage_raw=done.usage_raw,
            usage=done.usage,
            trace=[],
            artifacts=done.artifacts,
            verification=Verification(harness_ok=True),
            outcome=done.outcome,
        )


Work = Callable[[HostRun], Awaitable[Done | Told]]


def _set(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value


def _uuid_or_new(text: str) -> str:
    try:
        return uuid_text(text)
    except ValueError:
        return str(uuid.uuid4())


class _Link:
    """The host's end over two file descriptors."""

    def __init__(
        self, host: Host, work: Work, stdin: int, stdout: int, *, owns_process: bool, line_bytes_max: int | None
    ) -> None:
        from backplane.protocol import LINE_BYTES_MAX, HostEnd

        self.host = host
        self._work = work
        self._stdin = stdin
        self._stdout = stdout
        self._owns_process = owns_process
        self._end = HostEnd(line_bytes_max=LINE_BYTES_MAX if line_bytes_max is None else line_bytes_max)
        self._runs: dict[str, HostRun] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        """Where runs and what belongs to them live."""
        self._stdin_open = True
        self._writing = 0
        self._waiting_since: float | None = None
        """When the reader last took something while a write waits; None while none does."""
        self._gave_up_reader = False
        self._write_lock = anyio.Lock()
        self._parent = os.getppid()
        self.signal: int | None = None
        """The first one that came."""

    def can_ask(self, run: HostRun) -> bool:
        return self._stdin_open and "ask/1" in run.extensions and "ask/1" in self.host.extensions

    async def send(
        self, message: wire.Hello | wire.Event | wire.Final | wire.Fatal | wire.Ask | wire.Pong | wire.Patch
    ) -> None:
        await self.write(self._end.send(message))

    async def write(self, line: bytes) -> None:
        try:
            if not self._writing and not self._gave_up_reader:
                line = line[_write_some(self._stdout, line) :]
            if line:
                await self._write_pieces((line,))
        except OSError as error:
            raise self._unread() from error

    async def write_pieces(self, line: Iterable[bytes]) -> None:
        """One line that is too long to be held whole, piece by piece as the reader takes it."""
        try:
            await self._write_pieces(line)
        except OSError as error:
            raise self._unread() from error

    def _unread(self) -> BackplaneError:
        self._cancel_all("nobody reads this host's output", GRACE_S)
        return BackplaneError("stream_closed", "nobody reads this host's output")

    async def _write_pieces(self, pieces: Iterable[bytes]) -> None:
        self._writing += 1
        try:
            # A line once begun is finished: half a line would corrupt the next message.
            with anyio.CancelScope(shield=True):
                async with self._write_lock:
                    for piece in pieces:
                        while piece:
                            piece = piece[await self._write_when_taken(piece) :]
        finally:
            self._writing -= 1

    async def _write_when_taken(self, piece: bytes) -> int:
        if self._gave_up_reader:
            raise BrokenPipeError
        written = _write_some(self._stdout, piece)
        if not written:
            self._waiting_since = self._waiting_since or time.monotonic()
            try:
                await anyio.wait_writable(self._stdout)
            except anyio.ClosedResourceError as error:
                raise BrokenPipeError from error
            return 0
        self._waiting_since = None
        return written

    def _give_up_reader(self) -> None:
        """Whoever waits to be read waits no more, and what is said from now on is not said."""
        self._gave_up_reader = True
        anyio.notify_closing(self._stdout)

    async def serve(self, *, said_hello: bool) -> None:
        """Take runs until stdin ends and the last run is over."""
        if said_hello:
            self._end.send(self.host.hello())
        else:
            await self.send(self.host.hello())
        async with anyio.create_task_group() as tasks:
            if self._owns_process:
                tasks.start_soon(self._heed_signals, tasks.cancel_scope)
            tasks.start_soon(self._watch_peer, tasks.cancel_scope)
            async with anyio.create_task_group() as runs:
                self._tasks = runs
                try:
                    await self._read()
                except BackplaneError as error:
                    if error.code != "stream_closed":
                        raise
                self._stdin_open = False
                for run in list(self._runs.values()):
                    self._stdin_ended(run)
                if self._runs and all("cancel/1" in run.extensions for run in self._runs.values()):
                    await self._end_all("the control plane went away", tasks.cancel_scope, PEER_GONE_S)
            tasks.cancel_scope.cancel()

    async def _read(self) -> None:
        while True:
            try:
                await anyio.wait_readable(self._stdin)
            except PermissionError:  # A regular file or /dev/null cannot be waited for, and never keeps us waiting.
                await anyio.lowlevel.checkpoint()
            data = os.read(self._stdin, 65536)
            for received in self._end.receive(data) if data else self._end.end():
                await self._take(received)
            if not data:
                return

    async def _take(self, received: Received) -> None:
        from backplane.protocol import Broken

        if isinstance(received, wire.Run):
            await self._begin(received)
        elif isinstance(received, wire.Cancel):
            grace_s = received.grace_ms / 1000 if isinstance(received.grace_ms, int) else GRACE_S
            if received.ref_id in self._runs:
                reason = received.reason or "cancelled by the control plane"
                self._cancel(self._runs[received.ref_id], reason, grace_s)
        elif isinstance(received, wire.Input | wire.Interrupt):
            self._steer(received)
        elif isinstance(received, wire.Ping):
            await self.send(wire.Pong(seq=received.seq))
        elif isinstance(received, wire.Answer):
            asking = self._runs.get(received.ref_id)
            waiting = asking.answers.get(received.id) if asking is not None else None
            if waiting is not None and not waiting[1]:
                waiting[1].append(received)
                waiting[0].set()
        elif isinstance(received, wire.Tree):
            owner = self._runs.get(received.ref_id)
            if owner is not None and owner.tree_in is not None:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # The run has ended meanwhile.
                    await owner.tree_in.send(received)
        elif isinstance(received, Broken):
            await self._complain(received)

    def _steer(self, received: wire.Input | wire.Interrupt) -> None:
        """Words for a run that takes none, or not yet, are dropped: a control plane knows who takes some."""
        run = self._runs.get(received.ref_id)
        if run is None or self._tasks is None:
            return
        if isinstance(received, wire.Input) and run.on_input is not None:
            self._tasks.start_soon(run.on_input, received.text)
        elif isinstance(received, wire.Interrupt) and run.on_interrupt is not None:
            self._tasks.start_soon(run.on_interrupt)

    async def _complain(self, broken: Broken) -> None:
        """One bad message is one error; the runs that are open go on."""
        await self.write(self._end.refuse(broken))

    async def _begin(self, message: wire.Run) -> None:
        try:
            run = HostRun(self, message)
        except BackplaneError as error:
            await self.send(wire.Fatal(ref_id=message.id, error=error.message, error_code=error.code))
            return
        self._runs[run.id] = run
        assert self._tasks is not None
        self._tasks.start_soon(self._run, run)
        if not self._stdin_open:
            self._stdin_ended(run)

    def _stdin_ended(self, run: HostRun) -> None:
        """A peer that can cancel keeps stdin open, so its end means that the peer is gone."""
        if "cancel/1" in run.extensions:
            self._cancel(run, "the control plane went away", GRACE_S)
        for arrived, _ in run.answers.values():
            arrived.set()
        if run.tree_in is not None:
            run.tree_in.close()

    def _cancel(self, run: HostRun, reason: str, grace_s: float) -> None:
        if run.cancelled_because is None:
            run.cancelled_because = reason
            run.grace_s = max(grace_s - GRACE_MARGIN_S, GRACE_MARGIN_S)
            if run.on_cancel is None:
                run.scope.cancel()
            elif self._tasks is not None:
                self._tasks.start_soon(run.on_cancel)

    def _cancel_all(self, reason: str, grace_s: float) -> None:
        for run in self._runs.values():
            self._cancel(run, reason, grace_s)

    async def _run(self, run: HostRun) -> None:
        try:
            ending = await self._do(run)
            with anyio.CancelScope(shield=True):
                await self._tell_end(run, ending)
        except BackplaneError as error:
            if error.code != "stream_closed":
                raise
        finally:
            self._runs.pop(run.id, None)
            run.close_tree()

    async def _tell_end(self, run: HostRun, ending: Done | Told | wire.Fatal) -> None:
        if isinstance(ending, Told):
            await self.write_pieces(ending.line)
            self._end.close_run(run.id)
            return
        try:
            message: wire.Final | wire.Fatal = (
                wire.Final(ref_id=run.id, receipt=_checked(run.receipt(ending))) if isinstance(ending, Done) else ending
            )
            line = self._end.send(message)
        except Exception as error:  # What the host's own code gave back cannot be said: that is said instead.
            line = self._end.send(_failure(run.id, error))
        await self.write(line)

    async def _do(self, run: HostRun) -> Done | Told | wire.Fatal:
        """Run the host's own code; whatever it does, exactly one ending comes back."""
        done: Done | Told | None = None
        failure: wire.Fatal | None = None
        with run.scope:
            try:
                done = await self._narrated(run)
            except Exception as error:  # The kit is the outermost edge: a bug in a host is a fatal, not a silence.
                if not isinstance(error, BackplaneError):
                    sys.stderr.write(f"{_text(error)}\n")
                failure = _failure(run.id, error)
        if failure is not None and run.cancelled_because is None:
            return failure
        if done is None:
            outcome: Literal["partial", "failed"] = "partial" if run.emitted else "failed"
            return Done(outcome=outcome, usage_raw={"cancelled": run.cancelled_because})
        return done

    async def _narrated(self, run: HostRun) -> Done | Told:
        """The host's work between the events that say when it began and ended."""
        if self.host.backends is not UNSET:
            # A control plane tells another run's events: one more would not be in that run's receipt.
            return await self._work(run)
        await run.emit(RunStarted(ts=run.now(), message=f"{self.host.id} starts"))
        done = await self._work(run)
        assert isinstance(done, Done)
        await run.emit(RunCompleted(ts=run.now(), message=f"{self.host.id} ends: {done.outcome}"))
        return done

    async def _heed_signals(self, whole: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                self.signal = self.signal or int(number)
                await self._end_all(f"the host got {signal.Signals(number).name}", whole, GRACE_S)

    async def _watch_peer(self, whole: anyio.CancelScope) -> None:
        """Whatever becomes of stdin, the peer may still read, or be gone; gone ends everything."""
        poll = select.poll()
        poll.register(self._stdout, 0)
        while not self._peer_is_gone(poll):
            await anyio.sleep(PEER_GONE_POLL_S)
        await self._end_all("the control plane is gone", whole, PEER_GONE_S)

    def _peer_is_gone(self, poll: select.poll) -> bool:
        orphaned = self._owns_process and os.getppid() != self._parent
        return orphaned or any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))

    async def _end_all(self, reason: str, whole: anyio.CancelScope, within_s: float) -> None:
        """Cancel every run, give them the time there is, and end."""
        self._cancel_all(reason, within_s)
        with anyio.move_on_after(within_s - GRACE_MARGIN_S):
            while self._runs:
                if self._waiting_since is not None and time.monotonic() - self._waiting_since > WRITE_STUCK_S:
                    self._give_up_reader()
                await anyio.sleep(RUNS_END_POLL_S)
        if self._runs and self._owns_process:
            # The host's own code does not let itself be cancelled, and nothing may outlive the grace.
            os._exit(1)
        whole.cancel()


def _checked(receipt: Receipt) -> Json:
    """The receipt in plain JSON. Types are checked when something is read, not when it is built."""
    plain = msgspec.to_builtins(receipt)
    read_receipt(plain)
    return plain


def _text(error: Exception) -> str:
    text = error.message if isinstance(error, BackplaneError) else f"{type(error).__name__}: {error}"
    # A name of a file may hold bytes that are no text, and they are no reason to say nothing.
    return text[:ERROR_CHARS_MAX].encode("utf-8", "backslashreplace").decode()


def _failure(run_id: str, error: Exception) -> wire.Fatal:
    code = error.code if isinstance(error, BackplaneError) else "internal"
    return wire.Fatal(ref_id=run_id, error=_text(error), error_code=code)


def _write_some(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0


async def serve(host: Host, work: Work, stdin: int, stdout: int, *, line_bytes_max: int | None = None) -> None:
    """Speak the protocol as `host` over two descriptors of this process; they stay the caller's to close."""
    link = _Link(host, work, stdin, stdout, owns_process=False, line_bytes_max=line_bytes_max)
    await link.serve(said_hello=False)


def main(host: Host, work: Work, *, line_bytes_max: int | None = None) -> None:
    """Be a host: speak the protocol on this process's stdin and stdout until the end of stdin.

    Args:
        line_bytes_max: longest line, both ways; None for the protocol's own.
    """
    try:
        speak(host, work, line_bytes_max=line_bytes_max)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)


def speak(host: Host, work: Work, *, line_bytes_max: int | None = None) -> int | None:
    """The same for a program that goes on afterwards: gives the signal that was the end, None for that of stdin.

    The hello goes out before the event loop is loaded: a control plane that waits for it saves that time.

    Raises:
        BrokenPipeError: nobody reads the hello.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    line = msgspec.json.encode(host.hello()) + b"\n"
    mode = os.fstat(stdout).st_mode
    while line:
        line = line[os.write(stdout, line) :]
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        # Only then is the description ours alone; a terminal's is shared with the shell.
        os.set_blocking(stdout, False)
    link = _Link(host, work, 0, stdout, owns_process=True, line_bytes_max=line_bytes_max)
    anyio.run(functools.partial(link.serve, said_hello=True))
    return link.signal
