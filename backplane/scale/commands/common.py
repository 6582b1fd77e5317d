"""Shared parts of the `queue` commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from backplane import config
from backplane.cli import code_of, streams
from backplane.cli.command import Args, open_store, wrong_words
from backplane.cli.ended import patch_line
from backplane.receipts.outcomes import failure_of
from backplane.scale.commands.waits import HoldReason, held
from backplane.scale.engine import LISTED_MAX, Status, check_label, check_priority
from backplane.scale.orders import keep
from backplane.scale.place import QueuePlace
from backplane.view.figures import elapsed
from backplane.view.findings import outcome_words, remarks

if TYPE_CHECKING:
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Batch, Job, OrderResult

HELD_S: Final = 3.0
"""Seconds without an event after which a follower prints the reason; a heartbeat comes every 2 s."""
END_S: Final = 0.1
"""Seconds between two polls for the result, which is stored shortly after the last event."""


def find_queue(args: Args) -> QueuePlace:
    """Return the queue that these options name.

    Raises:
        ConfigError: `config_invalid`: an invalid label or priority, or as `QueuePlace`.
    """
    place = QueuePlace(args.engine, getattr(args, "content", None))
    if getattr(args, "label", None) is not None:
        check_label(args.label)
    check_priority(getattr(args, "priority", None))
    return place


@contextmanager
def opened(place: QueuePlace, *, may_make: bool = True, **settings: float) -> Iterator[DurableEngine]:
    """Open a queue; write a line to stderr if it is new. Raises as `QueuePlace.open`."""
    engine = place.open(may_make=may_make, **settings)
    try:
        if place.is_new:
            streams.note(f"created the queue {engine.url.removeprefix('sqlite:///')}")
        yield engine
    finally:
        engine.close()


@contextmanager
def opened_order(args: Args) -> Iterator[tuple[DurableEngine, QueuePlace, str]]:
    """Open the queue that the options name; yield it with its place and the id of the order."""
    place = find_queue(args)
    with opened(place, may_make=False) as engine:
        yield engine, place, engine.find(args.order)


def within(args: Args, name: str, least: float, most: float = LISTED_MAX) -> None:
    """Raise ConfigError `usage_invalid` if an option's number is outside these bounds, or no number."""
    value = getattr(args, name)
    if value is not None and not least <= value <= most:
        raise wrong_words(f"--{name} {value:g} is out of range", f"give a number from {least:g} to {most:g}")


class QueuedOrder(msgspec.Struct, frozen=True):
    """An order's state; after its end also the outcome in its receipt, which is then stored on this machine."""

    order: Status
    holds: HoldReason | None
    """Why the order has not ended; None after its end."""
    outcome: str | None = None
    run_id: str | None = None
    receipt_sha256: str | None = None


def wait_for(engine: DurableEngine, order_id: str, each: Callable[[Batch], object] = lambda _: None) -> OrderResult:
    """Wait for an order's end; write to stderr what it waits for, and the next commands if the user stops the wait.

    Args:
        each: called with the events, past ones first.
    """
    known = None
    try:
        for batch in engine.batches(order_id, wait_s=HELD_S):
            if batch is not None:
                each(batch)
                continue
            found = held(engine, engine.status(order_id))
            if found.kind != "nothing" and (words := f"{found.verdict}: {found.fact}") != known:
                streams.note(words)
                known = words
        while (result := engine.result(order_id)) is None:
            time.sleep(END_S)
    except KeyboardInterrupt:
        show = f"backplane queue show {order_id}"
        streams.note(f"the order continues: `{show}` shows it, `backplane queue cancel {order_id}` ends it")
        raise
    return result


def bring_home(job: Job, result: OrderResult, content: Contents, root: str = "", status: Status | None = None) -> int:
    """Store an order's receipt, print the outcome, and return the run's exit code.

    Args:
        root: the folder to apply the patch to; empty if unknown.
        status: the order's state, to print JSON; None prints text.
    """
    row = keep(config.home(os.environ), job, result, content, root)
    with open_store() as store:
        receipt = store.load(row.run_id)
        if status is not None:
            streams.write_record(QueuedOrder(status, None, row.outcome, row.run_id, row.sha256))
        else:
            patch = patch_line(receipt, store.patch(row), root or "DIR")
            words = outcome_words(row.outcome, receipt.findings)
            tries = f"  attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
            lines = (f"{words}{tries}", f"run {row.run_id}  receipt {row.sha256}", patch)
            streams.write("\n".join(filter(None, lines)) + "\n")
        if (failure := failure_of(receipt)) is not None:
            streams.error(failure)
        for line in remarks(receipt.meta.run_id, receipt.outcome, receipt.backplane):
            streams.note(line)
        return code_of(receipt)


def order_line(status: Status) -> str:
    is_cancelled = status.cancelled is not None and status.state in ("waiting", "running")
    state = "limited" if status.limited_ms is not None else status.outcome or status.state
    word = "cancelling" if is_cancelled else state
    attempts = f"attempt {len(status.attempts)}" if status.attempts else ""
    age = elapsed(status.waiting_ms // 1000)
    return streams.one_line(f"{status.order_id}  {word:<10}  {status.label}  {age}  {attempts}".rstrip())
