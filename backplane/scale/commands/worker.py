"""`queue worker`: take orders from a queue and run them here."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import anyio

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings
from backplane.contract import canonical
from backplane.runtime.plane import ControlPlane
from backplane.scale.commands.common import find_queue, opened, within
from backplane.scale.runner import Runner

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine

LEASE_S_MIN: Final = 1.0
"""Shortest lease in seconds; each of its ten heartbeats is a transaction."""
POLL_S_MIN: Final = 0.05
SECONDS_MAX: Final = 3600.0
SECONDS_CHARS: Final = len("2026-01-01T00:00:00")
"""Characters of a timestamp up to its seconds."""

HELP = """Take orders from a queue and run them on this machine. After a signal, the worker takes no more orders and
waits for the running ones to end. After a second signal, it ends at once and other workers take over its orders."""
EXAMPLE = "backplane queue worker --slots 4 --label gpu"


def options(p: Parser) -> None:
    add.value(p, "--slots", metavar="N", type=int, default=1, help="run up to N orders at once (default: 1)")
    add.value(p, "--label", metavar="LABEL", default="default", help="take orders with this label (default: default)")
    add.config(p)
    add.queue(p, content=True)
    add.value(
        p, "--lease", metavar="TIME", type=add.seconds,
        help="let other workers take over this worker's orders after TIME without a heartbeat (default: 20s)",
    )  # fmt: skip
    add.value(p, "--poll", metavar="TIME", type=add.seconds, help="check the queue for orders every TIME (default: 1s)")


def run(args: Args) -> int:
    within(args, "slots", 1, 1024)
    within(args, "lease", LEASE_S_MIN, SECONDS_MAX)
    within(args, "poll", POLL_S_MIN, SECONDS_MAX)
    place = find_queue(args)
    settings, content = load_settings(args), place.contents()
    given = {"lease_s": args.lease, "beat_s": args.lease and args.lease / 10, "poll_s": args.poll}
    with opened(place, **{name: value for name, value in given.items() if value is not None}) as engine:
        anyio.run(_work, engine, content, settings, args.slots, args.label)
    return 0


async def _work(engine: DurableEngine, content: Contents, settings: Settings, slots: int, label: str) -> None:
    from backplane.scale.worker import serve

    plane = ControlPlane(settings, config.home(os.environ), dict(os.environ))
    async with plane, anyio.create_task_group() as tasks:
        with anyio.CancelScope() as taking:
            tasks.start_soon(_end_on_signal, taking)
            end = "on Ctrl-C or SIGTERM the worker takes no more orders, and stops when its orders have ended"
            streams.note(f"taking orders with the label {label}, {streams.count(slots, 'slot')}; {end}")
            with _gauges(plane, engine, label):
                await serve(engine, Runner(plane, content, _log), slots=slots, label=label, say=_log)
        tasks.cancel_scope.cancel()


def _gauges(plane: ControlPlane, engine: DurableEngine, label: str) -> AbstractContextManager[None]:
    """Send the queue's depth to a collector while the block runs, if the environment names a collector."""
    if plane.sender is None:
        return nullcontext()
    from backplane.telemetry.export import sending_queue

    return sending_queue(engine.depths, label)


def _log(text: str) -> None:
    """Write a line of a worker's log, with the time in UTC."""
    at = canonical.timestamp_at(time.time_ns())
    streams.note(f"{at[:SECONDS_CHARS]}Z  {text}")


async def _end_on_signal(taking: Any) -> None:
    """Drain at the first signal; at the second, end this process and so its hosts: other workers take the orders."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            if taking.cancel_called:
                os._exit(128 + number)
            streams.complain("taking no more orders; waiting for the running orders to end\n")
            taking.cancel()
