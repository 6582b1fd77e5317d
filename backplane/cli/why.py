"""`why`: what a run waits for, or why it ended as it did: the evidence, and the next step."""

from __future__ import annotations

import time
from typing import Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.cli.exchanges import find_either
from backplane.cli.terminal import look as stdout_look
from backplane.gateway.record import RecordedExchange
from backplane.view.exchanges import diagnose_exchange, models_of
from backplane.view.figures import ID_CHARS, lasting
from backplane.view.load import why
from backplane.view.why_kinds import HEALTHY

HELP = """Explain what a run waits for, or why it ended as it did, with the evidence and the next step. An id of an
exchange of `backplane gateway` is explained likewise."""
EXAMPLE = "backplane why last\nbackplane why 3f2a1b0c"

TASK_CHARS_MAX: Final = 120

STEPS_SHOWN: Final = 3
"""Most next steps that are printed: the likeliest stand first."""


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.json(p, "the diagnosis as one JSON object", "cli_why")


def run(args: Args) -> int:
    with open_store() as store:
        run = find_either(store, args.run)
        if isinstance(run, RecordedExchange):
            found = diagnose_exchange(run, time.time_ns() // 1_000_000)
            head = f"{run.id[:ID_CHARS]}  {streams.one_line(run.client)}  {models_of(run)}"
        else:
            found = why(store, run)
            task = streams.one_line(run.task, TASK_CHARS_MAX) if run.task is not None else "(task unknown)"
            head = f"{run.run_id[:ID_CHARS]}  {streams.one_line(run.backend)}  {task}"
    if args.json:
        streams.write_record(found)
        return 0
    look = stdout_look()
    streams.write(look.dress("dim", head) + "\n")
    since = f", for {lasting(found.since_ms)}" if found.since_ms is not None else ""
    likely = "" if found.sure else "probably: "
    colour = "green" if found.kind in HEALTHY else "red"
    streams.write(f"{look.dress(colour, likely + found.verdict)}{since}\n")
    for one in found.evidence:
        place = f"event {one.event}: " if one.event is not None else ""
        streams.write(f"  {look.dress('dim', place)}{one.text}\n")
    for step in found.next[:STEPS_SHOWN]:
        streams.write(f"  {look.dress('blue', 'next:')} {step}\n")
    return 0
