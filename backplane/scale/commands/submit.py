"""`queue submit`: put a work order into a queue."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from backplane import config
from backplane.cli import options as add
from backplane.cli import order, streams
from backplane.cli.command import Args, Parser, load_settings, wrong, wrong_words
from backplane.runtime.faults import check_whole
from backplane.runtime.place import quota_of
from backplane.scale.commands.common import bring_home, find_queue, opened, wait_for
from backplane.scale.orders import Packer, make_job

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.contract.work import WorkOrder
    from backplane.scale.engine import Job

HELP = "Put a work order into a queue, and print its id. A worker on any machine runs it."
EXAMPLE = """
backplane queue submit "make test" --backend shell --root ~/project
backplane queue submit --order order.json --engine postgresql://me@db/work --content /mnt/content
"""


def options(p: Parser) -> None:
    add.task_or_order(p)
    add.config(p)
    queue = p.add_argument_group("the queue")
    add.queue(queue, content=True)
    add.value(
        queue,
        "--label",
        metavar="LABEL",
        default="default",
        help="label of the workers that may take the order (default: default)",
    )
    add.priority(queue)
    queue.add_argument(
        "--on-lost-worker",
        choices=("rerun", "fail"),
        help="if the worker dies, rerun the order or end it as failed (default: rerun only without network and MCP)",
    )
    add.flag(queue, "--asks", help="let requests for approval wait until `queue answer` answers them")
    add.flag(queue, "--wait", help="wait until the order ends, and store its receipt")
    add.value(queue, "--jsonl", metavar="FILE", help="submit the orders in FILE, one JSON object per line; - for stdin")
    add.flag(queue, "--with-ignored", help="also send the files that git ignores")
    add.many(queue, "--secret", metavar="NAME", help="pass the environment variable NAME of the worker to the agent")
    work = p.add_argument_group("the order")
    add.value(work, "-b", "--backend", metavar="NAME", help="use this backend on the worker's machine")
    add.model(work)
    add.root(work)
    add.files(work)
    add.bounds(work)
    p.set_defaults(in_place=False, apply=False, env=[], image=[], checkpoints=False)


def run(args: Args) -> int:
    place = find_queue(args)
    settings = load_settings(args)
    packer = Packer(place.contents(), config.home(os.environ), quota_of(settings.limits))
    if args.jsonl is not None and (args.wait or args.task is not None or args.order is not None):
        raise wrong_words(
            "--jsonl cannot be combined with TASK, --order or --wait", "leave them out; `queue list` shows the orders"
        )
    given = _lines_of(args) if args.jsonl is not None else [None]
    jobs = [_job_of(args, each, settings, packer) for each in given]
    with opened(place) as engine:  # Last, so that a wrong order is refused without waiting for the engine.
        for _, job in jobs:
            is_new = engine.submit(job, priority=args.priority)
            streams.write(f"{job.order.id}\n")
            if not is_new:
                streams.complain(f"{job.order.id} was submitted before; the first order is kept\n")
        if not args.wait:
            return 0
        ((root, job),) = jobs
        return bring_home(job, wait_for(engine, job.order.id), packer.content, root)


def _lines_of(args: Args) -> list[WorkOrder]:
    """Read a file of orders, one per line. Raises ConfigError `config_invalid`, before any of them is submitted."""
    data, source = streams.read_input(args.jsonl), streams.source(args.jsonl)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise wrong(f"{source} has no work order", "write one work order per line, as JSON")
    return [order.read_order(line, f"{source}, line {number}", lenient=args.lenient) for number, line in lines]


def _job_of(args: Args, given: WorkOrder | None, settings: Settings, packer: Packer) -> tuple[str, Job]:
    """Make a job of an order; return the folder for its patch, and the job.

    Args:
        given: None reads the order that the options name.
    """
    abp: dict[str, Any] = {"secrets": args.secret or None, "on_lost_worker": args.on_lost_worker}
    built = order.build(args, dict(os.environ), streams.folder(), settings.policy, given)
    work = order.with_settings(built, abp)
    check_whole(work)
    job = make_job(work, packer, backend=args.backend, label=args.label, ignored=args.with_ignored, asks=args.asks)
    order.say_without_effect(work)
    return work.workspace.root, job
