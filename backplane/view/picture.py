"""The picture of a run: its facts, events and receipt folded into what every view draws. Pure.

`begin` takes facts of the head, `take` the events in their order, `end` the receipt. Texts stay as they came; each
view escapes them for its medium.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carried
from backplane.contract.receipt import Receipt, Usage
from backplane.receipts.folded import Folded, fold
from backplane.view.values import TEXT_CHARS_MAX, about, as_list, as_object, words_of

KEPT_MAX: Final = 50
"""Last failures and denials kept, as many as a screen shows; all are counted."""

ITEMS_MAX: Final = 10_000
"""Open calls, open questions, steps and changed files kept; further ones are not shown."""

ERROR_CHARS_MAX: Final = 400
"""Characters of a failed call's output that identify the failure."""

_STEP_STATES: Final = {"completed": "done", "in_progress": "doing", "inProgress": "doing"}


class Evidence(msgspec.Struct, frozen=True):
    """One fact in words."""

    text: str
    event: int | None = None
    """Number of the event in the run's trace, counted from 1; None if the fact is no event."""


class ShownCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    number: int
    """The number of its event, counted from 1."""
    tool: str
    about: str
    ts: str
    input: Json = None
    """Kept while the call is open."""


class ShownQuestion(msgspec.Struct, frozen=True):
    """One question of the agent: an approval or an input."""

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
    """The value that was equal each time."""
    times: int
    number: int
    """The number of its last event."""


NO_REPEAT: Final = Repeat("", "", 0, 0)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, by its receipt."""

    outcome: str
    reason: str
    code: str | None
    exit_code: int | None
    signal: int | None
    message: str
    hint: str
    evidence: str
    duration_ms: int | None
    """None if it is not known."""
    sha256: str
    added: dict[str, Any]
    """All that the control plane added to the receipt (`usage_raw.backplane`)."""


class Picture(msgspec.Struct, eq=False, kw_only=True):
    """A run so far; filled by `begin`, `take` and `end`, and by nothing else."""

    run_id: str = ""
    task: str = ""
    root: str = ""
    mode: str = ""
    model: str | None = None
    backend: str = ""
    """Its name in the configuration."""
    started_at: str = ""
    boot_id: str | None = None
    reached: str = ""
    """The last step of its start: held (the host was started), hello or sent (the agent has the order)."""
    events: int = 0
    last_ts: str = ""
    last: str = ""
    """The type of the last event that shows what the agent does."""
    open_calls: dict[str, ShownCall] = {}
    calls: int = 0
    calls_failed: int = 0
    open_asks: dict[str, ShownQuestion] = {}
    denied: list[Evidence] = []
    denials: int = 0
    unasked: int = 0
    """Denials by default: no terminal and no caller was there to answer."""
    plan: tuple[Step, ...] = ()
    folded: Folded = Folded()
    retry: Evidence | None = None
    """The last repeated request to the model; None once the model answers."""
    retry_code: str = ""
    """The status or code that the model's service gave for it."""
    retry_until: str = ""
    """The time until which no further request is sent, if the order allows that wait."""
    retries: int = 0
    files: dict[str, str] = {}
    """Files that events name as changed → summary; a claim of the agent."""
    last_command: Command | None = None
    message: str = ""
    """The last whole message of the agent."""
    output: str = ""
    """The end of the open command's output."""
    faults: list[Evidence] = []
    """Errors that the agent or its host reported."""
    absent: list[Evidence] = []
    """MCP servers that could not be used."""
    same_call: Repeat = NO_REPEAT
    same_failure: Repeat = NO_REPEAT
    host: tuple[int, int] | None = None
    """Process id of the host or of the sandbox around it, and its start time in clock ticks since the machine began."""
    ended: Ended | None = None

    @property
    def usage(self) -> Usage:
        return self.folded.usage

    @property
    def cost_usd_micros(self) -> int | None:
        """The cost in millionths of a dollar; None if it is unknown."""
        cost = self.usage.estimated_cost_usd
        return None if cost is None else round(cost * 1_000_000)

    @property
    def waits(self) -> ShownQuestion | None:
        """The oldest question without an answer; None after the end."""
        return next(iter(self.open_asks.values()), None) if self.ended is None else None

    @property
    def state(self) -> str:
        """The state of the run: starting, waiting, waiting until a time, working or ended."""
        if self.ended is not None:
            return "ended"
        if self.open_asks:
            return "waiting"
        if self.until:
            return f"waiting until {self.until}"
        return "working" if self.reached in ("hello", "sent") else "starting"

    @property
    def until(self) -> str:
        """Time until which the run waits for a limit of its model's service; empty if it does not."""
        return self.retry_until if self.retry is not None else ""

    def begin(self, fact: dict[str, Any]) -> None:
        """Add a fact of the journal's head."""
        match fact.get("fact"):
            case "order":
                self._order(fact)
            case "held" | "hello" | "sent" as reached:
                self.reached = reached
            case "host":
                self.host = _number(fact.get("pid")) or 0, _number(fact.get("start")) or 0

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

    def take(self, event: AgentEvent) -> None:
        """Add the next event."""
        if event.ext is not None:
            event = carried(event)
        self.events += 1
        self.last_ts = event.ts
        self.reached = "sent"
        match event:
            case kinds.AssistantDelta():
                self.retry = None
            case kinds.AssistantMessage():
                self.message, self.retry = event.text[-TEXT_CHARS_MAX:], None
            case kinds.ToolCall():
                self._called(event)
            case kinds.ToolResult():
                self._resulted(event)
            case kinds.CommandExecuted():
                output = (event.output_preview or self.output)[-ERROR_CHARS_MAX:]
                self.last_command = Command(self.events, event.command, event.exit_code, output)
            case kinds.FileChanged():
                if len(self.files) < ITEMS_MAX:
                    self.files[event.path] = event.summary
            case kinds.Failed():
                self._failed(event)
            case kinds.Approval():
                self._asked(event)
            case kinds.ApprovalAnswered():
                self._answered(event)
            case kinds.UsageReported() | kinds.TurnEnded():
                self.folded = fold(self.folded, event)
            case kinds.TaskReported():
                self._plan(event.body.get("plan"))
            case kinds.RetryReported():
                self._retried(event)
            case kinds.OutputReported():
                self.output = (self.output + _text(event.body.get("text")))[-TEXT_CHARS_MAX:]
            case kinds.Warned() if "absent_server" in as_object(event.ext):
                self.absent = [*self.absent[1 - KEPT_MAX :], Evidence(event.message, self.events)]
        if type(event) not in _SILENT:
            self.last = type(event).__name__

    def end(self, receipt: Receipt) -> None:
        """Add the receipt; calls and questions that are still open are over."""
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
            sha256=receipt.receipt_sha256 or "",
            added=added,
        )

    def _called(self, event: kinds.ToolCall) -> None:
        self.calls += 1
        self.retry, self.output = None, ""
        call = ShownCall(self.events, event.tool_name, about(event.input), event.ts, event.input)
        if len(self.open_calls) < ITEMS_MAX:
            self.open_calls[event.tool_use_id or f"#{self.events}"] = call
        self._plan(as_object(event.input).get("todos"))

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
        key = call.tool, call.input, text
        self.same_call = _again(self.same_call, f"{call.tool} {call.about}", key, self.events)

    def _close(self, event: kinds.ToolResult) -> ShownCall | None:
        if event.tool_use_id is not None:
            return self.open_calls.pop(event.tool_use_id, None)
        # A host without ids: the newest open call of this tool.
        named = [key for key, call in self.open_calls.items() if call.tool == event.tool_name]
        return self.open_calls.pop(named[-1]) if named else None

    def _failed(self, event: kinds.Failed) -> None:
        foreign = as_object(event.ext).get("error_code")
        code = event.error_code if isinstance(event.error_code, str) else foreign
        words = f"{event.message} ({code})" if isinstance(code, str) else event.message
        self.faults = [*self.faults[1 - KEPT_MAX :], Evidence(words, self.events)]

    def _asked(self, event: kinds.Approval) -> None:
        if len(self.open_asks) < ITEMS_MAX:
            id = _text(event.body.get("id"))
            self.open_asks[id] = ShownQuestion(self.events, id, event.message, event.body, event.ts)

    def _answered(self, event: kinds.ApprovalAnswered) -> None:
        ask = self.open_asks.pop(_text(event.body.get("id")), None)
        if event.body.get("decision") != "deny":
            return
        self.denials += 1
        by, what = event.body.get("by"), f"{ask.tool} {ask.about}" if ask is not None else "a question"
        self.unasked += by == "default"
        words = f"{what}: {event.body.get('reason')} (by {by})"
        self.denied = [*self.denied[1 - KEPT_MAX :], Evidence(words, self.events)]

    def _plan(self, value: Json) -> None:
        if steps := tuple(_steps(as_list(value))):
            self.plan = steps

    def _retried(self, event: kinds.RetryReported) -> None:
        self.retries += 1
        self.folded = fold(self.folded, event)
        code = event.body.get("error_status", event.body.get("status", event.body.get("code")))
        self.retry_until = _text(event.body.get("until"))
        self.retry, self.retry_code = Evidence(event.message, self.events), "" if code is None else str(code)


_SILENT: Final = frozenset({kinds.UsageReported, kinds.SessionNamed, kinds.TurnEnded, kinds.LossReported})
"""Events that do not show what the agent does."""


def _again(before: Repeat, what: str, key: object, number: int) -> Repeat:
    return Repeat(what, key, before.times + 1 if before.key == key else 1, number)


def _steps(rows: list[Json]) -> Iterator[Step]:
    for row in map(as_object, rows[:ITEMS_MAX]):
        text = row.get("content", row.get("step"))  # As Claude and ACP have it, and as Codex has it.
        if isinstance(text, str):
            yield Step(text, _STEP_STATES.get(str(row.get("status")), "open"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
