"""`answer` and `cancel`: speak to a live run from another terminal."""

from __future__ import annotations

from typing import Any

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import open_store, wrong
from backplane.receipts.memory import UNFOLLOWED, find
from backplane.runtime.door import AnswerCommand, CancelCommand, Request, knock


def answer(options: Options) -> int:
    remember: Any = "run" if options.always else "once"
    given = AnswerCommand(
        ask=options.ask, decision=options.decision, reason=options.reason, text=options.text, remember=remember
    )
    return _knock(options.run, given)


def cancel(options: Options) -> int:
    return _knock(options.run, CancelCommand(reason=options.reason))


def _knock(name: str, asked: Request) -> int:
    """Ask it of the run of this name. Raises what `door.knock` raises."""
    with open_store() as store:
        run = find(store, name)
        if run.state != "live":
            fact = f"run {run.run_id} is not live: it is {run.outcome or run.reason or 'cut off'}"
            hint = "backplane runs --live"
            if run.reason == UNFOLLOWED:
                hint = f"backplane queue cancel {run.queued} [--engine URL]"
                if isinstance(asked, AnswerCommand):
                    hint = f"backplane queue answer {run.queued} {asked.ask} {asked.decision} [--engine URL]"
            raise wrong(fact, hint)
        streams.write(streams.one_line(knock(store.home, run.run_id, asked)) + "\n")
    return 0
