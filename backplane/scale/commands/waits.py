"""Explains why an order has not ended yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backplane.cli import streams
from backplane.scale.engine import LISTED_MAX, Status
from backplane.scale.orders import open_asks
from backplane.view.figures import elapsed

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine


class HoldReason(msgspec.Struct, frozen=True):
    """The reason why an order has not ended yet, and the next step."""

    kind: str
    """Kind of the reason, one of those in `view/why_kinds`."""
    verdict: str
    fact: str
    step: str


def held(engine: DurableEngine, status: Status) -> HoldReason:
    """Return why an order has not ended: the queue, a limit, a dead worker, a cancel, an open question, or work."""
    follow = f"backplane queue events {status.order_id} --follow, or wait"
    start = f"backplane queue worker --label {status.label}"
    cancelled = f"it was cancelled ({status.cancelled}), and ends" if status.cancelled is not None else ""
    if status.state == "waiting" and cancelled:
        return HoldReason("queued", f"{cancelled} once a worker takes it", _why_it_waits(engine, status), start)
    if status.limited_ms is not None:
        fact = f"it may begin again in {elapsed(status.limited_ms // 1000)}"
        return HoldReason("limit_waits", "it waits for a limit of the model's service, and takes no slot", fact, follow)
    if status.state == "waiting":
        return HoldReason("queued", "it waits in the queue for a worker", _why_it_waits(engine, status), follow)
    alive = [one for one in engine.ledger.workers() if one.age_ms <= engine.ledger.lease_ms]
    if all(one.id != status.worker for one in alive):
        has_others = any(one.label == status.label for one in alive)
        takes = (
            "another worker takes the order over soon" if has_others else f"no other worker runs; start one: {start}"
        )
        fact = f"{status.worker} sent no heartbeat for its lease of {engine.lease_s:g} s; {takes}"
        return HoldReason("interrupted", "its worker is dead", fact, follow if has_others else start)
    if cancelled:
        fact = f"{status.worker} runs it, and sees the cancel at its next heartbeat"
        return HoldReason("queued", f"{cancelled} soon", fact, follow)
    asks = open_asks(engine, status) if engine.job(status.order_id).asks else {}
    for id, ask in asks.items():
        words = " --text WORDS" if ask.kind == "input" else ""
        kind = "question_waits" if ask.kind == "input" else "approval_waits"
        step = f"backplane queue answer {status.order_id} {id} allow{words}, or deny"
        return HoldReason(kind, "it waits for your answer", ask.message, step)
    fact = f"{status.worker} runs it; backplane queue events {status.order_id} --follow shows it"
    return HoldReason("nothing", "all is well: a worker runs it", fact, follow)


def _why_it_waits(engine: DurableEngine, status: Status) -> str:
    """Return why no worker has taken the order yet."""
    workers = [one for one in engine.ledger.workers() if one.label == status.label]
    alive = [worker for worker in workers if worker.age_ms <= engine.ledger.lease_ms]
    if not alive:
        return f"no worker with the label {status.label} runs; start one: backplane queue worker --label {status.label}"
    limits, slots = engine.limits(status.label), sum(worker.slots for worker in alive)
    running = len(engine.list(limit=LISTED_MAX, state="running", label=status.label))
    most = f", {limits.concurrency} orders at once" if limits.concurrency is not None else ""
    rate = f", {limits.rate_orders} begin in {limits.rate_ms / 1000:g} s" if limits.rate_ms is not None else ""
    bounds = f"; limits of the label: {(most + rate).lstrip(', ')}" if most or rate else ""
    return f"{running} orders run in the {slots} slots of {streams.count(len(alive), 'worker')}{bounds}"
