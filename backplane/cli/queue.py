"""`submit`, `queue`, `worker`: the same orders on many machines. What an engine is lives in `backplane.scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_requirements, add_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from backplane.receipts import ReceiptRow
    from backplane.scale.content import ContentStore
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Result, Status

ACTIONS: Final = ("list", "show", "cancel", "events", "status")
_ORDER: Final = "the order's id, as `submit` printed it"


def parser(name: str) -> Parser:
    """The options of `submit`, `queue` or `worker`."""
    return {"submit": _submit_parser, "queue": _queue_parser, "worker": _worker_parser}[name]()


def _submit_parser() -> Parser:
    about = "Put a work order into a queue; its id is printed, and a worker on any machine runs it."
    example = """
backplane submit "make test" --backend shell --root ~/project
backplane submit --order order.json --engine postgresql://me@db/work --content /mnt/content
"""
    made = Parser("backplane submit", about, example, _submit)
    made.usage = "backplane submit [options] (TASK | --order FILE)"
    add_task(made, or_order=True)
    add_config(made)
    _add_engine(made)
    queue = made.add_argument_group("the queue").add_argument
    queue("--label", metavar="L", default="default", help="which workers may take it (default)")
    queue("--priority", metavar="N", type=int, help="1 goes first; without one before all that have one")
    queue("--on-lost-worker", choices=("rerun", "fail"), help="when its worker dies: once more, or a failed receipt")
    queue("--wait", action="store_true", help="wait for its end and keep its receipt")
    queue("--with-ignored", action="store_true", help="take files along that git ignores")
    queue("--secret", metavar="NAME", action="append", default=[], help="a variable that the worker gives the agent")
    who = made.add_argument_group("who does it")
    who.add_argument("-b", "--backend", metavar="NAME", help="a backend of the worker's")
    add_requirements(who, "the model it should use")
    where = made.add_argument_group("the workspace").add_argument
    where("--root", metavar="DIR", help="folder whose copy travels (.)")
    where("--include", metavar="GLOB", action="append", default=[], help="only these files")
    where("--exclude", metavar="GLOB", action="append", default=[], help="not these files")
    where("--context", metavar="FILE", action="append", default=[], help="a file it should look at")
    may = made.add_argument_group("what it may do").add_argument
    may("--policy", metavar="FILE", help="policy as JSON, or `default`, `strict` or `ci`, which are shipped")
    may("--allow-tool", metavar="T", action="append", default=[], help="only these tools")
    may("--deny-tool", metavar="T", action="append", default=[], help="not these tools")
    may("--lenient", action="store_true", help="take a stranger's order though some of its members are unknown")
    may("--isolation", choices=("required", "best_effort", "off"), help="keep it inside its workspace (best_effort)")
    may("--param", metavar="KEY=JSON", action="append", default=[], help="a vendor's setting; a.b=1 nests")
    limits = made.add_argument_group("limits").add_argument
    limits("--max-turns", metavar="N", type=int, help="turns of the model")
    limits("--max-budget-usd", metavar="X", type=float, help="money, as far as the backend counts it")
    # What `order.build` reads of a `run`, and has no meaning in a queue.
    made.set_defaults(mode=None, lane=None, env=[], env_file=None, checkpoints=False, pure=False)
    return made


def _queue_parser() -> Parser:
    about = "Look into a queue, or end one of its orders. `show` keeps a done order's receipt and patch here, verified."
    example = "backplane queue list\nbackplane queue show ORDER && backplane why last"
    made = Parser("backplane queue", about, example, _queue)
    made.add_argument("action", metavar="|".join(ACTIONS), choices=ACTIONS, help="what to do")
    made.add_argument("order", nargs="?", metavar="ORDER", help=_ORDER)
    made.add_argument("--follow", action="store_true", help="with `events`: wait for more until the order has ended")
    made.add_argument("--after", metavar="CURSOR", type=int, default=0, help="with `events`: only those after this one")
    made.add_argument("--reason", metavar="WHY", default="cancelled", help="with `cancel`: kept in the receipt")
    made.add_argument("--limit", metavar="N", type=int, default=50, help="with `list`: the newest N (50)")
    add_config(made)
    _add_engine(made)
    return made


def _worker_parser() -> Parser:
    about = (
        "Take orders of a queue and run them here, until a signal: then no more are taken, and those that run are "
        "waited for; a second signal leaves them to the other workers."
    )
    made = Parser("backplane worker", about, "backplane worker --slots 4 --label gpu", _worker)
    made.add_argument(
        "--slots", metavar="N", type=int, default=1, help="orders at once (1); the label's last word counts"
    )
    made.add_argument("--label", metavar="L", default="default", help="which orders to take (default)")
    add_config(made)
    _add_engine(made)
    made.add_argument(
        "--lease", metavar="S", type=float, help="seconds without a sign after which a worker is dead (20)"
    )
    made.add_argument("--poll", metavar="S", type=float, help="seconds between two looks for orders (1)")
    return made


def _add_engine(made: Parser) -> None:
    made.add_argument(
        "--engine", metavar="URL", help="sqlite:///FILE or postgresql://… (a file in the state folder of this user)"
    )
    made.add_argument(
        "--content", metavar="DIR", help="folder that submitters and workers share (beside the SQLite file)"
    )


# What all of them need ------------------------------------------------------------------------------------------------


def _open(options: Options) -> tuple[DurableEngine, ContentStore, Path]:
    """The engine, the content store and the state folder.

    Raises:
        ConfigError: `config_invalid`: no such kind of engine, the extra is not installed, no content folder.
    """
    import os
    from pathlib import Path

    from backplane import config
    from backplane.errors import ConfigError
    from backplane.scale.content import ContentStore

    home = config.home(os.environ)
    url = options.engine or f"sqlite:///{home / 'queue.sqlite'}"
    if not url.startswith(("sqlite:///", "postgresql://")):
        fact = f"{url.partition(':')[0][:40]!r} is no kind of engine"
        raise ConfigError("config_invalid", fact, hint="sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
    folder = options.content
    if folder is None and url.startswith("sqlite"):
        folder = f"{url.removeprefix('sqlite:///')}.content"
    if folder is None:
        fact = "an engine on a server needs a content folder that all machines share"
        raise ConfigError("config_invalid", fact, hint="--content DIR, the same files for submitters and workers")
    try:
        from backplane.scale.durable import DurableEngine
    except ImportError as error:
        fact = f"the queue's engine is not installed ({error.name})"
        raise ConfigError("config_invalid", fact, hint="pip install 'backplane[scale]'") from error
    given = {"lease_s": getattr(options, "lease", None), "poll_s": getattr(options, "poll", None)}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "lease_s" in settings:
        settings["beat_s"] = settings["lease_s"] / 10
    return DurableEngine(url, **settings), ContentStore(Path(folder)), home


def _settings(options: Options) -> Any:
    import os
    from pathlib import Path

    from backplane import config

    return config.load(Path(options.config) if options.config else None, os.environ, streams.folder())


def _do(work: Callable[[], Awaitable[int]], engine: DurableEngine) -> int:
    import anyio

    try:
        return anyio.run(work)
    finally:
        engine.close()


# The commands ---------------------------------------------------------------------------------------------------------


def _submit(options: Options) -> int:
    import os

    import anyio.to_thread

    from backplane.cli import order
    from backplane.scale.orders import make_job
    from backplane.workspace import Quota

    settings, (engine, content, home) = _settings(options), _open(options)
    abp: dict[str, Any] = {}
    if options.secret:
        abp["secrets"] = options.secret
    if options.on_lost_worker is not None:
        abp["on_lost_worker"] = options.on_lost_worker
    work = order.build(options, dict(os.environ), streams.folder(), settings.policy, abp)
    limits = settings.limits
    quota = Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
    job = make_job(
        work, content, home, quota, backend=options.backend, label=options.label, ignored=options.with_ignored
    )

    async def submit() -> int:
        is_new = await engine.submit(job, priority=options.priority)
        streams.write(f"{job.order.id}\n")
        if not is_new:
            streams.complain("it was submitted before, and stays as it was\n")
        if not options.wait:
            return 0
        result = await engine.result(job.order.id)
        return await anyio.to_thread.run_sync(_kept, home, job.order.id, result, content)

    return _do(submit, engine)


def _kept(home: Path, order_id: str, result: Result, content: ContentStore) -> int:
    """Keep a result here, say so, and give the exit code of the run."""
    from backplane.receipts import Store
    from backplane.scale.orders import keep

    with Store.open(home) as store:
        row = keep(store, order_id, result, content)
    streams.write(_ended(row, result) + "\n")
    return {"complete": 0, "partial": 3}.get(row.outcome, 1)


def _ended(row: ReceiptRow, result: Result) -> str:
    tries = f"  attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
    return f"{row.outcome}{tries}\nrun {row.run_id}  receipt {row.sha256}"


def _queue(options: Options) -> int:
    from backplane.errors import ConfigError

    takes_order = options.action in ("show", "cancel", "events")
    if takes_order == (options.order is None):
        fact = f"`queue {options.action}` {'needs' if takes_order else 'takes no'} ORDER"
        raise ConfigError("config_invalid", fact, hint="backplane queue --help")
    engine, content, home = _open(options)
    doing = {"list": _list, "show": _show, "cancel": _cancel, "events": _events, "status": _status}[options.action]
    return _do(lambda: doing(options, engine, content, home), engine)


async def _list(options: Options, engine: DurableEngine, content: ContentStore, home: Path) -> int:
    for status in await engine.list(limit=options.limit):
        streams.write(_line(status) + "\n")
    return 0


def _line(status: Status) -> str:
    word = "cancelling" if status.cancelled and status.state in ("waiting", "running") else status.state
    attempts = f"attempt {len(status.attempts)}" if status.attempts else ""
    age = f"{status.waiting_ms // 1000} s"
    return streams.one_line(f"{status.order_id}  {word:<10}  {status.label}  {age}  {attempts}".rstrip())


async def _show(options: Options, engine: DurableEngine, content: ContentStore, home: Path) -> int:
    import anyio.to_thread

    status = await engine.status(options.order)
    streams.write(_line(status) + "\n")
    if status.state == "broken":
        streams.write(f"{streams.one_line(status.error or '')}\n")
        return 1
    if status.state != "done":
        return 0
    result = await engine.result(options.order)
    return await anyio.to_thread.run_sync(_kept, home, options.order, result, content)


async def _cancel(options: Options, engine: DurableEngine, content: ContentStore, home: Path) -> int:
    await engine.cancel(options.order, options.reason)
    return 0


async def _events(options: Options, engine: DurableEngine, content: ContentStore, home: Path) -> int:
    from backplane.errors import ConfigError

    if not options.follow and (await engine.status(options.order)).state not in ("done", "broken"):
        raise ConfigError("config_invalid", "the order has not ended", hint="--follow waits for its events")
    async for event in engine.events(options.order, after=options.after):
        head = f'{{"attempt":"{event.attempt}","seq":{event.seq},"cursor":{event.cursor},'
        if event.superseded is not None:
            head += f'"superseded":"{event.superseded}",'
        streams.write_json(head.encode() + b'"event":' + event.record.rstrip() + b"}\n")
    return 0


async def _status(options: Options, engine: DurableEngine, content: ContentStore, home: Path) -> int:
    orders, workers = await engine.list(limit=10_000), await engine.workers()
    for state in ("waiting", "running", "done", "broken"):
        ages = [status.waiting_ms // 1000 for status in orders if status.state == state]
        oldest = f"  oldest {max(ages)} s" if ages and state in ("waiting", "running") else ""
        streams.write(f"{state:<8} {len(ages)}{oldest}\n")
    for worker in workers:
        beat = f"{worker.slots} slots  beat {worker.age_ms / 1000:.1f} s ago"
        streams.write(streams.one_line(f"worker   {worker.id}  {worker.label}  {beat}") + "\n")
    return 0


def _worker(options: Options) -> int:
    import os

    import anyio

    from backplane.errors import ConfigError
    from backplane.runtime.plane import ControlPlane
    from backplane.scale.runner import Runner

    if not 1 <= options.slots <= 1024:
        raise ConfigError("config_invalid", f"--slots {options.slots}", hint="1 to 1024")
    streams.require_descriptors()
    settings, (engine, content, home) = _settings(options), _open(options)

    async def work() -> int:
        async with ControlPlane(settings, home, dict(os.environ)) as plane, anyio.create_task_group() as tasks:
            with anyio.CancelScope() as taking:
                tasks.start_soon(_end_on_signal, taking)
                await engine.serve(Runner(plane, content), slots=options.slots, label=options.label)
            tasks.cancel_scope.cancel()
        return 0

    return _do(work, engine)


async def _end_on_signal(taking: Any) -> None:
    """The first signal drains; the second leaves the orders to the others, as our death ends their hosts."""
    import os
    import signal

    import anyio

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for _ in received:
            if taking.cancel_called:
                os._exit(130)
            streams.complain("no more orders are taken; waiting for those that run\n")
            taking.cancel()
