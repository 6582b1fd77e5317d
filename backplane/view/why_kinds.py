"""The kinds of trouble that `why` names: their words, their next steps, and the facts that they are found in. Pure.

An error of a run is a kind by its code, in the words of the code's meaning; every other kind has a row in `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from backplane.process.table import Process
from backplane.view.figures import lasting
from backplane.view.picture import Evidence, Picture, ShownCall

REPEATS_MIN: Final = 3
"""Equal calls or failures in a row that count as a loop; the second may be a retry."""

WAITS_LONG_MS: Final = 3_600_000
"""Longest pause that a service may ask for before its quota counts as used up."""

_RESETS: Final = (
    r"(?is)\b(resets?|renews?|try again|available again|retry)\b.{0,40}?"
    r"(\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\d{1,2} ?[ap]m\b|\d+ ?(h|hours?|days?)\b"
    r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d)"
)
"""Compiled on first use, so that no diagnosis of another kind waits for it."""
_LIMITED: Final = re.compile(r"\b(limit|quota|usage|credits?)\b", re.IGNORECASE)

Kind = str

KINDS: Final[dict[Kind, tuple[str, ...]]] = {
    "nothing": ("nothing is wrong: {what}",),
    # Live runs.
    "approval_waits": ("it waits for your approval of {tool}",
                       "backplane answer {run} {ask} allow, or deny --reason WHY",
                       "or in the terminal where it runs, or in: backplane watch"),
    "question_waits": ("it waits for your answer to a question", "backplane answer {run} {ask} allow --text WORDS",
                       "or in the terminal where it runs, or in: backplane watch"),
    "hook_hangs": ("a hook has not answered yet: {names}", "wait for its limit (timeout_ms of the hook)",
                   "or fix the hook: a good one answers in milliseconds"),
    "quota": ("the account's quota is used up, {until}", "another login, model or backend", "or wait until then"),
    "overloaded": ("the model's service {what}; the request is repeated{code}",
                   "wait; if it lasts, another model or backend"),
    "same_failure": ("the same failure came {times} times in a row",
                     "stop it (Ctrl-C where it runs), and say in the task what goes wrong"),
    "same_call": ("it made the same call {times} times in a row, with the same result",
                  "stop it (Ctrl-C where it runs), and say in the task what it should do instead"),
    "no_hello": ("its host has started and has not said hello yet", "wait for its limit (BACKPLANE_HELLO_S)",
                 "backplane doctor, for the backend {backend!r}"),
    "staging": ("its workspace is being copied, or its host is being prepared",
                "wait, or exclude folders that it does not need (--exclude)"),
    "tool_works": ("{tool} runs", "wait"),
    "tool_quiet": ("{tool} runs, without any output for {age}", "wait, if the command is a long one",
                   "if it waits for input: a flag that asks nothing (-y, --no-input)"),
    "model_silent": ("no tool runs, and the agent has sent nothing for {age}",
                     "wait: the run ends by itself after BACKPLANE_IDLE_S", "Ctrl-C where it runs"),
    # Ended runs and runs that were cut off, by the reason of the end.
    "idle_limit": ("the agent sent nothing for longer than the limit",
                   "raise BACKPLANE_IDLE_S, or use a tool with output"),
    "deadline": ("its time was up", "raise run --timeout, or split the task"),
    "budget": ("its budget was spent", "raise --max-budget-usd, or split the task"),
    "max_turns": ("it used all its turns", "raise --max-turns, or split the task"),
    "cancelled": ("it was cancelled", "run the order again; its conversation, if it was kept: run --resume last"),
    "interrupted": ("its control plane {how}",
                    "run the order again; its conversation, if it was kept: run --resume last"),
    "crashed": ("its host ended before it {what}: {how}",
                "see its last words above; run it again, as a retry may help"),
    "out_of_memory": ("its host was killed: most often by lack of memory",
                      "give the machine or the run more memory, or see what killed it (journalctl -k)"),
    "refused": ("the order was refused before it was sent", "see the order's requirements and policy"),
    "disk_full": ("the disk is full", "make room on that disk",
                  "backplane prune --keep 100, which removes what older runs keep"),
    "altered": ("its receipt is not what was sealed: nothing it says can be relied on",
                "backplane receipts verify {run}", "backplane receipts import, from an export that still verifies"),
    # Ended runs by what the agent did.
    "rule_broken": ("it did what the policy forbids", "or correct the rule"),
    "denied": ("{denied} denied, and it ended as {outcome}", "allow what it needs, and run it again",
               "or say in the task what it should do instead", "backplane policy test POLICY {run}, to try a rule"),
    "agent_failed": ("the agent itself ended as {outcome}", "backplane receipts show {run}, for all that it said"),
    "nobody_asked": ("{denied} denied, as there was no terminal to ask on",
                     "run it in a terminal, or with run --on-ask prompt", "or a rule that allows it (--policy)"),
    "failed_on": ("it is complete, and its exit code is 3: {found}", "allow what it needs, and run it again",
                  "backplane receipts audit {run}, for what it claimed", "or take it as it is: run --fail-on none"),
    "false_claims": ("it is complete, and it made {count}", "backplane receipts audit {run}, for what was seen"),
    "only_ignored": ("it changed {ignored} that git ignores, and nothing else: no patch has ignored files",
                     "take them out of .gitignore, or work with run --in-place"),
    "done_but_unchanged": ("it says that it changed files, and none is changed",
                           "backplane receipts show {run}, for what it did"),
    "done_but_red": ("it says that it is done, and its last tests failed", "run it yourself: {command}"),
}  # fmt: skip
"""Kind → its verdict, and the next steps, the likeliest first. Names in braces are facts of the run."""

LIKELY: Final = frozenset(
    ("no_hello", "staging", "tool_quiet", "model_silent", "out_of_memory", "denied", "done_but_red")
)
"""Kinds that are never sure."""

HEALTHY: Final = frozenset({"nothing", "tool_works"})
"""Kinds that are no trouble."""


class Cause(msgspec.Struct, frozen=True):
    """One kind that holds."""

    kind: Kind
    evidence: Sequence[Evidence] = ()
    facts: Mapping[str, object] = {}
    """Values of the names in braces in its words."""
    since: str = ""
    """Time of the event that began it."""
    hint: str = ""
    """A next step that goes before those of the kind."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run beside its journal and receipt."""

    now_ms: int
    """Milliseconds since 1970."""
    state: Literal["live", "cut_off", "ended"]
    boot_id: str | None = None
    """The id of this start of the machine."""
    processes: tuple[Process, ...] = ()
    """A live run's processes, parents first; empty if nothing looked."""
    faults: tuple[str, ...] = ()
    """Differences between the receipt and what was sealed."""
    models: tuple[str, ...] = ()
    """Known names of models."""


def repeated(picture: Picture) -> Cause | None:
    """Return the cause of a run that repeats a failure or a call; a complete run may have done so."""
    if picture.ended is not None and picture.ended.outcome == "complete":
        return None
    for kind, found in (("same_failure", picture.same_failure), ("same_call", picture.same_call)):
        if found.times >= REPEATS_MIN:
            return Cause(kind, [Evidence(found.what, found.number)], {"times": found.times})
    return None


def quota(picture: Picture, text: str, rows: Sequence[Evidence], since: str = "") -> Cause | None:
    """Return the cause of a limit that no short pause lifts: its text names a date, or the pause is long."""
    after_ms = picture.folded.retry_after_ms
    found = re.search(_RESETS, text) if _LIMITED.search(text) else None
    if found is None and (after_ms is None or after_ms < WAITS_LONG_MS):
        return None
    until = f"until then: {found[0]}" if found is not None else f"for {lasting(after_ms or 0)}"
    return Cause("quota", rows, {"until": until}, since)


def newest_call(picture: Picture) -> ShownCall | None:
    """Return the newest call that has no result yet."""
    return max(picture.open_calls.values(), key=lambda call: call.number, default=None)
