"""Decides an ended run again under another policy. Pure.

From stored events, the policy of the run and the policy to try, it returns each decision that would differ. Both
policies decide with the present code, so that only their rules differ; redacted values are used as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import (
    AgentEvent,
    Approval,
    ApprovalAnswered,
    Carried,
    CommandExecuted,
    FileChanged,
    ToolCall,
    Warned,
)
from backplane.policy.rules import Policy, Ruling, tool_names

CALLS_OPEN_MAX: Final = 1000
"""Maximum calls that wait for their ask; agents have a few at once. An ask about a further
one counts as a decision of its own."""

SUBJECT_CHARS_MAX: Final = 400
"""Maximum length of a decision's subject; a longer one, such as a command, is cut."""

_ASKED_KINDS: Final = ("tool", "patch")
"""Kinds of asks that a policy decides; no rule is about questions to the user and shown results."""


class Judged(msgspec.Struct, frozen=True, gc=False):
    """One decision of a policy."""

    allowed: Literal["allow", "deny", "ask"]
    rule: str | None
    """List of the profile, `workspace` or `malformed`; None if no rule matched."""
    pattern: str | None
    reason: str


class Redecided(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One decision that differs under the tried policy."""

    event: int | None
    """Index in the trace, from 0; None for a file of the patch that no event has."""
    kind: Literal["tool_call", "ask", "file_changed", "command", "patch"]
    subject: str
    """A tool and its input, a command, or a path."""
    before: Judged
    after: Judged
    answered: str | None = None
    """The answer to the host in the run: `allow`, `deny` or `modify`; None without an ask."""
    by: str | None = None
    """Source of the answer: policy, hook, caller, default."""


class Backtest:
    """Decides one run by two policies: `take` its events in order, then read `differing`."""

    def __init__(self, before: Policy, after: Policy, root: str) -> None:
        self.decisions = 0
        """Number of decisions, each by both policies."""
        self._policies = before, after
        self._root = root
        self._event = -1
        self._found: dict[int, Redecided] = {}
        """Number of the decision → the decision."""
        self._reasons: set[str] = set()
        """Reasons of the tried policy for decisions on calls and events that differ."""
        self._open: dict[int, tuple[str, Json, int]] = {}
        """Calls without an ask so far, oldest first: number of the decision → tool, input, index in the trace."""
        self._asked: dict[str, int] = {}
        """Id of an ask → number of its decision."""
        self._shells = 0
        """Number of shell calls without a reported command so far."""
        self._paths: set[str] = set()

    def take(self, events: Iterable[AgentEvent]) -> None:
        """Decide on these events."""
        for event in events:
            self._event += 1
            judge = _JUDGES.get(type(event))
            if judge is not None:
                judge(self, event)

    def take_files(self, paths: Iterable[str]) -> None:
        """Decide on the files of the patch that are in no event.

        Args:
            paths: relative to the workspace.
        """
        for path in paths:
            if path not in self._paths:
                self._write(f"./{path}", path, "patch", None)

    def differing(self) -> Iterator[Redecided]:
        """Return the decisions that differ, in the order of their events."""
        return (self._found[number] for number in sorted(self._found))

    def _both(self, decide: Any) -> tuple[Ruling, Ruling]:
        before, after = self._policies
        return decide(before), decide(after)

    def _keep(self, number: int, both: tuple[Ruling, Ruling], **place: Any) -> None:
        before, after = both
        if before.allowed == after.allowed:
            self._found.pop(number, None)
            return
        if place["event"] is not None:
            self._reasons.add(after.reason)
        earlier = self._found.get(number)
        told: dict[str, Any] = {} if earlier is None else {"answered": earlier.answered, "by": earlier.by}
        self._found[number] = Redecided(before=_judged(before), after=_judged(after), **place, **told)

    def _call(self, event: ToolCall) -> None:
        number = self._tool("tool_call", self._event, event.tool_name, event.input, None)
        self._shells += "bash" in tool_names(event.tool_name)
        if len(self._open) < CALLS_OPEN_MAX:
            self._open[number] = (event.tool_name, event.input, self._event)

    def _tool(self, kind: str, place: int, name: str, input: Json, cwd: str | None, number: int | None = None) -> int:
        if number is None:
            number = self.decisions
            self.decisions += 1
        before, after = self._policies
        was = before.decide_tool_call(name, input, root=self._root, cwd=cwd)
        now = after.decide_tool_call(name, input, root=self._root, cwd=cwd)
        if was.allowed != now.allowed or number in self._found:
            self._keep(number, (was, now), event=place, kind=kind, subject=_subject(name, input))
        return number

    def _warned(self, event: Warned | Carried) -> None:
        ext = event.ext
        if not isinstance(ext, dict):
            return
        ask, answer = ext.get("ask"), ext.get("answer")
        if isinstance(ask, dict) and ask.get("kind") in _ASKED_KINDS:
            self._ask(ask)
        elif isinstance(answer, dict) and isinstance(answer.get("id"), str):
            self._answer(answer)

    def _ask(self, ask: dict[str, Any]) -> None:
        """Repeat the decision on the ask's call, now with the ask's working folder."""
        name, input = str(ask.get("name") or ""), ask.get("input")
        if ask["kind"] == "patch":
            number = self._patch([path for path in ask.get("files") or () if isinstance(path, str)])
        else:
            cwd = ask.get("cwd") if isinstance(ask.get("cwd"), str) else None
            called = next((it for it, call in self._open.items() if call[:2] == (name, input)), None)
            if called is None:
                number = self._tool("ask", self._event, name, input, cwd)
            else:
                number, (_, _, place) = called, self._open.pop(called)
                if cwd not in (None, self._root):
                    self._tool("tool_call", place, name, input, cwd, number)
        if isinstance(ask.get("id"), str) and number in self._found:
            self._asked[ask["id"]] = number

    def _patch(self, files: list[str]) -> int:
        number = self.decisions
        self.decisions += 1
        both = self._both(lambda policy: _of_files(policy, files, self._root))
        self._keep(number, both, event=self._event, kind="ask", subject=_short(", ".join(files)))
        return number

    def _answer(self, answer: dict[str, Any]) -> None:
        number = self._asked.pop(answer["id"], None)
        if number is not None:
            told = {"answered": _text(answer.get("decision")), "by": _text(answer.get("by"))}
            self._found[number] = msgspec.structs.replace(self._found[number], **told)

    def _file(self, event: FileChanged) -> None:
        self._paths.add(event.path)
        self._write(event.path, event.path, "file_changed", self._event)

    def _write(self, path: str, shown: str, kind: str, place: int | None) -> None:
        """Decide on a changed file; if its call differs for the same reason, that is the same decision."""
        number = self.decisions
        self.decisions += 1
        both = self._both(lambda policy: policy.decide_write(path, self._root))
        if both[1].reason not in self._reasons:
            self._keep(number, both, event=place, kind=kind, subject=_short(shown))

    def _command(self, event: CommandExecuted) -> None:
        if self._shells:
            self._shells -= 1
            return
        self._tool("command", self._event, "bash", {"command": event.command}, None)


def _of_files(policy: Policy, files: list[str], root: str) -> Ruling:
    decisions = [policy.decide_write(path, root) for path in files]
    return next((it for it in decisions if it.allowed == "deny"), Ruling("allow", "no rule forbids it"))


def _judged(decision: Ruling) -> Judged:
    rule = decision.rule
    name, pattern = (rule.name, rule.pattern) if rule is not None else (None, None)
    return Judged(decision.allowed, name, pattern, decision.reason)


def _subject(name: str, input: Json) -> str:
    if isinstance(input, dict):
        for member in ("command", "path", "file_path", "url", "pattern", "query"):
            if isinstance(input.get(member), str):
                return _short(f"{name} {input[member]}")
    return _short(name)


def _short(text: str) -> str:
    return text if len(text) <= SUBJECT_CHARS_MAX else text[: SUBJECT_CHARS_MAX - 1] + "…"


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


_JUDGES: Final[dict[type[Any], Any]] = {
    ToolCall: Backtest._call,
    FileChanged: Backtest._file,
    CommandExecuted: Backtest._command,
    **dict.fromkeys((Warned, Approval, ApprovalAnswered), Backtest._warned),
}
