"""The picture of a run: its facts, events and receipt folded into what every view draws. Pure.

Facts of the head go in by `begin`, events by `take` in their order, the receipt by `end`. Texts stay as
they came: whoever draws makes them harmless for its own medium.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.deltas import taken_back
from backplane.contract.events import AgentEvent, carried
from backplane.contract.receipt import Receipt, Usage
from backplane.receipts.folded import Folded, fold
from backplane.view.values import about, as_list, as_object, words_of

KEPT_MAX: Final = 50
"""Last calls, failures and denials kept: as many as a screen shows; all are counted."""

OPEN_MAX: Final = 1_000
"""Open calls and questions told apart; agents have dozens."""

FILES_MAX: Final = 10_000
"""Files remembered as named by events; more are counted by nobody who looks at a screen."""

ERROR_CHARS_MAX: Final = 400
"""Of a failed call's output, by which it is known again."""

CURVE_MAX: Final = 400
"""Points of a curve; more are narrower than a pixel."""

STEPS_MAX: Final = 200
"""Steps of a plan that are kept."""

TEXT_CHARS_MAX: Final = 16 * 1024
"""Kept of a text: what is shown at once is shorter."""

ANNOUNCED_CHARS_MAX: Final = 2000
"""Of the end of a message, where it says what comes next."""

_ANNOUNCES: Final = re.compile(
    r"\b(I'll|I’ll|I will|I am going to|I'm going to|let me(?! know)|let's|next,? I)\b", re.IGNORECASE
)
_KINDS: Final = ("type", "subtype", "method", "kind", "name")
_COMPACTED: Final = re.compile(r"\b(compact(ed|ion|ing)|summari[sz]ed the conversation)\b", re.IGNORECASE)
_PLANS: Final = ("todos", "plan", "entries")
_STEP_TEXTS: Final = ("content", "step", "text", "title", "activeForm")
_DONE: Final = frozenset({"completed", "complete", "done"})
_DOING: Final = frozenset({"in_progress", "inProgress", "active", "running"})


class ShownCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    number: int
    """Of its event, counted from 1."""
    tool: str
    about: str
    ts: str
    parent: str | None = None
    input: Json = None
    tokens: int = 0
    """Used by the run when it began."""
    failed: bool | None = None
    """Whether its result was an error; None while it is open."""
    output: str = ""


class ShownQuestion(msgspec.Struct, frozen=True):
    """One ask, and what became of it."""

    number: int
    id: str
    message: str
    body: dict[str, Any]
    ts: str

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def tool(self) -> str:
        return str(self.body.get("name") or self.body.get("kind") or "")

    @property
    def about(self) -> str:
        return about(self.body.get("input")) or str(self.body.get("question") or self.message)


class Denial(msgspec.Struct, frozen=True):
    """An ask that was answered with no."""

    number: int
    tool: str
    about: str
    by: str
    """policy, caller, hook, default or another word of the control plane's."""
    reason: str


class ReportedFault(msgspec.Struct, frozen=True):
    """An error that the agent or its host told under way."""

    number: int
    message: str
    code: str | None


class Step(msgspec.Struct, frozen=True):
    """A step of the agent's plan."""

    text: str
    state: str
    """done, doing or open."""


class Command(msgspec.Struct, frozen=True):
    """A command that has run."""

    number: int
    command: str
    exit_code: int | None
    output: str = ""


class Repeat(msgspec.Struct, frozen=True):
    """The same thing several times in a row."""

    what: str
    key: object
    """What has to be equal."""
    times: int
    number: int
    """Of its last event."""


NO_REPEAT: Final = Repeat("", "", 0, 0)


class HostProcess(msgspec.Struct, frozen=True):
    """The process of the run's host, or what stands around it."""

    pid: int
    start: int
    """In clock ticks since the machine began."""
    plane: int
    """The process that holds the run."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, by its receipt."""

    outcome: str
    reason: str
    code: str | None
    exit_code: int | None
    signal: int | None
    message: str
    hint: str
    evidence: str
    duration_ms: int | None
    """None where it is not known."""
    finished_at: str
    sha256: str
    harness_ok: bool
    added: dict[str, Any]
    """All that the control plane added to the receipt (`usage_raw.backplane`)."""
    diff: str | None
    """The patch as the receipt has it; None where it is too long or holds a secret."""


class UsageDelta(msgspec.Struct, frozen=True):
    """Tokens that one report of usage added to the one before."""

    input: int = 0
    cached: int = 0
    """Of these, read from the service's cache."""


class Spending(msgspec.Struct, frozen=True):
    """What a run had used in all at one moment."""

    ts: str
    tokens: int
    usd_micros: int | None


class Picture(msgspec.Struct, eq=False, kw_only=True):
    """A run so far; filled by `begin`, `take` and `end`, and by nothing else."""

    run_id: str = ""
    task: str = ""
    root: str = ""
    mode: str = ""
    model: str | None = None
    backend: str = ""
    """The name that it has here."""
    started_at: str = ""
    boot_id: str | None = None
    said_hello: bool = False
    is_sent: bool = False
    """The order went to the host: its workspace stands, and the agent may begin."""
    has_stage: bool = False
    """What holds the host is known, and its host was started."""
    events: int = 0
    last_ts: str = ""
    last: str = ""
    """The type of the last event that says anything."""
    open_calls: dict[str, ShownCall] = {}
    calls: int = 0
    calls_failed: int = 0
    recent: list[ShownCall] = []
    """The last calls that ended."""
    open_asks: dict[str, ShownQuestion] = {}
    denied: list[Denial] = []
    denials: int = 0
    plan: tuple[Step, ...] = ()
    folded: Folded = Folded()
    turns: int = 0
    retry: ReportedFault | None = None
    """The model is asked again, and has said nothing since."""
    retries: int = 0
    files: dict[str, str] = {}
    """Files that events name as changed; a claim of the child."""
    last_command: Command | None = None
    streamed: str = ""
    """The end of what the agent writes and has not finished."""
    message: str = ""
    """The last whole message of the agent."""
    messages: int = 0
    has_talked: bool = False
    """It has said something in this turn, and no call has come since."""
    output: str = ""
    """The end of what the open command has printed."""
    faults: list[ReportedFault] = []
    absent: list[ReportedFault] = []
    """MCP servers that could not be used."""
    same_call: Repeat = NO_REPEAT
    same_failure: Repeat = NO_REPEAT
    only_announced: Repeat = NO_REPEAT
    """Turns in a row that say what the agent will do, and call nothing."""
    compactions: Repeat = NO_REPEAT
    """How often the conversation was shortened since a file was changed last."""
    spent: tuple[UsageDelta, ...] = ()
    """The last two additions to the usage, the older first."""
    curve: list[Spending] = []
    """What it had used after each report of usage; of many each second, each fourth, and so on."""
    _every: int = 1
    parents: dict[str, int] = {}
    """Calls that other calls name as theirs: those of sub-agents. Id → how many."""
    hooks: dict[str, tuple[str, ...]] = {}
    """Asks over which hooks take long, and these hooks."""
    servers: tuple[str, ...] = ()
    """MCP servers of the order."""
    context: int = 0
    """Files and texts that the order gave along."""
    host: HostProcess | None = None
    ended: Ended | None = None

    @property
    def usage(self) -> Usage:
        return self.folded.usage

    @property
    def cost_usd_micros(self) -> int | None:
        """What it has cost in millionths of a dollar; None where nobody says."""
        cost = self.usage.estimated_cost_usd
        return None if cost is None else round(cost * 1_000_000)

    @property
    def waits(self) -> ShownQuestion | None:
        """The oldest question that nobody has answered; None after the end."""
        return next(iter(self.open_asks.values()), None) if self.ended is None else None

    @property
    def state(self) -> str:
        """What it does now, in one word: starting, waiting, working or ended."""
        if self.ended is not None:
            return "ended"
        if self.open_asks:
            return "waiting"
        return "working" if self.said_hello else "starting"

    def begin(self, fact: dict[str, Any]) -> None:
        """Add a fact of the journal's head."""
        match fact.get("fact"):
            case "order":
                self._order(fact)
            case "held":
                self.has_stage = True
            case "hello":
                self.said_hello = True
            case "sent":
                self.is_sent = True
            case "host":
                pid, start, plane = (_number(fact.get(name)) or 0 for name in ("pid", "start", "plane"))
                self.host = HostProcess(pid, start, plane)
            case "hooks":
                self._hooked(_text(fact.get("ask")), fact.get("names"))

    def _hooked(self, ask: str, names: Json) -> None:
        if isinstance(names, list) and names and len(self.hooks) < OPEN_MAX:
            self.hooks[ask] = tuple(map(str, names))
        else:
            self.hooks.pop(ask, None)

    def _order(self, fact: dict[str, Any]) -> None:
        order = as_object(fact.get("order"))
        workspace, config = as_object(order.get("workspace")), as_object(order.get("config"))
        self.run_id = _text(fact.get("run_id"))
        self.started_at = _text(fact.get("started_at"))
        self.boot_id = _text(fact.get("boot_id")) or None
        self.backend = _text(as_object(fact.get("backend")).get("id"))
        self.task = _text(order.get("task"))
        self.root, self.mode = _text(workspace.get("root")), _text(workspace.get("mode"))
        self.model = _text(config.get("model")) or None
        packet = as_object(order.get("context"))
        self.context = sum(len(as_list(packet.get(name))) for name in ("files", "snippets"))
        servers = as_list(as_object(as_object(config.get("vendor")).get("abp")).get("mcp_servers"))
        self.servers = tuple(_text(as_object(row).get("name")) for row in servers)

    def take(self, event: AgentEvent) -> None:
        """Add the next event."""
        if event.ext is not None:
            event = carried(event)
        self.events += 1
        self.last_ts = event.ts
        self.said_hello = self.is_sent = True
        add = _TAKE.get(type(event))
        if add is not None:
            add(self, event)
        if type(event) not in _SILENT:
            self.last = type(event).__name__

    def end(self, receipt: Receipt) -> None:
        """Add the receipt; what the events left open is over."""
        added, cause = receipt.backplane, as_object(receipt.backplane.get("error"))
        end = as_object(added.get("end"))
        self.run_id = receipt.meta.run_id
        self.started_at = receipt.meta.started_at
        self.backend = self.backend or receipt.backend.id
        self.folded = msgspec.structs.replace(self.folded, usage=receipt.usage)
        self.ended = Ended(
            outcome=receipt.outcome,
            reason=_text(end.get("reason")),
            code=_text(cause.get("code")) or _text(end.get("code")) or None,
            exit_code=_number(end.get("exit_code")),
            signal=_number(end.get("signal")),
            message=_text(cause.get("message")),
            hint=_text(cause.get("hint")),
            evidence=_text(cause.get("evidence")),
            duration_ms=None if added.get("duration") == "unknown" else receipt.meta.duration_ms,
            finished_at=receipt.meta.finished_at,
            sha256=receipt.receipt_sha256 or "",
            harness_ok=receipt.verification.harness_ok,
            added=added,
            diff=receipt.verification.git_diff,
        )

    # What each kind of event adds.

    def _delta(self, event: kinds.AssistantDelta) -> None:
        self.streamed = (self.streamed + event.text)[-TEXT_CHARS_MAX:]
        self.retry = None

    def _message(self, event: kinds.AssistantMessage) -> None:
        self.message, self.streamed, self.retry = event.text[-TEXT_CHARS_MAX:], "", None
        self.messages += 1
        self.has_talked = True

    def _called(self, event: kinds.ToolCall) -> None:
        self.calls += 1
        self.retry, self.output = None, ""
        self.only_announced, self.has_talked = NO_REPEAT, False
        parent = event.parent_tool_use_id
        if parent is not None and (parent in self.parents or len(self.parents) < OPEN_MAX):
            self.parents[parent] = self.parents.get(parent, 0) + 1
        call = ShownCall(self.events, event.tool_name, about(event.input), event.ts, parent, event.input, self.tokens)
        if len(self.open_calls) < OPEN_MAX:
            self.open_calls[event.tool_use_id or f"#{self.events}"] = call
        if isinstance(event.input, dict):
            self._plan(next((event.input[name] for name in _PLANS if isinstance(event.input.get(name), list)), None))

    def _resulted(self, event: kinds.ToolResult) -> None:
        call = self._close(event)
        text = words_of(event.output)
        self.output = ""
        if event.is_error:
            self.calls_failed += 1
            what = f"{event.tool_name}: {text[:ERROR_CHARS_MAX]}"
            self.same_failure = _again(self.same_failure, what, what, self.events)
        elif self.same_failure.what.startswith(f"{event.tool_name}: "):
            self.same_failure = NO_REPEAT
        if call is None:
            return
        ended = msgspec.structs.replace(call, input=None, failed=event.is_error, output=text[:TEXT_CHARS_MAX])
        self.recent = [*self.recent[1 - KEPT_MAX :], ended]
        key = call.tool, call.input, text
        self.same_call = _again(self.same_call, f"{call.tool} {call.about}", key, self.events)

    def _close(self, event: kinds.ToolResult) -> ShownCall | None:
        if event.tool_use_id is not None:
            return self.open_calls.pop(event.tool_use_id, None)
        # A host that numbers nothing: the newest open call of this tool.
        named = [key for key, call in self.open_calls.items() if call.tool == event.tool_name]
        return self.open_calls.pop(named[-1]) if named else None

    def _ran(self, event: kinds.CommandExecuted) -> None:
        self.last_command = Command(
            self.events, event.command, event.exit_code, (event.output_preview or self.output)[-ERROR_CHARS_MAX:]
        )

    def _changed(self, event: kinds.FileChanged) -> None:
        self.compactions = NO_REPEAT
        if len(self.files) < FILES_MAX:
            self.files[event.path] = event.summary

    def _failed(self, event: kinds.Failed) -> None:
        foreign = as_object(event.ext).get("error_code")
        code = event.error_code if isinstance(event.error_code, str) else foreign if isinstance(foreign, str) else None
        self.faults = [*self.faults[1 - KEPT_MAX :], ReportedFault(self.events, event.message, code)]

    def _asked(self, event: kinds.Approval) -> None:
        if len(self.open_asks) < OPEN_MAX:
            id = _text(event.body.get("id"))
            self.open_asks[id] = ShownQuestion(self.events, id, event.message, event.body, event.ts)

    def _answered(self, event: kinds.ApprovalAnswered) -> None:
        ask = self.open_asks.pop(_text(event.body.get("id")), None)
        if event.body.get("decision") != "deny":
            return
        self.denials += 1
        tool, what = (ask.tool, ask.about) if ask is not None else ("", "")
        by, reason = _text(event.body.get("by")), _text(event.body.get("reason"))
        self.denied = [*self.denied[1 - KEPT_MAX :], Denial(self.events, tool, what, by, reason)]

    def _counted(self, event: kinds.UsageReported) -> None:
        before = self.usage
        self.folded = fold(self.folded, event)
        after = self.usage
        added = (after.input_tokens or 0) - (before.input_tokens or 0)
        if self.events % self._every == 0:
            self.curve.append(Spending(event.ts, self.tokens, self.cost_usd_micros))
            if len(self.curve) > CURVE_MAX:
                self.curve, self._every = self.curve[1::2], self._every * 2
        if added > 0:
            cached = (after.cache_read_tokens or 0) - (before.cache_read_tokens or 0)
            self.spent = (*self.spent[-1:], UsageDelta(added, max(cached, 0)))

    @property
    def tokens(self) -> int:
        """All that it has used; what nobody tells counts as nothing."""
        return (self.usage.input_tokens or 0) + (self.usage.output_tokens or 0)

    def _turned(self, event: kinds.TurnEnded) -> None:
        self.turns += 1
        self.folded = fold(self.folded, event)
        if self.has_talked and _ANNOUNCES.search(self.message[-ANNOUNCED_CHARS_MAX:]):
            self.only_announced = _again(self.only_announced, self.message, "announced", self.events)
        else:
            self.only_announced = NO_REPEAT
        self.has_talked = False

    def _told(self, event: kinds.TaskReported) -> None:
        self._plan(event.body.get("plan"))

    def _plan(self, value: Json) -> None:
        if steps := tuple(_steps(as_list(value))):
            self.plan = steps

    def _retried(self, event: kinds.RetryReported) -> None:
        if taken_back(event):
            self.streamed = ""
        self.retries += 1
        code = event.body.get("error_status", event.body.get("status", event.body.get("code")))
        self.retry = ReportedFault(self.events, event.message, str(code) if isinstance(code, int | str) else None)

    def _printed(self, event: kinds.OutputReported) -> None:
        self.output = (self.output + _text(event.body.get("text")))[-TEXT_CHARS_MAX:]

    def _warned(self, event: kinds.Warned) -> None:
        if "absent_server" in as_object(event.ext):
            self.absent = [*self.absent[1 - KEPT_MAX :], ReportedFault(self.events, event.message, None)]
        named = as_object(as_object(event.ext).get("raw_message"))
        # Agents call it so in a member of their own message, or in the words that a host puts beside that.
        if any("compact" in _text(named.get(name)).lower() for name in _KINDS) or _COMPACTED.search(event.message):
            self.compactions = _again(self.compactions, event.message, "compacted", self.events)


_TAKE: Final[dict[type[Any], Callable[[Picture, Any], None]]] = {
    kinds.AssistantDelta: Picture._delta,
    kinds.AssistantMessage: Picture._message,
    kinds.ToolCall: Picture._called,
    kinds.ToolResult: Picture._resulted,
    kinds.CommandExecuted: Picture._ran,
    kinds.FileChanged: Picture._changed,
    kinds.Failed: Picture._failed,
    kinds.Warned: Picture._warned,
    kinds.Approval: Picture._asked,
    kinds.ApprovalAnswered: Picture._answered,
    kinds.UsageReported: Picture._counted,
    kinds.TurnEnded: Picture._turned,
    kinds.TaskReported: Picture._told,
    kinds.RetryReported: Picture._retried,
    kinds.OutputReported: Picture._printed,
}
_SILENT: Final = frozenset({kinds.UsageReported, kinds.SessionNamed, kinds.TurnEnded, kinds.LossReported})
"""Events that say nothing of what the agent does."""


def _again(before: Repeat, what: str, key: object, number: int) -> Repeat:
    return Repeat(what, key, before.times + 1 if before.key == key else 1, number)


def _steps(value: list[Json]) -> Iterator[Step]:
    for row in value[:STEPS_MAX]:
        if isinstance(row, str):
            yield Step(row, "open")
        elif isinstance(row, dict):
            text = next((row[name] for name in _STEP_TEXTS if isinstance(row.get(name), str)), None)
            if text is not None:
                state = row.get("status", row.get("state"))
                yield Step(text, "done" if state in _DONE else "doing" if state in _DOING else "open")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
