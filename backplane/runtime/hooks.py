"""Calls hooks, which are commands and functions of the user: before and after a tool runs, and at moments of a run.

A hook of a tool allows, denies or changes an ask. Hooks only make a run stricter: the policy decides before them, and
again about their changes. A hook of a moment (`OBSERVED`) changes nothing. `approvals` decides whether hooks are
asked, and `hook_calls` calls one hook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import msgspec
from msgspec import UNSET

from backplane.config import HOOK_MS, HookEvent, HookSettings, absolute_command, read_command
from backplane.contract import envelope as wire
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, ToolResult
from backplane.contract.unknown import explain
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, CapabilityError, ConfigError, PolicyError, ProtocolError
from backplane.policy.globs import Globs, compile_globs
from backplane.policy.rules import TOOL_NAME_CHARS_MAX, tool_names
from backplane.receipts.calls import PATCH_TOOL, CallRecord, neutral
from backplane.redact.secrets import Redactor
from backplane.runtime import hook_calls
from backplane.runtime.hook_calls import HookCall

HOOKS_MAX: Final = 32
"""Maximum number of hooks of a run: each tool call may wait for them all, one after the other."""

DECISIONS_MAX: Final = 1000
"""Maximum number of decisions listed in a receipt; all are counted."""

ID_CHARS_MAX: Final = 256
"""Maximum length of an ask's id in this list; usual ones are shorter."""

TOOLS_MAX: Final = 1000
"""Maximum number of tool names that are counted separately; agents have dozens of tools."""

CAPABILITY: Final[dict[HookEvent, str]] = {"pre_tool": "hooks_pre_tool_use", "post_tool": "hooks_post_tool_use"}

OBSERVED: Final[tuple[HookEvent, ...]] = ("run_start", "run_end", "subagent_end")
"""Events of hooks that only observe: their answer changes nothing, and a failure is a warning."""

SUBAGENT: Final = "subagent/1"
"""Extension of a host that reports the end of each sub-agent: an event `task` with the member `subagent_end`."""

_EVENT_OF: Final[dict[str, HookEvent]] = {"tool": "pre_tool", "patch": "pre_tool", "result": "post_tool"}
"""Kinds of asks → events of the hooks that are asked."""

PutAbove = Callable[[wire.Ask], Awaitable[Decision]]
Reread = Callable[[wire.Ask, Decision], Decision]
"""Returns a decision as the host will read it. Raises ProtocolError: it cannot be sent."""


class Hook(msgspec.Struct, frozen=True):
    """One hook: its event, its command or function, and its tools.

    Attributes:
        event: `pre_tool` asks before a tool runs, `post_tool` after it. `run_start`, `run_end` and `subagent_end` only
            observe: when the agent gets its order, when the run has ended, and when a sub-agent has ended.
        run: A command, or a function (plain or `async`) that takes a `HookCall` and returns a `Decision` or None for
            "allow"; None asks the callback or client that answers this run's asks.
        tools: Globs for the names of tools, both the agent's and the neutral ones; only for hooks of tools.
        name: Name in the receipt; empty takes the program's or the function's name.
        timeout_ms: Time limit for the answer, in milliseconds.
        on_failure: Decision that counts if the hook of a tool fails, is late, or was not asked.

    Raises:
        ConfigError: `config_invalid`, a member has no valid value.
        PolicyError: `policy_invalid`, a malformed glob.
    """

    event: HookEvent
    run: Sequence[str] | str | Callable[[HookCall], Any] | None
    tools: tuple[str, ...] = ("*",)
    name: str = ""
    timeout_ms: int = HOOK_MS
    on_failure: Literal["deny", "allow"] = "deny"

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        try:  # A program may give any value.
            row = msgspec.convert({name: getattr(self, name) for name in _SHARED} | {"command": ("-",)}, HookSettings)
        except msgspec.ValidationError as error:
            raise _invalid(f"a hook: {explain(error, HookSettings)}") from error
        for name in _SHARED:
            force(self, name, getattr(row, name))
        if isinstance(self.run, str):
            force(self, "run", read_command(self.run))
        if self.run is not None and not callable(self.run):
            _check_command(self.run)
        if not self.tools:
            raise _invalid("a hook for no tools at all", hint="leave `tools` out for all of them")
        compile_globs(self.tools)
        if self.event in OBSERVED and self.tools != ("*",):
            raise _invalid(f"a hook for {self.event} names tools, and none is used then", "leave `tools` out")
        if self.run is None and self.event in ("run_start", "run_end"):
            raise _invalid(f"a hook for {self.event} without a command", "the order's sender sees this moment itself")
        if not self.name:
            program = Path((self.run or ("above",))[0]).name if not callable(self.run) else "function"
            force(self, "name", getattr(self.run, "__name__", program))

    @property
    def kind(self) -> str:
        return "above" if self.run is None else "function" if callable(self.run) else "command"


_SHARED: Final = ("event", "tools", "name", "timeout_ms", "on_failure")
"""Members that a hook has in common with a row of the configuration."""


def _check_command(words: Sequence[str]) -> None:
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words) or not words[0]:
        raise _invalid("the command of a hook names no program")
    if "/" in words[0] and not words[0].startswith("/"):
        fact = f"the hook's program {words[0][:80]!r} is a path that depends on the current folder"
        raise _invalid(fact, "give an absolute path, or a name that PATH finds")


_SCHEMA: Final = "see `backplane schema configuration`, member hooks"


def _invalid(fact: str, hint: str | None = _SCHEMA) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)


def configured(rows: Iterable[HookSettings]) -> tuple[Hook, ...]:
    """Return the hooks for the rows of a configuration."""
    return tuple(Hook(row.event, row.command, row.tools, row.name, row.timeout_ms, row.on_failure) for row in rows)


def from_command(event: HookEvent, command: str, cwd: Path) -> Hook:
    """Return a hook that asks a command about all tools; paths in the command are relative to `cwd`."""
    return Hook(event, absolute_command(read_command(command), cwd))


def taken(order: WorkOrder) -> tuple[WorkOrder, tuple[Hook, ...]]:
    """Return an order without its hooks that have commands, and these hooks; for senders that may start programs.

    Raises:
        ConfigError: `config_invalid`.
    """
    rows = order.abp("hooks")
    hooks = read_rows(rows)
    own = tuple(hook for hook in hooks if hook.run is not None)
    left: list[Json] = [row for row, hook in zip(rows or (), hooks, strict=True) if hook.run is None]
    return (order.with_abp("hooks", left) if own else order), own


def above(rows: Json) -> tuple[Hook, ...]:
    """Return the hooks of an order that its sender answers, `{event, tools, above: true}`.

    Raises:
        ConfigError: `config_invalid`; also for a command, because the sender of this order may start no programs.
    """
    hooks = read_rows(rows)
    for number, hook in enumerate(hooks):
        if hook.run is not None:
            fact = f"config.vendor.abp.hooks[{number}]: a hook's command is not taken from an order over the line"
            raise _invalid(fact, "put it into the configuration here, or say above: true and answer the asks")
    return hooks


def read_rows(rows: Json) -> tuple[Hook, ...]:
    """Read `config.vendor.abp.hooks`; the hook of a row with `above: true` has no command. Raises ConfigError."""
    if rows is not None and not (isinstance(rows, list | tuple) and all(isinstance(row, dict) for row in rows)):
        raise _invalid("config.vendor.abp.hooks is no list of objects")
    hooks: list[Hook] = []
    for number, row in enumerate(rows or ()):
        try:
            if row.get("above") is True:
                hooks.append(Hook(row.get("event", ""), None, row.get("tools", ("*",))))
            else:
                hooks += configured((msgspec.convert(row, HookSettings),))
        except (ValueError, BackplaneError) as error:
            fact, hint = (error.message, error.hint) if isinstance(error, BackplaneError) else (str(error), _SCHEMA)
            raise _invalid(f"config.vendor.abp.hooks[{number}]: {fact}", hint) from error
    return tuple(hooks)


def below(order: WorkOrder, hooks: Sequence[Hook]) -> WorkOrder:
    """Return the order for a host: with the tools to ask about, and without the hooks' commands."""
    rows: list[Json] = []
    for event in CAPABILITY:
        tools = sorted({glob for hook in hooks if hook.event == event for glob in hook.tools})
        rows += [{"event": event, "tools": tools, "above": True}] if tools else []
    if any(hook.event == "subagent_end" for hook in hooks):
        rows.append({"event": "subagent_end", "above": True})
    return order.with_abp("hooks", rows) if rows else order


class Hooks:
    """Asks the hooks of one run, and records their decisions.

    Args:
        put_above: asks the order's sender for hooks without a command or function; None if the sender answers no asks.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        run_id: str,
        environ: Mapping[str, str],
        redactor: Redactor,
        put_above: PutAbove | None,
    ) -> None:
        if len(hooks) > HOOKS_MAX:
            raise _invalid(f"{len(hooks)} hooks; {HOOKS_MAX} are the most", "join some of them in one program")
        # The sender is asked first, or it would count a call that a hook here denies as one it was not asked about.
        self.all = tuple(sorted(hooks, key=lambda hook: hook.run is not None))
        self._globs: list[Globs] = [compile_globs(hook.tools) for hook in self.all]
        self._run_id = run_id
        self._environ = environ
        self._redactor = redactor
        self._put_above = put_above
        if put_above is None and any(hook.run is None and hook.event in CAPABILITY for hook in self.all):
            fact = "the order leaves hooks to whoever gave it, and nobody there answers"
            raise CapabilityError("capability_unsupported", fact, hint="announce ask/1 and answer, or leave them out")
        self._counts: dict[str, Counter[str]] = {hook.name: Counter() for hook in self.all}
        self._decisions: list[Json] = []
        self._missed: Counter[str] = Counter()

    def of(self, ask: wire.Ask, decided: Decision | None) -> tuple[Hook, ...]:
        """Return the hooks for an ask that the policy did not deny."""
        event = _EVENT_OF.get(ask.kind)
        if event is None:
            return ()
        # If the policy leaves an ask open, the order's sender is asked in any case, so the sender's hooks are left out.
        return tuple(hook for hook in self._matching(event, _tool(ask)) if decided is not None or hook.run is not None)

    def _matching(self, event: HookEvent, tool: str) -> tuple[Hook, ...]:
        names = tool_names(tool)
        return tuple(
            hook
            for hook, globs in zip(self.all, self._globs, strict=True)
            if hook.event == event and any(_matches(globs, name) for name in names)
        )

    async def hear(
        self, ask: wire.Ask, hooks: Sequence[Hook], root: str, reread: Reread
    ) -> tuple[wire.Ask, Decision | None, str]:
        """Ask the hooks, one after the other, until one denies.

        Args:
            reread: returns a decision as the host will read it; if it raises, the hook has failed.

        Returns:
            The ask with the changes of the hooks; a denial, or None; the name of the last hook that changed the ask.
        """
        changed_by = ""
        for hook in hooks:
            decision = await self._one(hook, ask, root, reread)
            self._note(hook, ask, decision)
            if decision.decision == "deny":
                reason = f"hook {hook.name!r}" + (f": {decision.reason}" if decision.reason else "")
                return ask, Decision(decision="deny", reason=reason), changed_by
            if decision.decision == "modify":
                ask, changed_by = _changed(ask, decision), hook.name
        return ask, None, changed_by

    async def _one(self, hook: Hook, ask: wire.Ask, root: str, reread: Reread) -> Decision:
        input = {"diff": ask.diff, "files": ask.files} if ask.kind == "patch" else ask.input
        more = {"output": ask.output, "is_error": ask.is_error}
        try:
            decision = reread(ask, await self._call(hook, root, ask, tool=_tool(ask), input=input, **more))
        except (hook_calls.HookFailed, ProtocolError) as error:
            self._counts[hook.name]["failed"] += 1
            decision = Decision(decision=hook.on_failure, reason=f"failed: {error}")
        return msgspec.structs.replace(decision, reason=self._redactor.text(decision.reason)[0])

    async def _call(self, hook: Hook, root: str, ask: wire.Ask | None = None, **members: Any) -> Decision:
        """Call a hook, or ask the order's sender in its place. Raises HookFailed."""
        if hook.run is not None:
            call = HookCall(event=hook.event, run=self._run_id, root=root, **members)
            answer: Awaitable[Decision] = hook_calls.put(hook.run, call, self._environ, self._redactor)
        else:
            assert self._put_above is not None
            assert ask is not None
            answer = self._put_above(ask)
        with anyio.move_on_after(hook.timeout_ms / 1000):
            return await answer
        raise hook_calls.HookFailed(f"no answer within {hook.timeout_ms} ms (timeout_ms)")

    def observers(self, event: HookEvent) -> tuple[Hook, ...]:
        """Return the hooks that observe a moment; the order's sender observes its own moments itself."""
        return tuple(hook for hook in self.all if hook.event == event and hook.run is not None)

    async def observe(self, hook: Hook, root: str, input: Json) -> str:
        """Call a hook that observes; return why it failed, empty if it did not."""
        try:
            decision = await self._call(hook, root, input=input)
        except hook_calls.HookFailed as error:
            self._counts[hook.name]["failed"] += 1
            return self._redactor.text(f"hook {hook.name!r} for {hook.event} failed: {error}")[0]
        self._counts[hook.name]["observed"] += 1
        without = f"hook {hook.name!r} for {hook.event} said {decision.decision}, which has no effect"
        return "" if decision.decision == "allow" else without

    def _note(self, hook: Hook, ask: wire.Ask, decision: Decision) -> None:
        self._counts[hook.name][decision.decision] += 1
        if len(self._decisions) >= DECISIONS_MAX:
            return
        row = {
            "hook": hook.name,
            "ask": self._redactor.text(ask.id)[0][:ID_CHARS_MAX],
            "tool": _tool(ask)[: TOOL_NAME_CHARS_MAX + 1],
            "decision": decision.decision,
            "reason": decision.reason[: hook_calls.REASON_CHARS_MAX],
        }
        self._decisions.append({name: value for name, value in row.items() if value or name != "reason"})

    def look(self, event: AgentEvent, call: CallRecord | None) -> PolicyError | None:
        """Check whether the hooks for a tool result were asked; return an error if a required hook was not.

        Args:
            call: the tool call of the result; None if the host neither asked about the call nor reported it.
        """
        if not isinstance(event, ToolResult) or event.is_error:
            return None
        asked: dict[HookEvent, str] = {}
        if call is not None:
            asked = {"pre_tool": call.asked_as if call.answer == "allow" else "", "post_tool": call.shown_as}
        for kind in CAPABILITY:
            heard = self._matching(kind, asked.get(kind) or "")
            missed = [
                hook for hook in self._matching(kind, event.tool_name) if hook not in heard or not asked.get(kind)
            ]
            if not missed:
                continue
            tool = neutral(event.tool_name)
            name = f"{kind} {tool}"
            self._missed[name if name in self._missed or len(self._missed) < TOOLS_MAX else ""] += 1
            strict = next((hook for hook in missed if hook.on_failure == "deny"), None)
            if strict is not None:
                when = "before it ran" if kind == "pre_tool" else "about its result"
                fact = f"tool {tool[:80]!r} was used and hook {strict.name!r} was not asked {when}"
                return PolicyError("policy_denied", fact, hint="narrow the hook's tools, or let on_failure be allow")
        return None

    def to_wire(self) -> dict[str, Json]:
        """Return the receipt's member `usage_raw.backplane.hooks`."""
        attached = [
            {"name": hook.name, "event": hook.event, "kind": hook.kind, "tools": list(hook.tools)} for hook in self.all
        ]
        member: dict[str, Json] = {
            "attached": attached,
            "counts": {name: dict(sorted(counts.items())) for name, counts in self._counts.items()},
            "decisions": self._decisions,
        }
        return {**member, "missed": dict(sorted(self._missed.items()))} if self._missed else member


def _tool(ask: wire.Ask) -> str:
    return PATCH_TOOL if ask.kind == "patch" else ask.name if isinstance(ask.name, str) else ""


def _matches(globs: Globs, name: str) -> bool:
    try:
        return globs.matches(name) is not None
    except PolicyError:  # A name that is too long for the globs counts as a match.
        return True


def _changed(ask: wire.Ask, decision: Decision) -> wire.Ask:
    if ask.kind == "result":
        return msgspec.structs.replace(ask, output=decision.text)
    # The command is dropped, as it was read from the old input.
    return msgspec.structs.replace(ask, input=decision.input, command=UNSET)
