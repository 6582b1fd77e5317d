"""Supplies the desk with the list of runs, and with one run as it grows: JSON with rendered HTML."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.receipts.memory import Remembered, mentions, remembered, state_of
from backplane.receipts.recovery import is_live
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.runtime.results import kept
from backplane.view.load import comparison_of, moment_of, patch_of
from backplane.view.page import PARTS, Shown, draw_row, part, verdict
from backplane.view.picture import Picture, ShownQuestion
from backplane.view.rows import Story
from backplane.view.text import one_line
from backplane.view.why import Diagnosis, diagnose
from backplane.web import draw

RUNS_MAX: Final = 200
"""Most runs in the list; the filter finds older runs."""
DIAGNOSIS_S: Final = 5.0
"""Seconds between two diagnoses of a live run, which read its processes."""
SETTLED_S: Final = 2.0
"""Seconds after which a run without a control plane counts as cut off; sealing takes less."""
PARTS_S: Final = 0.5
"""Seconds between two renderings of a live run's parts; rows and questions are sent at once."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def hash_of(ask: ShownQuestion) -> str:
    """Return the hash of a question as it is shown; an answer with another hash is refused."""
    return hashlib.sha256(canonical.encode([ask.id, ask.message, ask.body])).hexdigest()


class RunList:
    """The list of runs; each `look` reads only the new lines of the live runs' journals."""

    def __init__(self, home: Path) -> None:
        self._home, self._lock = home, threading.Lock()
        self._live: dict[str, tuple[Tail, Picture]] = {}

    def look(self, words: str, sort: str, state: str) -> dict[str, Any]:
        """Return the newest runs that have all these words: waiting runs first, then other live runs.

        Args:
            sort: a name in `draw.SORTS`; any other sorts by age.
            state: `live` or `failed`; any other means all.
        """
        found: list[Remembered] = []
        live: list[Remembered] = []
        with self._lock, Store.open(self._home, readonly=True) as store:
            for run in remembered(store):  # The live ones come first.
                live += [run] if run.state == "live" else []
                if (state == "failed" and not run.has_failed) or (state == "live" and run.state != "live"):
                    continue
                if mentions(store, run, words.split()):
                    found.append(run)
                if len(found) == RUNS_MAX:
                    break
            if sort in draw.SORTS:
                found.sort(key=draw.SORTS[sort], reverse=True)
            found.sort(key=lambda run: (not run.waits, run.state != "live"))
            self._follow(store, [run.run_id for run in live])
            pictures = {run_id: picture for run_id, (_, picture) in self._live.items()}
            html = "".join(draw.item(run, pictures.get(run.run_id), _now_ms()) for run in found)
        waiting = sum(run.waits for run in live)
        return {"html": html or draw.NO_RUNS[bool(words or state)], "waiting": waiting, "live": len(live)}

    def _follow(self, store: Store, live: list[str]) -> None:
        for gone in self._live.keys() - set(live):
            self._live.pop(gone)[0].close()
        for run_id in live:
            _read(*self._live.setdefault(run_id, (Tail(store.folder(run_id)), Picture(run_id=run_id))))


def _read(tail: Tail, picture: Picture, rows: Story | None = None) -> bool:
    """Add the facts and events since the last call; return True if there were events."""
    for fact in tail.facts():
        picture.begin(fact)
    events = tail.events()
    for event in events:
        picture.take(event)
        if rows is not None:
            rows.take(event)
    return bool(events)


class Follower:
    """Follows one run from its beginning to its end; each `look` returns at most one line of JSON."""

    def __init__(self, home: Path, run: Remembered, *, read_only: bool) -> None:
        self._home, self._run, self._read_only = home, run, read_only
        self._tail = Tail(home / "runs" / run.run_id)
        self._picture, self._story = Picture(run_id=run.run_id), Story()
        self._sent: dict[str, object] = {}
        self._asks: list[str] = []
        self._diagnosis: Diagnosis | None = None
        self._drawn_s = 0.0
        self._diagnosed_s = self._live_s = time.monotonic()
        """Time at which the run was last seen alive."""
        self.is_live, self.is_over = True, False

    def close(self) -> None:
        """Close the journal."""
        self._tail.close()

    def look(self) -> list[bytes]:
        """Return the changes since the last call as a line of JSON; the last line has `over`."""
        is_read, now_s = not _read(self._tail, self._picture, self._story), time.monotonic()
        self.is_live = is_live(self._home, self._run.run_id)
        self._live_s = now_s if self.is_live else self._live_s
        line: dict[str, Any] = {} if self._sent else {"names": ["head", "asks", "acts", *list(PARTS)[1:]]}
        asks = list(self._picture.open_asks)
        if now_s - self._drawn_s >= PARTS_S or asks != self._asks or (is_read and not self.is_live):
            self._drawn_s, self._asks = now_s, asks
            with Store.open(self._home, readonly=True) as store:
                made = self._parts(store, is_read=is_read)
            line |= {name: value for name, value in made.items() if self._sent.get(name) != value}
            self._sent = made
        if touched := sorted(self._story.touched):
            line["rows"] = [(number, draw_row(self._story.rows[number])) for number in touched]
            self._story.touched.clear()
        if self.is_over:
            line["over"] = True
        return [msgspec.json.encode(line) + b"\n"] if line else []

    def _parts(self, store: Store, *, is_read: bool) -> dict[str, object]:
        """Draw everything except the rows; set `is_over` once the run has ended and all its events are read."""
        run, picture, receipt = self._run, self._picture, None
        state = state_of(store, run.run_id)
        # A run that is just being sealed looks cut off for a moment.
        is_settled = state == "ended" or time.monotonic() - self._live_s >= SETTLED_S
        self.is_over = state != "live" and is_read and is_settled
        if self.is_over and state == "ended":
            receipt = store.load(run.run_id)
            picture.end(receipt)
        if self.is_over or time.monotonic() - self._diagnosed_s >= DIAGNOSIS_S:
            now = msgspec.structs.replace(run, state=state if self.is_over else "live")
            self._diagnosis = diagnose(picture, moment_of(store, picture, now))
            self._diagnosed_s = time.monotonic()
        asks = [] if self.is_over else list(picture.open_asks.values())
        shown = Shown(
            picture=picture,
            state=state if self.is_over else "live",
            diagnosis=None if asks else self._diagnosis,
            rows=self._story,
            patch=patch_of(store, run.run_id) if self.is_over else None,
            compared=comparison_of(store, picture) if self.is_over else None,
            now_ms=_now_ms(),
        )
        checkpoints = [one.name for one in kept(receipt)] if receipt is not None else []
        is_bad = receipt is not None and receipt.findings.violations > 0
        return {
            "title": one_line(picture.task, 80),
            "says": f"asks: {one_line(asks[0].message)}" if asks else verdict(shown)[0],
            "asks": [(ask.id, draw.question(ask, hash_of(ask), self._read_only)) for ask in asks],
            "part acts": draw.acts(shown, checkpoints, has_violations=is_bad, read_only=self._read_only),
            **{f"part {name}": part(name, shown) for name in PARTS if name != "story"},
        }
