"""Say what a run waits for, or why it ended as it did: the first cause that holds, its evidence, the next step. Pure.

`why_kinds` has the words of each kind, `why_live` and `why_ended` find the kinds that hold, in the order of how much
they tell. A diagnosis that is only likely says so.
"""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.errors import CODES, STEPS
from backplane.view.figures import lasting, milliseconds
from backplane.view.picture import Evidence, Picture
from backplane.view.text import one_line
from backplane.view.why_ended import cut_off, ended
from backplane.view.why_kinds import HEALTHY, KINDS, LIKELY, Cause, Kind, Moment
from backplane.view.why_live import live

ALSO_MAX: Final = 3
"""Further kinds named beside the first: more than that is no diagnosis."""

EVIDENCE_MAX: Final = 6
"""Lines of evidence: verdict, evidence and next steps fit a screen of 24 rows."""

LINE_CHARS_MAX: Final = 200
"""Characters of a verdict, a step or a line of evidence; the rest is cut."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The cause that a run waits for, or ended with, and what to do."""

    run_id: str
    kind: Kind
    """One word for programs, as `approval_waits`, or the code of an error; `nothing` if nothing is wrong."""
    sure: bool
    """False if it is only likely."""
    verdict: str
    since_ms: int | None
    """Milliseconds since it began; None for a run that has ended."""
    evidence: tuple[Evidence, ...]
    next: tuple[str, ...]
    """Next steps, the likeliest first."""
    also: tuple[str, ...] = ()
    """Further kinds that hold."""


_FINDERS: Final = {"live": live, "cut_off": cut_off, "ended": ended}


def diagnose(picture: Picture, moment: Moment) -> Diagnosis:
    """Return what a run waits for, or why it ended as it did."""
    first, *others = [*_FINDERS[moment.state](picture, moment)] or [_fine(picture)]
    began_ms = milliseconds(first.since) if moment.state == "live" and first.since else None
    named = {"run": picture.run_id[:8], "backend": picture.backend, "kind": first.kind, **first.facts}
    verdict, *steps = (words.format_map(named) for words in KINDS.get(first.kind) or _words_of_code(first.kind))
    return Diagnosis(
        run_id=picture.run_id,
        kind=first.kind,
        sure=first.kind not in LIKELY,
        verdict=one_line(verdict, LINE_CHARS_MAX),
        since_ms=max(0, moment.now_ms - began_ms) if began_ms is not None else None,
        evidence=tuple(
            Evidence(one_line(one.text, LINE_CHARS_MAX), one.event) for one in first.evidence[:EVIDENCE_MAX]
        ),
        next=tuple(one_line(step, LINE_CHARS_MAX) for step in (first.hint, *steps) if step),
        also=tuple(cause.kind for cause in others if cause.kind not in HEALTHY)[:ALSO_MAX],
    )


def _words_of_code(code: str) -> tuple[str, str]:
    """Return the meaning and the next step of an error's code, which may be a code of the host's own."""
    if code not in CODES:
        return "the host ended the run with an error code of its own, {kind!r}", "backplane receipts show {run}"
    step = STEPS[code].replace("RUN", "{run}")
    if "backplane why" in step:  # That is this command.
        step = f"backplane explain {code}, and backplane receipts show {{run}}"
    return CODES[code].meaning.rstrip("."), step


def _fine(picture: Picture) -> Cause:
    end = picture.ended
    if end is not None:
        lasted = f" after {lasting(end.duration_ms)}" if end.duration_ms is not None else ""
        return Cause("nothing", picture.absent, {"what": f"the run is {end.outcome}{lasted}"})
    writes = picture.last == "AssistantDelta"
    doing = "the agent writes" if writes else "the model thinks" if picture.reached == "sent" else "the run starts"
    return Cause("nothing", facts={"what": doing}, since=picture.last_ts or picture.started_at)
