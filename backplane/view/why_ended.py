"""Find why a run ended as it did, from its receipt and what its events said. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from backplane.contract.receipt import findings_of, reasons_of
from backplane.contract.unknown import nearest_name
from backplane.view.figures import counted
from backplane.view.findings import fail_on_words
from backplane.view.picture import Ended, Evidence, Picture
from backplane.view.values import as_list, as_object
from backplane.view.why_kinds import Cause, Moment, newest_call, quota, repeated

_LIMITS: Final = {"idle": "idle_limit", **{kind: kind for kind in ("deadline", "budget", "max_turns")}}
"""Reason of an end at a limit → kind."""
_FULL: Final = re.compile(r"ENOSPC|EDQUOT|no space left|disk quota exceeded|disk( is)? full", re.IGNORECASE)
_TESTS: Final = re.compile(r"\b(test|tests|pytest|unittest|tox|nox|check|ctest|vitest|jest|mocha|rspec|phpunit)\b")
"""Commands whose failure is news; a search without a match fails too."""


def cut_off(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """Yield what ended a run that has no receipt yet."""
    restarted = None not in (picture.boot_id, moment.boot_id) and picture.boot_id != moment.boot_id
    yield _interrupted(picture, restarted=restarted, hint="start any run: it writes the receipt of this run")


def ended(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """Yield what holds, the most telling first; a receipt that was altered comes before all."""
    end = picture.ended
    if moment.faults:
        yield Cause("altered", [Evidence(fault) for fault in moment.faults])
    if end is None:
        return
    if reasons := reasons_of(as_object(end.added.get("enforcement")).get("violations")):
        seen = f"backplane receipts show {picture.run_id[:8]}, to see what the agent did"
        hint = end.hint if end.code == "policy_denied" and end.hint else seen
        yield Cause("rule_broken", [Evidence(reason) for reason in dict.fromkeys(reasons)], hint=hint)
    yield from _done(picture, end) if end.outcome == "complete" else _not_done(picture, end, moment)


# Runs that are not complete -------------------------------------------------------------------------------------------


def _not_done(picture: Picture, end: Ended, moment: Moment) -> Iterator[Cause]:
    last, failure = picture.last_command, picture.same_failure
    texts = [*_said(end), *picture.faults[-1:], Evidence(failure.what, failure.number)]
    texts += [Evidence(f"{last.command}: {last.output}", last.number)] if last is not None and last.exit_code else []
    if full := [row for row in texts if _FULL.search(row.text)]:
        yield Cause("disk_full", full)
    if end.reason in ("failed", "partial"):
        yield from _denied(picture, end)
    yield _by_reason(picture, end) or (
        _by_agent(picture, end) if end.code is None else _by_code(picture, end, end.code, moment)
    )
    if (again := repeated(picture)) is not None:
        yield again


def _said(end: Ended) -> list[Evidence]:
    """Return the message of the error, and the last lines of the host's stderr."""
    stderr = end.evidence or str(as_object(end.added.get("stderr")).get("tail") or "")
    words = [Evidence(f"stderr: {line}") for line in stderr.strip().splitlines()[-3:]]
    return [*([Evidence(end.message)] if end.message else []), *words]


def _at_work(picture: Picture) -> list[Evidence]:
    """Return the newest call that got no result."""
    call = newest_call(picture)
    return [Evidence(f"{call.tool} was running: {call.about}", call.number)] if call is not None else []


def _interrupted(picture: Picture, *, restarted: bool, hint: str = "") -> Cause:
    rows = [Evidence(f"the machine has {'' if restarted else 'not '}been restarted since")]
    if picture.last:
        rows.append(Evidence(f"the last event was {picture.last}", picture.events))
    how = "ended when the machine went down" if restarted else "was killed"
    return Cause("interrupted", [*rows, *_at_work(picture)], {"how": how}, hint=hint)


def _by_reason(picture: Picture, end: Ended) -> Cause | None:
    """Return the cause that the reason of the end tells by itself, without the error's code."""
    match end.reason:
        case "interrupted":
            durability = as_object(end.added.get("durability"))
            return _interrupted(picture, restarted=durability.get("machine_restarted") is True)
        case "cancelled":
            reason = end.added.get("cancel_reason") or "the program that started the run cancelled it"
            return Cause("cancelled", [Evidence(str(reason))])
        case "host_exit":
            return _crashed(end)
        case "refused":
            return Cause("refused", _said(end), hint=end.hint)
        case limit if limit in _LIMITS:
            calls = Evidence(counted(picture.calls, "tool call"))
            return Cause(_LIMITS[limit], [*_said(end), *_at_work(picture), calls], hint=end.hint)
    return None


def _crashed(end: Ended) -> Cause:
    at_start, rows = end.code == "protocol_handshake_failed", _said(end)
    if end.signal == 9:
        return Cause("out_of_memory", rows)
    if at_start and end.added.get("noise"):
        hint = "print only protocol messages on stdout (no banner, no output of a shell profile)"
        return Cause("protocol_handshake_failed", rows, hint=hint)
    how = f"signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
    what, hint = ("sent its hello", "backplane doctor") if at_start else ("sent a result", "")
    return Cause("crashed", rows, {"what": what, "how": how}, hint=hint)


def _by_code(picture: Picture, end: Ended, code: str, moment: Moment) -> Cause:
    rows, hint = _said(end), end.hint
    if code == "backend_rate_limited" and (used_up := quota(picture, " ".join(row.text for row in rows), rows)):
        return used_up
    if code == "backend_model_not_found" and picture.model:
        near = nearest_name(picture.model, moment.models)
        hint = f"did you mean --model {near}?" if near not in (None, picture.model) else hint
    return Cause(code, rows, hint=hint)


def _by_agent(picture: Picture, end: Ended) -> Cause:
    """Return the cause of a run that its host itself ended as failed or partial."""
    rows = [*picture.faults[-2:], *picture.absent]
    last = picture.last_command
    if last is not None and last.exit_code:
        rows.append(Evidence(f"{last.command}: exit code {last.exit_code}", last.number))
    return Cause("agent_failed", rows or [Evidence("the agent gave no reason")], {"outcome": end.outcome})


def _denied(picture: Picture, end: Ended) -> Iterator[Cause]:
    """Yield that calls, questions or connections were denied."""
    refusals = as_list(as_object(end.added.get("network")).get("refusals"))
    rows = [*picture.denied[-3:], *(Evidence(f"{text} (by the sandbox)") for text in refusals[:3])]
    if rows:
        kind = "nobody_asked" if picture.unasked else "denied"
        denied = counted(picture.denials, "call") if picture.denials else counted(len(refusals), "connection")
        yield Cause(kind, rows, {"denied": denied, "outcome": end.outcome})


# Runs that are complete -----------------------------------------------------------------------------------------------


def _done(picture: Picture, end: Ended) -> Iterator[Cause]:
    added, last = end.added, picture.last_command
    patch = as_object(added.get("patch"))
    is_empty = patch.get("bytes") == 0
    counts = as_object(as_object(added.get("claimed")).get("counts"))
    numbers = ((kind, as_object(row).get("false")) for kind, row in counts.items())
    false = [Evidence(f"{counted(number, 'false claim')} of the kind {kind}") for kind, number in numbers if number]
    if words := fail_on_words(added):
        yield Cause("failed_on", [*picture.denied[-3:], *false], {"found": words})
    if is_empty and picture.denied:
        yield from _denied(picture, end)
    if is_empty and patch.get("ignored"):
        yield Cause("only_ignored", facts={"ignored": counted(patch["ignored"], "file")})
    claimed = as_list(as_object(added.get("reconciliation")).get("claimed_only"))
    if is_empty and claimed:
        yield Cause("done_but_unchanged", [Evidence(f"claimed: {', '.join(map(str, claimed[:5]))}")])
    if last is not None and last.exit_code and _TESTS.search(last.command) is not None:
        rows = [Evidence(f"{last.command}: exit code {last.exit_code}", last.number)]
        yield Cause("done_but_red", rows, {"command": last.command})
    if number := findings_of(added).false_claims:
        yield Cause("false_claims", false, {"count": counted(number, "false claim")})
