"""`watch` and `top`: live runs seen from any terminal. Both read journals; an answer goes to the run's door."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane.cli import FAILED, code_of, show, streams
from backplane.cli.foot import Foot
from backplane.cli.painter import Painter
from backplane.cli.parser import Options
from backplane.cli.runs import ID_CHARS
from backplane.cli.show import Look
from backplane.cli.start import open_store
from backplane.contract.events import carried
from backplane.errors import BackplaneError
from backplane.receipts.journal import PATCH
from backplane.receipts.memory import Remembered, find, follow_step, state_of, unsettled
from backplane.receipts.tail import LOOK_S, Tail
from backplane.view.columns import Line, Span, fitted_line, padded
from backplane.view.figures import count, lasting, milliseconds, money
from backplane.view.picture import Picture, ShownQuestion
from backplane.view.text import in_workspace

if TYPE_CHECKING:
    from backplane.receipts.store import Store

TOP_S: Final = 1.0

DOING_CHARS_MAX: Final = 200


# One run --------------------------------------------------------------------------------------------------------------


def watch(options: Options) -> int:
    with open_store() as store:
        run = find(store, options.run)
        return _Watch(store, run, plain=options.plain).follow()


class _Watch:
    """One run, followed to its end."""

    def __init__(self, store: Store, run: Remembered, *, plain: bool) -> None:
        self._store, self._run = store, run
        self._look = Look.here(plain=plain, sessions=True)
        self._picture = Picture(run_id=run.run_id)
        self._foot = self._made_foot() if self._look.terminal else None
        self._asked: str | None = None
        """The question that stands on this terminal."""

    def follow(self) -> int:
        """Show all of it; gives the exit code of the run."""
        folder: Path = self._store.folder(self._run.run_id)
        state: str = self._run.state
        with closing(Tail(folder)) as tail, self._continued():
            self._say_what_it_is(tail)
            while True:
                # First how it stands, then what it has said: what it said last is shown before its end.
                state = state_of(self._store, self._run.run_id) if state == "live" else state
                seen = self._show(tail)
                if state != "live" and not seen:
                    return self._end(state)
                if not seen:
                    self._ask()
                if self._foot is not None and self._asked is None and self._foot.is_due:
                    streams.write(self._foot.frame())
                if not seen:
                    time.sleep(LOOK_S) if self._asked is None else self._heed_keys()

    def _made_foot(self) -> Foot:
        return Foot(self._look, self._picture)

    @contextmanager
    def _continued(self) -> Iterator[None]:
        """Paint anew after a stop: the shell has written meanwhile."""
        foot = self._foot
        if foot is None:
            yield
            return
        before = signal.signal(signal.SIGCONT, lambda *_: foot.continued())
        try:
            yield
        finally:
            signal.signal(signal.SIGCONT, before)
            self._clear()

    def _write(self, text: str) -> None:
        """Write text of whole lines, above what is painted."""
        if self._foot is None:
            streams.write(text)
        else:
            self._foot.add(text, ())

    def _clear(self) -> None:
        """Leave the text alone on the terminal, nothing painted."""
        if self._foot is not None:
            streams.write(self._foot.clear())

    def _say_what_it_is(self, tail: Tail) -> None:
        for fact in tail.facts():
            self._picture.begin(fact)
        task = streams.one_line(self._run.task, DOING_CHARS_MAX) if self._run.task is not None else ""
        head = f"{self._run.run_id[:ID_CHARS]}  {streams.one_line(self._run.backend)}  {task}"
        self._write(self._look.dress("dim", head) + "\n")

    def _show(self, tail: Tail) -> bool:
        events = tail.events()
        text = ""
        for event in events:
            self._picture.take(event)
            text += self._look.event(carried(event))
        if text and self._asked is not None:
            text, self._asked = f"\n{text}", None
        if text:
            self._write(text)
        return bool(events)

    def _ask(self) -> None:
        """Put the oldest open question, where somebody can answer it here."""
        from backplane.cli import asking

        waits = self._picture.waits
        if waits is None or self._asked == waits.id:
            return
        self._write(self._look.end_line() + asking.question(waits.message, waits.body))
        self._clear()
        if streams.is_terminal(streams.STDIN) and streams.is_terminal(streams.STDOUT):
            streams.write(asking.KEYS if waits.kind != "input" else "")
        else:
            streams.write(f"  backplane answer {self._run.run_id[:ID_CHARS]} {streams.one_line(waits.id)} allow\n")
        self._asked = waits.id

    def _heed_keys(self) -> None:
        """Take a typed line as the answer to the question that stands here, should one come."""
        import select
        import sys

        waits = self._picture.waits
        if not streams.is_terminal(streams.STDIN) or waits is None:
            time.sleep(LOOK_S)
        elif select.select([streams.STDIN], [], [], LOOK_S)[0]:
            line = sys.stdin.readline()
            if not line:
                raise KeyboardInterrupt
            self._answer(waits, line.strip())

    def _answer(self, waits: ShownQuestion, line: str) -> None:
        from backplane.cli import asking
        from backplane.runtime.door import AnswerCommand, knock

        in_words = waits.kind == "input"
        decision = asking.reply(line, waits.body) if in_words else asking.judge(line)
        if decision is None or decision.decision == "modify":
            streams.write(asking.offer(waits.body) if in_words else asking.HELP + asking.KEYS)
            return
        given = AnswerCommand(
            ask=waits.id,
            decision=decision.decision,
            reason=decision.reason,
            text=decision.text,
            remember=decision.remember,
        )
        try:
            knock(self._store.home, self._run.run_id, given)
        except BackplaneError as error:
            streams.error(error)

    def _end(self, state: str) -> int:
        self._write(self._look.end_line())
        self._clear()
        if state == "cut_off":
            gone, queued = "cut off: its control plane is gone; the next run seals it", self._run.queued
            streams.write(
                f"unfollowed here: {follow_step(queued)} [--engine URL]\n" if queued is not None else f"{gone}\n"
            )
            return FAILED
        receipt = self._store.load(self._run.run_id)
        patch = self._store.folder(self._run.run_id) / PATCH
        streams.write(show.summary(receipt, self._look, patch if patch.is_file() else None))
        for line in show.remarks_on(receipt):
            streams.note(line)
        return code_of(receipt)


# All of them ----------------------------------------------------------------------------------------------------------


def top(options: Options) -> int:
    look = Look.here(plain=options.plain)
    painter = Painter(look)
    with open_store() as store, ExitStack() as opened:
        board = _Board(store, opened)
        while True:
            lines = list(board.lines(look))
            if not look.terminal or options.once:
                streams.write("".join(f"{look.dress_line(line)}\n" for line in lines))
                return 0
            streams.write(painter.frame(lines, streams.columns()))
            time.sleep(TOP_S)


class _Board:
    """The pictures of all live runs, each read on from where it was."""

    def __init__(self, store: Store, opened: ExitStack) -> None:
        self._store, self._opened = store, opened
        self._seen: dict[str, tuple[Picture, Tail]] = {}

    def lines(self, look: Look) -> Iterator[Line]:
        """A line a live run, at most as many as the terminal has; one line where there is none."""
        live = [run for run in unsettled(self._store) if run.state == "live"]
        pictures = [self._picture(run) for run in live]
        for gone in self._seen.keys() - {run.run_id for run in live}:
            self._seen.pop(gone)[1].close()
        waiting = sum(picture.state == "waiting" for picture in pictures)
        yield (Span(f"{streams.count(len(live), 'live run')}, {waiting} waiting for you", "dim"),)
        order = sorted(pictures, key=lambda picture: (picture.state != "waiting", picture.started_at))
        room = max(streams.rows() - 2, 1) if look.terminal else len(order)
        for picture in order[:room]:
            yield _line(picture, look)
        if len(order) > room:
            yield (Span(f"and {len(order) - room} more"),)

    def _picture(self, run: Remembered) -> Picture:
        if run.run_id not in self._seen:
            tail = self._opened.enter_context(closing(Tail(self._store.folder(run.run_id))))
            self._seen[run.run_id] = Picture(run_id=run.run_id, started_at=run.started_at, backend=run.backend), tail
        picture, tail = self._seen[run.run_id]
        for fact in tail.facts():
            picture.begin(fact)
        for event in tail.events():
            picture.take(event)
        return picture


def _line(picture: Picture, look: Look) -> Line:
    started_ms = milliseconds(picture.started_at)
    lasted = lasting(time.time_ns() // 1_000_000 - started_ms) if started_ms is not None else "?"
    colour = {"waiting": "yellow", "working": "green"}.get(picture.state, "cyan")
    usage = picture.usage
    numbers = f"{count(usage.input_tokens):>6}/{count(usage.output_tokens):<6}  {money(picture.cost_usd_micros):>7}"
    line = (
        Span(padded(picture.run_id[:ID_CHARS], ID_CHARS) + "  "),
        Span(padded(picture.state, 8), colour),
        Span(f"  {padded(lasted, 10)}  {padded(streams.one_line(picture.backend), 9)}  {numbers}  "),
        Span(streams.one_line(_doing(picture), DOING_CHARS_MAX)),
    )
    return fitted_line(line, streams.columns() - 1) if look.terminal else line


def _doing(picture: Picture) -> str:
    """What a run does now, or what it was asked."""
    waits = picture.waits
    if waits is not None:
        return f"asks: {waits.tool} {in_workspace(waits.about)}"
    call = max(picture.open_calls.values(), key=lambda call: call.number, default=None)
    return f"{call.tool} {in_workspace(call.about)}" if call is not None else picture.task
