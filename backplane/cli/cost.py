"""`cost`: what runs have cost, as far as that is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.gateway.journal import recorded
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered, remembered
from backplane.view.figures import count, milliseconds, money

_KEYS: Final[dict[str, Callable[[Remembered], str | None]]] = {
    "provider": lambda run: run.backend,
    "model": lambda run: run.model or run.model_told,
    "day": lambda run: run.started_at[:10],
    "session": lambda run: run.session,
    "folder": lambda run: run.root,
}
"""Word of `--by` → the key of a run."""

_EXCHANGE_KEYS: Final[dict[str, Callable[[RecordedExchange], str | None]]] = {
    "provider": lambda one: one.backend,
    "model": lambda one: one.model,
    "day": lambda one: one.began_at[:10],
    "client": lambda one: one.client,
}
"""Word of `--by` → the key of a gateway's exchange."""

HELP = """Sum up what runs have cost. An unknown cost is shown as ?, never as 0. What `backplane gateway` has cost is
named beside the sum."""
EXAMPLE = "backplane cost --by model --since 7d\nbackplane cost --gateway --by client"


def options(p: Parser) -> None:
    keys = tuple(dict.fromkeys((*_KEYS, *_EXCHANGE_KEYS)))
    p.add_argument("--by", choices=keys, default="provider", help="group the runs by this (default: provider)")
    add.flag(p, "--gateway", help="sum up the exchanges of `backplane gateway`, and not the runs")
    add.since(p)
    add.json(p, "one JSON object per sum, one per line; the last is the sum of all runs", "cli_cost")


def run(args: Args) -> int:
    keys = _EXCHANGE_KEYS if args.gateway else _KEYS
    if args.by not in keys:
        kind = "exchanges" if args.gateway else "runs"
        raise wrong_words(f"{kind} have no {args.by}", f"use --by {', '.join(keys)}")
    found, total = sums(_of_exchanges(args, _EXCHANGE_KEYS[args.by]) if args.gateway else _of_runs(args))
    rows = [("(not known)" if one.key is None else streams.one_line(one.key), one) for one in found]
    for label, one in [*rows, ("all", total)]:
        if args.json:
            streams.write_record(one)
        else:
            streams.write(f"{label:<24}  {_figures(one, 'exchange' if args.gateway else 'run')}\n")
    if not args.gateway and not args.json:
        # Not a part of the sum: a run may have asked its models through the gateway.
        _, beside = sums(_of_exchanges(args, lambda _: None))
        if beside.runs:
            streams.write(f"{'beside: the gateway':<24}  {_figures(beside, 'exchange')}\n")
    return 0


def _of_exchanges(args: Args, key: Callable[[RecordedExchange], str | None]) -> Iterator[CostRow]:
    """Yield the figures of each ended exchange of all starts of the gateway."""
    for one in recorded(config.home_path(os.environ)):
        if one.state == "ended" and (milliseconds(one.began_at) or 0) >= (args.since or 0):
            counts = one.tokens or {}
            yield key(one) or None, one.cost_usd_micros, counts.get("input"), counts.get("output")


def _of_runs(args: Args) -> Iterator[CostRow]:
    """Yield the figures of each run that was paid for."""
    with open_store() as store:
        # The check of a comparison is the caller's own command, and none of its runs.
        runs = [run for run in remembered(store) if run.check_of is None]
    runs = [run for run in runs if (milliseconds(run.started_at) or 0) >= (args.since or 0)]
    # A refused run started nothing, and a replayed one did nothing: both are known to cost nothing.
    paid = [run for run in runs if not run.is_retold and (run.state != "ended" or run.reason != "refused")]
    key = _KEYS[args.by]
    for run in paid:
        yield key(run) or None, run.cost_usd_micros, run.input_tokens, run.output_tokens


def _figures(one: Spend, noun: str) -> str:
    def at_least(total: int | None, known: int | None, say: Callable[[int | None], str]) -> str:
        return say(total) if total is not None or known is None else f"≥ {say(known)}"

    cost = at_least(one.cost_usd_micros, one.known_usd_micros, money)
    unknown = f", cost unknown for {one.unknown}" if one.unknown else ""
    sent = at_least(one.input_tokens, one.known_input_tokens, count)
    got = at_least(one.output_tokens, one.known_output_tokens, count)
    return f"{cost:>10}  {streams.count(one.runs, noun)}{unknown}  {sent} in, {got} out"


class Spend(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of some runs' costs and tokens."""

    key: str | None
    """The value that the runs share; None if it is unknown, and for the sum of all runs."""
    runs: int = 0
    unknown: int = 0
    """Number of runs whose cost is unknown."""
    cost_usd_micros: int | None = 0
    """None if the cost of any run is unknown."""
    known_usd_micros: int | None = None
    """Sum of the known costs, so all runs cost at least this much; None if no cost is known."""
    input_tokens: int | None = 0
    """None if they are unknown for any run; `output_tokens` likewise."""
    output_tokens: int | None = 0
    known_input_tokens: int | None = None
    """Sum over the runs that reported them, so all used at least this many; None if no run did.

    `known_output_tokens` likewise.
    """
    known_output_tokens: int | None = None

    def plus(self, cost: int | None, input_tokens: int | None, output_tokens: int | None) -> Spend:
        """Add one run."""
        return Spend(
            key=self.key,
            runs=self.runs + 1,
            unknown=self.unknown + (cost is None),
            cost_usd_micros=_sum(self.cost_usd_micros, cost),
            known_usd_micros=_at_least(self.known_usd_micros, cost),
            input_tokens=_sum(self.input_tokens, input_tokens),
            output_tokens=_sum(self.output_tokens, output_tokens),
            known_input_tokens=_at_least(self.known_input_tokens, input_tokens),
            known_output_tokens=_at_least(self.known_output_tokens, output_tokens),
        )


CostRow = tuple[str | None, int | None, int | None, int | None]
"""Key, cost in millionths of a dollar, tokens sent, tokens got."""


def sums(runs: Iterable[CostRow]) -> tuple[list[Spend], Spend]:
    """Sum up by key, the dearest by what is known first; and all together."""
    found: dict[str | None, Spend] = {}
    total = Spend(key=None)
    for key, *figures in runs:
        found[key] = found.get(key, Spend(key=key)).plus(*figures)
        total = total.plus(*figures)
    return sorted(found.values(), key=lambda one: (-(one.known_usd_micros or 0), one.key or "")), total


def _sum(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more


def _at_least(so_far: int | None, more: int | None) -> int | None:
    return so_far if more is None else (so_far or 0) + more
