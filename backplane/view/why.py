"""Say what a run waits for, or why it ended as it did: the first cause that holds, its evidence, the next step. Pure.

`why_kinds` has the words of each kind, `why_live` and `why_ended` find the kinds that hold, in the order of how much
they tell. A diagnosis that is only likely says so.
"""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.view.figures import lasting, milliseconds
from backplane.view.picture import Picture
from backplane.view.text import one_line
from backplane.view.why_ended import cut_off, ended
from backplane.view.why_kinds import HEALTHY, Cause, Evidence, Kind, Moment
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
    """One word for programs, as `approval_waits`; `nothing` if nothing is wrong."""
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
    return Diagnosis(
        run_id=picture.run_id,
        kind=first.kind,
        sure=first.sure,
        verdict=one_line(first.verdict, LINE_CHARS_MAX),
        since_ms=max(0, moment.now_ms - began_ms) if began_ms is not None else None,
        evidence=tuple(
            Evidence(one_line(one.text, LINE_CHARS_MAX), one.event) for one in first.evidence[:EVIDENCE_MAX]
        ),
        next=tuple(one_line(step, LINE_CHARS_MAX) for step in first.next),
        also=tuple(cause.kind for cause in others if cause.kind not in HEALTHY)[:ALSO_MAX],
    )


def _fine(picture: Picture) -> Cause:
    end = picture.ended
    if end is not None:
        lasted = f" after {lasting(end.duration_ms)}" if end.duration_ms is not None else ""
        absent = [Evidence(server.message, server.number) for server in picture.absent]
        return Cause(kind="nothing", verdict=f"nothing is wrong: it is {end.outcome}{lasted}", evidence=absent)
    doing = "the agent writes" if picture.streamed else "the model thinks" if picture.is_sent else "it starts"
    return Cause(kind="nothing", verdict=f"nothing is wrong: {doing}", since=picture.last_ts or picture.started_at)
