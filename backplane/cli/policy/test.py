"""`policy test`: judge stored runs by another policy, before it is deployed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from backplane.cli import DONE, FAILED, REFUSED, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.cli.terminal import look as stdout_look
from backplane.contract.work import WorkOrder
from backplane.receipts.rejudge import Rejudge
from backplane.runtime.orders import read_policy, without_effect
from backplane.view.console import Look
from backplane.view.diff import changes

if TYPE_CHECKING:
    from backplane.receipts.rejudge import Redecided

HELP = "Apply another policy to stored runs, and list each decision that would differ. Nothing is started."
EXAMPLE = """
backplane policy test strict last
backplane policy test new.json --all
"""


def options(p: Parser) -> None:
    add.value(p, "policy", metavar="POLICY", help="JSON policy file, or a built-in policy: default, strict or ci")
    add.value(p, "runs", metavar="RUN", nargs="*", help="run ids or prefixes, `last`, or `last~2` (two runs earlier)")
    add.flag(p, "--all", help="apply the policy to every stored run")
    add.json(p, "one JSON object per run, one per line", "cli_replay")


def run(args: Args) -> int:
    """Judge stored runs; 0 if no decision would differ, 1 if one would, 4 if no run could be judged."""
    if bool(args.runs) == args.all:
        raise wrong_words("no run is named", "name one or more runs, or give --all")
    profile = read_policy(args.policy)
    for _, _, fact in without_effect(WorkOrder("", policy=profile), ()):
        streams.note(fact)  # Without this note "no decision would differ" would be a false comfort.
    look = stdout_look()
    runs = decisions = differing = 0
    unjudged: Counter[str] = Counter()
    with open_store() as store:
        rejudge = Rejudge(store, profile, lambda diff: (one.path for one in changes(diff.splitlines())))
        rows = store.scan() if args.all else {row.run_id: row for row in map(store.find, args.runs)}.values()
        for found in map(rejudge.run, rows):
            runs, decisions, differing = runs + 1, decisions + found.decisions, differing + len(found.differing)
            unjudged.update([found.unjudged] if found.unjudged is not None else ())
            if args.json:
                streams.write_record(found)
            elif found.differing:
                streams.write(f"{found.run_id}\n{''.join(_lines(one, look) for one in found.differing)}")
    if not args.json:
        for why, count in unjudged.items():
            label = look.dress("warn", f"not judged, {streams.count(count, 'run')}: ")
            streams.write(f"{label}{streams.one_line(why)}\n")
        rest = f", {streams.count(unjudged.total(), 'run')} only partly judged" if unjudged else ""
        counted = f"{streams.count(runs, 'run')}, {streams.count(decisions, 'decision')}"
        streams.write(f"{counted}, {differing} would differ{rest}\n")
    if differing:
        return FAILED
    return REFUSED if unjudged and unjudged.total() == runs and not decisions else DONE


def _lines(one: Redecided, look: Look) -> str:
    place = f"event {one.event}" if one.event is not None else "patch"
    then = f"  (then answered: {one.answered} by {one.by})" if one.answered is not None else ""
    after = look.dress({"allow": "good", "deny": "bad"}.get(one.after.allowed, "warn"), one.after.allowed)
    head = f"  {place}: {streams.one_line(one.subject, 120)}: {one.before.allowed} → {after}{streams.one_line(then)}"
    return f"{head}\n    {look.dress('dim', streams.one_line(one.after.reason))}\n"
