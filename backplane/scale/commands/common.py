"""Shared parts of the `queue` commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from backplane.cli import code_of, streams
from backplane.cli.command import Args, open_store, wrong, wrong_words
from backplane.cli.ended import patch_line
from backplane.receipts.database import ReceiptRow
from backplane.receipts.outcomes import failure_of
from backplane.scale.commands.waits import HoldReason, held
from backplane.scale.engine import Status, check_label, check_priority, unknown_order
from backplane.scale.orders import bring
from backplane.scale.place import LISTED_MAX, QueuePlace
from backplane.view.figures import elapsed
from backplane.view.findings import outcome_words, remarks

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Job, OrderResult

HELD_S: Final = 3.0
"""Seconds between two checks of a followed order; a heartbeat comes every 2 s, so its state is rarely out of date."""
ID_CHARS_MIN: Final = 4
"""Characters of an id that a search needs; fewer find nothing."""
ID_CHARS: Final = 36
"""Characters of a whole id."""


def find_queue(args: Args, *, may_make: bool = True) -> QueuePlace:
    """Return the queue that these options name.

    Raises:
        ConfigError: `config_invalid`: no such label or priority, or as `QueuePlace`.
    """
    place = QueuePlace(args.engine, getattr(args, "content", None), may_make=may_make)
    if getattr(args, "label", None) is not None:
        check_label(args.label)
    check_priority(getattr(args, "priority", None))
    return place


def open_queue(place: QueuePlace, **settings: float) -> DurableEngine:
    """Open a queue; write a line to stderr if it is new."""
    engine = place.open(**settings)
    if place.is_new:
        streams.note(f"created the queue {place.file}")
    return engine


def within(args: Args, name: str, least: float, most: float = float("inf")) -> None:
    """Raise ConfigError `usage_invalid` for an option whose number is outside these bounds, or none."""
    value = getattr(args, name, None)
    if value is not None and not least <= value <= most:
        more = f"give a number from {least:g} to {most:g}" if most < float("inf") else f"give at least {least:g}"
        raise wrong_words(f"--{name} {value:g} is out of range", more)


def do(work: Callable[[], Awaitable[int]], engine: DurableEngine) -> int:
    try:
        return anyio.run(work)
    finally:
        engine.close()


def on_queue(
    doing: Callable[[Args, DurableEngine, QueuePlace], Awaitable[int]],
    args: Args,
    empty: Callable[[], int] | None = None,
    *,
    may_make: bool = False,
) -> int:
    """Run a function on the queue that the options name.

    Args:
        empty: called instead if this user has no queue yet; None refuses.
        may_make: make a new queue if there is none.
    """
    within(args, "keep", 0, LISTED_MAX)
    within(args, "limit", 1, LISTED_MAX)
    within(args, "after", 0)
    place = find_queue(args, may_make=may_make)
    if not place.is_new or may_make:
        engine = open_queue(place)

        async def look() -> int:
            if getattr(args, "order", None) is not None:
                args.order = await order_id(engine, args.order)
            return await doing(args, engine, place)

        return do(look, engine)
    if empty is None:
        raise place.none_there()
    return empty()


async def order_id(engine: DurableEngine, name: str) -> str:
    """Return the id of the order, among the newest `LISTED_MAX`, whose id begins with this name.

    Raises:
        ConfigError: `config_invalid`, no id or several ids begin with it.
    """
    found = [name] if len(name) == ID_CHARS else []
    if ID_CHARS_MIN <= len(name) < ID_CHARS:
        found = [one.order_id for one in await engine.list(limit=LISTED_MAX) if one.order_id.startswith(name)]
    if len(found) > 1:
        raise wrong(f"the ids of {len(found)} orders begin with {name!r}", "give more characters of the id")
    if not found:
        raise unknown_order(name)
    return found[0]


class QueuedOrder(msgspec.Struct, frozen=True):
    """An order's state; if it is done, its outcome by the receipt, which is then stored on this machine."""

    order: Status
    holds: HoldReason | None
    """Why it has not ended; None after its end."""
    outcome: str | None = None
    run_id: str | None = None
    receipt_sha256: str | None = None


@asynccontextmanager
async def followed(engine: DurableEngine, order_id: str) -> AsyncIterator[None]:
    """Write to stderr what a followed order waits for, and how to continue if the block ends early."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_print_waits, engine, order_id)
        try:
            yield
        except anyio.get_cancelled_exc_class():
            show = f"backplane queue show {order_id}"
            streams.note(f"the order continues: `{show}` shows it, `backplane queue cancel {order_id}` ends it")
            raise
        tasks.cancel_scope.cancel()


async def _print_waits(engine: DurableEngine, order_id: str) -> None:
    told = None
    while True:
        await anyio.sleep(HELD_S)  # First, as an order that a worker takes at once waits for nothing.
        status = await engine.status(order_id)
        if status.state in ("done", "broken"):
            return
        found = await held(engine, status)
        if found.kind != "nothing" and (words := f"{found.verdict}: {found.fact}") != told:
            streams.note(words)
            told = words


async def bring_home(
    engine: DurableEngine, job: Job, content: Contents, home: Path, root: str = "", status: Status | None = None
) -> int:
    """Wait for an order's end, store its receipt, print the outcome, and return the run's exit code.

    Args:
        root: the folder that its patch is for, where it is known.
        status: the order's, if JSON is wanted.
    """
    row, result = await bring(engine, job, content, home, root=root)
    with open_store() as store:
        receipt = store.load(row.run_id)
        if status is not None:
            streams.write_record(QueuedOrder(status, None, row.outcome, row.run_id, row.sha256))
        else:
            patch = patch_line(receipt, store.patch(row), root or "DIR")
            streams.write("\n".join(filter(None, (ended_words(row, result, receipt), patch))) + "\n")
        if (failure := failure_of(receipt)) is not None:
            streams.error(failure)
        for line in remarks(receipt.meta.run_id, receipt.outcome, receipt.backplane):
            streams.note(line)
        return code_of(receipt)


def ended_words(row: ReceiptRow, result: OrderResult, receipt: Receipt) -> str:
    tries = f"  attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
    return f"{outcome_words(row.outcome, receipt.findings)}{tries}\nrun {row.run_id}  receipt {row.sha256}"


def order_line(status: Status) -> str:
    is_cancelled = status.cancelled is not None and status.state in ("waiting", "running")
    word = "cancelling" if is_cancelled else status.outcome or status.state
    attempts = f"attempt {len(status.attempts)}" if status.attempts else ""
    age = elapsed(status.waiting_ms // 1000)
    return streams.one_line(f"{status.order_id}  {word:<10}  {status.label}  {age}  {attempts}".rstrip())
