"""Supplies the desk with the lists of runs and exchanges, and with one of them as it grows: JSON with HTML."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.errors import ConfigError, StoreError
from backplane.gateway.journal import beginning, recorded
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered, mentions, remembered, state_of, unsettled
from backplane.receipts.recovery import is_live
from backplane.receipts.store import Store
from backplane.receipts.tail import LOOK_S, Tail
from backplane.runtime.results import kept
from backplane.view.exchanges import mentions_all
from backplane.view.load import moment_of, shown_of
from backplane.view.page import PARTS, Shown, draw_row, part, verdict
from backplane.view.picture import Picture
from backplane.view.rows import Story
from backplane.view.text import one_line
from backplane.view.why import diagnose
from backplane.web import draw

RUNS_MAX: Final = 200
"""Most runs in the list; the filter finds older runs."""
DIAGNOSIS_S: Final = 5.0
"""Seconds between two diagnoses of a live run, which read its processes."""
SETTLED_S: Final = 2.0
"""Seconds after which a run without a control plane counts as cut off; sealing takes less."""
PARTS_S: Final = 0.5
"""Seconds between two renderings of a live run's parts; rows and questions are sent at once."""
NAMES: Final = {"names": ["head", "asks", "acts", *list(PARTS)[1:]]}
"""The places of a run's page, in the first line about it."""


def runs(home: Path, words: str, state: str) -> dict[str, Any]:
    """Return the newest runs that have all these words: waiting runs first, then other live runs.

    Args:
        state: `live` or `failed`; any other means all.
    """
    found, waiting, live = list[Remembered](), 0, 0
    with Store.open(home, readonly=True) as store:
        for run in remembered(store):  # The live ones come first.
            live, waiting = live + (run.state == "live"), waiting + run.waits
            if (state == "failed" and not run.has_failed) or (state == "live" and run.state != "live"):
                continue
            if mentions(store, run, words.split()):
                found.append(run)
            if len(found) == RUNS_MAX:
                break
    found.sort(key=lambda run: (not run.waits, run.state != "live"))
    html = "".join(draw.item(run, time.time_ns() // 1_000_000) for run in found)
    return {"html": html or draw.NO_RUNS[bool(words or state)], "waiting": waiting, "live": live}


def exchanges(home: Path, words: str, state: str) -> dict[str, Any]:
    """Return the newest exchanges of the gateway that have all these words, open ones first.

    Args:
        state: `live` or `failed`; any other means all.
    """
    now_ms, found, live = time.time_ns() // 1_000_000, list[RecordedExchange](), 0
    for one in recorded(home):  # The live ones come first.
        live += one.state == "live"
        if (state == "failed" and not one.has_failed) or (state == "live" and one.state != "live"):
            continue
        if mentions_all(one, words.split()):
            found.append(one)
        if len(found) == RUNS_MAX:
            break
    with Store.open(home, readonly=True) as store:
        waiting = sum(run.waits for run in unsettled(store))
    html = "".join(draw.exchange_item(one, now_ms) for one in found)
    return {"html": html or draw.NO_EXCHANGES[bool(words or state)], "waiting": waiting, "live": live}


def exchange(home: Path, id: str) -> dict[str, Any]:
    """Return one exchange of the gateway as it is now. Raises ConfigError `config_invalid`: there is none."""
    found = beginning(home, id)
    if not found:
        raise ConfigError("config_invalid", f"no exchange {id} is recorded", hint="backplane runs --gateway")
    html = draw.exchange(found[0], time.time_ns() // 1_000_000)
    return {"html": html, "title": f"{found[0].client}: {found[0].asked}", "over": found[0].state == "ended"}


def follow(home: Path, run: Remembered, *, read_only: bool) -> Iterator[bytes]:
    """Yield one run to its end: each line of JSON has what changed, and the last line has `over`. Blocks meanwhile."""
    story, sent = Story(), _Sent(read_only)
    if run.state == "live":
        yield from _live(home, run, story, sent)
    try:
        with Store.open(home, readonly=True) as store:
            run = msgspec.structs.replace(run, state=state_of(store, run.run_id))
            shown = shown_of(store, run, rows=None if story.rows else story)
            checkpoints = kept(store.load(run.run_id)) if run.state == "ended" else ()
    except StoreError as error:  # Its content was pruned, or its receipt was altered.
        yield msgspec.json.encode({**NAMES, "part head": draw.failure(error), "over": True}) + b"\n"
    else:
        names = tuple(one.name for one in checkpoints)
        yield sent.line(msgspec.structs.replace(shown, rows=story), names, over=True)


def _live(home: Path, run: Remembered, story: Story, sent: _Sent) -> Iterator[bytes]:
    """Yield a live run until all of its events are read."""
    picture, diagnosis, asks = Picture(run_id=run.run_id), None, list[str]()
    drawn_s, diagnosed_s, lived_s = 0.0, time.monotonic(), time.monotonic()
    with closing(Tail(home / "runs" / run.run_id)) as tail:
        while True:
            now_s, lives = time.monotonic(), is_live(home, run.run_id)
            lived_s = now_s if lives else lived_s
            is_new = _read(tail, picture, story)
            # A run that is just being sealed looks cut off for a moment.
            if not (lives or is_new) and (_has_ended(home, run) or now_s - lived_s >= SETTLED_S):
                return
            if now_s - diagnosed_s >= DIAGNOSIS_S:
                with Store.open(home, readonly=True) as store:
                    diagnosis, diagnosed_s = diagnose(picture, moment_of(store, picture, run)), now_s
            if now_s - drawn_s >= PARTS_S or asks != list(picture.open_asks):
                drawn_s, asks = now_s, list(picture.open_asks)
                now_ms, why = time.time_ns() // 1_000_000, None if asks else diagnosis
                yield sent.line(Shown(picture=picture, state="live", diagnosis=why, rows=story, now_ms=now_ms))
            elif story.touched:
                yield msgspec.json.encode({"rows": _rows(story)}) + b"\n"
            if not is_new:
                time.sleep(LOOK_S)


class _Sent:
    """The parts of a run's page as they were sent last."""

    def __init__(self, read_only: bool) -> None:
        self._read_only = read_only
        self._parts: dict[str, object] = {}

    def line(self, shown: Shown, checkpoints: tuple[str, ...] = (), **more: object) -> bytes:
        """Return the parts that have changed, and the rows."""
        asks = list(shown.picture.open_asks.values()) if shown.state == "live" else []
        made: dict[str, object] = {
            "title": one_line(shown.picture.task, 80),
            "says": f"asks: {one_line(asks[0].message)}" if asks else verdict(shown)[0],
            "asks": [(ask.number, draw.question(ask, self._read_only)) for ask in asks],
            "part acts": draw.acts(shown, checkpoints, read_only=self._read_only),
            **{f"part {name}": part(name, shown) for name in PARTS if name != "story"},
        }
        changed = {name: value for name, value in made.items() if self._parts.get(name) != value}
        changed |= more if self._parts else {**NAMES, **more}
        self._parts = made
        return msgspec.json.encode({**changed, "rows": _rows(shown.rows)}) + b"\n"


def _has_ended(home: Path, run: Remembered) -> bool:
    with Store.open(home, readonly=True) as store:
        return store.has(run.run_id)


def _read(tail: Tail, picture: Picture, rows: Story) -> bool:
    """Add the facts and events since the last call; return True if there were events."""
    for fact in tail.facts():
        picture.begin(fact)
    events = tail.events()
    for event in events:
        picture.take(event)
        rows.take(event)
    return bool(events)


def _rows(story: Story) -> list[tuple[int, str]]:
    """Return the rows that are new or changed since the last call."""
    touched = sorted(story.touched)
    story.touched.clear()
    return [(number, draw_row(story.rows[number])) for number in touched]
