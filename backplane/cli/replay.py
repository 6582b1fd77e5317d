"""`replay`: stored runs under another policy, before that policy is deployed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from backplane.cli import DONE, FAILED, REFUSED, streams
from backplane.cli.parser import Options
from backplane.cli.show import Look
from backplane.cli.start import open_store, wrong_words
from backplane.contract.work import WorkOrder
from backplane.receipts.backtest import Rejudge, Rejudged
from backplane.runtime.orders import read_policy, without_effect
from backplane.view.diff import changes

if TYPE_CHECKING:
    from backplane.policy.backtest import Judged
    from backplane.receipts.database import ReceiptRow
    from backplane.receipts.store import Store


def replay(options: Options) -> int:
    """Judge stored runs; 0 where no decision would be another, 1 where one would, 4 where no run could be judged."""
    if options.policy is None:
        raise wrong_words("no policy to try is named", "--policy NEW: a file, or default, strict or ci")
    if bool(options.runs) == options.all:
        raise wrong_words("name a RUN or more, or --all", "backplane replay --help")
    profile = read_policy(options.policy)
    for _, _, fact in without_effect(WorkOrder("", policy=profile), ()):
        streams.note(fact)  # That it changes no decision would be said of such a rule, and be no comfort.
    look = Look.here()
    runs = decisions = differing = unjudged = 0
    alike: Counter[str] = Counter()
    with open_store() as store:
        rejudge = Rejudge(store, profile, _files)
        for row in _rows(store, options):
            found = rejudge.run(row)
            runs += 1
            decisions += found.decisions
            differing += len(found.differing)
            unjudged += found.unjudged is not None
            if options.json:
                streams.write_record(found)
            elif options.all and found.unjudged is not None and not found.differing:
                alike[found.unjudged] += 1  # A store has hundreds that were pruned, and they say nothing.
            else:
                _tell(found, look)
    if not options.json:
        for why, count in alike.items():
            told = f"not judged, {streams.count(count, 'run')}: "
            streams.write(f"{look.dress('yellow', told)}{streams.one_line(why)}\n")
        rest = f", {streams.count(unjudged, 'run')} not wholly judged" if unjudged else ""
        counted = f"{streams.count(runs, 'run')}, {streams.count(decisions, 'decision')}"
        streams.write(f"{counted}, {differing} would differ{rest}\n")
    if differing:
        return FAILED
    return REFUSED if unjudged == runs and unjudged and not decisions else DONE


def _rows(store: Store, options: Options) -> Iterator[ReceiptRow]:
    """The named runs, each once; names are looked up before anything is judged."""
    if options.all:
        return store.scan()
    return iter({row.run_id: row for row in map(store.find, options.runs)}.values())


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
