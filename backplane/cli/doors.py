"""`answer`, `cancel`, `interrupt`: a live run is told something from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backplane.cli import streams
from backplane.cli.parser import Options, Parser

if TYPE_CHECKING:
    from backplane.runtime.door import Request

_RUN = "run id or its beginning, or `last`"


def parser(name: str) -> Parser:
    """The options of `answer`, `cancel` or `interrupt`."""
    if name == "answer":
        about = "Answer what a live run asks, from any terminal; `why RUN` and `watch RUN` show what it is."
        made = Parser(f"backplane {name}", about, "backplane answer last ask-1 allow", _answer)
        made.add_argument("run", metavar="RUN", help=_RUN)
        made.add_argument("ask", metavar="ASK", help="the question's id or its beginning")
        made.add_argument("decision", metavar="allow|deny", choices=("allow", "deny"), help="what you decide")
        made.add_argument("--reason", metavar="WHY", default="", help="told to the agent, kept in the receipt")
        made.add_argument("--text", metavar="WORDS", help="the answer to a question in words")
        made.add_argument("--always", action="store_true", help="the same for this tool until the run ends")
        return made
    if name == "cancel":
        about = "End a live run in order: its host is stopped, what it did is kept, its receipt is sealed."
        made = Parser(f"backplane {name}", about, "backplane cancel last --reason 'wrong branch'", _cancel)
        made.add_argument("run", metavar="RUN", help=_RUN)
        made.add_argument("--reason", metavar="WHY", default="", help="kept in the receipt")
        return made
    about = "Stop the turn of a live run's agent; the run ends, and a kept conversation can be gone on with."
    made = Parser(f"backplane {name}", about, "backplane interrupt last", _interrupt)
    made.add_argument("run", metavar="RUN", help=_RUN)
    return made


def _answer(options: Options) -> int:
    from backplane.runtime.door import AnswerCommand

    remember: Any = "run" if options.always else "once"
    given = AnswerCommand(
        ask=options.ask, decision=options.decision, reason=options.reason, text=options.text, remember=remember
    )
    return _knock(options.run, given)


def _cancel(options: Options) -> int:
    from backplane.runtime.door import CancelCommand

    return _knock(options.run, CancelCommand(reason=options.reason))


def _interrupt(options: Options) -> int:
    from backplane.runtime.door import InterruptCommand

    return _knock(options.run, InterruptCommand())


def _knock(name: str, asked: Request) -> int:
    """Ask it of the run of this name. Raises what `door.knock` raises."""
    from backplane.cli.runs import open_store
    from backplane.errors import ConfigError
    from backplane.receipts.memory import UNFOLLOWED, find
    from backplane.runtime.door import AnswerCommand, knock

    with open_store() as store:
        run = find(store, name)
        if run.state != "live":
            fact = f"run {run.run_id} is not live: it is {run.outcome or run.reason or 'cut off'}"
            hint = "backplane runs --live"
            if run.reason == UNFOLLOWED:
                words = f" {asked.ask} {asked.decision}" if isinstance(asked, AnswerCommand) else ""
                hint = f"backplane queue {'answer' if words else 'cancel'} {run.queued}{words}"
            raise ConfigError("config_invalid", fact, hint=hint)
        streams.write(streams.one_line(knock(store.home, run.run_id, asked)) + "\n")
    return 0
