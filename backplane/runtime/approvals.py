"""Decides the asks of one run: first the policy decides, then hooks, then the caller, or else a default."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.config import HookEvent, Limits
from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.approval import Decision, misfit
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, Approval
from backplane.errors import ProtocolError
from backplane.policy import approvals
from backplane.policy.remembered import remembered_by
from backplane.protocol.lines import strict
from backplane.protocol.messages import Events
from backplane.receipts.state import RunState
from backplane.runtime.checkpoints import RunCheckpoints
from backplane.runtime.ending import RunEnding
from backplane.runtime.events import RunRecord
from backplane.runtime.hook_calls import call_function, log_raised
from backplane.runtime.hooks import Hook, Hooks

if TYPE_CHECKING:
    from backplane.runtime.channel import HostChannel

ASKS_OPEN_MAX: Final = 64
"""Limit of asks that wait for an answer at once; further ones are decided at once, without hooks or a person."""

ASKS_BYTES_MAX: Final = 8 * 1024 * 1024
"""Size limit of all waiting asks, far above what agents write; a single larger ask waits if no other does."""

REMEMBERED_MAX: Final = 1000
"""Limit of tools and kinds of command with a remembered answer in a run; the caller is asked about others again."""

_TOO_MANY: Final = f"{ASKS_OPEN_MAX} asks, or {ASKS_BYTES_MAX} bytes of them, are open already"

OnAsk = Callable[[Approval], Awaitable[Decision] | Decision]


class Approvals:
    """Answers the asks of a host.

    Attributes:
        open: asks that wait for an answer, by id.
        host: the channel that answers are sent on; set once the host has started.
        hooks: hooks that are asked after the policy and before the caller; None if the run has no hooks.
        checkpoints: makes a checkpoint before each tool that may write; None if the order wants none.
    """

    def __init__(
        self, facts: RunState, limits: Limits, ending: RunEnding, record: RunRecord, on_ask: OnAsk | None
    ) -> None:
        self.open: dict[str, wire.Ask] = {}
        self.host: HostChannel
        self.hooks: Hooks | None = None
        self.checkpoints: RunCheckpoints | None = None
        self.start_observer: Callable[..., object] = bool
        """Starts a task for which the end of the run waits; set once the host is started."""
        self.put_above = self._put_above if on_ask is not None else None
        """Asks the caller in place of a hook that has no program or function; None without `on_ask`."""
        self._facts = facts
        self._limits = limits
        self._ending = ending
        self._record = record
        self._on_ask = on_ask
        self._unsent: list[bytes] = []
        self._bytes = 0
        self._remembered: dict[tuple[str, ...], Decision] = {}
        """Decisions for the rest of the run, by the key that `remembered_by` returns."""

    async def close(self) -> None:
        """Wait until no checkpoint is being made."""
        if self.checkpoints is not None:
            await self.checkpoints.close()

    async def observe(self, event: HookEvent, input: Json, scope: anyio.CancelScope | None = None) -> None:
        """Call the hooks that observe a moment, all at once; a failure is a warning.

        Args:
            scope: what stops all of them; None if only their own time limits do.
        """
        if self.hooks is None or not (hooks := self.hooks.observers(event)):
            return
        with scope or anyio.CancelScope():
            async with anyio.create_task_group() as tasks:
                for hook in hooks:
                    tasks.start_soon(self._observe, self.hooks, hook, input)

    async def _observe(self, hooks: Hooks, hook: Hook, input: Json) -> None:
        why = f"hook {hook.name!r} for {hook.event} was stopped, as the run had to end"
        try:
            why = await hooks.observe(hook, self._facts.root, input)
        finally:
            if why:  # A warning, also after the host's last message.
                self._record.add([self._record.own("hook_failed", {"hook": hook.name, "event": hook.event}, why)])

    def observe_subagent(self, told: Json) -> None:
        """Call the hooks for the end of a sub-agent; the run's end waits for them."""
        if self.hooks is not None and self.hooks.observers("subagent_end"):
            self.start_observer(self.observe, "subagent_end", told)

    def take(self, ask: wire.Ask) -> list[Events]:
        """Begin to decide an ask; return its event, and the event of the answer if that needs no wait."""
        assert self._facts.policy is not None
        raised = self._ask_event(ask)
        self._facts.asked(ask)
        decision, by = approvals.judge(self._facts.policy, ask, root=self._facts.root), "policy"
        hooks = self.hooks.of(ask, decision) if self.hooks is not None and not _denies(decision) else ()
        if decision is None and not hooks:
            decision, by = self._without_caller(ask)
        size = len(raised.lines)
        fits = not self.open or self._bytes + size <= ASKS_BYTES_MAX
        may_wait = fits and len(self.open) < ASKS_OPEN_MAX
        if not may_wait and (hooks or decision is None):
            denial = Decision(decision="deny", reason=_TOO_MANY) if hooks else approvals.by_default(ask, _TOO_MANY)
            decision, by, hooks = denial, "default", ()
        saves = self.checkpoints is not None and may_wait and not _denies(decision)
        if decision is not None and not hooks and not saves:
            return [raised, *self._answer(ask, decision, by=by)]
        self.open[ask.id] = ask
        self._bytes += size
        self.host.start_soon(self._decide, ask, size, raised.events[0], hooks, decision, by)
        return [raised]

    def _ask_event(self, ask: wire.Ask) -> Events:
        return self._record.own("ask", approvals.body(ask), approvals.describe(ask))

    def _without_caller(self, ask: wire.Ask) -> tuple[Decision | None, str]:
        """Return a decision that needs no question to the caller, and its maker; None if the caller has to decide."""
        key = remembered_by(ask) if self._remembered else None
        if key is not None and (decision := self._remembered.get(key)) is not None:
            return decision, "caller"
        if self._on_ask is None:
            return approvals.by_default(ask, "nobody is there to answer"), "default"
        return None, "caller"

    async def _decide(
        self, ask: wire.Ask, size: int, event: AgentEvent, hooks: tuple[Hook, ...], decided: Decision | None, by: str
    ) -> None:
        """Make a checkpoint, ask the hooks, ask the caller if the ask is still undecided, and answer."""
        if self.checkpoints is not None:
            await self.checkpoints.before(ask)
        changed = ""
        if hooks:
            ask, decided, by, changed = await self._ask_hooks(ask, hooks)
            event = self._ask_event(ask).events[0] if changed else event
        if decided is None:
            decided, by = self._without_caller(ask)
        if decided is None:
            decided, by = await self._ask_caller(ask, event)
        if changed and decided.decision == "allow":
            decided = approvals.changed(ask, decided, f"hook {changed!r} changed it")
            by = "hook" if by == "policy" else by
        del self.open[ask.id]
        self._bytes -= size
        self.host.progressed()
        if not self._ending.over.is_set():
            self._record.add(self._answer(ask, decided, by=by))
            self.send()

    async def _ask_hooks(self, ask: wire.Ask, hooks: tuple[Hook, ...]) -> tuple[wire.Ask, Decision | None, str, str]:
        """Ask the hooks; return the ask as they changed it, the decision, its maker, and the hook that changed it."""
        assert self.hooks is not None
        assert self._facts.policy is not None
        with anyio.move_on_after(self._limits.ask_s):
            heard, denial, changed_by = await self.hooks.hear(ask, hooks, self._facts.root, self._reread)
            if denial is not None:
                return heard, denial, "hook", changed_by
            return heard, approvals.judge(self._facts.policy, heard, root=self._facts.root), "policy", changed_by
        reason = f"no answer of the hooks within {self._limits.ask_s:g} s"
        return ask, Decision(decision="deny", reason=reason), "default", ""

    async def _put_above(self, ask: wire.Ask) -> Decision:
        """Ask the caller in place of a hook, as for an ask that the policy leaves open."""
        return (await self._ask_caller(ask, self._ask_event(ask).events[0]))[0]

    async def _ask_caller(self, ask: wire.Ask, event: AgentEvent) -> tuple[Decision, str]:
        """Return the caller's decision, or the default decision after `ask_s`, and its maker."""
        assert self._on_ask is not None
        assert isinstance(event, Approval)
        decision, by = approvals.by_default(ask, f"no answer within {self._limits.ask_s:g} s"), "default"
        with anyio.move_on_after(self._limits.ask_s):
            try:
                decision, by = self._reread(ask, await call_function(self._on_ask, event)), "caller"
            except Exception as error:  # The caller's own code: its bug must not let a tool through.
                # A ProtocolError is from a caller that forwards asks to another control plane, or of a wrong decision.
                if isinstance(error, ProtocolError):
                    why = error.message
                else:
                    why = log_raised("callback on_ask", self._on_ask, error, self._facts.redactor)
                decision = Decision(decision="deny", reason=f"the answering callback failed: {why}")
        if by == "caller" and decision.remember == "run" and decision.decision != "modify":
            self._remember(ask, decision)
        return decision, by

    def _remember(self, ask: wire.Ask, decision: Decision) -> None:
        key = remembered_by(ask)
        if key is not None and len(self._remembered) < REMEMBERED_MAX:
            reason = f"{decision.decision} for this run" + (f": {decision.reason}" if decision.reason else "")
            self._remembered[key] = Decision(decision=decision.decision, reason=reason)

    def _reread(self, ask: wire.Ask, given: Decision) -> Decision:
        """Return a decision as the host will read it, so that exactly this form is checked and recorded.

        Raises:
            ProtocolError: it cannot be encoded, is too long for a line, or the host would refuse it.
        """
        try:
            data = canonical.encode(approvals.answer(ask, approvals.checked(given)))
            decision = approvals.answered(msgspec.convert(strict(data), wire.AnswerMessage))
        except (ValueError, TypeError, RecursionError) as error:
            fact = f"{type(error).__name__}: {self._facts.redactor.text(str(error))[0][:200]}"
            raise ProtocolError("protocol_invalid_envelope", f"the decision cannot be sent: {fact}") from error
        if why := misfit(decision, ask.kind, ask.input):
            raise ProtocolError("contract_schema_violation", why)
        self._line_of(ask, decision)
        return decision

    def send(self) -> None:
        """Send the answers that have been made, once the journal has them.

        A host may act at once: if this process is killed then, the next one must know what was allowed.
        """
        lines, self._unsent = self._unsent, []
        for line in lines if not self._ending.over.is_set() else ():
            self.host.write(line)

    def _line_of(self, ask: wire.Ask, decision: Decision) -> bytes:
        """Return the answer as a line to send. Raises ProtocolError if it is too long for a line."""
        return self.host.line.send(approvals.answer(ask, decision))

    def _answer(self, ask: wire.Ask, decision: Decision, *, by: str) -> list[Events]:
        """Make the answer, and return its event; deny the ask if the answer is too long for a line.

        If even the denial is too long, because of the ask's id, end the run.
        """
        try:
            line = self._line_of(ask, decision)
        except ProtocolError as too_long:
            try:
                line = self._line_of(ask, Decision(decision="deny"))
            except ProtocolError as error:
                self._ending.decide("protocol", error)
                self._ending.close()
                return []
            decision, by = Decision(decision="deny", reason=f"the answer was not sent: {too_long.message}"), "default"
        self._unsent.append(line)
        self._facts.answered(ask, decision)
        body = {"id": ask.id, "decision": decision.decision, "by": by, "reason": decision.reason}
        return [self._record.own("answer", body, f"{decision.decision} by {by}: {decision.reason}")]


def _denies(decision: Decision | None) -> bool:
    return decision is not None and decision.decision == "deny"
