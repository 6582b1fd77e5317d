"""`receipts audit`: compare the agent's claims with what was observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.terminal import look as stdout_look
from backplane.receipts.claims import audit
from backplane.view.ended import names

if TYPE_CHECKING:
    from backplane.receipts.claims import FalseClaim, Verdict

HELP = """Compare the agent's claims with what was observed. Exits with 1 if a claim is false, with 4 if no claim
could be judged."""
EXAMPLE = "backplane receipts audit last"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.json(p, "the verdicts as one JSON object", "cli_receipts_audit")


def run(args: Args) -> int:
    with open_store() as store:
        found = audit(store.load(args.run))
    if args.json:
        streams.write_record(found)
        return _AUDITED[found.verdict]
    look = stdout_look()
    if found.verdict == "not_judged":
        streams.write(f"{look.dress('yellow', 'not judged')}: {streams.one_line(found.why)}\n")
        return _AUDITED[found.verdict]
    words: tuple[Verdict, ...] = ("true", "false", "not_seen", "unwitnessed")
    sums = {it: sum(one.get(it, 0) for one in found.counts.values()) for it in words}
    word, colour = ("no claim is false", "green") if found.verdict == "no_alarm" else ("claims are false", "red")
    parts = [f"{sums[it]} {it.replace('_', ' ')}" for it in words if sums[it] or it != "not_seen"]
    streams.write(
        f"{look.dress(colour, word)}: {', '.join(parts)}; seen by {', '.join(map(streams.one_line, found.layers))}\n"
    )
    for rows, verdict, colour in ((found.false, "false", "red"), (found.not_seen, "not seen", "yellow")):
        for row in rows:
            streams.write(f"  {look.dress(colour, verdict)}  {_claim(row)}\n")
    if found.unexplained:
        streams.write(f"  {look.dress('yellow', 'no event names')}  {names(found.unexplained)}\n")
    if found.unnamed:
        streams.write(f"  no event names  {names(found.unnamed)}  (a command or a tool may have changed them)\n")
    for kind, counts in sorted(found.counts.items()):
        verdicts = ", ".join(f"{number} {verdict.replace('_', ' ')}" for verdict, number in counts.items())
        streams.write(f"  {streams.one_line(kind):<23} {verdicts}\n")
    return _AUDITED[found.verdict]


def _claim(row: FalseClaim) -> str:
    place = f" (event {row.event})" if row.event is not None else ""
    claimed, seen = streams.one_line(row.claimed, 100), streams.one_line(row.seen, 100)
    return f"{streams.one_line(row.kind)}{place}: claimed {claimed}; seen: {seen}"


_AUDITED: Final = {"no_alarm": 0, "false_claims": 1, "not_judged": 4}
"""Verdict → exit code; 1 means a false claim and nothing else."""
