"""`queue limit`: show or set the limits of a label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong_words
from backplane.errors import ConfigError
from backplane.scale.commands.common import on_queue
from backplane.scale.engine import LabelLimits
from backplane.scale.place import QueuePlace

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

HELP = "Show or set the limits for orders with a label, and the budget of the queue. The word `off` removes a limit."
EXAMPLE = "backplane queue limit --label gpu --concurrency 4 --rate 10/60 --budget-usd 50"


def options(p: Parser) -> None:
    add.queue(p)
    label = "show or set the limits of this label (default: default)"
    add.value(p, "--label", metavar="LABEL", default="default", help=label)
    add.value(p, "--concurrency", metavar="N", help="run at most N orders at once, across all workers of the label")
    add.value(p, "--rate", metavar="N/S", help="begin at most N orders in S seconds")
    add.value(p, "--budget-usd", metavar="USD", help="limit the cost of all orders of the queue, including past orders")
    add.json(p, "the limits in force as one JSON object", "cli_queue_limit")


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a label, and the budget of the whole queue; None means no limit."""

    label: str
    concurrency: int | None
    rate_orders: int | None
    """Orders that may begin in `rate_ms`."""
    rate_ms: int | None
    budget_usd_micros: int | None
    spent_usd_micros: int


def run(args: Args) -> int:
    concurrency, rate, budget = _limits_of(args)

    async def set(_: Args, engine: DurableEngine, __: QueuePlace) -> int:
        limits = await engine.limits(args.label)
        if args.concurrency is not None or args.rate is not None:
            limits = LabelLimits(
                limits.concurrency if args.concurrency is None else concurrency,
                limits.rate if args.rate is None else rate,
            )
            await engine.set_limits(args.label, limits)
        if args.budget_usd is not None:
            await engine.set_budget(budget)
        orders, span_ms = limits.rate or (None, None)
        held = await engine.budget()
        now = QueueLimits(
            label=args.label,
            concurrency=limits.concurrency,
            rate_orders=orders,
            rate_ms=span_ms,
            budget_usd_micros=held.limit_usd_micros,
            spent_usd_micros=held.spent_usd_micros,
        )
        return _show_limits(now, as_json=args.json)

    given = (args.concurrency, args.rate, args.budget_usd)
    return on_queue(set, args, may_make=any(one is not None for one in given))


def _show_limits(now: QueueLimits, *, as_json: bool) -> int:
    if as_json:
        streams.write_record(now)
        return 0
    rate = "no limit" if now.rate_ms is None else f"{now.rate_orders} in {now.rate_ms / 1000:g} s"
    budget = "no limit" if now.budget_usd_micros is None else f"of {_usd(now.budget_usd_micros)}"
    streams.write(f"label        {now.label}\nconcurrency  {now.concurrency or 'no limit'}\n")
    streams.write(f"rate         {rate}\nbudget       {_usd(now.spent_usd_micros)} spent, {budget}\n")
    return 0


def _limits_of(args: Args) -> tuple[int | None, tuple[int, int] | None, int | None]:
    """Return concurrency, rate and budget of the options; None for no limit. Raises ConfigError `usage_invalid`."""
    concurrency, rate = _number(args.concurrency, "--concurrency", int), _rate(args.rate)
    is_money = _number(args.budget_usd, "--budget-usd", float, least=1e-6) is not None
    return concurrency, rate, round(float(args.budget_usd) * 1_000_000) if is_money else None


def _usd(micros: int) -> str:
    """Format an amount with all its decimal places, at least two."""
    digits = f"${micros / 1e6:.6f}"
    return digits[:-4] + digits[-4:].rstrip("0")


def _number(text: str | None, name: str, kind: type[Any], least: float = 1e-3) -> Any:
    """Return a number from `least` on, or None for `off` and without a value. Raises ConfigError `usage_invalid`."""
    if text is None or text == "off":
        return None
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not least <= number < (1 << 31):
        raise wrong_words(f"{name} {text} is not a limit", "give a number over 0, or `off` to remove the limit")
    return number


def _rate(text: str | None) -> tuple[int, int] | None:
    if text is None or text == "off":
        return None
    count, _, seconds = text.partition("/")
    try:
        most, span_s = _number(count, "--rate", int), _number(seconds, "--rate", float)
    except ConfigError:
        most = span_s = None
    if most is None or span_s is None:
        hint = "give N/S (N orders in S seconds), for example 10/60, or `off` to remove the limit"
        raise wrong_words(f"--rate {text} is not a rate", hint)
    return most, round(float(seconds) * 1000)
