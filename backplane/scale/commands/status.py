"""`queue status`: count orders, and list the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.scale.commands.common import find_queue, opened
from backplane.scale.engine import LISTED_MAX, State, Status, Worker
from backplane.view.figures import ID_CHARS, elapsed

STATES: Final = get_args(State)

HELP = "Count the orders in each state, and list the workers."
EXAMPLE = "backplane queue status"


def options(p: Parser) -> None:
    add.queue(p)
    add.value(p, "--label", metavar="LABEL", help="count only orders and workers with this label")
    add.json(p, "the counts and workers as one JSON object", "cli_queue_status")


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of orders by state, and the registered workers. Ages count from the submission."""

    waiting: int
    running: int
    done: int
    broken: int
    oldest_waiting_ms: int | None
    oldest_running_ms: int | None
    ended_in_1_min: int
    ended_in_10_min: int
    ended_in_1_h: int
    workers: tuple[Worker, ...]


def run(args: Args) -> int:
    place = find_queue(args)
    orders: Sequence[Status] = ()
    workers: Sequence[Worker] = ()
    if not place.is_new or args.engine is not None:  # Otherwise, this user has no queue yet.
        with opened(place, may_make=False) as engine:
            orders = engine.list(limit=LISTED_MAX, label=args.label)
            workers = [one for one in engine.ledger.workers() if args.label in (None, one.label)]
    _show_counts(_counts(orders, workers), as_json=args.json)
    return 0


def _counts(orders: Sequence[Status], workers: Sequence[Worker]) -> QueueCounts:
    ages = {state: [one.waiting_ms for one in orders if one.state == state] for state in STATES}

    def running_on(worker: str) -> tuple[str, ...]:
        return tuple(one.order_id for one in orders if one.state == "running" and one.worker == worker)

    ended_ms = [one.ended_ms_ago for one in orders if one.ended_ms_ago is not None]
    return QueueCounts(
        **{state: len(found) for state, found in ages.items()},
        oldest_waiting_ms=max(ages["waiting"], default=None),
        oldest_running_ms=max(ages["running"], default=None),
        ended_in_1_min=sum(ago <= 60_000 for ago in ended_ms),
        ended_in_10_min=sum(ago <= 600_000 for ago in ended_ms),
        ended_in_1_h=sum(ago <= 3_600_000 for ago in ended_ms),
        workers=tuple(msgspec.structs.replace(worker, orders=running_on(worker.id)) for worker in workers),
    )


def _show_counts(found: QueueCounts, *, as_json: bool) -> None:
    if as_json:
        streams.write_record(found)
        return
    oldest = {"waiting": found.oldest_waiting_ms, "running": found.oldest_running_ms}
    for state in STATES:
        age = oldest.get(state)
        more = f"  oldest {elapsed(age // 1000)}" if age is not None else ""
        streams.write(f"{state:<8} {getattr(found, state)}{more}\n")
    within = f"{found.ended_in_1_min} in 60 s, {found.ended_in_10_min} in 600 s, {found.ended_in_1_h} in 3600 s"
    streams.write(f"ended    {within}\n")
    for worker in found.workers:
        beat = f"{worker.slots} slots  heartbeat {worker.age_ms / 1000:.1f} s ago"
        has = f"  runs {' '.join(order_id[:ID_CHARS] for order_id in worker.orders)}" if worker.orders else ""
        streams.write(streams.one_line(f"worker   {worker.id}  {worker.label}  {beat}{has}") + "\n")
