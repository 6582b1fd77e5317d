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
    "approval_waits": ("the run waits for approval of {tool}",
                       "backplane answer {run} {ask} allow, or deny --reason WHY",
                       "or answer in the terminal of the run, or in backplane watch",
                       "or wait for a hook, if the run has hooks: each has to answer within its timeout_ms"),
    "question_waits": ("the run waits for your answer to a question", "backplane answer {run} {ask} allow --text WORDS",
                       "or answer in the terminal of the run, or in backplane watch"),
    "quota": ("the account's quota is used up; the service says: {until}", "use another login, model or backend",
              "or wait until the quota is renewed"),
    "limit_waits": ("the run waits until {until} for a limit of the model's service", "wait",
                    "or backplane cancel {run}, and use another login, model or backend"),
    "overloaded": ("the model's service {what}{code}; the agent repeats the request",
                   "wait, or use another model or backend"),
    "same_failure": ("the same failure happened {times} times in a row",
                     "stop the run (Ctrl-C in its terminal), and describe the failure in the task"),
    "same_call": ("the agent made the same call {times} times in a row, with the same result",
                  "stop the run (Ctrl-C in its terminal), and say in the task what the agent should do instead"),
    "no_hello": ("the host has started, but has not sent its first message yet",
                 "wait: the limit BACKPLANE_HELLO_S ends the run",
                 "backplane doctor, to check the backend {backend!r}"),
    "staging": ("the workspace is being copied, or the host is being prepared",
                "wait, or exclude folders that the agent does not need (--exclude)"),
    "tool_works": ("{tool} is running", "wait"),
    "tool_quiet": ("{tool} is running, without any output for {age}", "wait, if the command takes long",
                   "if the command waits for input, use a flag that turns its questions off (-y, --no-input)"),
    "model_silent": ("no tool is running, and the agent has sent nothing for {age}",
                     "wait: the limit BACKPLANE_IDLE_S ends the run", "or press Ctrl-C in the terminal of the run"),
    # Ended runs and runs that were cut off, by the reason of the end.
    "idle_limit": ("the agent sent nothing for longer than the limit",
                   "raise BACKPLANE_IDLE_S, or use commands that print their progress"),
    "deadline": ("the run reached its time limit", "raise run --timeout, or split the task"),
    "budget": ("the run has spent its budget", "raise --max-budget-usd, or split the task"),
    "max_turns": ("the agent has used all its turns", "raise --max-turns, or split the task"),
    "cancelled": ("the run was cancelled",
                  "run the order again, or continue its stored conversation: run --resume last"),
    "interrupted": ("the backplane process of the run {how}",
                    "run the order again, or continue its stored conversation: run --resume last"),
    "crashed": ("the host ended before it {what}: {how}",
                "read its last output above, and run the order again: a retry may help"),
    "out_of_memory": ("the host was killed, most often for lack of memory",
                      "give the machine or the run more memory, or find out what killed the host (journalctl -k)"),
    "refused": ("the order was refused before it was sent", "check the requirements and the policy of the order"),
    "disk_full": ("the disk is full", "free space on this disk",
                  "backplane prune --keep 100, which removes the files of older runs"),
    "altered": ("the receipt was changed after it was sealed, so nothing in it can be trusted",
                "backplane receipts verify {run}", "backplane receipts import FOLDER, if you have an intact export"),
    # Ended runs by what the agent did.
    "rule_broken": ("the agent did what the policy forbids", "or correct the rule"),
    "denied": ("{denied} denied, and the run ended as {outcome}", "allow what the agent needs, and run the order again",
               "or say in the task what the agent should do instead",
               "backplane policy test POLICY {run}, to try a changed policy"),
    "agent_failed": ("the agent itself reported the outcome {outcome}",
                     "backplane receipts show {run}, to read all events"),
    "nobody_asked": ("{denied} denied, because there was no terminal to ask on",
                     "run the order in a terminal, or use --on-ask wait and answer from another terminal",
                     "or add a rule that allows the call (--policy)"),
    "failed_on": ("the run is complete, but its exit code is 3: {found}",
                  "allow what the agent needs, and run the order again",
                  "backplane receipts audit {run}, to see what the agent claimed",
                  "or accept such runs: run --fail-on none"),
    "false_claims": ("the run is complete, but the agent made {count}",
                     "backplane receipts audit {run}, to see each claim and what was observed"),
    "only_ignored": ("the agent changed only {ignored} that git ignores, and a patch contains no ignored files",
                     "remove the pattern from .gitignore, or use run --in-place"),
    "done_but_unchanged": ("the agent says that it changed files, but no file has changed",
                           "backplane receipts show {run}, to see what the agent did"),
    "done_but_red": ("the agent says that it is done, but its last tests failed", "run the tests yourself: {command}"),
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
    until = found[0] if found is not None else f"wait for {lasting(after_ms or 0)}"
    return Cause("quota", rows, {"until": until}, since)


def newest_call(picture: Picture) -> ShownCall | None:
    """Return the newest call that has no result yet."""
    return max(picture.open_calls.values(), key=lambda call: call.number, default=None)
