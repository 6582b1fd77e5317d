"""`compare`: one order on several backends from the same tree, and what the data says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from backplane import config
from backplane.cli import DONE, FAILED, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, load_settings, wrong_words
from backplane.config import Settings
from backplane.errors import ConfigError
from backplane.process.aio import ending_signals
from backplane.routing.compare import Side, compare, read_side, so_far
from backplane.runtime import backends
from backplane.runtime.orders import make_order
from backplane.runtime.plane import ControlPlane
from backplane.view.columns import padded, width
from backplane.view.figures import lasting, money

if TYPE_CHECKING:
    from backplane.contract.work import WorkOrder
    from backplane.routing.intervals import Comparison, Interval, Trial


HELP = "Run one order on several backends from the same tree. Nothing is applied. Exits with 1 if no run succeeded."
EXAMPLE = """
backplane compare "fix the failing test" -b one -b other --check "make test" --repeat 5
backplane compare "fix the failing test" -b mine/large -b mine/small
"""


def options(p: Parser) -> None:
    add.value(p, "task", metavar="TASK", help="what to do, in words")
    add.many(p, "-b", "--backend", metavar="NAME[/MODEL]", help="compare this backend; give two at least")
    add.value(p, "--check", metavar="CMD", help="run this command in a copy with each patch; exit code 0 passes")
    add.value(p, "--repeat", metavar="N", type=int, default=1, help="run N rounds; a verdict needs three (default: 1)")
    add.value(p, "-C", "--root", metavar="DIR", default=".", help="work on this folder (default: the current one)")
    add.value(p, "--timeout", metavar="TIME", type=add.seconds, help="end a run after this time, as 90s or 5m")
    add.config(p)
    add.json(p, "the comparison as one JSON object", "cli_compare")


def run(args: Args) -> int:
    streams.require_descriptors()
    environ, cwd = dict(os.environ), streams.folder()
    settings = load_settings(args, {"run_s": args.timeout})
    # Every run starts its host alike: a first round without a warm one would be the slower.
    settings = msgspec.structs.replace(settings, limits=msgspec.structs.replace(settings.limits, warm_max=0))
    order = make_order(args.task, root=os.path.normpath(cwd / args.root))
    sides = _sides(args.backend, settings, environ)
    plane = ControlPlane(settings, config.home(environ), environ)
    worked = _Work(plane, order, args)
    anyio.run(worked.follow, sides)
    if worked.found is None:
        return 128 + worked.signal
    if worked.signal:
        streams.complain(f"ended by a signal after {streams.count(len(worked.found.trials), 'run')}\n")
    if args.json:
        streams.write_record(worked.found)
    else:
        for line in told(worked.found):
            streams.write(line + "\n")
    if worked.signal:
        return 128 + worked.signal
    return DONE if any(trial.succeeded for trial in worked.found.trials) else FAILED


def _sides(given: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> tuple[Side, ...]:
    """Read the sides. Raises ConfigError: `usage_invalid`, one names nothing, or there are not two different ones."""
    try:
        sides = tuple(map(read_side, given))
    except ConfigError as error:
        raise wrong_words(error.message, error.hint or "give -b BACKEND/MODEL") from error
    if len(sides) < 2 or len(set(sides)) < len(sides):
        names = ", ".join(status.id for status in backends.known(settings, dict(environ)))
        step = f"give -b A -b B, or -b BACKEND/MODEL to choose a model; backends: {names}"
        raise wrong_words("compare needs at least two different backends", step)
    return sides


class _Work:
    """A comparison while it goes on."""

    def __init__(self, plane: ControlPlane, order: WorkOrder, args: Args) -> None:
        self.found: Comparison | None = None
        """The result; after a signal that of the runs until then, None if a side had none."""
        self.signal = 0
        """Number of the signal that ended the comparison, or 0."""
        self._trials: list[Trial] = []
        self._plane = plane
        self._order = order
        self._args = args

    async def follow(self, sides: tuple[Side, ...]) -> None:
        """Compare; a signal ends the run that is at work in order, and with it the comparison."""

        async def watch() -> None:
            with anyio.open_signal_receiver(*ending_signals()) as received:
                async for number in received:
                    self.signal = int(number)
                    tasks.cancel_scope.cancel()

        args = self._args
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            async with self._plane as plane:
                self.found = await compare(
                    plane,
                    self._order,
                    sides,
                    check=args.check,
                    repeat=args.repeat,
                    heard=self._hear,
                )
            tasks.cancel_scope.cancel()
        if self.signal:
            self.found = so_far(self._order, args.check, sides, self._trials)

    def _hear(self, trial: Trial) -> None:
        self._trials.append(trial)
        streams.complain(_line(trial) + "\n")


def _line(trial: Trial) -> str:
    words = [f"round {trial.round}", streams.one_line(trial.side), trial.outcome]
    words += [trial.code] if trial.code else []
    if trial.checked is not None:
        why = f": {streams.one_line(trial.check_says)}" if trial.check_says else ""
        words.append("check passed" if trial.checked else f"check failed{why}")
    words += [lasting(trial.duration_ms), money(trial.cost_usd_micros), f"+{trial.added} −{trial.removed}"]
    return "  ".join([*words, trial.run_id[:8]])


def told(found: Comparison) -> Iterator[str]:
    """The comparison in words: a column a side, then what the data says."""
    rows: list[tuple[str, list[str]]] = [
        ("", [streams.one_line(side.side) for side in found.sides]),
        ("success", [f"{side.succeeded} of {side.runs} {_reach(side.success, _percent)}" for side in found.sides]),
        ("cost", [_figure(side.cost_usd_micros, money) for side in found.sides]),
        ("time", [_figure(side.duration_ms, lasting) for side in found.sides]),
        ("patches", [str(side.patches) for side in found.sides]),
    ]
    columns = [max(width(cells[place]) for _, cells in rows) for place in range(len(found.sides))]
    for label, cells in rows:
        line = "  ".join(padded(cell, columns[place]) for place, cell in enumerate(cells))
        yield f"{label:<9}{line}".rstrip()
    for verdict in found.verdicts:
        better = streams.one_line(verdict.better) if verdict.better is not None else "no backend"
        yield f"{verdict.measure}: {better} is better: {streams.one_line(verdict.why)}"
    named = {trial.side: trial for trial in found.trials}
    for side, trial in named.items():
        if trial.patch_sha256 is not None:
            yield f"patch of {streams.one_line(side)}: backplane apply {trial.run_id[:8]}"


def _figure(found: Interval | None, say: Callable[[int], str]) -> str:
    if found is None:
        return "?"
    return f"{say(found.value)} {_reach(found, say)}".rstrip()


def _reach(found: Interval, say: Callable[[int], str]) -> str:
    if found.low is None or found.high is None:
        return ""
    return f"[{say(found.low)} to {say(found.high)}]"


def _percent(thousandths: int) -> str:
    return f"{thousandths / 10:.0f} %"
