"""Describes a host, and gives its `work` one run: the order, and methods for events and asks."""

from __future__ import annotations

import os.path
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from backplane.contract import envelope as wire
from backplane.contract.approval import Decision, misfit
from backplane.contract.canonical import Json, timestamp_at, uuid_text
from backplane.contract.capability import CAPABILITIES, Level, Manifest
from backplane.contract.deltas import OTHER, Deltas, take_back
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
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
)
from backplane.contract.unknown import check_settings, check_supported, nearest_name
from backplane.contract.work import OF_HOST, WorkOrder

if TYPE_CHECKING:  # The hello must not wait for these modules.
    import anyio

    from backplane.host.link import HostLink
    from backplane.policy.rules import Policy

GRACE_S: Final = 2.0
"""Seconds for an orderly end if the cancel gives no time; the control plane has the same default."""

ASK_S: Final = 300.0
"""Seconds that an ask waits for a person's answer; then the ask's default decides."""

PREVIEW_BYTES_MAX: Final = 8192
"""Maximum length in bytes of a preview of a command's output, set by the contract."""

EXTENSIONS: Final = ("cancel/1", "ping/1", "ask/1")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host's name, capabilities and extensions."""

    id: str
    version: str | None = None
    """Version of the agent that the host drives; None without an agent."""
    capabilities: dict[str, Level]
    extensions: tuple[str, ...] = EXTENSIONS
    backends: tuple[dict[str, Any], ...] | UnsetType = UNSET
    """Backends of a host that is itself a control plane, each as `{id, ready, capabilities}`."""
    heeds: tuple[str, ...] = ("model", "max_turns", "max_budget_usd", "context")
    """Settings in `OF_HOST` that the host's `work` follows; an order with any other of them is refused."""
    instruction_files: tuple[str, ...] | UnsetType = UNSET
    """Names of the project's files that the agent reads itself as its instructions, such as `AGENTS.md`."""

    def __post_init__(self) -> None:
        for names, known, kind in ((self.capabilities, CAPABILITIES, "capability"), (self.heeds, OF_HOST, "setting")):
            for name in names:
                if name not in known:
                    nearest = nearest_name(name, known)
                    raise ValueError(f"{name!r} is no {kind} of the contract" + (f": {nearest}?" if nearest else ""))

    def hello(self) -> wire.Hello:
        return wire.Hello(
            contract_version=CONTRACT_VERSION,
            backend=BackendIdentity(self.id, self.version),
            capabilities=Manifest(self.capabilities).to_wire(),
            extensions=self.extensions,
            backends=self.backends,
            heeds=self.heeds,
            instruction_files=self.instruction_files,
        )


class Written(msgspec.Struct, frozen=True):
    """A run's last message that other code has encoded: its line, in pieces."""

    line: Iterable[bytes]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, which `work` returns."""

    outcome: Literal["complete", "partial", "failed"] = "complete"
    usage: Usage = Usage()
    usage_raw: Json = {}
    artifacts: tuple[Artifact, ...] = ()


def _placed(order: WorkOrder) -> WorkOrder:
    """Make an order's root absolute; a relative root counts from the current folder of this process."""
    if os.path.isabs(order.workspace.root):
        return order
    workspace = msgspec.structs.replace(order.workspace, root=os.path.abspath(order.workspace.root))
    return msgspec.structs.replace(order, workspace=workspace)


class Given:
    """A run's order, policy, and other facts that are known before the run begins."""

    def __init__(self, message: wire.RunMessage, policy: Policy) -> None:
        check_settings(message.work_order)
        self.id = message.id
        self.order: WorkOrder = _placed(message.work_order)
        self.names_root = bool(message.work_order.workspace.root)
        """False if the order names no root; its root in `order` is then the host's current folder."""
        self.extensions = message.extensions
        self.policy = policy


class HostRun(Given):
    """One run in a host: the order, and methods for its events and asks.

    Args:
        scope: the cancel scope of the host's own code.
    """

    def __init__(self, link: HostLink, message: wire.RunMessage, policy: Policy, scope: anyio.CancelScope) -> None:
        super().__init__(message, policy)
        self.host = link.host
        check_supported(self.order, self.host.heeds, self.host.id)
        self.grace_s = GRACE_S
        """Seconds for the host's own clean-up after a cancel."""
        self.cancelled_because: str | None = None
        self.fault: Exception | None = None
        """The exception that the host's own code raised, in `work` or in a callback; None without one."""
        self.on_cancel: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called when the run is cancelled, instead of cancelling `work`, which must then end by itself."""
        self.on_input: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Called with the user's further text while `work` runs; a host that sets it must announce `input/1`."""
        self.on_interrupt: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called to stop the agent's turn, so that `work` ends; a host that sets it must announce `interrupt/1`."""
        self.emitted = 0
        self.mode: Literal["mapped", "passthrough"] = "mapped"
        """`passthrough` if events carry the agent's own messages; the receipt records the mode."""
        self.scope = scope
        self.started_ns = time.time_ns()
        self._started_monotonic = time.monotonic()
        self._link = link
        self._asked = 0
        self._deltas = Deltas()

    async def emit(self, event: AgentEvent) -> None:
        """Send one event; wait while the reader is slow.

        Deltas that the event's whole message does not repeat are first taken back by another event.

        Raises:
            BackplaneError: `stream_closed`, the reader has gone.
        """
        chars = self._deltas.take(event)
        if chars:
            await self._send(take_back(OTHER, chars, ts=event.ts))
        await self._send(event)

    async def _send(self, event: AgentEvent) -> None:
        self.emitted += 1
        await self._link.send(wire.EventMessage(ref_id=self.id, event=event))

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
        """Send a value that none of the ten events can express (see `events.CARRIED`)."""
        await self.emit(carry(name, body, ts=self.now(), message=message))

    async def write_raw(self, data: bytes) -> None:
        """Write bytes to the connection unchecked, for messages that are already encoded and for scripted faults."""
        await self._link.write(data)

    async def may(
        self, tool: str, input: Json, *, id: str | None = None, command: str | None = None, cwd: str | None = None
    ) -> Decision:
        """Decide whether a tool may run: by the policy, and by an ask to the control plane if it takes asks.

        Args:
            id: the call's id, as in the call's events; the answer counts only for this call.

        Returns:
            The decision; `modify` has the input to use. The agent gets a denied call as a tool result
            (`policy_denied`), and the run continues.
        """
        local = self.policy.decide_tool_call(tool, input, root=self.order.workspace.root, cwd=cwd)
        if not self._link.can_ask(self):
            return Decision("allow") if local.allowed == "allow" else Decision("deny", local.reason)
        verdict = await self._ask(
            kind="tool",
            name=tool,
            input=input,
            tool_use_id=_set(id),
            command=_set(command),
            cwd=_set(cwd),
            default="deny",
        )
        # The ask also covers a call that the policy forbids, so that the control plane records that it did not run.
        return Decision("deny", local.reason) if local.allowed == "deny" else verdict

    async def shown(
        self, tool: str, input: Json, output: Json, *, id: str | None = None, is_error: bool = False
    ) -> tuple[Json, bool]:
        """Return the tool output that the agent may see; without `post_tool` hooks in the order, the whole output.

        Returns:
            The output, as given, changed or withheld (`policy_denied`), and whether it is an error.
        """
        rows = self.order.abp("hooks")
        wanted = isinstance(rows, list | tuple) and any(
            isinstance(row, dict) and row.get("event") == "post_tool" for row in rows
        )
        if not wanted or not self._link.can_ask(self):
            return output, is_error
        verdict = await self._ask(
            kind="result", name=tool, input=input, tool_use_id=_set(id), output=output, is_error=is_error
        )
        if verdict.decision == "deny":
            return f"policy_denied: {verdict.reason or 'withheld'}", True
        return (output if verdict.text is None or verdict.decision == "allow" else verdict.text), is_error

    async def pass_on(self, ask: dict[str, Any]) -> Decision | None:
        """Forward an inner run's ask to the control plane; return None if the control plane takes no asks."""
        if not self._link.can_ask(self):
            return None
        members = {name: value for name, value in ask.items() if name in wire.Ask.__struct_fields__}
        members.pop("id", None)
        members.pop("deadline_ms", None)
        return await self._ask(**members)

    async def ask_user(
        self, question: str, *, options: tuple[Any, ...] = (), schema: Json | UnsetType = UNSET, default: str = ""
    ) -> Decision:
        """Ask a person a question; without an answer, return `deny` with `default` as its text."""
        if not self._link.can_ask(self):
            return Decision("deny", "nobody can be asked", text=default)
        verdict = await self._ask(kind="input", question=question, options=options, schema=schema)
        if verdict.decision == "deny" and verdict.text is None:
            return Decision("deny", verdict.reason, text=default)
        return verdict

    async def _ask(self, **members: Any) -> Decision:
        self._asked += 1
        ask = wire.Ask(ref_id=self.id, id=f"ask-{self._asked}", deadline_ms=int(ASK_S * 1000), **members)
        answer = await self._link.ask(ask, ASK_S)
        if answer is None:
            return Decision(ask.default, "nobody answered in time")
        decision = Decision(
            answer.decision,
            answer.reason if isinstance(answer.reason, str) else "",
            answer.input,
            answer.text if isinstance(answer.text, str) else None,
            answer.remember,
        )
        if why := misfit(decision, ask.kind, ask.input):
            return Decision("deny", f"the answer does not fit: {why}")
        # Other programs write null for an absent input.
        return decision if decision.decision == "modify" else msgspec.structs.replace(decision, input=UNSET)

    def now(self) -> str:
        return timestamp_at(time.time_ns())

    def receipt(self, done: Done) -> Receipt:
        """Make the host's own receipt, which the control plane compares with what it observed."""
        return Receipt(
            meta=RunMetadata(
                run_id=_uuid_or_new(self.id),
                work_order_id=self.order.id,
                contract_version=CONTRACT_VERSION,
                started_at=timestamp_at(self.started_ns),
                finished_at=timestamp_at(max(time.time_ns(), self.started_ns)),
                duration_ms=int((time.monotonic() - self._started_monotonic) * 1000),
            ),
            backend=BackendIdentity(self.host.id, self.host.version),
            capabilities=Manifest(self.host.capabilities).to_wire(),
            usage_raw=done.usage_raw,
            usage=done.usage,
            trace=[],
            artifacts=done.artifacts,
            verification=Verification(harness_ok=True),
            outcome=done.outcome,
            mode=self.mode,
        )


Work = Callable[[HostRun], Awaitable[Done | Written]]


def _set(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value


def _uuid_or_new(text: str) -> str:
    try:
        return uuid_text(text)
    except ValueError:
        return str(uuid.uuid4())
