"""`policy test`: judge stored runs by another policy, before it is deployed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from backplane.cli import DONE, FAILED, REFUSED, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.cli.terminal import look as stdout_look
from backplane.contract.work import WorkOrder
from backplane.receipts.backtest import Rejudge, Rejudged
from backplane.runtime.orders import read_policy, without_effect
from backplane.view.console import Look
from backplane.view.diff import changes

if TYPE_CHECKING:
    from backplane.policy.backtest import Judged
    from backplane.receipts.database import ReceiptRow
    from backplane.receipts.store import Store


HELP = "Judge stored runs by another policy, and list each decision that would differ. Nothing is started."
EXAMPLE = """
backplane policy test strict last
backplane policy test new.json --all
"""


def options(p: Parser) -> None:
    add.value(p, "policy", metavar="POLICY", help="policy to try: a file, or a shipped one: default, strict or ci")
    add.value(p, "runs", metavar="RUN", nargs="*", help="run ids or their beginnings, `last`, or `last~2`")
    add.flag(p, "--all", help="judge every stored run")
    add.json(p, "one JSON object per run, one per line", "cli_replay")


def run(args: Args) -> int:
    """Judge stored runs; 0 where no decision would be another, 1 where one would, 4 where no run could be judged."""
    if bool(args.runs) == args.all:
        raise wrong_words("no run is named", "name one or more runs, or give --all")
    profile = read_policy(args.policy)
    for _, _, fact in without_effect(WorkOrder("", policy=profile), ()):
        streams.note(fact)  # That it changes no decision would be said of such a rule, and be no comfort.
    look = stdout_look()
    runs = decisions = differing = unjudged = 0
    alike: Counter[str] = Counter()
    with open_store() as store:
        rejudge = Rejudge(store, profile, _files)
        for row in _rows(store, args):
            found = rejudge.run(row)
            runs += 1
            decisions += found.decisions
            differing += len(found.differing)
            unjudged += found.unjudged is not None
            if args.json:
                streams.write_record(found)
            elif args.all and found.unjudged is not None and not found.differing:
                alike[found.unjudged] += 1  # A store has hundreds that were pruned, and they say nothing.
            else:
                _tell(found, look)
    if not args.json:
        for why, count in alike.items():
            told = f"not judged, {streams.count(count, 'run')}: "
            streams.write(f"{look.dress('yellow', told)}{streams.one_line(why)}\n")
        rest = f", {streams.count(unjudged, 'run')} only partly judged" if unjudged else ""
        counted = f"{streams.count(runs, 'run')}, {streams.count(decisions, 'decision')}"
        streams.write(f"{counted}, {differing} would differ{rest}\n")
    if differing:
        return FAILED
    return REFUSED if unjudged == runs and unjudged and not decisions else DONE


def _rows(store: Store, args: Args) -> Iterator[ReceiptRow]:
    """The named runs, each once; names are looked up before anything is judged."""
    if args.all:
        return store.scan()
    return iter({row.run_id: row for row in map(store.find, args.runs)}.values())


def _files(diff: str) -> Iterable[str]:
    return (change.path for change in changes(diff.splitlines()))


def _tell(found: Rejudged, look: Look) -> None:
    if found.differing or found.unjudged is not None:
        streams.write(f"{found.run_id}\n")
    for it in found.differing:
        place = f"event {it.event}" if it.event is not None else "patch"
        answered = f"  (then answered: {streams.one_line(it.answered)} by {streams.one_line(it.by)})"
        told = answered if it.answered is not None else ""
        change = f"{it.before.allowed} → {look.dress(_colour(it.after), it.after.allowed)}"
        streams.write(f"  {place}: {streams.one_line(it.subject, 120)}: {change}{told}\n")
        streams.write(f"    {look.dress('dim', streams.one_line(it.after.reason))}\n")
    if found.unjudged is not None:
        streams.write(f"  {look.dress('yellow', 'not judged: ')}{streams.one_line(found.unjudged)}\n")


def _colour(judged: Judged) -> str:
    return {"allow": "green", "deny": "red"}.get(judged.allowed, "yellow")
