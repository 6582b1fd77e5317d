"""Find why a run ended as it did, from its receipt and what its events said. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from backplane.contract.receipt import failed_on, findings_of
from backplane.contract.unheard import nearest_name
from backplane.errors import CODES
from backplane.view.figures import counted, lasting
from backplane.view.findings import fail_on_words
from backplane.view.picture import Denial, Ended, Picture
from backplane.view.values import as_list, as_object
from backplane.view.why_kinds import Cause, Evidence, Kind, Moment, cause, last_at_work, last_lines, quota, repeated

FREE_BYTES_MIN: Final = 1 << 20
"""Free bytes below which a disk counts as full: no receipt fits any more."""

_CODES: Final[dict[str, Kind]] = {
    "sidecar_spawn_failed": "not_started",
    "protocol_handshake_failed": "no_handshake",
    "protocol_invalid_envelope": "bad_line",
    "backend_auth_failed": "key_refused",
    "backend_model_not_found": "model_unknown",
    "backend_context_length": "too_long",
    "backend_unavailable": "unavailable",
    "backend_rate_limited": "rate_limited",
    "backend_content_filtered": "filtered",
    "validation_failed": "wrong_shape",
    "execution_workspace_error": "workspace",
    "receipt_store_failed": "store",
    "circuit_breaker_open": "breaker_open",
    "receipt_hash_mismatch": "altered",
}
"""Code → kind; any other code is a kind of its own, in the words of its meaning."""

_CANCELLED_BY: Final = (
    ("reads the output", "its output had no reader any more"),
    ("interrupted by SIG", "a signal ended it"),
    ("cancelled on the page (from process", "it was cancelled on the page of backplane web"),
    ("(from process", "it was cancelled from another terminal"),
)
_NETWORK: Final = (
    ("its name is not found (DNS)", r"name or service not known|getaddrinfo|ENOTFOUND|EAI_AGAIN|name resolution"
     r"|no address associated|could not resolve|nodename nor servname"),
    ("its certificate is not accepted (TLS)", r"certificate|\bssl\b|\btls\b"),
    ("a proxy is in the way", r"\bproxy\b"),
    ("no server listens there", r"refused|ECONNREFUSED"),
    ("there is no way to it", r"unreachable|no route|EHOSTUNREACH|ENETUNREACH|ETIMEDOUT|timed out"
     r"|connection (attempts )?failed"),
)  # fmt: skip
_MOVED: Final = re.compile(r"changed since the run began|conflict|has changed meanwhile", re.IGNORECASE)
_FULL: Final = re.compile(r"ENOSPC|EDQUOT|no space left|disk quota exceeded|disk( is)? full", re.IGNORECASE)
_TESTS: Final = re.compile(r"\b(test|tests|pytest|unittest|tox|nox|check|ctest|vitest|jest|mocha|rspec|phpunit)\b")
"""Commands whose failure is news; a search without a match fails too."""


def cut_off(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """Yield what ended a run that has no receipt yet."""
    if moment.free_bytes is not None and moment.free_bytes < FREE_BYTES_MIN:
        rows = [Evidence(f"{moment.free_bytes} bytes are left where the runs are kept")]
        yield cause("disk_full", picture, rows)
    restarted = None not in (picture.boot_id, moment.boot_id) and picture.boot_id != moment.boot_id
    yield _interrupted(picture, restarted=restarted, hint="the next run here seals it")


def ended(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """Yield what holds, the most telling first; a receipt that was altered comes before all."""
    end = picture.ended
    if moment.faults:
        yield cause("altered", picture, [Evidence(fault) for fault in moment.faults])
    if end is None:
        return
    yield from _violations(picture, end)
    yield from _done(picture, end) if end.outcome == "complete" else _not_done(picture, end, moment)
    left_ms = moment.circuit_until_ms - moment.now_ms
    if left_ms > 0 and end.code != "circuit_breaker_open":
        until = f"{picture.backend} failed several times in a row: no order is routed to it for {lasting(left_ms)}"
        yield cause("breaker_open", picture, [Evidence(until)])


def _violations(picture: Picture, end: Ended) -> Iterator[Cause]:
    """Yield a rule that was not kept, or that forbids to apply the result."""
    rows = as_list(as_object(end.added.get("enforcement")).get("violations"))
    if rows:
        reasons = dict.fromkeys(str(row.get("reason")) for row in rows if isinstance(row, dict))
        seen = f"what it did is in the receipt: backplane receipts show {picture.run_id[:8]}"
        hint = end.hint if end.code == "policy_denied" and end.hint else seen
        yield cause("rule_broken", picture, [Evidence(reason) for reason in reasons], hint=hint)


# Runs that are not complete -------------------------------------------------------------------------------------------


def _not_done(picture: Picture, end: Ended, moment: Moment) -> Iterator[Cause]:
    calls = [Evidence(f"{one.tool}: {one.output}", one.number) for one in picture.recent[-1:] if one.failed]
    faults = [Evidence(fault.message, fault.number) for fault in picture.faults[-1:]]
    last = picture.last_command
    commands = [Evidence(f"{last.command}: {last.output}", last.number)] if last is not None and last.exit_code else []
    texts = [*_said(end), *faults, *commands, *calls, *_stderr(end)]
    if full := [row for row in texts if _FULL.search(row.text)]:
        yield cause("disk_full", picture, full)
    if end.reason in ("failed", "partial"):
        refusals = as_list(as_object(end.added.get("network")).get("refusals"))
        rows = [Evidence(f"{text} (by the sandbox)") for text in refusals[:3]]
        rows += _denial_rows([row for row in picture.denied if row.by in ("policy", "hook")])
        if rows:
            yield cause("rule_blocks", picture, rows)
    by_reason = _REASONS.get(end.reason)
    if by_reason is not None:
        yield by_reason(picture, end)
    else:
        yield _by_agent(picture, end) if end.code is None else _by_code(picture, end, moment)
    if (again := repeated(picture)) is not None:
        yield again


def _said(end: Ended) -> list[Evidence]:
    return [Evidence(end.message)] if end.message else []


def _stderr(end: Ended) -> list[Evidence]:
    return last_lines(end.evidence or str(as_object(end.added.get("stderr")).get("tail") or ""))


def _interrupted(picture: Picture, end: Ended | None = None, *, restarted: bool = False, hint: str = "") -> Cause:
    if end is not None:
        restarted = as_object(end.added.get("durability")).get("machine_restarted") is True
    rows = [Evidence("the machine was restarted since" if restarted else "the machine was not restarted since")]
    if picture.last:
        rows.append(Evidence(f"the last event was {picture.last}", picture.events))
    how = "was cut off: the machine went down" if restarted else "was killed"
    return cause("interrupted", picture, [*rows, *last_at_work(picture)], hint=hint, how=how)


def _limit(picture: Picture, end: Ended) -> Cause:
    done = Evidence(f"{counted(picture.turns, 'turn')}, {counted(picture.calls, 'call')} of tools")
    kind = "idle_limit" if end.reason == "idle" else end.reason
    return cause(kind, picture, [*_said(end), *last_at_work(picture), done], hint=end.hint)


def _cancelled(picture: Picture, end: Ended) -> Cause:
    reason = str(end.added.get("cancel_reason") or "")
    by = next((words for mark, words in _CANCELLED_BY if mark in reason), "it was cancelled")
    return cause("cancelled", picture, [Evidence(reason)] if reason else [], by=by)


def _crashed(picture: Picture, end: Ended) -> Cause:
    at_start, rows = end.code == "protocol_handshake_failed", [*_said(end), *_stderr(end)]
    if end.signal == 9:
        return cause("out_of_memory", picture, rows)
    if at_start and end.added.get("noise"):
        hint = "have the command print messages alone on stdout, each with its `t` (no banner, no shell's profile)"
        return cause("no_handshake", picture, rows, hint=hint)
    how = "no exit code is known" if end.exit_code is None else f"exit code {end.exit_code}"
    how = how if end.signal is None else f"signal {end.signal}"
    return cause("crashed_at_start" if at_start else "crashed", picture, rows, how=how)


def _refused(picture: Picture, end: Ended) -> Cause:
    return cause("refused", picture, _said(end), hint=end.hint)


_REASONS: Final[dict[str, Callable[[Picture, Ended], Cause]]] = {
    **dict.fromkeys(("idle", "deadline", "budget", "max_turns"), _limit),
    "interrupted": _interrupted,
    "cancelled": _cancelled,
    "host_exit": _crashed,
    "refused": _refused,
}
"""Reason of the end → how its cause is found; any other reason leaves it to the error's code."""


def _by_code(picture: Picture, end: Ended, moment: Moment) -> Cause:
    code, rows = end.code or "internal", [*_said(end), *_stderr(end)]
    text = " ".join(row.text for row in rows)
    found: Cause | None = None
    match code:
        case "backend_unavailable":
            what = next((words for words, pattern in _NETWORK if re.search(pattern, text, re.IGNORECASE)), None)
            found = cause("no_network", picture, rows, hint=end.hint, what=what) if what is not None else None
        case "backend_rate_limited":
            found = quota(picture, text, rows)
        case "backend_model_not_found":
            near = nearest_name(picture.model, moment.models) if picture.model else None
            hint = f"did you mean --model {near}?" if near not in (None, picture.model) else end.hint
            found = cause("model_unknown", picture, rows, hint=hint)
        case "execution_workspace_error" if _MOVED.search(end.message):
            found = cause("conflict", picture, rows)
    if found is not None:
        return found
    if code in _CODES:
        return cause(_CODES[code], picture, rows, hint=end.hint)
    facts = CODES.get(code)
    verdict = facts.meaning.rstrip(".") if facts is not None else f"its host ended it with a code of its own, {code!r}"
    meaning = f"backplane explain {code}, and " if facts is not None else ""
    steps = (end.hint, f"{meaning}backplane receipts show {picture.run_id[:8]}")
    return Cause(kind=code, verdict=verdict, evidence=rows, next=[step for step in steps if step])


def _by_agent(picture: Picture, end: Ended) -> Cause:
    """Return the cause of a run that its host itself ended as failed or partial."""
    rows = [
        Evidence(f"{fault.message} ({fault.code})" if fault.code else fault.message, fault.number)
        for fault in picture.faults[-2:]
    ]
    rows += [Evidence(server.message, server.number) for server in picture.absent]
    last = picture.last_command
    if last is not None and last.exit_code:
        rows.append(Evidence(f"{last.command}: exit code {last.exit_code}", last.number))
    if picture.denied and not rows:
        return _denied(picture, "denied", outcome=end.outcome)
    rows += _denial_rows(picture.denied)
    return cause("agent_failed", picture, rows or [Evidence("it did not say why")], outcome=end.outcome)


def _denial_rows(denied: Sequence[Denial]) -> list[Evidence]:
    return [Evidence(f"{row.tool} {row.about}: {row.reason} (by {row.by})", row.number) for row in denied[-3:]]


def _denied(picture: Picture, kind: Kind, outcome: str = "") -> Cause:
    if any(row.by == "default" for row in picture.denied):
        kind = "nobody_asked"
    calls = counted(picture.denials, "call")
    rows = _denial_rows(picture.denied)
    return cause(kind, picture, rows, denials=picture.denials, denied=calls, outcome=outcome)


# Runs that are complete -----------------------------------------------------------------------------------------------


def _done(picture: Picture, end: Ended) -> Iterator[Cause]:
    added, last = end.added, picture.last_command
    patch = as_object(added.get("patch"))
    is_empty = patch.get("bytes") == 0
    if words := failed_on(added):
        denied = "denied" in words
        rows = [*(_denial_rows(picture.denied) if denied else ()), *(_false(added) if "false-claims" in words else ())]
        audit = f"backplane receipts audit {picture.run_id[:8]}"
        hint = "allow what it needs, and run it again" if denied else audit
        yield cause("failed_on", picture, rows, hint=hint, found=fail_on_words(added))
    if is_empty and picture.denied:
        yield _denied(picture, "done_but_denied")
    if is_empty and patch.get("ignored"):
        yield cause("only_ignored", picture, ignored=counted(patch["ignored"], "file"))
    claimed = as_list(as_object(added.get("reconciliation")).get("claimed_only"))
    if is_empty and claimed:
        rows = [Evidence(f"claimed: {', '.join(map(str, claimed[:5]))}")]
        yield cause("done_but_unchanged", picture, rows)
    if last is not None and last.exit_code and _TESTS.search(last.command) is not None:
        rows = [Evidence(f"{last.command}: exit code {last.exit_code}", last.number)]
        yield cause("done_but_red", picture, rows, command=last.command)
    if number := findings_of(added).false_claims:
        yield cause("false_claims", picture, _false(added), count=counted(number, "false claim"))


def _false(added: dict[str, Any]) -> list[Evidence]:
    counts = as_object(as_object(added.get("claimed")).get("counts"))
    false = ((kind, as_object(row).get("false")) for kind, row in counts.items())
    return [Evidence(f"found false: {number} × {kind}") for kind, number in false if number]
