"""Find what a live run waits for, from its picture and one look at its processes. Pure.

A run that waits is not silent for another reason too, so the first wait hides what the run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backplane.view.asked import decided
from backplane.view.figures import counted, lasting, milliseconds
from backplane.view.picture import Evidence, Picture
from backplane.view.text import in_workspace
from backplane.view.why_kinds import Cause, Moment, newest_call, quota, repeated

QUIET_MS: Final = 30_000
"""Milliseconds without an event after which a model or tool counts as silent; models think for less."""

STAGING_MS: Final = 5_000
"""Milliseconds after which a start counts as slow."""

SLACK_MS: Final = 1_500
"""Error of a process's start time, which the system dates from a boot time in whole seconds."""

ASKED_LINES_MAX: Final = 3
"""Lines of a question's subject; `watch` and the desk show the rest."""

_LIMITS: Final = {"429": "asks to slow down", "529": "is overloaded", "503": "is overloaded"}


def live(picture: Picture, moment: Moment) -> Iterator[Cause]:
    """Yield what holds, the most telling first: a wait, a loop, then what the run does."""
    waits = _question(picture, moment) or _retried(picture)
    loops = repeated(picture)
    does = None if waits is not None else _starts(picture, moment) or _tool(picture, moment) or _silent(picture, moment)
    yield from (found for found in (waits, loops, does) if found is not None)


def _age_ms(picture: Picture, moment: Moment) -> int:
    last = milliseconds(picture.last_ts or picture.started_at)
    return max(0, moment.now_ms - last) if last is not None else 0


def _question(picture: Picture, moment: Moment) -> Cause | None:
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
        left, default = lasting(asked_ms + limit_ms - moment.now_ms), ask.body.get("default", "deny")
        rows.append(Evidence(f"without an answer, {default!r} is used in {left}"))
    kind = "question_waits" if ask.kind == "input" else "approval_waits"
    return Cause(kind, rows, {"tool": ask.tool, "ask": ask.id}, ask.ts)


def _retried(picture: Picture) -> Cause | None:
    retry, after_ms = picture.retry, picture.folded.retry_after_ms
    if retry is None:
        return None
    if picture.until:
        return Cause("limit_waits", [retry], {"until": picture.until}, picture.last_ts)
    if (used_up := quota(picture, retry.text, [retry], picture.last_ts)) is not None:
        return used_up
    pause = [Evidence(f"the service asks for a pause of {lasting(after_ms)}")] if after_ms is not None else []
    rows = [retry, *pause, Evidence(f"{counted(picture.retries, 'repeated request')} in this run")]
    what, code = _LIMITS.get(picture.retry_code, "failed"), f" ({picture.retry_code})" if picture.retry_code else ""
    return Cause("overloaded", rows, {"what": what, "code": code}, picture.last_ts)


def _starts(picture: Picture, moment: Moment) -> Cause | None:
    if picture.reached == "sent" or _age_ms(picture, moment) < STAGING_MS:
        return None
    if picture.reached == "held":
        return Cause("no_hello", since=picture.started_at)
    return Cause("staging", [Evidence(f"workspace: {picture.root}")], since=picture.started_at)


def _tool(picture: Picture, moment: Moment) -> Cause | None:
    """Return whether the newest open call works or is quiet."""
    call = newest_call(picture)
    if call is None:
        return None
    rows, age_ms = [Evidence(f"{call.tool}: {call.about}", call.number)], _age_ms(picture, moment)
    began_ms = milliseconds(call.ts)
    own = [one for one in moment.processes if began_ms is not None and one.started_ms >= began_ms - SLACK_MS]
    if picture.output.strip():
        rows.append(Evidence(f"last line of its output: {picture.output.strip().splitlines()[-1]}"))
    busy = [one for one in own if one.is_busy]
    rows += [Evidence(f"process {one.pid} is busy: {one.command}") for one in busy[:2]]
    kind = "tool_quiet" if age_ms >= QUIET_MS and not busy else "tool_works"
    return Cause(kind, rows, {"tool": call.tool, "age": lasting(age_ms)}, call.ts)


def _silent(picture: Picture, moment: Moment) -> Cause | None:
    age_ms = _age_ms(picture, moment)
    if picture.reached != "sent" or age_ms < QUIET_MS:
        return None
    rows = [Evidence(f"the last event was {picture.last or 'none'}", picture.events or None)]
    return Cause("model_silent", rows, {"age": lasting(age_ms)}, picture.last_ts or picture.started_at)
