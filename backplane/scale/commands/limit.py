"""`queue limit`: show or set the limits of a label."""

from __future__ import annotations

from typing import Any

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong_words
from backplane.scale.commands.common import find_queue, opened
from backplane.scale.engine import QueueLimits

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


def run(args: Args) -> int:
    given = _given(args)
    with opened(find_queue(args), may_make=bool(given)) as engine:
        limits = engine.limits(args.label)
        if given:
            limits = msgspec.structs.replace(limits, **given)
            engine.set_limits(limits)
    if args.json:
        streams.write_record(limits)
    else:
        _show(limits)
    return 0


def _show(now: QueueLimits) -> None:
    rate = "no limit" if now.rate_ms is None else f"{now.rate_orders} in {now.rate_ms / 1000:g} s"
    budget = "no limit" if now.budget_usd_micros is None else f"of {_usd(now.budget_usd_micros)}"
    streams.write(f"label        {now.label}\nconcurrency  {now.concurrency or 'no limit'}\n")
    streams.write(f"rate         {rate}\nbudget       {_usd(now.spent_usd_micros)} spent, {budget}\n")


def _usd(micros: int) -> str:
    """Format an amount with all its decimal places, at least two."""
    digits = f"${micros / 1e6:.6f}"
    return digits[:-4] + digits[-4:].rstrip("0")


def _given(args: Args) -> dict[str, Any]:
    """Return the members of `QueueLimits` that the options set. Raises ConfigError `usage_invalid`."""
    given: dict[str, Any] = {}
    if args.concurrency is not None:
        given["concurrency"] = _scaled("--concurrency", args.concurrency)
    if args.budget_usd is not None:
        given["budget_usd_micros"] = _scaled("--budget-usd", args.budget_usd, 1_000_000)
    if args.rate is not None:
        count, _, seconds = ("off", "", "off") if args.rate == "off" else args.rate.partition("/")
        given |= {"rate_orders": _scaled("--rate", count), "rate_ms": _scaled("--rate", seconds, 1000)}
    return given


def _scaled(name: str, text: str, scale: int = 1) -> int | None:
    """Return a number times `scale` as an integer from 1 on; None for `off`. Raises ConfigError `usage_invalid`."""
    if text == "off":
        return None
    try:
        number = round((int if scale == 1 else float)(text) * scale)
    except (ValueError, OverflowError):
        number = 0
    if not 1 <= number < (1 << 31) * scale:
        hint = "give a number over 0 (for --rate N/S, as 10/60: N orders in S seconds), or `off` to remove the limit"
        raise wrong_words(f"{name} {text} is not a limit", hint)
    return number
