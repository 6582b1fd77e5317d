"""What the page shows, as JSON: runs of the store, and one run as it goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.receipts.memory import Remembered, mentions, remembered, state_of
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.shown import diagnosis_of
from backplane.view.asked import decided
from backplane.view.figures import ago, count, elapsed, lasting, milliseconds, money, standing
from backplane.view.live import MARKS
from backplane.view.picture import Picture, ShownQuestion
from backplane.view.story import Story
from backplane.view.text import in_workspace, one_line, printable
from backplane.view.why import HEALTHY

RUNS_MAX: Final = 200
"""Of a list: who looks for another one searches."""

"""Of a run on the page; what comes then is in its report."""

TEXT_CHARS_MAX: Final = 4000
_TONES: Final = {"live": "dim"}
"""The page's words for tones, where they are others."""


def rows(store: Store, *, text: str, failed: bool, live: bool) -> list[dict[str, Any]]:
    """The newest runs, the live ones first."""
    found = []
    for run in remembered(store):
        if (failed and not run.has_failed) or (live and run.state != "live"):
            continue
        if mentions(store, run, text.split()):
            found.append(_row(run))
        if len(found) == RUNS_MAX:
            break
    return found


def _row(run: Remembered) -> dict[str, Any]:
    began = milliseconds(run.started_at)
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    return {
        "run_id": run.run_id,
        "when": ago(_now_ms() - began) if began is not None else "?",
        "standing": word,
        "tone": _TONES.get(tone, tone),
        "backend": one_line(run.backend),
        "cost": money(run.cost_usd_micros),
        "task": one_line(run.task, 200) if run.task is not None else None,
        "cause": one_line(run.cause, 200) if run.cause is not None else None,
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def hash_of(ask: ShownQuestion) -> str:
    """What names a question with all that was shown of it: an answer to another one is refused."""
    return hashlib.sha256(canonical.encode([ask.id, ask.message, ask.body])).hexdigest()


class Follower:
    """One run from its beginning to its end, a line of JSON at each look that has something new."""

    def __init__(self, store: Store, run: Remembered) -> None:
        self._store, self._run = store, run
        self._tail = Tail(store.folder(run.run_id))
        self.picture, self._story = Picture(run_id=run.run_id), Story()
        self._told: dict[str, Any] | None = None
        self.is_over = False

    def close(self) -> None:
        self._tail.close()

    def look(self) -> list[bytes]:
        """What is new since the last look, as lines; at the end the last one says `over`."""
        first, state = self._told is None, self._run.state
        if state == "live":
            state = state_of(self._store, self._run.run_id)
        for fact in self._tail.facts():
            self.picture.begin(fact)
        events = self._tail.events()
        for event in events:
            self.picture.take(event)
            self._story.take(event)
        self.is_over = state != "live" and not events
        if self.is_over and state == "ended":
            self.picture.end(self._store.load(self._run.run_id))
        now = self._state(state)
        line: dict[str, Any] = {"over": True} if self.is_over else {}
        if first:
            line["fresh"] = True
        if events and (changed := list(self._changed())):
            line["rows"] = changed
        if now != self._told:
            line["state"] = self._told = now
        return [msgspec.json.encode(line) + b"\n"] if line else []

    def _changed(self) -> Iterator[tuple[int, str, str]]:
        """Rows that are new, or to which a result has come."""
        for number in sorted(self._story.touched):
            row = self._story.rows[number]
            yield number, row.kind, row.drawn()
        self._story.touched.clear()

    def _state(self, state: str) -> dict[str, Any]:
        picture = self.picture
        ended = picture.ended
        if state == "cut_off" or ended is not None:
            word, tone = standing(state, ended.outcome if ended else None, ended.reason if ended else None)
        else:  # Live, or its last events are still being read.
            word, tone = picture.state, "warn" if picture.state == "waiting" else "dim"
        calls = picture.open_calls.values() if ended is None else ()
        run = msgspec.structs.replace(self._run, state=state)
        found = diagnosis_of(self._store, picture, run) if state != "live" else None
        return {
            "task": printable(picture.task[:TEXT_CHARS_MAX]),
            "standing": word,
            "tone": tone,
            "ended": state == "cut_off" or ended is not None,
            "facts": "  ·  ".join(self._facts()),
            "doing": [one_line(f"{call.tool} {in_workspace(call.about)}", 200) for call in calls][-5:],
            "plan": [f"{MARKS[step.state][0]} {one_line(step.text, 200)}" for step in picture.plan],
            "asks": [_ask(ask) for ask in picture.open_asks.values()] if state == "live" else [],
            "message": printable(picture.message[-TEXT_CHARS_MAX:]),
            "beyond": self._story.beyond,
            "verdict": one_line(found.verdict) if found is not None and found.kind not in HEALTHY else None,
        }

    def _facts(self) -> Iterator[str]:
        picture = self.picture
        yield one_line(picture.backend + (f", {picture.model}" if picture.model else ""))
        began = milliseconds(picture.started_at)
        if picture.ended is not None:
            yield lasting(picture.ended.duration_ms) if picture.ended.duration_ms is not None else "took ?"
        elif began is not None:
            yield elapsed((_now_ms() - began) // 1000)
        yield f"{count(picture.usage.input_tokens)} tokens in, {count(picture.usage.output_tokens)} out"
        yield money(picture.cost_usd_micros)
        yield f"run {picture.run_id}"


def _ask(ask: ShownQuestion) -> dict[str, Any]:
    question = [printable(str(ask.body["question"]))] if ask.body.get("question") else []
    return {
        "id": ask.id,
        "kind": ask.kind,
        "message": one_line(ask.message),
        "body": "\n".join([*question, *decided(ask.body)]),
        "shown": hash_of(ask),
    }
