"""What a run waits for, or why it ended as it did: the first cause that holds, its evidence, the next step. Pure.

Each kind is one small function over the picture; `LIVE` and `OVER` are their order. What is only likely says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from backplane.errors import CODES
from backplane.view.figures import lasting, milliseconds
from backplane.view.picture import Denial, Ended, Picture, Question
from backplane.view.text import one_line

ALSO_MAX: Final = 3
"""Further kinds named beside the first: more than that is no diagnosis."""

EVIDENCE_MAX: Final = 6
"""Lines of evidence: verdict, evidence and next steps fit a screen of 24 rows."""

LINE_CHARS_MAX: Final = 200
"""Of one line of evidence."""

REPEATS_MIN: Final = 3
"""The same call, or the same failure, so often in a row is a loop; twice is a second try."""

QUIET_MS: Final = 30_000
"""A model that has said nothing for so long is told as silent; until then it thinks."""

STAGING_MS: Final = 5_000
"""A start that takes longer than this is told as one."""

Kind = str


class Evidence(msgspec.Struct, frozen=True):
    """One fact that a diagnosis rests on."""

    text: str
    event: int | None = None
    """Number of the event in the run's trace, counted from 1; None where it is no event."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is the matter with a run."""

    run_id: str
    kind: Kind
    """One word for programs, as `approval_waits`; `nothing` where nothing is wrong."""
    sure: bool
    """False where it is only likely."""
    verdict: str
    since_ms: int | None
    """How long it has been so; None for a run that has ended."""
    evidence: tuple[Evidence, ...]
    next: tuple[str, ...]
    """What to do, the likeliest first."""
    also: tuple[str, ...] = ()
    """Further kinds that hold."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One kind that holds."""

    kind: Kind
    verdict: str
    evidence: Sequence[Evidence] = ()
    next: Sequence[str] = ()
    sure: bool = True
    since: str = ""
    """Since when, as a time of an event."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run beside its journal and receipt."""

    now_ms: int
    """Since 1970."""
    state: Literal["live", "cut_off", "ended"]
    boot_id: str | None = None
    """Of this start of the machine."""


Rule = Callable[[Picture, Moment], Cause | None]


def diagnose(picture: Picture, moment: Moment) -> Diagnosis:
    """Say what a run waits for, or why it ended as it did."""
    rules = LIVE if moment.state == "live" else CUT_OFF if moment.state == "cut_off" else OVER
    found = [cause for rule in rules if (cause := rule(picture, moment)) is not None]
    first = found[0] if found else _fine(picture, moment)
    began_ms = milliseconds(first.since) if moment.state == "live" and first.since else None
    return Diagnosis(
        run_id=picture.run_id,
        kind=first.kind,
        sure=first.sure,
        verdict=one_line(first.verdict, LINE_CHARS_MAX),
        since_ms=max(0, moment.now_ms - began_ms) if began_ms is not None else None,
        evidence=tuple(_cut(one) for one in first.evidence[:EVIDENCE_MAX]),
        next=tuple(one_line(step, LINE_CHARS_MAX) for step in first.next),
        also=tuple(cause.kind for cause in found[1 : ALSO_MAX + 1]),
    )


def _cut(evidence: Evidence) -> Evidence:
    return msgspec.structs.replace(evidence, text=one_line(evidence.text, LINE_CHARS_MAX))


def _short(picture: Picture) -> str:
    return picture.run_id[:8]


def _age_ms(picture: Picture, moment: Moment) -> int:
    last = milliseconds(picture.last_ts or picture.started_at)
    return max(0, moment.now_ms - last) if last is not None else 0


# A run that lives -----------------------------------------------------------------------------------------------------


def _question_waits(picture: Picture, moment: Moment) -> Cause | None:
    ask = picture.waits
    if ask is None:
        return None
    asked_ms, limit_ms = milliseconds(ask.ts), ask.body.get("deadline_ms")
    rows = [Evidence(f"{ask.tool}: {ask.about}", ask.number)]
    if isinstance(limit_ms, int) and asked_ms is not None:
        left_ms = asked_ms + limit_ms - moment.now_ms
        default = ask.body.get("default", "deny")
        rows.append(Evidence(f"answered with {default!r} in {lasting(left_ms)}, if nobody answers"))
    if len(picture.open_asks) > 1:
        rows.append(Evidence(f"{len(picture.open_asks) - 1} more questions wait behind it"))
    is_input = ask.kind == "input"
    return Cause(
        kind="question_waits" if is_input else "approval_waits",
        verdict="it waits for your answer to a question" if is_input else f"it waits for your approval of {ask.tool}",
        evidence=rows,
        next=[_answer_by(picture, ask, is_input), "or in the terminal where it runs, or in: backplane watch"],
        since=ask.ts,
    )


def _answer_by(picture: Picture, ask: Question, is_input: bool) -> str:
    words = "allow --text WORDS" if is_input else "allow, or deny --reason WHY"
    return f"backplane answer {_short(picture)} {ask.id} {words}"


def _starts(picture: Picture, moment: Moment) -> Cause | None:
    if picture.said_hello or _age_ms(picture, moment) < STAGING_MS:
        return None
    if picture.has_stage:
        return Cause(
            kind="no_hello",
            verdict="its host was started and has said nothing yet",
            next=["wait for its limit (--hello-timeout)", f"backplane doctor, for the backend {picture.backend!r}"],
            since=picture.started_at,
            sure=False,
        )
    return Cause(
        kind="staging",
        verdict="its workspace is being copied, or its host is being prepared",
        evidence=[Evidence(f"workspace: {picture.root}")],
        next=["wait, or exclude folders that it does not need (--exclude)"],
        since=picture.started_at,
        sure=False,
    )


def _repeats(picture: Picture, moment: Moment) -> Cause | None:
    if picture.ended is not None and picture.ended.outcome == "complete":
        return None
    failure, call = picture.same_failure, picture.same_call
    if failure.times >= REPEATS_MIN:
        return Cause(
            kind="same_failure",
            verdict=f"the same failure came {failure.times} times in a row",
            evidence=[Evidence(failure.what, failure.number)],
            next=["stop it (Ctrl-C where it runs), and say in the task what goes wrong"],
        )
    if call.times >= REPEATS_MIN:
        return Cause(
            kind="same_call",
            verdict=f"it made the same call {call.times} times in a row, with the same result",
            evidence=[Evidence(call.what, call.number)],
            next=["stop it (Ctrl-C where it runs), and say in the task what it should do instead"],
        )
    return None


def _is_retried(picture: Picture, moment: Moment) -> Cause | None:
    retry = picture.retry
    if retry is None:
        return None
    code = f" ({retry.code})" if retry.code else ""
    return Cause(
        kind="asked_again",
        verdict=f"the model's service failed, and is asked again{code}",
        evidence=[Evidence(retry.message, retry.number), Evidence(f"{picture.retries} times in this run")],
        next=["wait; where it goes on, another model or backend"],
        since=picture.last_ts,
    )


def _tool_works(picture: Picture, moment: Moment) -> Cause | None:
    if not picture.open_calls:
        return None
    call = max(picture.open_calls.values(), key=lambda call: call.number)
    rows = [Evidence(f"{call.tool}: {call.about}", call.number)]
    if picture.output.strip():
        rows.append(Evidence(f"its last line: {picture.output.strip().splitlines()[-1]}"))
    age_ms = _age_ms(picture, moment)
    if age_ms >= QUIET_MS:
        return Cause(
            kind="tool_quiet",
            verdict=f"{call.tool} runs and has said nothing for {lasting(age_ms)}",
            evidence=rows,
            next=["wait, if it is a long one", "if it waits for input: a flag that asks nothing (-y, --no-input)"],
            since=call.ts,
            sure=False,
        )
    return Cause(kind="tool_works", verdict=f"{call.tool} runs", evidence=rows, next=["wait"], since=call.ts)


def _model_silent(picture: Picture, moment: Moment) -> Cause | None:
    age_ms = _age_ms(picture, moment)
    if picture.open_calls or not picture.said_hello or age_ms < QUIET_MS:
        return None
    return Cause(
        kind="model_silent",
        verdict=f"no tool runs, and the agent has said nothing for {lasting(age_ms)}",
        evidence=[Evidence(f"the last event was {picture.last or 'none'}", picture.events or None)],
        next=["wait: the run ends by itself after --idle-timeout", "Ctrl-C where it runs"],
        since=picture.last_ts or picture.started_at,
        sure=False,
    )


# A run that was cut off -----------------------------------------------------------------------------------------------


def _cut_off(picture: Picture, moment: Moment) -> Cause | None:
    restarted = None not in (picture.boot_id, moment.boot_id) and picture.boot_id != moment.boot_id
    return _interruption(restarted, picture, sealed=False)


def _interruption(restarted: bool, picture: Picture, *, sealed: bool) -> Cause:
    rows = [Evidence("the machine was started anew since" if restarted else "the machine was not started anew since")]
    if picture.last:
        rows.append(Evidence(f"the last event was {picture.last}", picture.events))
    calls = sorted(picture.open_calls.values(), key=lambda call: call.number)
    rows += [Evidence(f"{call.tool} was at work: {call.about}", call.number) for call in calls[-1:]]
    next_ = ["run the order again; its conversation, if it was kept: run --resume last"]
    return Cause(
        kind="interrupted",
        verdict="its control plane was cut off: the machine went down" if restarted else "its control plane was killed",
        evidence=rows,
        next=next_ if sealed else ["the next run here seals it", *next_],
    )


# A run that has ended -------------------------------------------------------------------------------------------------


def _ended_badly(picture: Picture, moment: Moment) -> Cause | None:
    """How it ended says most, then the error's code, then the agent's own words."""
    end = picture.ended
    if end is None or end.outcome == "complete":
        return None
    if end.reason in _REASONS:
        return _REASONS[end.reason](picture, end)
    return _by_code(picture, end) if end.code is not None else _by_agent(picture, end)


def _interrupted(picture: Picture, end: Ended) -> Cause:
    durability = end.added.get("durability")
    restarted = isinstance(durability, dict) and durability.get("machine_restarted") is True
    return _interruption(restarted, picture, sealed=True)


def _idle(picture: Picture, end: Ended) -> Cause:
    calls = sorted(picture.open_calls.values(), key=lambda call: call.number)
    rows = [Evidence(f"{call.tool} was at work: {call.about}", call.number) for call in calls[-1:]]
    who = "a tool" if calls else "the agent"
    return Cause(
        kind="idle_limit",
        verdict=f"{who} said nothing for longer than the limit",
        evidence=[*rows, *_said(end)],
        next=[end.hint or "raise --idle-timeout, or have the tool say something"],
    )


def _deadline(picture: Picture, end: Ended) -> Cause:
    calls = sorted(picture.open_calls.values(), key=lambda call: call.number)
    rows = [Evidence(f"{call.tool} was at work: {call.about}", call.number) for call in calls[-1:]]
    next_ = [end.hint or "raise --timeout", "or split the task"]
    return Cause(kind="deadline", verdict="its time was up", evidence=[*_said(end), *rows], next=next_)


def _budget(picture: Picture, end: Ended) -> Cause:
    rows = [*_said(end), Evidence(f"{picture.turns} turns, {picture.calls} calls of tools")]
    next_ = ["raise --max-budget-usd, or split the task"]
    return Cause(kind="budget", verdict="its budget was spent", evidence=rows, next=next_)


def _turns(picture: Picture, end: Ended) -> Cause:
    next_ = ["raise --max-turns, or split the task"]
    return Cause(kind="max_turns", verdict="it used all its turns", evidence=_said(end), next=next_)


def _cancelled(picture: Picture, end: Ended) -> Cause:
    reason = str(end.added.get("cancel_reason") or "")
    by = "nobody read its output any more" if "reads the output" in reason else "it was cancelled"
    rows = [Evidence(reason)] if reason else []
    next_ = ["run the order again; its conversation, if it was kept: run --resume last"]
    return Cause(kind="cancelled", verdict=by, evidence=rows, next=next_)


def _crashed(picture: Picture, end: Ended) -> Cause:
    how = f"signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
    rows = [*_said(end), *_words(end)]
    if end.signal == 9:
        next_ = ["give the machine or the run more memory, or see who killed it (journalctl -k)"]
        verdict = "its host was killed: most often by lack of memory"
        return Cause(kind="out_of_memory", verdict=verdict, evidence=rows, next=next_, sure=False)
    if end.code == "protocol_handshake_failed":
        noise = end.added.get("noise")
        if isinstance(noise, dict):
            rows.append(Evidence(f"it printed what is no message: {noise.get('text')}"))
            next_ = ["have the command print nothing of its own on stdout (a shell's profile, a banner)"]
            return Cause(
                kind="no_handshake", verdict="it printed other things than messages", evidence=rows, next=next_
            )
        next_ = ["backplane conform -- COMMAND…, which shows how far it gets", "backplane doctor"]
        verdict = f"its host ended before it said hello: {how}"
        return Cause(kind="crashed_at_start", verdict=verdict, evidence=rows, next=next_)
    return Cause(
        kind="crashed",
        verdict=f"its host ended before it gave a result: {how}",
        evidence=rows,
        next=["see its last words above; run it again, as a retry may help"],
    )


def _refused(picture: Picture, end: Ended) -> Cause:
    next_ = [end.hint] if end.hint else ["see the order's requirements and policy"]
    negotiation = end.added.get("negotiation")
    change = negotiation.get("smallest_change") if isinstance(negotiation, dict) else None
    if isinstance(change, list):
        next_ += [str(row) for row in change[:3]]
    return Cause(kind="refused", verdict="the order was refused before it was sent", evidence=_said(end), next=next_)


_REASONS: Final[dict[str, Callable[[Picture, Ended], Cause]]] = {
    "interrupted": _interrupted,
    "idle": _idle,
    "deadline": _deadline,
    "budget": _budget,
    "max_turns": _turns,
    "cancelled": _cancelled,
    "host_exit": _crashed,
    "refused": _refused,
}


def _said(end: Ended) -> list[Evidence]:
    return [Evidence(end.message)] if end.message else []


def _words(end: Ended) -> list[Evidence]:
    text = end.evidence
    stderr = end.added.get("stderr")
    if not text and isinstance(stderr, dict):
        text = str(stderr.get("tail") or "")
    return [Evidence(f"stderr: {line}") for line in text.strip().splitlines()[-3:]]


_CODES: Final[dict[str, tuple[Kind, str, str]]] = {
    "sidecar_spawn_failed": ("not_started", "its host could not be started", "install it, or put right its path"),
    "protocol_handshake_failed": ("no_handshake", "its host said no valid hello", "backplane conform -- COMMAND…"),
    "protocol_invalid_envelope": ("bad_line", "its host broke the protocol", "backplane conform -- COMMAND…"),
    "backend_auth_failed": ("key_refused", "the model's service refused the key", "backplane doctor"),
    "backend_model_not_found": ("model_unknown", "the model's service does not know the model", "another --model"),
    "backend_context_length": ("too_long", "the conversation is longer than the model takes", "a smaller task"),
    "backend_unavailable": ("unavailable", "the backend cannot be reached or used", "backplane doctor"),
    "backend_rate_limited": ("rate_limited", "the model's service asked to slow down", "wait, or another model"),
    "backend_content_filtered": ("filtered", "the model's service withheld the answer", "say it in other words"),
    "validation_failed": ("wrong_shape", "its answer does not match the schema", "see the answer, or the schema"),
    "execution_workspace_error": ("workspace", "its result does not fit the files", "backplane apply RUN --merge"),
    "receipt_store_failed": ("store", "its receipt could not be kept", "see the disk; backplane receipts prune"),
    "circuit_breaker_open": ("breaker_open", "the backend failed too often and is left alone", "wait, then try again"),
    "receipt_hash_mismatch": ("altered", "the receipt is not what was sealed", "backplane receipts verify RUN"),
}
"""Code → kind, verdict and what to do where the error itself says nothing better."""


def _by_policy(picture: Picture, moment: Moment) -> Cause | None:
    """A rule of ours was not kept, or the result may not be applied for it."""
    end = picture.ended
    enforcement = end.added.get("enforcement") if end is not None else None
    rows = enforcement.get("violations") if isinstance(enforcement, dict) else None
    if not isinstance(rows, list) or not rows:
        return None
    told = list(dict.fromkeys(str(row.get("reason")) for row in rows if isinstance(row, dict)))
    return Cause(
        kind="rule_broken",
        verdict="it did what the policy forbids",
        evidence=[Evidence(reason) for reason in told],
        next=["read the patch, then: backplane apply " + _short(picture) + " --accept-violations", "or mend the rule"],
    )


def _by_code(picture: Picture, end: Ended) -> Cause:
    code = end.code or "internal"
    kind, verdict, step = _CODES.get(code, ("", "", ""))
    if not kind:
        facts = CODES.get(code)
        kind, verdict = code, facts.meaning.rstrip(".") if facts is not None else f"it ended with {code!r}"
        step = f"backplane errors {code}, and backplane receipts show RUN"
    step = step.replace("RUN", _short(picture))
    rows = [*_said(end), *_words(end)]
    return Cause(kind=kind, verdict=verdict, evidence=rows, next=[text for text in (end.hint, step) if text])


def _by_agent(picture: Picture, end: Ended) -> Cause:
    """The host itself said that the run failed, or is partial."""
    rows = [Evidence(_coded(fault.message, fault.code), fault.number) for fault in picture.faults[-2:]]
    last = picture.last_command
    if last is not None and last.exit_code:
        rows.append(Evidence(f"{last.command}: exit code {last.exit_code}", last.number))
    if end.outcome == "partial" and not rows and picture.denied:
        return _denied(picture, picture.denied)
    return Cause(
        kind="agent_failed",
        verdict=f"the agent itself ended as {end.outcome}",
        evidence=rows or [Evidence("it did not say why")],
        next=["backplane receipts show " + _short(picture) + ", for all that it said"],
    )


def _coded(message: str, code: str | None) -> str:
    return f"{message} ({code})" if code else message


def _denied(picture: Picture, denied: Sequence[Denial]) -> Cause:
    by_default = [row for row in denied if row.by == "default"]
    rows = [Evidence(f"{row.tool} {row.about}: {row.reason} (by {row.by})", row.number) for row in denied[-3:]]
    if by_default:
        return Cause(
            kind="nobody_asked",
            verdict=f"{picture.denials} calls were denied, as nobody could be asked",
            evidence=rows,
            next=["run it in a terminal, or with --on-ask prompt", "or a rule that allows it (--policy)"],
        )
    return Cause(
        kind="done_but_denied",
        verdict=f"it says that it is done, and {picture.denials} of its calls were denied",
        evidence=rows,
        next=["allow what it needs, and run it again"],
    )


def _changed_nothing(picture: Picture) -> bool:
    patch = picture.ended.added.get("patch") if picture.ended is not None else None
    return isinstance(patch, dict) and patch.get("bytes") == 0


def _done_but_denied(picture: Picture, moment: Moment) -> Cause | None:
    if not picture.denied or not _changed_nothing(picture):
        return None
    return _denied(picture, picture.denied)


def _done_but_ignored(picture: Picture, moment: Moment) -> Cause | None:
    added = picture.ended.added if picture.ended is not None else {}
    patch: Any = added.get("patch")
    if not _changed_nothing(picture) or not patch.get("ignored"):
        return None
    return Cause(
        kind="only_ignored",
        verdict=f"it changed {patch['ignored']} files that git ignores, and no other: they are in no patch",
        next=["take them out of .gitignore, or work with --mode pass_through"],
    )


def _done_but_unchanged(picture: Picture, moment: Moment) -> Cause | None:
    added = picture.ended.added if picture.ended is not None else {}
    reconciliation = added.get("reconciliation")
    claimed = reconciliation.get("claimed_only") if isinstance(reconciliation, dict) else None
    if not _changed_nothing(picture) or not isinstance(claimed, list) or not claimed:
        return None
    return Cause(
        kind="done_but_unchanged",
        verdict="it says that it changed files, and none is changed",
        evidence=[Evidence(f"claimed: {', '.join(map(str, claimed[:5]))}")],
        next=["backplane receipts show " + _short(picture) + ", for what it did"],
    )


_TESTS: Final = re.compile(r"\b(test|tests|pytest|unittest|tox|nox|check|ctest|vitest|jest|mocha|rspec|phpunit)\b")
"""Commands whose failure is news; a search that finds nothing fails, too."""


def _done_but_red(picture: Picture, moment: Moment) -> Cause | None:
    last = picture.last_command
    if last is None or not last.exit_code or _TESTS.search(last.command) is None:
        return None
    return Cause(
        kind="done_but_red",
        verdict="it says that it is done, and its last tests failed",
        evidence=[Evidence(f"{last.command}: exit code {last.exit_code}", last.number)],
        next=[f"run it yourself: {last.command}"],
        sure=False,
    )


LIVE: Final[tuple[Rule, ...]] = (_question_waits, _repeats, _is_retried, _tool_works, _starts, _model_silent)
CUT_OFF: Final[tuple[Rule, ...]] = (_cut_off,)
OVER: Final[tuple[Rule, ...]] = (
    *(_by_policy, _ended_badly, _repeats),
    *(_done_but_denied, _done_but_ignored, _done_but_unchanged, _done_but_red),
)
HEALTHY: Final = frozenset({"nothing", "tool_works"})
"""Kinds that are no trouble."""


def _fine(picture: Picture, moment: Moment) -> Cause:
    end = picture.ended
    if end is not None:
        lasted = f" after {lasting(end.duration_ms)}" if end.duration_ms is not None else ""
        return Cause(kind="nothing", verdict=f"nothing is wrong: it is {end.outcome}{lasted}")
    doing = "the agent writes" if picture.streamed else "the model thinks" if picture.said_hello else "it starts"
    return Cause(kind="nothing", verdict=f"nothing is wrong: {doing}", since=picture.last_ts or picture.started_at)
