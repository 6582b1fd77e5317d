"""`receipts audit`: compare the agent's claims with what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.terminal import look as stdout_look
from backplane.receipts.claims import Audited, audit
from backplane.view.console import Look
from backplane.view.ended import names

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
    else:
        streams.write_lines(_lines(found, stdout_look()), "")
    return _AUDITED[found.verdict]


def _lines(found: Audited, look: Look) -> Iterator[str]:
    if found.verdict == "not_judged":
        yield f"{look.dress('warn', 'not judged')}: {streams.one_line(found.why)}"
        return
    is_good = found.verdict == "no_alarm"
    word = look.dress("good", "no claim is false") if is_good else look.dress("bad", "claims are false")
    sums: Counter[str] = Counter()
    for counts in found.counts.values():
        sums.update(counts)
    words = [it for it in ("true", "false", "not_seen", "unwitnessed") if sums[it] or it != "not_seen"]
    parts = ", ".join(f"{sums[it]} {it.replace('_', ' ')}" for it in words)
    yield f"{word}: {parts}; seen by {', '.join(map(streams.one_line, found.layers))}"
    for rows, verdict, tone in ((found.false, "false", "bad"), (found.not_seen, "not seen", "warn")):
        for row in rows:
            place = f" (event {row.event})" if row.event is not None else ""
            claimed, seen = streams.one_line(row.claimed, 100), streams.one_line(row.seen, 100)
            kind = streams.one_line(row.kind)
            yield f"  {look.dress(tone, verdict)}  {kind}{place}: claimed {claimed}; seen: {seen}"
    if found.unexplained:
        yield f"  {look.dress('warn', 'no event names')}  {names(found.unexplained)}"


_AUDITED: Final = {"no_alarm": 0, "false_claims": 1, "not_judged": 4}
"""Verdict → exit code; 1 means a false claim and nothing else."""
