"""What a run waits for, or why it ended as it did: the first cause that holds, its evidence, the next step. Pure.

Each kind is one small function over the picture; `WAITS`, `HABITS`, `DOING` and `OVER` are their order. What is only
likely says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from backplane.contract.unheard import nearest_name
from backplane.errors import CODES
from backplane.process.table import Process
from backplane.view.figures import count, lasting, milliseconds
from backplane.view.picture import Call, Denial, Ended, Picture, Question
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

HANGS_MS: Final = 5_000
"""What seems to wait for a person, or to be stuck, is told after so long without an event; sooner it may work."""

FIRST_TURN_MS: Final = 15_000
"""Until its first word an agent may start its servers; a model that is asked answers in less."""

SPENT_TOKENS_MIN: Final = 20_000
"""Spent by sub-agents of one open call: less is a usual question to one."""

CACHED_TOKENS_MIN: Final = 1_000
"""Services cache no prefix that is shorter."""

SLACK_MS: Final = 1_500
"""Processes are dated from when the machine began, which the system tells in whole seconds."""

FREE_BYTES_MIN: Final = 1 << 20
"""Of a disk: with less than this left no receipt can be kept."""

WAITS_LONG_MS: Final = 3_600_000
"""A service that asks to wait longer than this says that a quota is used up."""

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
    processes: tuple[Process, ...] = ()
    """Those of a live run's host, parents first; empty where nobody looked."""
    words: str = ""
    """What a live run's host said last on its stderr."""
    free_bytes: int | None = None
    """Left on the disk of the state folder; None where nobody looked."""
    faults: tuple[str, ...] = ()
    """What is not as it was sealed."""
    logins: tuple[str, ...] = ()
    """Ways in which the agent may log in that are all there."""
    models: tuple[str, ...] = ()
    """Known names of models."""
    circuit_until_ms: int = 0
    """Until when the router leaves the backend alone, since 1970; 0 where nobody looked."""


Rule = Callable[[Picture, Moment], Cause | None]


def diagnose(picture: Picture, moment: Moment) -> Diagnosis:
    """Say what a run waits for, or why it ended as it did."""
    found = list(_causes(picture, moment))
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
        also=tuple(cause.kind for cause in found[1:] if cause.kind not in HEALTHY)[:ALSO_MAX],
    )


def _causes(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """What holds, the most telling first. A run that waits for one thing is not silent for another reason, too."""
    if moment.state == "live":
        waits = next(_holding(WAITS, picture, moment), None)
        if waits is not None:
            yield waits
        yield from _holding(HABITS, picture, moment)
        if waits is None:
            yield from islice(_holding(DOING, picture, moment), 1)
    else:
        yield from _holding(CUT_OFF if moment.state == "cut_off" else OVER, picture, moment)


def _holding(rules: Sequence[Rule], picture: Picture, moment: Moment) -> Iterator[Cause]:
    return (cause for rule in rules if (cause := rule(picture, moment)) is not None)


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


def _stopped(picture: Picture, moment: Moment) -> Cause | None:
    found = [one for one in moment.processes if one.is_stopped]
    if not found:
        return None
    return Cause(
        kind="stopped",
        verdict="a process of it was stopped, and does nothing until it is continued",
        evidence=[Evidence(f"process {one.pid} is stopped: {one.command}") for one in found],
        next=[f"kill -CONT {' '.join(str(one.pid) for one in found[:5])}"],
        since=picture.last_ts or picture.started_at,
    )


def _hook_hangs(picture: Picture, moment: Moment) -> Cause | None:
    for id, names in picture.hooks.items():
        ask = picture.open_asks.get(id)
        if ask is not None:
            return Cause(
                kind="hook_hangs",
                verdict=f"a hook has not answered yet: {', '.join(names)}",
                evidence=[Evidence(f"asked about {ask.tool}: {ask.about}", ask.number)],
                next=["wait for its limit (timeout_ms of the hook)", "or mend the hook: it answers in milliseconds"],
                since=ask.ts,
            )
    return None


def _last_words(words: str) -> list[Evidence]:
    return [Evidence(f"stderr: {line}") for line in words.strip().splitlines()[-3:]]


_LOGIN: Final = re.compile(
    r"\b(log ?in|sign ?in|authori[sz]e|authenticate|(device|verification|user|one-time) code|enter (the|this) code)\b",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(r"https?://\S+|\b[A-Z0-9]{4}-[A-Z0-9]{4}\b")


def _has_begun(picture: Picture) -> bool:
    """Whether the agent has said or done anything yet."""
    return bool(picture.messages or picture.calls or picture.streamed)


def _login_wanted(picture: Picture, moment: Moment) -> Cause | None:
    if _age_ms(picture, moment) < HANGS_MS or picture.open_calls or _has_begun(picture):
        return None
    if not (_LOGIN.search(moment.words) and _ADDRESS.search(moment.words)):
        return None
    return Cause(
        kind="login_wanted",
        verdict="the agent waits for somebody to log in",
        evidence=_last_words(moment.words),
        next=["log in with the agent's own program, then run it again", "or give it a key: backplane doctor"],
        since=picture.started_at,
    )


_RESETS: Final = (
    r"(?is)\b(resets?|renews?|try again|available again|retry)\b.{0,40}?"
    r"(\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\d{1,2} ?[ap]m\b|\d+ ?(h|hours?|days?)\b"
    r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d)"
)
"""Compiled on first use, as no diagnosis of another kind shall wait for it."""
_LIMITED: Final = re.compile(r"\b(limit|quota|usage|credits?)\b", re.IGNORECASE)


def _quota(text: str, after_ms: int | None, rows: Sequence[Evidence]) -> Cause | None:
    """A limit that no short pause lifts: its text names a date, or the service asks to wait long."""
    found = re.search(_RESETS, text) if _LIMITED.search(text) else None
    long = after_ms is not None and after_ms >= WAITS_LONG_MS
    if found is None and not long:
        return None
    until = f"until then: {found[0]}" if found is not None else f"for {lasting(after_ms or 0)}"
    return Cause(
        kind="quota",
        verdict=f"the account's quota is used up, {until}",
        evidence=rows,
        next=["another login, model or backend", "or wait until then"],
    )


def _quota_used_up(picture: Picture, moment: Moment) -> Cause | None:
    retry = picture.retry
    if retry is None:
        return None
    found = _quota(retry.message, picture.folded.retry_after_ms, [Evidence(retry.message, retry.number)])
    return msgspec.structs.replace(found, since=picture.last_ts) if found is not None else None


def _compaction_loop(picture: Picture, moment: Moment) -> Cause | None:
    found = picture.compactions
    if found.times < REPEATS_MIN or (picture.ended is not None and picture.ended.outcome == "complete"):
        return None
    return Cause(
        kind="compaction_loop",
        verdict=f"the conversation was shortened {found.times} times, and no file was changed in between",
        evidence=[Evidence(found.what, found.number)],
        next=["stop it, and give a smaller task", "or a model with a larger window"],
        sure=False,
    )


def _talks_only(picture: Picture, moment: Moment) -> Cause | None:
    found = picture.only_announced
    if found.times < REPEATS_MIN:
        return None
    return Cause(
        kind="talks_only",
        verdict=f"it says what it will do, and calls no tool: {found.times} turns in a row",
        evidence=[Evidence(found.what.strip(), found.number)],
        next=["another model: this one may not know how to call tools here"],
        sure=False,
    )


def _newest_call(picture: Picture) -> Call | None:
    return max(picture.open_calls.values(), key=lambda call: call.number, default=None)


def _of_call(picture: Picture, moment: Moment) -> list[Process]:
    """The processes that were started since the newest open call was."""
    call = _newest_call(picture)
    began_ms = milliseconds(call.ts) if call is not None else None
    if began_ms is None:
        return []
    return [one for one in moment.processes if one.started_ms >= began_ms - SLACK_MS]


def _of_tool(picture: Picture, moment: Moment, found: Sequence[Process], kind: Kind, **told: Any) -> Cause | None:
    call = _newest_call(picture)
    if call is None or not found or _age_ms(picture, moment) < HANGS_MS:
        return None
    seen = [Evidence(f"process {one.pid}: {one.command}" + _ports(one)) for one in found[:2]]
    rows = [Evidence(f"{call.tool}: {call.about}", call.number), *seen]
    return Cause(kind=kind, evidence=rows, since=call.ts, **told)


def _ports(process: Process) -> str:
    return f" (listens on {', '.join(map(str, process.listens[:5]))})" if process.listens else ""


def _tool_wants_input(picture: Picture, moment: Moment) -> Cause | None:
    found = [one for one in _of_call(picture, moment) if one.waits == "input"]
    next_ = [
        "stop it, and have the command ask nothing (-y, --no-input, --batch)",
        "or give it its input in the command",
    ]
    verdict = "the tool's command waits for input that nobody will type"
    return _of_tool(picture, moment, found, "tool_wants_input", verdict=verdict, next=next_)


def _server_in_foreground(picture: Picture, moment: Moment) -> Cause | None:
    own = _of_call(picture, moment)
    found = [one for one in own if one.listens]
    if any(one.is_busy for one in own):
        return None
    next_ = ["stop it, and have the server started in the background (&), with its output in a file"]
    verdict = "the tool started a server, and waits for its end"
    return _of_tool(picture, moment, found, "server_in_foreground", verdict=verdict, next=next_, sure=False)


_STDIN: Final = re.compile(r"additional input|(reading|waiting).{0,30}\b(stdin|standard input)\b", re.IGNORECASE)


def _agent_reads_stdin(picture: Picture, moment: Moment) -> Cause | None:
    if _has_begun(picture) or _age_ms(picture, moment) < HANGS_MS or not _STDIN.search(moment.words):
        return None
    if any(one.is_busy for one in moment.processes):
        return None
    return Cause(
        kind="agent_reads_stdin",
        verdict="the agent reads its standard input, and nobody will write there",
        evidence=_last_words(moment.words),
        next=["have its host close it: start the agent with </dev/null"],
        since=picture.last_ts or picture.started_at,
        sure=any(one.waits == "input" for one in moment.processes),
    )


def _server_hangs(picture: Picture, moment: Moment) -> Cause | None:
    if not picture.servers or _has_begun(picture) or not picture.is_sent or picture.retry is not None:
        return None
    # An agent that has reached its model's service waits for that, and not for a server.
    if _age_ms(picture, moment) < FIRST_TURN_MS or not moment.processes:
        return None
    if any(one.is_connected or one.is_busy for one in moment.processes):
        return None
    seen = [Evidence(f"process {one.pid}: {one.command}") for one in moment.processes[-2:]]
    return Cause(
        kind="mcp_hangs",
        verdict="the agent has not begun: an MCP server may hang at its start",
        evidence=[
            Evidence(f"MCP servers of the order: {', '.join(picture.servers)}"),
            *seen,
            *_last_words(moment.words),
        ],
        next=["leave out that server (--mcp), or start it by hand and see what it says"],
        since=picture.last_ts or picture.started_at,
        sure=False,
    )


def _sub_agent_spends(picture: Picture, moment: Moment) -> Cause | None:
    for id, call in picture.open_calls.items():
        spent = picture.tokens - call.tokens
        if picture.parents.get(id) and spent >= SPENT_TOKENS_MIN:
            inner = picture.parents[id]
            return Cause(
                kind="sub_agent_spends",
                verdict=f"a sub-agent works, and has spent {count(spent)} tokens",
                evidence=[Evidence(f"{call.tool}: {call.about}", call.number), Evidence(f"{inner} calls of its own")],
                next=["wait", "or stop it; --max-budget-usd bounds what it may spend"],
                since=call.ts,
            )
    return None


def _nobody_reads(picture: Picture, moment: Moment) -> Cause | None:
    own = _of_call(picture, moment)
    found = [one for one in moment.processes if one.waits == "output" and one not in own]
    if not found or _age_ms(picture, moment) < HANGS_MS:
        return None
    return Cause(
        kind="nobody_reads",
        verdict="its host cannot write: nobody reads what the run tells",
        evidence=[Evidence(f"process {one.pid} waits for its reader: {one.command}") for one in found],
        next=["let the program go on that reads the run's output (a pager, a pipe, a stopped terminal)"],
        since=picture.last_ts or picture.started_at,
    )


def _cache_lost(picture: Picture, moment: Moment) -> Cause | None:
    if len(picture.spent) < 2:
        return None
    before, last = picture.spent
    if before.cached < CACHED_TOKENS_MIN or last.cached or last.input * 2 < before.input:
        return None
    return Cause(
        kind="cache_lost",
        verdict="the service's cache was lost: what it knew is paid for in full again",
        evidence=[Evidence(f"{count(before.cached)} of {count(before.input)} tokens from the cache, then 0 of "
                           f"{count(last.input)}")],
        next=["see what changed at its beginning: tools, servers, system text, model; or a long pause"],
        sure=False,
    )  # fmt: skip


def _starts(picture: Picture, moment: Moment) -> Cause | None:
    if picture.is_sent or _age_ms(picture, moment) < STAGING_MS:
        return None
    if picture.has_stage and not picture.said_hello:
        return Cause(
            kind="no_hello",
            verdict="its host was started and has said nothing yet",
            evidence=_last_words(moment.words),
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
    limited = retry.code in _LIMITS
    after_ms = picture.folded.retry_after_ms
    pause = [Evidence(f"it asks for a pause of {lasting(after_ms)}")] if after_ms is not None else []
    return Cause(
        kind="overloaded" if limited else "asked_again",
        verdict=f"the model's service {_LIMITS.get(retry.code or '', 'failed')}, and is asked again{code}",
        evidence=[Evidence(retry.message, retry.number), *pause, Evidence(f"{picture.retries} times in this run")],
        next=["wait; where it goes on, another model or backend"],
        since=picture.last_ts,
    )


_LIMITS: Final = {"429": "asks to slow down", "529": "is overloaded", "503": "is overloaded"}


def _tool_works(picture: Picture, moment: Moment) -> Cause | None:
    call = _newest_call(picture)
    if call is None:
        return None
    rows = [Evidence(f"{call.tool}: {call.about}", call.number)]
    if picture.output.strip():
        rows.append(Evidence(f"its last line: {picture.output.strip().splitlines()[-1]}"))
    age_ms = _age_ms(picture, moment)
    busy = [one for one in _of_call(picture, moment) if one.is_busy]
    rows += [Evidence(f"process {one.pid} is at work: {one.command}") for one in busy[:2]]
    if age_ms >= QUIET_MS and not busy:
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
    if picture.open_calls or not picture.is_sent or age_ms < QUIET_MS:
        return None
    return Cause(
        kind="model_silent",
        verdict=f"no tool runs, and the agent has said nothing for {lasting(age_ms)}",
        evidence=[
            Evidence(f"the last event was {picture.last or 'none'}", picture.events or None),
            *_connection(moment),
            *_last_words(moment.words),
        ],
        next=["wait: the run ends by itself after --idle-timeout", "Ctrl-C where it runs"],
        since=picture.last_ts or picture.started_at,
        sure=False,
    )


def _connection(moment: Moment) -> list[Evidence]:
    if not moment.processes:
        return []
    up = any(one.is_connected for one in moment.processes)
    return [Evidence("it has a connection: the model may still answer" if up else "it has no connection to anywhere")]


# A run that was cut off -----------------------------------------------------------------------------------------------


def _disk_is_full(picture: Picture, moment: Moment) -> Cause | None:
    if moment.free_bytes is None or moment.free_bytes >= FREE_BYTES_MIN:
        return None
    return _full_disk([Evidence(f"{moment.free_bytes} bytes are left where the runs are kept")])


def _full_disk(rows: Sequence[Evidence]) -> Cause:
    next_ = ["make room on that disk", "backplane receipts prune --keep 100, which removes what older runs keep"]
    return Cause(kind="disk_full", verdict="the disk is full", evidence=rows, next=next_)


def _cut_off(picture: Picture, moment: Moment) -> Cause | None:
    restarted = None not in (picture.boot_id, moment.boot_id) and picture.boot_id != moment.boot_id
    return _interruption(restarted, picture, sealed=False)


def _interruption(restarted: bool, picture: Picture, *, sealed: bool) -> Cause:
    rows = [Evidence("the machine was started anew since" if restarted else "the machine was not started anew since")]
    if picture.last:
        rows.append(Evidence(f"the last event was {picture.last}", picture.events))
    rows += _at_work(picture)
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
    if end.code is None:
        return _by_agent(picture, end)
    refine = _REFINED.get(end.code)
    return (refine(picture, end, moment) if refine is not None else None) or _by_code(picture, end)


def _altered(picture: Picture, moment: Moment) -> Cause | None:
    if not moment.faults:
        return None
    return Cause(
        kind="altered",
        verdict="its receipt is not what was sealed: nothing it says can be relied on",
        evidence=[Evidence(fault) for fault in moment.faults],
        next=[
            f"backplane receipts verify {_short(picture)}",
            "backplane receipts import, from an export that still verifies",
        ],
    )


_FULL: Final = re.compile(r"ENOSPC|EDQUOT|no space left|disk quota exceeded|disk( is)? full", re.IGNORECASE)


def _ended_without_room(picture: Picture, moment: Moment) -> Cause | None:
    end = picture.ended
    if end is None or end.outcome == "complete":
        return None
    calls = [Evidence(f"{one.tool}: {one.output}", one.number) for one in picture.recent[-1:] if one.failed]
    faults = [Evidence(fault.message, fault.number) for fault in picture.faults[-1:]]
    last = picture.last_command
    commands = [Evidence(f"{last.command}: {last.output}", last.number)] if last is not None and last.exit_code else []
    rows = [row for row in (*_said(end), *faults, *commands, *calls, *_words(end)) if _FULL.search(row.text)]
    return _full_disk(rows) if rows else None


_BY_US: Final = ("policy", "hook")


def _rule_blocks(picture: Picture, moment: Moment) -> Cause | None:
    """A rule of ours kept it from something, and it did not get to its end."""
    end = picture.ended
    if end is None or end.outcome == "complete" or end.reason not in ("failed", "partial"):
        return None
    refusals = _object(end.added.get("network")).get("refusals")
    rows = [Evidence(f"{text} (held by the sandbox)") for text in (refusals if isinstance(refusals, list) else [])[:3]]
    denied = [row for row in picture.denied if row.by in _BY_US]
    rows += [Evidence(f"{row.tool} {row.about}: {row.reason} (by the {row.by})", row.number) for row in denied[-3:]]
    if not rows:
        return None
    return Cause(
        kind="rule_blocks",
        verdict="a rule of ours kept it from what it needed",
        evidence=rows,
        next=[
            "allow that in the policy (--policy), if it may do so",
            f"backplane replay {_short(picture)}, to try a rule",
        ],
        sure=False,
    )


def _interrupted(picture: Picture, end: Ended) -> Cause:
    restarted = _object(end.added.get("durability")).get("machine_restarted") is True
    return _interruption(restarted, picture, sealed=True)


_LIMITS_MET: Final[dict[str, tuple[Kind, str, str]]] = {
    "idle": (
        "idle_limit",
        "nothing was said for longer than the limit",
        "raise --idle-timeout, or have the tool speak",
    ),
    "deadline": ("deadline", "its time was up", "raise --timeout, or split the task"),
    "budget": ("budget", "its budget was spent", "raise --max-budget-usd, or split the task"),
    "max_turns": ("max_turns", "it used all its turns", "raise --max-turns, or split the task"),
}
"""Reason of the end → kind, verdict and what to do where the error itself says nothing better."""


def _limit_met(picture: Picture, end: Ended) -> Cause:
    kind, verdict, step = _LIMITS_MET[end.reason]
    done = Evidence(f"{picture.turns} turns, {picture.calls} calls of tools")
    rows = [*_said(end), *_at_work(picture), done]
    return Cause(kind=kind, verdict=verdict, evidence=rows, next=[end.hint or step])


def _at_work(picture: Picture) -> list[Evidence]:
    """The newest call that had no result yet."""
    call = _newest_call(picture)
    return [Evidence(f"{call.tool} was at work: {call.about}", call.number)] if call is not None else []


def _cancelled(picture: Picture, end: Ended) -> Cause:
    reason = str(end.added.get("cancel_reason") or "")
    by = next((words for mark, words in _CANCELLED_BY if mark in reason), "it was cancelled")
    rows = [Evidence(reason)] if reason else []
    next_ = ["run the order again; its conversation, if it was kept: run --resume last"]
    return Cause(kind="cancelled", verdict=by, evidence=rows, next=next_)


_CANCELLED_BY: Final = (
    ("reads the output", "nobody read its output any more"),
    ("interrupted by SIG", "a signal ended it"),
    ("(from process", "somebody cancelled it from another terminal"),
)


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
    change = _object(end.added.get("negotiation")).get("smallest_change")
    if isinstance(change, list):
        next_ += [str(row) for row in change[:3]]
    return Cause(kind="refused", verdict="the order was refused before it was sent", evidence=_said(end), next=next_)


_REASONS: Final[dict[str, Callable[[Picture, Ended], Cause]]] = {
    "interrupted": _interrupted,
    **dict.fromkeys(_LIMITS_MET, _limit_met),
    "cancelled": _cancelled,
    "host_exit": _crashed,
    "refused": _refused,
}


def _said(end: Ended) -> list[Evidence]:
    return [Evidence(end.message)] if end.message else []


def _words(end: Ended) -> list[Evidence]:
    text = end.evidence or str(_object(end.added.get("stderr")).get("tail") or "")
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


_NETWORK: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (what, re.compile(pattern, re.IGNORECASE))
    for what, pattern in (
        ("its name is not found (DNS)", r"name or service not known|getaddrinfo|ENOTFOUND|EAI_AGAIN|name resolution"
         r"|no address associated|could not resolve|nodename nor servname"),
        ("its certificate is not accepted (TLS)", r"certificate|\bssl\b|\btls\b"),
        ("a proxy is in the way", r"\bproxy\b"),
        ("nobody listens there", r"refused|ECONNREFUSED"),
        ("there is no way to it", r"unreachable|no route|EHOSTUNREACH|ENETUNREACH|ETIMEDOUT|timed out"
         r"|connection (attempts )?failed"),
    )
)  # fmt: skip


def _unavailable(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    rows = [*_said(end), *_words(end)]
    text = " ".join(row.text for row in rows)
    what = next((words for words, pattern in _NETWORK if pattern.search(text)), None)
    if what is None:
        return None
    next_ = [end.hint, "backplane doctor --url ADDRESS, which tries it step by step"]
    verdict = f"the model's service cannot be reached: {what}"
    return Cause(kind="no_network", verdict=verdict, evidence=rows, next=[step for step in next_ if step])


def _limited(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    rows = [*_said(end), *_words(end)]
    return _quota(" ".join(row.text for row in rows), picture.folded.retry_after_ms, rows)


def _key(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    if len(moment.logins) < 2:
        return None
    return Cause(
        kind="key_and_login",
        verdict="the key was refused, and there is more than one way to log in: the agent may have taken the wrong one",
        evidence=[*_said(end), *(Evidence(f"{one} is there") for one in moment.logins)],
        next=["leave one of them: unset the variable, or log out of the program", "backplane doctor"],
        sure=False,
    )


def _model(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    near = nearest_name(picture.model, moment.models) if picture.model else None
    found = _by_code(picture, end)
    if near is None or near == picture.model:
        return None
    return msgspec.structs.replace(found, next=[f"did you mean --model {near}?", *found.next])


def _too_long(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    found = _by_code(picture, end)
    given = f"{picture.context} files and texts were given along, {picture.calls} calls gave results"
    return msgspec.structs.replace(found, evidence=[*found.evidence, Evidence(given)])


_MOVED: Final = re.compile(r"changed since the run began|conflict|has changed meanwhile", re.IGNORECASE)


def _conflict(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    if not _MOVED.search(end.message):
        return None
    return Cause(
        kind="conflict",
        verdict="the folder was changed while it worked: its result does not fit any more",
        evidence=_said(end),
        next=[f"backplane apply {_short(picture)} --merge", "or run it again on what is there now"],
    )


_REFINED: Final[dict[str, Callable[[Picture, Ended, Moment], Cause | None]]] = {
    "backend_unavailable": _unavailable,
    "backend_rate_limited": _limited,
    "backend_auth_failed": _key,
    "backend_model_not_found": _model,
    "backend_context_length": _too_long,
    "execution_workspace_error": _conflict,
}
"""Codes of which more can be said than `_CODES` does; None where the code's own row stands."""


def _by_policy(picture: Picture, moment: Moment) -> Cause | None:
    """A rule of ours was not kept, or the result may not be applied for it."""
    end = picture.ended
    rows = _object(end.added.get("enforcement") if end is not None else None).get("violations")
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


def _breaker_open(picture: Picture, moment: Moment) -> Cause | None:
    end = picture.ended
    left_ms = moment.circuit_until_ms - moment.now_ms
    if left_ms <= 0 or end is None or end.code == "circuit_breaker_open":
        return None
    _, verdict, step = _CODES["circuit_breaker_open"]
    until = Evidence(
        f"{picture.backend} failed several times in a row: no order is routed to it for {lasting(left_ms)}"
    )
    return Cause(kind="breaker_open", verdict=verdict, evidence=[until], next=[step])


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
    claimed = _object(added.get("reconciliation")).get("claimed_only")
    if not _changed_nothing(picture) or not isinstance(claimed, list) or not claimed:
        return None
    return Cause(
        kind="done_but_unchanged",
        verdict="it says that it changed files, and none is changed",
        evidence=[Evidence(f"claimed: {', '.join(map(str, claimed[:5]))}")],
        next=["backplane receipts show " + _short(picture) + ", for what it did"],
    )


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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


WAITS: Final[tuple[Rule, ...]] = (_stopped, _hook_hangs, _question_waits, _login_wanted, _quota_used_up, _is_retried)
"""What a live run waits for."""
HABITS: Final[tuple[Rule, ...]] = (_repeats, _compaction_loop, _talks_only, _cache_lost)
"""How it goes on, whatever it waits for."""
DOING: Final[tuple[Rule, ...]] = (
    *(_starts, _agent_reads_stdin, _nobody_reads, _tool_wants_input, _server_in_foreground),
    *(_sub_agent_spends, _tool_works, _server_hangs, _model_silent),
)
"""What it does, or why it does nothing."""
CUT_OFF: Final[tuple[Rule, ...]] = (_disk_is_full, _cut_off)
OVER: Final[tuple[Rule, ...]] = (
    *(_altered, _by_policy, _ended_without_room, _rule_blocks, _ended_badly, _repeats, _compaction_loop),
    *(_done_but_denied, _done_but_ignored, _done_but_unchanged, _done_but_red, _talks_only, _cache_lost),
    _breaker_open,
)
HEALTHY: Final = frozenset({"nothing", "tool_works"})
"""Kinds that are no trouble."""


def _fine(picture: Picture, moment: Moment) -> Cause:
    end = picture.ended
    if end is not None:
        lasted = f" after {lasting(end.duration_ms)}" if end.duration_ms is not None else ""
        return Cause(kind="nothing", verdict=f"nothing is wrong: it is {end.outcome}{lasted}")
    doing = "the agent writes" if picture.streamed else "the model thinks" if picture.is_sent else "it starts"
    return Cause(kind="nothing", verdict=f"nothing is wrong: {doing}", since=picture.last_ts or picture.started_at)
