"""`watch`: follows a run from any terminal by its journal, and puts answers to its door."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane.cli import FAILED, code_of, streams
from backplane.cli import console as show
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.console import Look
from backplane.cli.foot import Foot
from backplane.cli.runs import ID_CHARS
from backplane.contract.events import carried
from backplane.errors import BackplaneError
from backplane.receipts.journal import PATCH
from backplane.receipts.memory import Remembered, find, follow_step, state_of
from backplane.receipts.tail import LOOK_S, Tail
from backplane.view.picture import Picture, ShownQuestion

if TYPE_CHECKING:
    from backplane.receipts.store import Store

DOING_CHARS_MAX: Final = 200


HELP = "Follow a run as its own terminal shows it, and answer its questions. Ctrl-C leaves; the run goes on."
EXAMPLE = "backplane watch\nbackplane watch 3f2a1b0c"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)


def run(args: Args) -> int:
    with open_store() as store:
        run = find(store, args.run)
        return _Watch(store, run, plain=False).follow()


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
