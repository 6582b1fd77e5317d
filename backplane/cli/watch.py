"""`watch`: follow a run from any terminal by its journal, and answer its questions at its door."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import TYPE_CHECKING, Final

import anyio

from backplane.cli import FAILED, asking, code_of, ended, streams
from backplane.cli import options as add
from backplane.cli import terminal as stdout
from backplane.cli.command import Args, Parser, open_store
from backplane.contract.events import carried
from backplane.errors import BackplaneError
from backplane.receipts.journal import PATCH
from backplane.receipts.memory import Remembered, find, state_of
from backplane.receipts.outcomes import failure_of
from backplane.receipts.tail import LOOK_S, Tail
from backplane.runtime.door import AnswerCommand, knock
from backplane.view.figures import ID_CHARS
from backplane.view.findings import remarks
from backplane.view.picture import Picture, ShownQuestion

if TYPE_CHECKING:
    from backplane.receipts.store import Store

HELP = "Follow a run from another terminal, and answer its questions. Ctrl-C stops following; the run continues."
EXAMPLE = "backplane watch\nbackplane watch 3f2a1b0c"

TASK_CHARS_MAX: Final = 200


def options(p: Parser) -> None:
    add.run_id(p, optional=True)


def run(args: Args) -> int:
    with open_store() as store:
        watch = _Watch(store, find(store, args.run))
        before = signal.signal(signal.SIGCONT, lambda *_: watch.terminal.continued())
        try:
            return anyio.run(watch.follow)
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
        """Id of the question that was asked last."""
        self._asking: anyio.CancelScope

    async def follow(self) -> int:
        """Show the run from its beginning to its end, and return its exit code."""
        state, self._asking = str(self._run.state), anyio.CancelScope()
        with closing(Tail(self._store.folder(self._run.run_id))) as tail:
            for fact in tail.facts():
                self._picture.begin(fact)
            task = streams.one_line(self._run.task or "", TASK_CHARS_MAX)
            head = f"{self._run.run_id[:ID_CHARS]}  {streams.one_line(self._run.backend)}  {task}"
            self.terminal.add(self.terminal.look.dress("dim", head) + "\n")
            async with anyio.create_task_group() as tasks:
                while True:
                    # The state first: what the run wrote before its end is shown before its end.
                    state = state_of(self._store, self._run.run_id) if state == "live" else state
                    events = tail.events()
                    for event in events:
                        self._picture.take(event)
                        self.terminal.add(self.terminal.look.event(carried(event)))
                    waits = self._picture.waits
                    if waits is None or waits.id != self._asked:
                        self._asking.cancel()
                    if self.terminal.is_due:
                        streams.write(self.terminal.frame())
                    if state != "live" and not events:
                        self._asking.cancel()
                        break
                    if waits is not None and waits.id != self._asked and not events:
                        self._asked, self._asking = waits.id, anyio.CancelScope()
                        tasks.start_soon(self._ask, waits, self._asking)
                    await anyio.sleep(0 if events else LOOK_S)
        return self._show_end(state)

    async def _ask(self, waits: ShownQuestion, scope: anyio.CancelScope) -> None:
        """Show a question, and answer it as a person on this terminal does."""
        id = self._run.run_id
        if not (streams.is_terminal(streams.STDOUT) and asking.can_ask()):
            step = f"  backplane answer {id[:ID_CHARS]} {streams.one_line(waits.id)} allow\n"
            self.terminal.add(self.terminal.look.end_line() + asking.question(waits.message, waits.body) + step)
            return
        with scope, self.terminal.away():
            self.terminal.add(self.terminal.look.end_line())
            decision = await asking.Person(self.terminal.clear).answer(waits)
            if decision is asking.CLOSED:  # Another terminal may answer.
                return
            given = {name: getattr(decision, name) for name in ("decision", "reason", "text", "remember")}
            try:
                knock(self._store.home, id, AnswerCommand(ask=waits.id, **given))
            except BackplaneError as error:
                streams.error(error)

    def _show_end(self, state: str) -> int:
        look = self.terminal.look
        self.terminal.add(look.end_line())
        streams.write(self.terminal.clear())
        if state == "cut_off":
            streams.write(
                "run cut off: its backplane process ended early; the next `backplane run` writes its receipt\n"
            )
            return FAILED
        receipt, patch = self._store.load(self._run.run_id), self._store.folder(self._run.run_id) / PATCH
        streams.write(ended.summary(receipt, look, patch))
        if (failure := failure_of(receipt)) is not None:
            streams.error(failure)
        for line in remarks(receipt.meta.run_id, receipt.outcome, receipt.backplane):
            streams.note(line)
        return code_of(receipt)
