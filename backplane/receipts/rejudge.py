"""Decides stored runs again under another policy, and lists each decision that would differ. Nothing here writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
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
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile
from backplane.errors import PolicyError, StoreError
from backplane.policy.rules import Policy, Ruling, compile_policy, tool_names
from backplane.receipts.audit import patch_claim
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import HeadOrder, read_head
from backplane.receipts.store import Store

CALLS_OPEN_MAX: Final = 1000
"""Maximum number of calls that wait for their ask; agents have a few at once. An ask about a further call counts as a
separate decision."""

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
    """Source of the answer: `policy`, `hook`, `caller` or `default`; None without an ask."""


class Backtest:
    """Decides one run by two policies: `take` its events in order, then read `differing`. Pure.

    Both policies decide with the present code, so that only their rules differ; redacted values are used as they are
    stored.
    """

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
        kept: dict[str, Any] = {} if earlier is None else {"answered": earlier.answered, "by": earlier.by}
        self._found[number] = Redecided(before=_judged(before), after=_judged(after), **place, **kept)

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
            given = {"answered": _text(answer.get("decision")), "by": _text(answer.get("by"))}
            self._found[number] = msgspec.structs.replace(self._found[number], **given)

    def _file(self, event: FileChanged) -> None:
        self._paths.add(event.path)
        self._write(event.path, event.path, "file_changed", self._event)

    def _write(self, path: str, shown: str, kind: str, place: int | None) -> None:
        """Decide on a changed file; a difference that its call has for the same reason is counted once."""
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


# The store ------------------------------------------------------------------------------------------------------------

POLICIES_MAX: Final = 64
"""Maximum number of compiled policies of stored runs; a user has a few."""


class Rejudged(msgspec.Struct, frozen=True, kw_only=True):
    """One stored run under the tried policy."""

    run_id: str
    decisions: int
    """Number of decisions, each by both policies."""
    differing: tuple[Redecided, ...] = ()
    unjudged: str | None = None
    """Why the run, or a part of it, could not be judged; None if all was judged."""


class Rejudge:
    """Judges stored runs by another policy.

    Args:
        profile: the policy to try; an empty one is the shipped `default`, as in a run.
        files_of: returns the paths of the files in a patch's text.

    Raises:
        PolicyError: `policy_invalid`.
    """

    def __init__(self, store: Store, profile: PolicyProfile, files_of: Callable[[str], Iterable[str]]) -> None:
        self._store = store
        self._after = compile_policy(profile)
        self._files_of = files_of
        self._before: dict[bytes, Policy] = {}

    def run(self, row: ReceiptRow) -> Rejudged:
        """Judge one run; `unjudged` says which part of it cannot be read."""
        if row.reason == "refused" and not row.trace_count:
            return Rejudged(run_id=row.run_id, decisions=0)  # Nothing was started, so nothing was decided.
        try:
            order, profile = self._order(row)
            receipt = self._store.load(row.run_id)
            if "replay" in receipt.backplane:
                return Rejudged(run_id=row.run_id, decisions=0)  # The replayed run has its own line.
            test = Backtest(self._policy(profile), self._after, self._root(row.run_id, order))
            test.take(receipt.trace)
        except (StoreError, PolicyError) as error:
            return Rejudged(run_id=row.run_id, decisions=0, unjudged=error.message)
        diff = receipt.verification.git_diff
        if diff:
            test.take_files(self._files_of(diff))
        return Rejudged(
            run_id=row.run_id,
            decisions=test.decisions,
            differing=tuple(test.differing()),
            unjudged=_unread(receipt, diff),
        )

    def _order(self, row: ReceiptRow) -> tuple[HeadOrder, PolicyProfile]:
        cause: Exception | None = None
        try:
            order = read_head(self._store.folder(row.run_id)).order
            if order.policy is not None:
                return order, order.policy
        except (OSError, msgspec.MsgspecError) as error:
            cause = error
        fact = "its order is not kept here, so its policy is not known (pruned or imported)"
        raise StoreError("receipt_store_failed", fact) from cause

    def _policy(self, profile: PolicyProfile) -> Policy:
        key = msgspec.json.encode(profile)
        if key not in self._before:
            if len(self._before) >= POLICIES_MAX:
                self._before.clear()
            self._before[key] = compile_policy(profile)
        return self._before[key]

    def _root(self, run_id: str, order: HeadOrder) -> str:
        """Return the folder in which the agent worked: the removed copy, or the original."""
        if order.workspace.mode == "staged":
            stages = self._store.home / "stage"
            stages = Path(os.path.realpath(stages)) if stages.is_symlink() else stages
            return str(stages / run_id / "tree")
        return os.path.realpath(order.workspace.root)


def _unread(receipt: Receipt, diff: str | None) -> str | None:
    if diff is None and patch_claim(receipt).get("bytes"):
        return "its patch is too long, binary or redacted, so files that no event names were not judged"
    return None
