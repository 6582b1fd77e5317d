"""`watch`: follow a run from any terminal by its journal, and answer its questions at its door."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from backplane.cli import FAILED, asking, code_of, ended, streams
from backplane.cli import options as add
from backplane.cli import terminal as stdout
from backplane.cli.command import Args, Parser, open_store
from backplane.contract.events import carried
from backplane.errors import BackplaneError
from backplane.receipts.build import failure_of
from backplane.receipts.journal import PATCH
from backplane.receipts.memory import Remembered, find, follow_step, state_of
from backplane.receipts.tail import LOOK_S, Tail
from backplane.runtime.door import AnswerCommand, knock
from backplane.view.figures import ID_CHARS
from backplane.view.findings import remarks
from backplane.view.picture import Picture, ShownQuestion

if TYPE_CHECKING:
    from backplane.receipts.store import Store

HELP = "Follow a run as its own terminal shows it, and answer its questions. Ctrl-C leaves; the run goes on."
EXAMPLE = "backplane watch\nbackplane watch 3f2a1b0c"

TASK_CHARS_MAX: Final = 200


def options(p: Parser) -> None:
    add.run_id(p, optional=True)


def run(args: Args) -> int:
    with open_store() as store:
        watch = _Watch(store, find(store, args.run))
        before = signal.signal(signal.SIGCONT, lambda *_: watch.terminal.continued())
        try:
            return watch.follow()
        finally:
            signal.signal(signal.SIGCONT, before)
            streams.write(watch.terminal.clear())


class _Watch:
    """One run, followed to its end."""

    def __init__(self, store: Store, run: Remembered) -> None:
        self._store, self._run = store, run
        self._picture = Picture(run_id=run.run_id)
        look = stdout.look(sessions=True)
        self.terminal = stdout.Terminal(look, self._picture if look.terminal else None)
        self._asked: str | None = None
        """Id of the question that stands on this terminal."""
        self._answered: str | None = None
        """Id of the last question that was answered; the journal shows it as open a moment longer."""
        self._can_answer = streams.is_terminal(streams.STDIN) and streams.is_terminal(streams.STDOUT)

    def follow(self) -> int:
        """Show the run from its beginning to its end, and return its exit code."""
        state: str = self._run.state
        with closing(Tail(self._store.folder(self._run.run_id))) as tail:
            for fact in tail.facts():
                self._picture.begin(fact)
            task = streams.one_line(self._run.task or "", TASK_CHARS_MAX)
            head = f"{self._run.run_id[:ID_CHARS]}  {streams.one_line(self._run.backend)}  {task}"
            self.terminal.add(self.terminal.look.dress("dim", head) + "\n")
            while True:
                # The state first: what the run wrote before its end is shown before its end.
                state = state_of(self._store, self._run.run_id) if state == "live" else state
                seen = self._show_events(tail)
                if state != "live" and not seen:
                    return self._show_end(state)
                if not seen:
                    self._ask()
                if self._asked is None and self.terminal.is_due:
                    streams.write(self.terminal.frame())
                if not seen:
                    self._wait()

    def _show_events(self, tail: Tail) -> bool:
        events, text = tail.events(), ""
        for event in events:
            self._picture.take(event)
            text += self.terminal.look.event(carried(event))
        waits = self._picture.waits
        if self._asked is not None and (text or waits is None or waits.id != self._asked):
            text, self._asked = f"\n{text}", None
        if events:
            self.terminal.add(text)
        return bool(events)

    def _ask(self) -> None:
        """Show the oldest open question, unless it stands here already."""
        waits = self._picture.waits
        if waits is None or waits.id in (self._asked, self._answered):
            return
        step = f"  backplane answer {self._run.run_id[:ID_CHARS]} {streams.one_line(waits.id)} allow\n"
        prompt = asking.prompt(waits.body) if self._can_answer else step
        self.terminal.add(self.terminal.look.end_line() + asking.question(waits.message, waits.body) + prompt)
        streams.write(self.terminal.clear())
        self._asked = waits.id

    def _wait(self) -> None:
        """Wait a moment, or for a line that answers the question on this terminal."""
        waits = self._picture.waits
        if self._asked is None or waits is None or waits.id == self._answered or not self._can_answer:
            time.sleep(LOOK_S)
        elif select.select([streams.STDIN], [], [], LOOK_S)[0]:
            line = os.read(streams.STDIN, asking.LINE_BYTES_MAX)  # A terminal gives one line at a time.
            if not line:
                raise KeyboardInterrupt
            self._answer(waits, line.decode("utf-8", "replace").removesuffix("\n"))

    def _answer(self, waits: ShownQuestion, line: str) -> None:
        decision = asking.judge(line, waits.body)
        if decision is None:
            streams.write(asking.again(waits.body) + asking.prompt(waits.body))
            return
        given = {name: getattr(decision, name) for name in ("decision", "reason", "text", "remember")}
        try:
            knock(self._store.home, self._run.run_id, AnswerCommand(ask=waits.id, **given))
            self._answered = waits.id
        except BackplaneError as error:
            streams.error(error)

    def _show_end(self, state: str) -> int:
        look = self.terminal.look
        self.terminal.add(look.end_line())
        streams.write(self.terminal.clear())
        if state == "cut_off":
            gone, queued = "cut off: its control plane is gone; the next run seals it", self._run.queued
            step = f"unfollowed here: {follow_step(queued)} [--engine URL]" if queued is not None else gone
            streams.write(f"{step}\n")
            return FAILED
        receipt, patch = self._store.load(self._run.run_id), self._store.folder(self._run.run_id) / PATCH
        streams.write(ended.summary(receipt, look, patch))
        if (failure := failure_of(receipt)) is not None:
            streams.error(failure)
        for line in remarks(receipt.meta.run_id, receipt.outcome, receipt.backplane):
            streams.note(line)
        return code_of(receipt)
