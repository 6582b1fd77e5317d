"""`compare`: one order on several backends from the same tree, and what the data says of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio
import msgspec

from backplane import config
from backplane.cli import DONE, FAILED, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, load_settings, wrong_words
from backplane.routing.compare import compare, read_side, so_far
from backplane.runtime.orders import make_order
from backplane.runtime.plane import ControlPlane
from backplane.view import compared
from backplane.view.columns import padded, width

if TYPE_CHECKING:
    from backplane.routing.intervals import Comparison, Trial

HELP = "Run one order on several backends, from the same files. No patch is applied. Exits with 1 if no run succeeded."
EXAMPLE = """
backplane compare "fix the failing test" -b one -b other --check "make test" --repeat 5
backplane compare "fix the failing test" -b mine/large -b mine/small
"""


def options(p: Parser) -> None:
    add.value(p, "task", metavar="TASK", help="task for the agents, in words")
    add.many(p, "-b", "--backend", metavar="NAME[/MODEL]", help="compare this backend; give the option at least twice")
    add.value(p, "--check", metavar="CMD", help="run this command on each patched copy; exit code 0 means passed")
    rounds = "run each backend N times; a verdict needs at least 3 rounds (default: 1)"
    add.value(p, "--repeat", metavar="N", type=int, default=1, help=rounds)
    add.value(p, "-C", "--root", metavar="DIR", default=".", help="work on this folder (default: the current one)")
    add.value(p, "--timeout", metavar="TIME", type=add.seconds, help="end a run after this time, such as 90s or 5m")
    add.config(p)
    add.json(p, "the comparison as one JSON object", "cli_compare")


def run(args: Args) -> int:
    settings = load_settings(args, {"run_s": args.timeout})
    # Every run starts its host alike: a first round without a warm one would be the slower.
    settings = msgspec.structs.replace(settings, limits=msgspec.structs.replace(settings.limits, warm_max=0))
    order = make_order(args.task, root=os.path.normpath(streams.folder() / args.root))
    if len(set(args.backend)) < 2:
        step = "give -b A -b B, or -b BACKEND/MODEL to choose a model; `backplane backends` lists the backends"
        raise wrong_words("compare needs at least two different backends", step)
    sides, trials = list(map(read_side, args.backend)), list["Trial"]()

    def hear(trial: Trial) -> None:
        trials.append(trial)
        streams.note(compared.trial(trial))

    async def work() -> None:
        async with ControlPlane(settings, config.home(os.environ), dict(os.environ)) as plane:
            await compare(plane, order, sides, check=args.check, repeat=args.repeat, heard=hear)

    try:
        anyio.run(work)  # A signal cancels it: the run at work ends in order.
    finally:
        found = so_far(order, args.check, sides, trials)
        if found is not None and args.json:
            streams.write_record(found)
        elif found is not None:
            streams.write_lines(map(streams.one_line, _lines(found)), "")
    return DONE if any(trial.succeeded for trial in trials) else FAILED


def _lines(found: Comparison) -> Iterator[str]:
    """Yield a table with a row per side, then what the data says."""
    rows = [compared.HEAD, *(tuple(map(streams.one_line, row)) for row in compared.cells(found))]
    columns = [max(map(width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(padded, row, columns)).rstrip()
    yield from compared.verdicts(found)
    for trial in {trial.side: trial for trial in found.trials}.values():
        if trial.patch_sha256 is not None:
            yield f"patch of {trial.side}: backplane apply {trial.run_id[:8]}"
