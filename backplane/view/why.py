"""What a run waits for, or why it ended as it did: the first cause that holds, its evidence, the next step. Pure.

`KINDS` has the words of each kind, and a small function over the picture finds it; `WAITS`, `HABITS`, `DOING` and
`OVER` are their order. What is only likely says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from backplane.contract.receipt import failed_on, findings_of
from backplane.contract.unheard import nearest_name
from backplane.errors import CODES
from backplane.process.table import Process
from backplane.view.asked import decided
from backplane.view.figures import count, counted, lasting, milliseconds
from backplane.view.findings import fail_on_words
from backplane.view.picture import Denial, Ended, Picture, ShownCall
from backplane.view.text import in_workspace, one_line
from backplane.view.values import as_list, as_object

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

ASKED_LINES_MAX: Final = 12
"""Lines of what a question is about; the rest stands where it is answered."""

Kind = str

KINDS: Final[dict[Kind, tuple[str, ...]]] = {
    # Of a run that lives.
    "approval_waits": ("it waits for your approval of {tool}",
                       "backplane answer {run} {ask} allow, or deny --reason WHY",
                       "or in the terminal where it runs, or in: backplane watch"),
    "question_waits": ("it waits for your answer to a question", "backplane answer {run} {ask} allow --text WORDS",
                       "or in the terminal where it runs, or in: backplane watch"),
    "stopped": ("a process of it was stopped, and does nothing until it is continued", "kill -CONT {pids}"),
    "hook_hangs": ("a hook has not answered yet: {names}", "wait for its limit (timeout_ms of the hook)",
                   "or mend the hook: it answers in milliseconds"),
    "login_wanted": ("the agent waits for somebody to log in",
                     "log in with the agent's own program, then run it again", "or give it a key: backplane doctor"),
    "quota": ("the account's quota is used up, {until}", "another login, model or backend", "or wait until then"),
    "overloaded": ("the model's service {what}, and is asked again{code}",
                   "wait; where it goes on, another model or backend"),
    "asked_again": ("the model's service failed, and is asked again{code}",
                    "wait; where it goes on, another model or backend"),
    "same_failure": ("the same failure came {times} times in a row",
                     "stop it (Ctrl-C where it runs), and say in the task what goes wrong"),
    "same_call": ("it made the same call {times} times in a row, with the same result",
                  "stop it (Ctrl-C where it runs), and say in the task what it should do instead"),
    "compaction_loop": ("the conversation was shortened {times} times, and no file was changed in between",
                        "stop it, and give a smaller task", "or a model with a larger window"),
    "talks_only": ("it says what it will do, and calls no tool: {times} turns in a row",
                   "another model: this one may not know how to call tools here"),
    "cache_lost": ("the service's cache was lost: what it knew is paid for in full again",
                   "see what changed at its beginning: tools, servers, system text, model; or a long pause"),
    "no_hello": ("its host was started and has said nothing yet", "wait for its limit (BACKPLANE_HELLO_S)",
                 "backplane doctor, for the backend {backend!r}"),
    "staging": ("its workspace is being copied, or its host is being prepared",
                "wait, or exclude folders that it does not need (--exclude)"),
    "agent_reads_stdin": ("the agent reads its standard input, and nobody will write there",
                          "have its host close it: start the agent with </dev/null"),
    "nobody_reads": ("its host cannot write: nobody reads what the run tells",
                     "let the program go on that reads the run's output (a pager, a pipe, a stopped terminal)"),
    "tool_wants_input": ("the tool's command waits for input that nobody will type",
                         "stop it, and have the command ask nothing (-y, --no-input, --batch)",
                         "or give it its input in the command"),
    "server_in_foreground": ("the tool started a server, and waits for its end",
                             "stop it, and have the server started in the background (&), with its output in a file"),
    "sub_agent_spends": ("a sub-agent works, and has spent {spent} tokens", "wait",
                         "or stop it; --max-budget-usd bounds what it may spend"),
    "tool_works": ("{tool} runs", "wait"),
    "tool_quiet": ("{tool} runs and has said nothing for {age}", "wait, if it is a long one",
                   "if it waits for input: a flag that asks nothing (-y, --no-input)"),
    "mcp_hangs": ("the agent has not begun: an MCP server may hang at its start",
                  "leave out that server (run --mcp), or start it by hand and see what it says"),
    "model_silent": ("no tool runs, and the agent has said nothing for {age}",
                     "wait: the run ends by itself after BACKPLANE_IDLE_S", "Ctrl-C where it runs"),
    # Of a run that has ended, or was cut off; by the reason of its end.
    "idle_limit": ("nothing was said for longer than the limit", "raise BACKPLANE_IDLE_S, or have the tool speak"),
    "deadline": ("its time was up", "raise run --timeout, or split the task"),
    "budget": ("its budget was spent", "raise --max-budget-usd, or split the task"),
    "max_turns": ("it used all its turns", "raise --max-turns, or split the task"),
    "cancelled": ("{by}", "run the order again; its conversation, if it was kept: run --resume last"),
    "interrupted": ("its control plane {how}",
                    "run the order again; its conversation, if it was kept: run --resume last"),
    "crashed": ("its host ended before it gave a result: {how}",
                "see its last words above; run it again, as a retry may help"),
    "crashed_at_start": ("its host ended before it said hello: {how}",
                         "backplane conform -- COMMAND…, which shows how far it gets", "backplane doctor"),
    "out_of_memory": ("its host was killed: most often by lack of memory",
                      "give the machine or the run more memory, or see who killed it (journalctl -k)"),
    "refused": ("the order was refused before it was sent", "see the order's requirements and policy"),
    # By the code of its error.
    "not_started": ("its host could not be started", "install it, or put right its path"),
    "no_handshake": ("its host said no valid hello", "backplane conform -- COMMAND…"),
    "bad_line": ("its host broke the protocol", "backplane conform -- COMMAND…"),
    "key_refused": ("the model's service refused the key", "backplane doctor"),
    "key_and_login": (
        "the key was refused, and there is more than one way to log in: the agent may have taken the wrong one",
        "leave one of them: unset the variable, or log out of the program", "backplane doctor"),
    "model_unknown": (
        "the model's service does not know the model, or base_url is wrong", "another --model, or another base_url"),
    "too_long": ("the conversation is longer than the model takes", "a smaller task"),
    "unavailable": ("the backend cannot be reached or used", "backplane doctor"),
    "no_network": ("the model's service cannot be reached: {what}",
                   "backplane doctor --probe, which tries it step by step"),
    "rate_limited": ("the model's service asked to slow down", "wait, or another model"),
    "filtered": ("the model's service withheld the answer", "say it in other words"),
    "wrong_shape": ("its answer does not match the schema", "see the answer, or the schema"),
    "workspace": ("its result does not fit the files", "backplane apply {run} --merge"),
    "conflict": ("the folder was changed while it worked: its result does not fit any more",
                 "backplane apply {run} --merge", "or run it again on what is there now"),
    "store": ("its receipt could not be kept", "see the disk; backplane prune"),
    "disk_full": ("the disk is full", "make room on that disk",
                  "backplane prune --keep 100, which removes what older runs keep"),
    "breaker_open": ("the backend failed too often and is left alone", "wait, then try again"),
    "altered": ("its receipt is not what was sealed: nothing it says can be relied on",
                "backplane receipts verify {run}", "backplane receipts import, from an export that still verifies"),
    # By what it did.
    "rule_blocks": ("a rule of ours kept it from what it needed",
                    "allow that in the policy (--policy), if it may do so",
                    "backplane policy test POLICY {run}, to try a rule"),
    "rule_broken": ("it did what the policy forbids", "or mend the rule"),
    "denied": ("of its calls or questions, denied: {denials}; it ended as {outcome}",
               "run it again, and allow what it needs", "or say in the task what it should do instead"),
    "agent_failed": ("the agent itself ended as {outcome}", "backplane receipts show {run}, for all that it said"),
    "nobody_asked": ("{denied} denied, as nobody could be asked",
                     "run it in a terminal, or with run --on-ask prompt", "or a rule that allows it (--policy)"),
    "done_but_denied": ("it says that it is done, and {denied} denied",
                        "allow what it needs, and run it again"),
    "failed_on": ("it is complete, and its exit code is 3: {found}", "or take it as it is: run --fail-on none"),
    "false_claims": ("it is complete, and it made {count}", "backplane receipts audit {run}, for what was seen"),
    "only_ignored": ("it changed {ignored} that git ignores, and nothing else: no patch has ignored files",
                     "take them out of .gitignore, or work with run --in-place"),
    "done_but_unchanged": ("it says that it changed files, and none is changed",
                           "backplane receipts show {run}, for what it did"),
    "done_but_red": ("it says that it is done, and its last tests failed", "run it yourself: {command}"),
}  # fmt: skip
"""Kind → its verdict, and what to do, the likeliest first. What stands in braces is a fact of the run."""

LIKELY: Final = frozenset({
    *("compaction_loop", "talks_only", "cache_lost", "no_hello", "staging", "server_in_foreground", "tool_quiet"),
    *("mcp_hangs", "model_silent", "out_of_memory", "key_and_login", "rule_blocks", "done_but_red"),
})  # fmt: skip
"""Kinds that are never sure."""

HEALTHY: Final = frozenset({"nothing", "tool_works"})
"""Kinds that are no trouble."""


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


Finder = Callable[[Picture, Moment], Cause | None]


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
        is_done = picture.ended is not None and picture.ended.outcome == "complete"
        rules = CUT_OFF if moment.state == "cut_off" else (*FIRST, *DONE, *OVER) if is_done else (*FIRST, *OVER)
        yield from _holding(rules, picture, moment)


def _holding(rules: Sequence[Finder], picture: Picture, moment: Moment) -> Iterator[Cause]:
    return (cause for rule in rules if (cause := rule(picture, moment)) is not None)


def _cut(evidence: Evidence) -> Evidence:
    return msgspec.structs.replace(evidence, text=one_line(evidence.text, LINE_CHARS_MAX))


def _cause(kind: Kind, picture: Picture, rows: Sequence[Evidence] = (), *, since: str = "", sure: bool = True,
           hint: str = "", **facts: object) -> Cause:  # fmt: skip
    """A kind in its words.

    Args:
        hint: a next step that goes before those of the kind.
        facts: what stands in braces in its words.
    """
    told = {"run": _short(picture), "backend": picture.backend, **facts}
    verdict, *steps = (words.format_map(told) for words in KINDS[kind])
    next_ = [step for step in (hint, *steps) if step]
    return Cause(kind=kind, verdict=verdict, evidence=rows, next=next_, sure=sure and kind not in LIKELY, since=since)


def _short(picture: Picture) -> str:
    return picture.run_id[:8]


def _age_ms(picture: Picture, moment: Moment) -> int:
    last = milliseconds(_last_ts(picture))
    return max(0, moment.now_ms - last) if last is not None else 0


def _last_ts(picture: Picture) -> str:
    return picture.last_ts or picture.started_at


def _last_words(words: str) -> list[Evidence]:
    return [Evidence(f"stderr: {line}") for line in words.strip().splitlines()[-3:]]


def _newest_call(picture: Picture) -> ShownCall | None:
    return max(picture.open_calls.values(), key=lambda call: call.number, default=None)


def _at_work(picture: Picture) -> list[Evidence]:
    """The newest call that had no result yet."""
    call = _newest_call(picture)
    return [Evidence(f"{call.tool} was at work: {call.about}", call.number)] if call is not None else []


# A run that lives -----------------------------------------------------------------------------------------------------


def _question_waits(picture: Picture, moment: Moment) -> Cause | None:
    ask = picture.waits
    if ask is None:
        return None
    asked_ms, limit_ms = milliseconds(ask.ts), ask.body.get("deadline_ms")
    about = in_workspace(ask.about)
    shown = [line for line in decided(ask.body) if line.partition(": ")[2] != about]
    rows = [Evidence(f"{ask.tool}: {about}", ask.number), *map(Evidence, shown[:ASKED_LINES_MAX])]
    if len(shown) > ASKED_LINES_MAX:
        rows.append(Evidence(f"… {len(shown) - ASKED_LINES_MAX} more lines: backplane watch"))
    if isinstance(limit_ms, int) and asked_ms is not None:
        left_ms = asked_ms + limit_ms - moment.now_ms
        default = ask.body.get("default", "deny")
        rows.append(Evidence(f"answered with {default!r} in {lasting(left_ms)}, if nobody answers"))
    if len(picture.open_asks) > 1:
        rows.append(Evidence(f"{len(picture.open_asks) - 1} more questions wait behind it"))
    kind = "question_waits" if ask.kind == "input" else "approval_waits"
    return _cause(kind, picture, rows, since=ask.ts, tool=ask.tool, ask=ask.id)


def _stopped(picture: Picture, moment: Moment) -> Cause | None:
    found = [one for one in moment.processes if one.is_stopped]
    if not found:
        return None
    rows = [Evidence(f"process {one.pid} is stopped: {one.command}") for one in found]
    return _cause("stopped", picture, rows, since=_last_ts(picture), pids=" ".join(str(one.pid) for one in found[:5]))


def _hook_hangs(picture: Picture, moment: Moment) -> Cause | None:
    for id, names in picture.hooks.items():
        ask = picture.open_asks.get(id)
        if ask is not None:
            rows = [Evidence(f"asked about {ask.tool}: {ask.about}", ask.number)]
            return _cause("hook_hangs", picture, rows, since=ask.ts, names=", ".join(names))
    return None


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
    return _cause("login_wanted", picture, _last_words(moment.words), since=picture.started_at)


_RESETS: Final = (
    r"(?is)\b(resets?|renews?|try again|available again|retry)\b.{0,40}?"
    r"(\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\d{1,2} ?[ap]m\b|\d+ ?(h|hours?|days?)\b"
    r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d)"
)
"""Compiled on first use, as no diagnosis of another kind shall wait for it."""
_LIMITED: Final = re.compile(r"\b(limit|quota|usage|credits?)\b", re.IGNORECASE)


def _quota(picture: Picture, text: str, rows: Sequence[Evidence], since: str = "") -> Cause | None:
    """A limit that no short pause lifts: its text names a date, or the service asks to wait long."""
    after_ms = picture.folded.retry_after_ms
    found = re.search(_RESETS, text) if _LIMITED.search(text) else None
    if found is None and (after_ms is None or after_ms < WAITS_LONG_MS):
        return None
    until = f"until then: {found[0]}" if found is not None else f"for {lasting(after_ms or 0)}"
    return _cause("quota", picture, rows, since=since, until=until)


def _quota_used_up(picture: Picture, moment: Moment) -> Cause | None:
    retry = picture.retry
    if retry is None:
        return None
    return _quota(picture, retry.message, [Evidence(retry.message, retry.number)], picture.last_ts)


_LIMITS: Final = {"429": "asks to slow down", "529": "is overloaded", "503": "is overloaded"}


def _is_retried(picture: Picture, moment: Moment) -> Cause | None:
    retry = picture.retry
    if retry is None:
        return None
    what, after_ms = _LIMITS.get(retry.code or ""), picture.folded.retry_after_ms
    pause = [Evidence(f"it asks for a pause of {lasting(after_ms)}")] if after_ms is not None else []
    rows = [Evidence(retry.message, retry.number), *pause, Evidence(f"{counted(picture.retries, 'time')} in this run")]
    kind, code = "overloaded" if what else "asked_again", f" ({retry.code})" if retry.code else ""
    return _cause(kind, picture, rows, since=picture.last_ts, what=what, code=code)


def _is_unfinished(picture: Picture) -> bool:
    """Whether it goes on, or has ended as anything but complete: then what it repeats is news."""
    return picture.ended is None or picture.ended.outcome != "complete"


def _repeats(picture: Picture, moment: Moment) -> Cause | None:
    for kind, found in (("same_failure", picture.same_failure), ("same_call", picture.same_call)):
        if found.times >= REPEATS_MIN and _is_unfinished(picture):
            return _cause(kind, picture, [Evidence(found.what, found.number)], times=found.times)
    return None


def _compaction_loop(picture: Picture, moment: Moment) -> Cause | None:
    found = picture.compactions
    if found.times < REPEATS_MIN or not _is_unfinished(picture):
        return None
    return _cause("compaction_loop", picture, [Evidence(found.what, found.number)], times=found.times)


def _talks_only(picture: Picture, moment: Moment) -> Cause | None:
    found = picture.only_announced
    if found.times < REPEATS_MIN:
        return None
    return _cause("talks_only", picture, [Evidence(found.what.strip(), found.number)], times=found.times)


def _cache_lost(picture: Picture, moment: Moment) -> Cause | None:
    if len(picture.spent) < 2:
        return None
    before, last = picture.spent
    if before.cached < CACHED_TOKENS_MIN or last.cached or last.input * 2 < before.input:
        return None
    seen = f"{count(before.cached)} of {count(before.input)} tokens from the cache, then 0 of {count(last.input)}"
    return _cause("cache_lost", picture, [Evidence(seen)])


def _of_call(picture: Picture, moment: Moment) -> list[Process]:
    """The processes that were started since the newest open call was."""
    call = _newest_call(picture)
    began_ms = milliseconds(call.ts) if call is not None else None
    if began_ms is None:
        return []
    return [one for one in moment.processes if one.started_ms >= began_ms - SLACK_MS]


def _of_tool(picture: Picture, moment: Moment, found: Sequence[Process], kind: Kind) -> Cause | None:
    call = _newest_call(picture)
    if call is None or not found or _age_ms(picture, moment) < HANGS_MS:
        return None
    seen = [Evidence(f"process {one.pid}: {one.command}" + _ports(one)) for one in found[:2]]
    return _cause(kind, picture, [Evidence(f"{call.tool}: {call.about}", call.number), *seen], since=call.ts)


def _ports(process: Process) -> str:
    return f" (listens on {', '.join(map(str, process.listens[:5]))})" if process.listens else ""


def _tool_wants_input(picture: Picture, moment: Moment) -> Cause | None:
    found = [one for one in _of_call(picture, moment) if one.waits == "input"]
    return _of_tool(picture, moment, found, "tool_wants_input")


def _server_in_foreground(picture: Picture, moment: Moment) -> Cause | None:
    own = _of_call(picture, moment)
    if any(one.is_busy for one in own):
        return None
    return _of_tool(picture, moment, [one for one in own if one.listens], "server_in_foreground")


_STDIN: Final = re.compile(r"additional input|(reading|waiting).{0,30}\b(stdin|standard input)\b", re.IGNORECASE)


def _agent_reads_stdin(picture: Picture, moment: Moment) -> Cause | None:
    if _has_begun(picture) or _age_ms(picture, moment) < HANGS_MS or not _STDIN.search(moment.words):
        return None
    if any(one.is_busy for one in moment.processes):
        return None
    reads = any(one.waits == "input" for one in moment.processes)
    return _cause("agent_reads_stdin", picture, _last_words(moment.words), since=_last_ts(picture), sure=reads)


def _server_hangs(picture: Picture, moment: Moment) -> Cause | None:
    if not picture.servers or _has_begun(picture) or not picture.is_sent or picture.retry is not None:
        return None
    # An agent that has reached its model's service waits for that, and not for a server.
    if _age_ms(picture, moment) < FIRST_TURN_MS or not moment.processes:
        return None
    if any(one.is_connected or one.is_busy for one in moment.processes):
        return None
    servers = Evidence(f"MCP servers of the order: {', '.join(picture.servers)}")
    seen = [Evidence(f"process {one.pid}: {one.command}") for one in moment.processes[-2:]]
    return _cause("mcp_hangs", picture, [servers, *seen, *_last_words(moment.words)], since=_last_ts(picture))


def _sub_agent_spends(picture: Picture, moment: Moment) -> Cause | None:
    for id, call in picture.open_calls.items():
        spent = picture.tokens - call.tokens
        if picture.parents.get(id) and spent >= SPENT_TOKENS_MIN:
            inner = Evidence(f"{counted(picture.parents[id], 'call')} of its own")
            rows = [Evidence(f"{call.tool}: {call.about}", call.number), inner]
            return _cause("sub_agent_spends", picture, rows, since=call.ts, spent=count(spent))
    return None


def _nobody_reads(picture: Picture, moment: Moment) -> Cause | None:
    own = _of_call(picture, moment)
    found = [one for one in moment.processes if one.waits == "output" and one not in own]
    if not found or _age_ms(picture, moment) < HANGS_MS:
        return None
    rows = [Evidence(f"process {one.pid} waits for its reader: {one.command}") for one in found]
    return _cause("nobody_reads", picture, rows, since=_last_ts(picture))


def _starts(picture: Picture, moment: Moment) -> Cause | None:
    if picture.is_sent or _age_ms(picture, moment) < STAGING_MS:
        return None
    if picture.has_stage and not picture.said_hello:
        return _cause("no_hello", picture, _last_words(moment.words), since=picture.started_at)
    return _cause("staging", picture, [Evidence(f"workspace: {picture.root}")], since=picture.started_at)


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
    kind = "tool_quiet" if age_ms >= QUIET_MS and not busy else "tool_works"
    return _cause(kind, picture, rows, since=call.ts, tool=call.tool, age=lasting(age_ms))


def _model_silent(picture: Picture, moment: Moment) -> Cause | None:
    age_ms = _age_ms(picture, moment)
    if picture.open_calls or not picture.is_sent or age_ms < QUIET_MS:
        return None
    last = Evidence(f"the last event was {picture.last or 'none'}", picture.events or None)
    rows = [last, *_connection(moment), *_last_words(moment.words)]
    return _cause("model_silent", picture, rows, since=_last_ts(picture), age=lasting(age_ms))


def _connection(moment: Moment) -> list[Evidence]:
    if not moment.processes:
        return []
    up = any(one.is_connected for one in moment.processes)
    return [Evidence("it has a connection: the model may still answer" if up else "it has no connection to anywhere")]


# A run that was cut off -----------------------------------------------------------------------------------------------


def _disk_is_full(picture: Picture, moment: Moment) -> Cause | None:
    if moment.free_bytes is None or moment.free_bytes >= FREE_BYTES_MIN:
        return None
    return _cause("disk_full", picture, [Evidence(f"{moment.free_bytes} bytes are left where the runs are kept")])


def _cut_off(picture: Picture, moment: Moment) -> Cause | None:
    restarted = None not in (picture.boot_id, moment.boot_id) and picture.boot_id != moment.boot_id
    return _interruption(restarted, picture, hint="the next run here seals it")


def _interruption(restarted: bool, picture: Picture, hint: str = "") -> Cause:
    rows = [Evidence("the machine was started anew since" if restarted else "the machine was not started anew since")]
    if picture.last:
        rows.append(Evidence(f"the last event was {picture.last}", picture.events))
    how = "was cut off: the machine went down" if restarted else "was killed"
    return _cause("interrupted", picture, [*rows, *_at_work(picture)], hint=hint, how=how)


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
    return _cause("altered", picture, [Evidence(fault) for fault in moment.faults]) if moment.faults else None


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
    return _cause("disk_full", picture, rows) if rows else None


_BY_US: Final = ("policy", "hook")


def _rule_blocks(picture: Picture, moment: Moment) -> Cause | None:
    """A rule of ours kept it from something, and it did not get to its end."""
    end = picture.ended
    if end is None or end.outcome == "complete" or end.reason not in ("failed", "partial"):
        return None
    refusals = as_list(as_object(end.added.get("network")).get("refusals"))
    rows = [Evidence(f"{text} (held by the sandbox)") for text in refusals[:3]]
    denied = [row for row in picture.denied if row.by in _BY_US]
    rows += [Evidence(f"{row.tool} {row.about}: {row.reason} (by the {row.by})", row.number) for row in denied[-3:]]
    return _cause("rule_blocks", picture, rows) if rows else None


def _interrupted(picture: Picture, end: Ended) -> Cause:
    return _interruption(as_object(end.added.get("durability")).get("machine_restarted") is True, picture)


_LIMITS_MET: Final = {"idle": "idle_limit", "deadline": "deadline", "budget": "budget", "max_turns": "max_turns"}
"""Reason of the end → kind."""


def _limit_met(picture: Picture, end: Ended) -> Cause:
    done = Evidence(f"{counted(picture.turns, 'turn')}, {counted(picture.calls, 'call')} of tools")
    return _cause(_LIMITS_MET[end.reason], picture, [*_said(end), *_at_work(picture), done], hint=end.hint)


def _cancelled(picture: Picture, end: Ended) -> Cause:
    reason = str(end.added.get("cancel_reason") or "")
    by = next((words for mark, words in _CANCELLED_BY if mark in reason), "it was cancelled")
    return _cause("cancelled", picture, [Evidence(reason)] if reason else [], by=by)


_CANCELLED_BY: Final = (
    ("reads the output", "nobody read its output any more"),
    ("interrupted by SIG", "a signal ended it"),
    ("cancelled on the page (from process", "somebody cancelled it on the page of backplane web"),
    ("(from process", "somebody cancelled it from another terminal"),
)


def _crashed(picture: Picture, end: Ended) -> Cause:
    how = "no exit code is known" if end.exit_code is None else f"exit code {end.exit_code}"
    how = how if end.signal is None else f"signal {end.signal}"
    rows, noise = [*_said(end), *_words(end)], as_object(end.added.get("noise"))
    if end.signal == 9:
        return _cause("out_of_memory", picture, rows)
    if end.code == "protocol_handshake_failed" and noise:
        hint = "have the command print messages alone on stdout, each with its `t` (no banner, no shell's profile)"
        return _cause("no_handshake", picture, rows, hint=hint)
    return _cause("crashed_at_start" if end.code == "protocol_handshake_failed" else "crashed", picture, rows, how=how)


def _refused(picture: Picture, end: Ended) -> Cause:
    return _cause("refused", picture, _said(end), hint=end.hint)


_REASONS: Final[dict[str, Callable[[Picture, Ended], Cause]]] = {
    **dict.fromkeys(_LIMITS_MET, _limit_met),
    "interrupted": _interrupted,
    "cancelled": _cancelled,
    "host_exit": _crashed,
    "refused": _refused,
}


def _said(end: Ended) -> list[Evidence]:
    return [Evidence(end.message)] if end.message else []


def _words(end: Ended) -> list[Evidence]:
    return _last_words(end.evidence or str(as_object(end.added.get("stderr")).get("tail") or ""))


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
"""Code → kind; another code is a kind of its own, in the words of its meaning."""


_NETWORK: Final = (
    ("its name is not found (DNS)", r"name or service not known|getaddrinfo|ENOTFOUND|EAI_AGAIN|name resolution"
     r"|no address associated|could not resolve|nodename nor servname"),
    ("its certificate is not accepted (TLS)", r"certificate|\bssl\b|\btls\b"),
    ("a proxy is in the way", r"\bproxy\b"),
    ("nobody listens there", r"refused|ECONNREFUSED"),
    ("there is no way to it", r"unreachable|no route|EHOSTUNREACH|ENETUNREACH|ETIMEDOUT|timed out"
     r"|connection (attempts )?failed"),
)  # fmt: skip


def _unavailable(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    rows = [*_said(end), *_words(end)]
    text = " ".join(row.text for row in rows)
    what = next((words for words, pattern in _NETWORK if re.search(pattern, text, re.IGNORECASE)), None)
    return _cause("no_network", picture, rows, hint=end.hint, what=what) if what is not None else None


def _limited(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    rows = [*_said(end), *_words(end)]
    return _quota(picture, " ".join(row.text for row in rows), rows)


def _key(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    if len(moment.logins) < 2:
        return None
    return _cause("key_and_login", picture, [*_said(end), *(Evidence(f"{one} is there") for one in moment.logins)])


def _model(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    near = nearest_name(picture.model, moment.models) if picture.model else None
    if near is None or near == picture.model:
        return None
    found = _by_code(picture, end)
    return msgspec.structs.replace(found, next=[f"did you mean --model {near}?", *found.next])


def _too_long(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    found = _by_code(picture, end)
    given = f"files and texts given along: {picture.context}, calls that gave results: {picture.calls}"
    return msgspec.structs.replace(found, evidence=[*found.evidence, Evidence(given)])


_MOVED: Final = re.compile(r"changed since the run began|conflict|has changed meanwhile", re.IGNORECASE)


def _conflict(picture: Picture, end: Ended, moment: Moment) -> Cause | None:
    return _cause("conflict", picture, _said(end)) if _MOVED.search(end.message) else None


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
    rows = as_list(as_object(end.added.get("enforcement") if end is not None else None).get("violations"))
    told = dict.fromkeys(str(row.get("reason")) for row in rows if isinstance(row, dict))
    if end is None or not rows:
        return None
    seen = f"what it did is in the receipt: backplane receipts show {_short(picture)}"
    hint = end.hint if end.code == "policy_denied" and end.hint else seen
    return _cause("rule_broken", picture, [Evidence(reason) for reason in told], hint=hint)


def _by_code(picture: Picture, end: Ended) -> Cause:
    code, rows = end.code or "internal", [*_said(end), *_words(end)]
    if code in _CODES:
        return _cause(_CODES[code], picture, rows, hint=end.hint)
    facts = CODES.get(code)
    verdict = facts.meaning.rstrip(".") if facts is not None else f"its host ended it with a code of its own, {code!r}"
    meaning = f"backplane explain {code}, and " if facts is not None else ""
    steps = (end.hint, f"{meaning}backplane receipts show {_short(picture)}")
    return Cause(kind=code, verdict=verdict, evidence=rows, next=[step for step in steps if step])


def _by_agent(picture: Picture, end: Ended) -> Cause:
    """The host itself said that the run failed, or is partial."""
    rows = [Evidence(_coded(fault.message, fault.code), fault.number) for fault in picture.faults[-2:]]
    rows += [Evidence(server.message, server.number) for server in picture.absent]
    last = picture.last_command
    if last is not None and last.exit_code:
        rows.append(Evidence(f"{last.command}: exit code {last.exit_code}", last.number))
    if picture.denied and not rows:
        return _denied(picture, picture.denied, "denied", outcome=end.outcome)
    rows += _denial_rows(picture.denied)
    return _cause("agent_failed", picture, rows or [Evidence("it did not say why")], outcome=end.outcome)


def _coded(message: str, code: str | None) -> str:
    return f"{message} ({code})" if code else message


def _denial_rows(denied: Sequence[Denial]) -> list[Evidence]:
    return [Evidence(f"{row.tool} {row.about}: {row.reason} (by {row.by})", row.number) for row in denied[-3:]]


def _denied(picture: Picture, denied: Sequence[Denial], kind: Kind = "done_but_denied", outcome: str = "") -> Cause:
    rows = _denial_rows(denied)
    if any(row.by == "default" for row in denied):
        kind = "nobody_asked"
    calls = counted(picture.denials, "call")
    return _cause(kind, picture, rows, denials=picture.denials, denied=calls, outcome=outcome)


def _breaker_open(picture: Picture, moment: Moment) -> Cause | None:
    end = picture.ended
    left_ms = moment.circuit_until_ms - moment.now_ms
    if left_ms <= 0 or end is None or end.code == "circuit_breaker_open":
        return None
    until = f"{picture.backend} failed several times in a row: no order is routed to it for {lasting(left_ms)}"
    return _cause("breaker_open", picture, [Evidence(until)])


def _empty_patch(picture: Picture) -> dict[str, Any] | None:
    """What is told of the patch of a run that changed nothing; None where it changed something, or nobody knows."""
    patch = as_object(picture.ended.added.get("patch")) if picture.ended is not None else {}
    return patch if patch.get("bytes") == 0 else None


def _false_rows(added: dict[str, Any]) -> list[Evidence]:
    counts = as_object(as_object(added.get("claimed")).get("counts"))
    false = ((kind, as_object(row).get("false")) for kind, row in counts.items())
    return [Evidence(f"found false: {number} × {kind}") for kind, number in false if number]


def _done_but_failed_on(picture: Picture, moment: Moment) -> Cause | None:
    """It has a finding of its order's `fail_on`."""
    added = picture.ended.added if picture.ended is not None else {}
    words = failed_on(added)
    if not words:
        return None
    denied = "denied" in words
    rows = [*(_denial_rows(picture.denied) if denied else []), *(_false_rows(added) if "false-claims" in words else [])]
    hint = "allow what it needs, and run it again" if denied else f"backplane receipts audit {_short(picture)}"
    return _cause("failed_on", picture, rows, hint=hint, found=fail_on_words(added))


def _done_but_false(picture: Picture, moment: Moment) -> Cause | None:
    added = picture.ended.added if picture.ended is not None else {}
    number = findings_of(added).false_claims
    words = "1 false claim" if number == 1 else f"{number} false claims"
    return _cause("false_claims", picture, _false_rows(added), count=words) if number else None


def _done_but_denied(picture: Picture, moment: Moment) -> Cause | None:
    return _denied(picture, picture.denied) if picture.denied and _empty_patch(picture) is not None else None


def _done_but_ignored(picture: Picture, moment: Moment) -> Cause | None:
    patch = _empty_patch(picture)
    return (
        _cause("only_ignored", picture, ignored=counted(patch["ignored"], "file"))
        if patch and patch.get("ignored")
        else None
    )


def _done_but_unchanged(picture: Picture, moment: Moment) -> Cause | None:
    added = picture.ended.added if picture.ended is not None else {}
    claimed = as_list(as_object(added.get("reconciliation")).get("claimed_only"))
    if _empty_patch(picture) is None or not claimed:
        return None
    return _cause("done_but_unchanged", picture, [Evidence(f"claimed: {', '.join(map(str, claimed[:5]))}")])


_TESTS: Final = re.compile(r"\b(test|tests|pytest|unittest|tox|nox|check|ctest|vitest|jest|mocha|rspec|phpunit)\b")
"""Commands whose failure is news; a search that finds nothing fails, too."""


def _done_but_red(picture: Picture, moment: Moment) -> Cause | None:
    last = picture.last_command
    if last is None or not last.exit_code or _TESTS.search(last.command) is None:
        return None
    rows = [Evidence(f"{last.command}: exit code {last.exit_code}", last.number)]
    return _cause("done_but_red", picture, rows, command=last.command)


WAITS: Final[tuple[Finder, ...]] = (_stopped, _hook_hangs, _question_waits, _login_wanted, _quota_used_up, _is_retried)
"""What a live run waits for."""
HABITS: Final[tuple[Finder, ...]] = (_repeats, _compaction_loop, _talks_only, _cache_lost)
"""How it goes on, whatever it waits for."""
DOING: Final[tuple[Finder, ...]] = (
    *(_starts, _agent_reads_stdin, _nobody_reads, _tool_wants_input, _server_in_foreground),
    *(_sub_agent_spends, _tool_works, _server_hangs, _model_silent),
)
"""What it does, or why it does nothing."""
CUT_OFF: Final[tuple[Finder, ...]] = (_disk_is_full, _cut_off)
FIRST: Final[tuple[Finder, ...]] = (_altered, _by_policy)
"""Of a run that has ended, however it did."""
OVER: Final[tuple[Finder, ...]] = (
    *(_ended_without_room, _rule_blocks, _ended_badly, _repeats, _compaction_loop),
    *(_talks_only, _cache_lost, _breaker_open),
)
DONE: Final[tuple[Finder, ...]] = (
    *(_done_but_failed_on, _done_but_denied, _done_but_ignored, _done_but_unchanged, _done_but_red, _done_but_false),
)
"""Of a run that says that it is done."""


def _fine(picture: Picture, moment: Moment) -> Cause:
    end = picture.ended
    if end is not None:
        lasted = f" after {lasting(end.duration_ms)}" if end.duration_ms is not None else ""
        absent = [Evidence(server.message, server.number) for server in picture.absent]
        return Cause(kind="nothing", verdict=f"nothing is wrong: it is {end.outcome}{lasted}", evidence=absent)
    doing = "the agent writes" if picture.streamed else "the model thinks" if picture.is_sent else "it starts"
    return Cause(kind="nothing", verdict=f"nothing is wrong: {doing}", since=picture.last_ts or picture.started_at)
