"""Explains why an order has not ended yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backplane.scale.engine import Status
from backplane.scale.orders import open_asks
from backplane.scale.place import LISTED_MAX
from backplane.view.figures import elapsed

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine


class HoldReason(msgspec.Struct, frozen=True):
    """The reason why an order has not ended yet, and the next step."""

    kind: str
    """Kind of the diagnosis, one of `view/why_kinds`."""
    verdict: str
    fact: str
    step: str


async def held(engine: DurableEngine, status: Status) -> HoldReason:
    """Return why an order has not ended: the queue, a dead worker, a cancel, an open question, or work."""
    follow = f"backplane queue events {status.order_id} --follow, or wait"
    if status.state != "running":
        if status.cancelled is None and status.limited_ms is not None:
            verdict = "it waits for a limit of the model's service, and takes no slot"
            return HoldReason(
                "limit_waits", verdict, f"it may begin again in {elapsed(status.limited_ms // 1000)}", follow
            )
        waits = await _why_it_waits(engine, status)
        if status.cancelled is None:
            return HoldReason("queued", "it waits in the queue for a worker", waits, follow)
        verdict = f"it was cancelled ({status.cancelled}), and ends once a worker takes it"
        return HoldReason("queued", verdict, waits, f"backplane queue worker --label {status.label}")
    workers = {worker.id: worker for worker in await engine.workers()}
    own, lease_ms = workers.get(status.worker or ""), engine.lease_s * 1000
    if own is None or own.age_ms > lease_ms:
        others = [one for one in workers.values() if one.label == status.label and one.age_ms <= lease_ms]
        beat = f"sent no heartbeat for {elapsed(own.age_ms // 1000)}" if own is not None else "is no longer registered"
        start = f"backplane queue worker --label {status.label}"
        takes = "another worker takes the order over soon" if others else f"no other worker runs; start one: {start}"
        fact = f"{status.worker} {beat} (its lease is {engine.lease_s:g} s); {takes}"
        return HoldReason("interrupted", "its worker is dead", fact, follow if others else start)
    if status.cancelled is not None:
        verdict = f"it was cancelled ({status.cancelled}), and ends soon"
        return HoldReason(
            "queued", verdict, f"{status.worker} runs it, and sees the cancel at its next heartbeat", follow
        )
    asks = await open_asks(engine, status) if (await engine.job(status.order_id)).asks else {}
    for id, ask in asks.items():
        words = " --text WORDS" if ask.kind == "input" else ""
        kind = "question_waits" if ask.kind == "input" else "approval_waits"
        step = f"backplane queue answer {status.order_id} {id} allow{words}, or deny"
        return HoldReason(kind, "it waits for your answer", ask.message, step)
    fact = f"{status.worker} runs it; backplane queue events {status.order_id} --follow shows it"
    return HoldReason("nothing", "all is well: a worker runs it", fact, follow)


async def _why_it_waits(engine: DurableEngine, status: Status) -> str:
    """Return why no worker has taken the order yet."""
    workers = [worker for worker in await engine.workers() if worker.label == status.label]
    alive = [worker for worker in workers if worker.age_ms <= engine.lease_s * 1000]
    if not alive:
        return f"no worker with the label {status.label} runs; start one: backplane queue worker --label {status.label}"
    limits, slots = await engine.limits(status.label), sum(worker.slots for worker in alive)
    running = await engine.list(limit=LISTED_MAX, state="running", label=status.label)
    if limits.concurrency is not None and len(running) >= limits.concurrency:
        return f"the label's limit of {limits.concurrency} orders at once is reached (backplane queue limit)"
    if len(running) >= slots:
        return f"all {slots} slots of {len(alive)} workers are taken"
    rate = "" if limits.rate is None else f"; at most {limits.rate[0]} begin in {limits.rate[1] / 1000:g} s"
    return f"{slots - len(running)} of {slots} slots are free: a worker takes it soon{rate}"
