"""`submit`, `queue`, `worker`: the same orders on many machines. What an engine is lives in `backplane.scale`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_requirements, add_task, scaled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from backplane.receipts.rows import ReceiptRow
    from backplane.runtime.door import Request
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Event, Job, OrderResult, Status

    Doing = Callable[[Options, DurableEngine], Awaitable[int]]

LISTED_MAX: Final = 10_000
"""Orders that `status` counts: more than that wait for a day."""
LEASE_S_MIN: Final = 1.0
"""Ten beats of a lease are ten transactions."""
POLL_S_MIN: Final = 0.05
SECONDS_MAX: Final = 3600.0
ID_CHARS_MIN: Final = 4
"""Of an order's id, where its beginning names it."""
_M_ARENA_MAX: Final = -8
"""An option of glibc's `mallopt`, from its malloc.h."""


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
    queue("--asks", action="store_true", help="what the policy leaves open waits for `queue answer`")
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
    made.set_defaults(mode=None, lane=None, env=[], env_file=None, checkpoints=False, pure=False, image=[])
    return made


def _queue_parser() -> Parser:
    about = "Look into a queue, or end one of its orders."
    example = """
backplane queue events ORDER --follow
backplane queue show ORDER && backplane why last
backplane queue limit --label gpu --concurrency 4 --rate 10/60 --budget-usd 50
"""
    made = Parser("backplane queue", about, example)
    commands = made.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)

    def add(what: str, about: str, example: str, doing: Doing, *, order: bool = False, content: bool = False) -> Parser:
        sentence = about[0].upper() + about[1:] + "."
        part: Parser = commands.add_parser(what, help=about, about=sentence, example=f"backplane queue {example}")
        part.set_defaults(call=partial(_queue, doing))
        if order:
            part.add_argument("order", metavar="ORDER", help="the order's id, as `submit` printed it")
        _add_engine(part, content=content)
        return part

    part = add("list", "list orders, the newest first", "list --label gpu", _list)
    part.add_argument("--limit", metavar="N", type=int, default=50, help="the newest N (50)")
    part.add_argument("--label", metavar="L", help="only orders with this one")
    about = "say where an order is; a done one's receipt and patch are kept here, verified"
    add("show", about, "show ORDER", _show, order=True, content=True)
    part = add("cancel", "end an order; it has a receipt all the same", "cancel ORDER", _cancel, order=True)
    part.add_argument("--reason", metavar="WHY", default="", help="kept in the receipt")
    about = "answer what an order asks that was submitted with --asks"
    part = add("answer", about, "answer ORDER ask-1 allow", _answer, order=True)
    part.add_argument("ask", metavar="ASK", help="the question's id, as its event has it")
    part.add_argument("decision", metavar="allow|deny", choices=("allow", "deny"), help="what you decide")
    part.add_argument("--reason", metavar="WHY", default="", help="kept in the receipt")
    part.add_argument("--text", metavar="WORDS", help="the answer to a question in words")
    part = add("events", "print the events of an order", "events ORDER --follow", _events, order=True, content=True)
    part.add_argument("--follow", action="store_true", help="wait for more until the end; `watch` shows it meanwhile")
    part.add_argument("--after", metavar="CURSOR", type=int, default=0, help="only those after this one")
    part.belong_to("--follow", "--content")
    part = add("status", "count orders, and name the workers", "status", _status)
    part.add_argument("--label", metavar="L", help="only orders and workers with this one")
    about = "show or set limits; `off` takes one away"
    part = add("limit", about, "limit --label gpu --concurrency 4 --rate 10/60 --budget-usd 50", _limit)
    part.add_argument("--label", metavar="L", default="default", help="whose orders (default)")
    part.add_argument("--concurrency", metavar="N", help="orders at once, over all workers of the label")
    part.add_argument("--rate", metavar="N/S", help="orders begun at most in so many seconds")
    part.add_argument("--budget-usd", metavar="X", help="what the whole queue may cost, all labels, from its beginning")
    part = add("prune", "remove all but the newest ended orders", "prune --keep 1000", _prune)
    part.add_argument("--keep", metavar="N", type=int, default=1000, help="the newest ended orders (1000)")
    return made


def _worker_parser() -> Parser:
    about = (
        "Take orders of a queue and run them here, until a signal: then no more are taken, and those that run are "
        "waited for; a second signal leaves them to the other workers."
    )
    made = Parser("backplane worker", about, "backplane worker --slots 4 --label gpu", _worker)
    made.add_argument("--slots", metavar="N", type=int, default=1, help="orders at once (1)")
    made.add_argument("--label", metavar="L", default="default", help="which orders to take (default)")
    add_config(made)
    _add_engine(made)
    made.add_argument(
        "--lease", metavar="S", type=float, help="seconds without a sign after which a worker is dead (20)"
    )
    made.add_argument("--poll", metavar="S", type=float, help="seconds between two looks for orders (1)")
    return made


def _add_engine(made: Parser, *, content: bool = True) -> None:
    made.add_argument(
        "--engine", metavar="URL", help="sqlite:///FILE or postgresql://… (a file in the state folder of this user)"
    )
    if content:
        made.add_argument(
            "--content",
            metavar="PLACE",
            help="folder or URL that submitters and workers share (beside the SQLite file)",
        )


# What all of them need ------------------------------------------------------------------------------------------------


def _url(options: Options) -> str:
    """The engine's URL, checked with what else is said of the queue; nothing is opened or loaded.

    Raises:
        ConfigError: `config_invalid`: no such engine, label or priority; the extra is missing.
    """
    from importlib.util import find_spec

    from backplane.errors import ConfigError
    from backplane.scale.engine import check_label, check_priority

    if find_spec("dbos") is None:
        fact = "the queue's engine is not installed (dbos)"
        raise ConfigError("config_invalid", fact, hint="pip install 'backplane[scale]'")
    if getattr(options, "label", None) is not None:
        check_label(options.label)
    check_priority(getattr(options, "priority", None))
    if options.engine is not None:
        _check_url(options.engine)
    return options.engine if options.engine is not None else f"sqlite:///{_home() / 'queue.sqlite'}"


def _home() -> Path:
    import os

    from backplane import config

    return config.home(os.environ)


def find_content(options: Options) -> Contents:
    """The content store that these options name; nothing is opened or loaded.

    Raises:
        ConfigError: `config_invalid`: as for the engine, or no such place.
    """
    import os

    from backplane.errors import ConfigError
    from backplane.scale.content import open_contents

    url, folder = _url(options), options.content
    if folder is None and url.startswith("sqlite"):
        folder = f"{url.removeprefix('sqlite:///')}.content"
    if folder is None:
        fact = "an engine on a server needs a place for contents that all machines share"
        raise ConfigError("config_invalid", fact, hint="--content DIR or URL, the same for submitters and workers")
    return open_contents(folder, os.environ)


def _check_url(url: str) -> None:
    from backplane.errors import ConfigError

    if not url.startswith(("sqlite:///", "postgresql://")):
        fact = f"{url.partition(':')[0][:40]!r} is no kind of engine"
        raise ConfigError("config_invalid", fact, hint="sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
    if url.startswith("sqlite") and not url.removeprefix("sqlite:///").strip("/"):
        raise ConfigError("config_invalid", f"{url!r} names no file", hint="sqlite:///FILE")


def _check_places(url: str, content: str | None, *, may_make: bool) -> None:
    """Refuse a mistyped place: a queue's file is made by `submit` and `worker` alone, and no folder above it is.

    Raises:
        ConfigError: `config_invalid`.
    """
    from pathlib import Path

    from backplane.errors import ConfigError

    folder = Path(content) if content is not None and "://" not in content else None
    if folder is not None and not folder.exists():
        _require_folder(folder.parent if may_make else folder, "--content")
    file = Path(url.removeprefix("sqlite:///").partition("?")[0]) if url.startswith("sqlite") else None
    if file is not None and not file.exists():
        if not may_make:
            fact = f"there is no queue at {streams.one_line(str(file))}"
            raise ConfigError("config_invalid", fact, hint="see --engine; `backplane submit` makes a new one")
        _require_folder(file.parent, "--engine")
        streams.complain(f"the queue {streams.one_line(str(file))} is new\n")


def _require_folder(folder: Path, option: str) -> None:
    from backplane.errors import ConfigError

    if not folder.is_dir():
        fact = f"there is no folder {streams.one_line(str(folder))}"
        raise ConfigError("config_invalid", fact, hint=f"see {option}, or make the folder")


def _within(name: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError `config_invalid` for a number outside these bounds, or none."""
    from backplane.errors import ConfigError

    if not least <= value <= most:
        raise ConfigError(
            "config_invalid",
            f"{name} {value:g}",
            hint=f"{least:g} to {most:g}" if most < float("inf") else f"{least:g} or more",
        )


def open_engine(options: Options, *, may_make: bool = True) -> DurableEngine:
    """The engine that these options name.

    Args:
        may_make: a queue's file that is not there is made.

    Raises:
        ConfigError: `config_invalid`: no such engine, label, priority, lease or place; the extra is missing.
    """
    url = _url(options)
    from backplane.scale.durable import DurableEngine

    for name, least in (("lease", LEASE_S_MIN), ("poll", POLL_S_MIN)):
        if getattr(options, name, None) is not None:
            _within(f"--{name}", getattr(options, name), least, SECONDS_MAX)
    given = {"lease_s": getattr(options, "lease", None), "poll_s": getattr(options, "poll", None)}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "lease_s" in settings:
        settings["beat_s"] = settings["lease_s"] / 10
    if may_make or options.engine is not None:
        _check_places(url, getattr(options, "content", None), may_make=may_make)
    return DurableEngine(url, **settings)


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

    from backplane.cli import order
    from backplane.scale.orders import make_job
    from backplane.workspace import Quota

    settings, content, engine, home = _settings(options), find_content(options), open_engine(options), _home()
    abp: dict[str, Any] = {}
    if options.secret:
        abp["secrets"] = options.secret
    if options.on_lost_worker is not None:
        abp["on_lost_worker"] = options.on_lost_worker
    work = order.with_settings(order.build(options, dict(os.environ), streams.folder(), settings.policy), abp)
    limits = settings.limits
    quota = Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
    job = make_job(
        work, content, home, quota, backend=options.backend, label=options.label, ignored=options.with_ignored,
        asks=options.asks,
    )  # fmt: skip

    order.say_without_effect(work)

    async def submit() -> int:
        is_new = await engine.submit(job, priority=options.priority)
        streams.write(f"{job.order.id}\n")
        if not is_new:
            streams.complain("it was submitted before, and stays as it was\n")
        if not options.wait:
            return 0
        return await _brought(engine, job, content, home, work.workspace.root)

    return _do(submit, engine)


async def _brought(engine: DurableEngine, job: Job, content: Contents, home: Path, root: str = "") -> int:
    """Keep an order's receipt here once it has ended, say so, and give the exit code of the run.

    Args:
        root: the folder that its patch is for, where it is known.
    """
    from backplane.cli.show import patch_lines
    from backplane.receipts.store import Store
    from backplane.scale.mirror import bring

    row, result = await bring(engine, job, content, home, root=root)
    with Store.open(home, readonly=True) as store:
        patch = patch_lines(store.load(row.run_id), store.patch(row), root or "DIR")
    streams.write("\n".join((_ended(row, result), *patch)) + "\n")
    return {"complete": 0, "partial": 3}.get(row.outcome, 1)


def _ended(row: ReceiptRow, result: OrderResult) -> str:
    tries = f"  attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
    return f"{row.outcome}{tries}\nrun {row.run_id}  receipt {row.sha256}"


def _queue(doing: Doing, options: Options) -> int:
    for name, least, most in (("keep", 0, LISTED_MAX), ("limit", 1, LISTED_MAX), ("after", 0, float("inf"))):
        if hasattr(options, name):
            _within(f"--{name}", getattr(options, name), least, most)
    engine = open_engine(options, may_make=False)
    return _do(lambda: doing(options, engine), engine)


async def _list(options: Options, engine: DurableEngine) -> int:
    streams.write_lines(map(_line, await engine.list(limit=options.limit, label=options.label)), "no orders")
    return 0


def _line(status: Status) -> str:
    word = "cancelling" if status.cancelled and status.state in ("waiting", "running") else status.state
    attempts = f"attempt {len(status.attempts)}" if status.attempts else ""
    age = f"{status.waiting_ms // 1000} s"
    return streams.one_line(f"{status.order_id}  {word:<10}  {status.label}  {age}  {attempts}".rstrip())


async def _show(options: Options, engine: DurableEngine) -> int:
    status = await engine.status(options.order)
    streams.write(_line(status) + "\n")
    if status.state == "broken":
        streams.write(f"{streams.one_line(status.error or '')}\n")
        return 1
    if status.state != "done":
        found = await held(engine, status)
        if found.kind != "nothing":
            streams.write(f"{streams.one_line(found.verdict)}: ")
        streams.write(f"{streams.one_line(found.fact)}\n")
        if found.kind in ("question_waits", "approval_waits"):
            streams.write(f"  {streams.one_line(found.step)}\n")
        return 0
    return await _brought(engine, await engine.job(options.order), find_content(options), _home())


class HoldReason(NamedTuple):
    """What an order that has not ended waits for, or that it is at work."""

    kind: str
    """As a diagnosis has it."""
    verdict: str
    fact: str
    step: str


async def held(engine: DurableEngine, status: Status) -> HoldReason:
    """What holds an order that has not ended: its worker, a question, the queue, and whether it was cancelled."""
    from backplane.scale.orders import open_asks

    follow = f"backplane queue events {status.order_id} --follow, or wait"
    if status.state != "running":
        waits = await _why_it_waits(engine, status)
        if status.cancelled is None:
            return HoldReason("queued", "it waits in the queue until a worker takes it", waits, follow)
        verdict = f"it was cancelled ({status.cancelled}), and ends once a worker takes it"
        return HoldReason("queued", verdict, waits, f"backplane worker --label {status.label}")
    workers = {worker.id: worker for worker in await engine.workers()}
    own, lease_ms = workers.get(status.worker or ""), engine.lease_s * 1000
    if own is None or own.age_ms > lease_ms:
        others = [one for one in workers.values() if one.label == status.label and one.age_ms <= lease_ms]
        beat = f"did not beat for {own.age_ms // 1000} s" if own is not None else "is not known any more"
        start = f"backplane worker --label {status.label}"
        takes = "another takes the order over within a moment" if others else f"no other is there: {start}"
        fact = f"{status.worker} {beat} (its lease is {engine.lease_s:g} s); {takes}"
        return HoldReason("interrupted", "its worker is dead", fact, follow if others else start)
    if status.cancelled is not None:
        verdict = f"it was cancelled ({status.cancelled}), and ends in order"
        return HoldReason(
            "queued", verdict, f"at work on {status.worker}, which hears of it with its next beat", follow
        )
    asks = await open_asks(engine, status) if (await engine.job(status.order_id)).asks else {}
    for id, ask in asks.items():
        words = " --text WORDS" if ask.kind == "input" else ""
        kind = "question_waits" if ask.kind == "input" else "approval_waits"
        step = f"backplane queue answer {status.order_id} {id} allow{words}, or deny"
        return HoldReason(kind, "it waits for your answer", ask.message, step)
    fact = f"at work on {status.worker}; backplane queue events {status.order_id} --follow shows it"
    return HoldReason("nothing", "nothing is wrong: a worker runs it", fact, follow)


async def _why_it_waits(engine: DurableEngine, status: Status) -> str:
    """What an order that no worker has taken waits for."""
    workers = [worker for worker in await engine.workers() if worker.label == status.label]
    alive = [worker for worker in workers if worker.age_ms <= engine.lease_s * 1000]
    if not alive:
        return f"no worker of the label {status.label} is there: backplane worker --label {status.label}"
    limits, slots = await engine.limits(status.label), sum(worker.slots for worker in alive)
    running = await engine.list(limit=LISTED_MAX, state="running", label=status.label)
    if limits.concurrency is not None and len(running) >= limits.concurrency:
        return f"the label's concurrency of {limits.concurrency} is used up (backplane queue limit)"
    if len(running) >= slots:
        return f"all {slots} slots of {len(alive)} workers are taken"
    rate = "" if limits.rate is None else f"; at most {limits.rate[0]} begin in {limits.rate[1] / 1000:g} s"
    return f"{slots - len(running)} of {slots} slots are free: it is its turn within a moment{rate}"


def look_up(name: str, url: str | None) -> tuple[Status, Job, HoldReason] | None:
    """The one order whose id begins so, and what it waits for; None where there is no queue, or none or several.

    Raises:
        ConfigError: `config_invalid`, no kind of engine.
    """
    import os
    from importlib.util import find_spec

    import anyio

    from backplane import config

    if url is not None:
        _check_url(url)
        _check_places(url, None, may_make=False)
    file = config.home_path(os.environ) / "queue.sqlite"
    if len(name) < ID_CHARS_MIN or (url is None and not file.is_file()) or find_spec("dbos") is None:
        return None
    from backplane.scale.durable import DurableEngine

    engine = DurableEngine(url or f"sqlite:///{file}")

    async def look() -> tuple[Status, Job, HoldReason] | None:
        named = [one for one in await engine.list(limit=LISTED_MAX) if one.order_id.startswith(name)]
        if len(named) != 1:
            return None
        return named[0], await engine.job(named[0].order_id), await held(engine, named[0])

    try:
        return anyio.run(look)
    finally:
        engine.close()


async def _cancel(options: Options, engine: DurableEngine) -> int:
    from backplane.runtime.door import CancelCommand

    return await _tell(options, engine, CancelCommand(reason=options.reason))


async def _answer(options: Options, engine: DurableEngine) -> int:
    from backplane.runtime.door import AnswerCommand

    asked = AnswerCommand(ask=options.ask, decision=options.decision, reason=options.reason, text=options.text)
    return await _tell(options, engine, asked)


async def _tell(options: Options, engine: DurableEngine, asked: Request) -> int:
    from backplane.scale.orders import tell

    streams.write(streams.one_line(await tell(engine, options.order, asked)) + "\n")
    return 0


async def _limit(options: Options, engine: DurableEngine) -> int:
    from backplane.scale.engine import LabelLimits

    concurrency, rate = _number(options.concurrency, "--concurrency", int), _rate(options.rate)
    is_money = _number(options.budget_usd, "--budget-usd", float) is not None
    budget = scaled(options.budget_usd, 1_000_000, "--budget-usd") if is_money else None
    limits = await engine.limits(options.label)
    if options.concurrency is not None or options.rate is not None:
        limits = LabelLimits(
            limits.concurrency if options.concurrency is None else concurrency,
            limits.rate if options.rate is None else rate,
        )
        await engine.set_limits(options.label, limits)
    if options.budget_usd is not None:
        await engine.set_budget(budget)
    now = await engine.budget()
    shown_rate = "no limit" if limits.rate is None else f"{limits.rate[0]} in {limits.rate[1] / 1000:g} s"
    shown_budget = "no limit" if now.limit_usd_micros is None else f"of {_usd(now.limit_usd_micros)}"
    streams.write(f"label        {options.label}\nconcurrency  {limits.concurrency or 'no limit'}\n")
    streams.write(f"rate         {shown_rate}\nbudget       {_usd(now.spent_usd_micros)} spent, {shown_budget}\n")
    return 0


def _usd(micros: int) -> str:
    """All of an amount, with two decimal places at least."""
    digits = f"${micros / 1e6:.6f}"
    return digits[:-4] + digits[-4:].rstrip("0")


def _number(text: str | None, name: str, kind: type[Any]) -> Any:
    """A positive number; None for none and for `off`. Raises ConfigError `config_invalid`."""
    import math

    from backplane.errors import ConfigError

    if text is None or text == "off":
        return None
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 < number < (1 << 31) or not math.isfinite(number):
        raise ConfigError("config_invalid", f"{name} {text}", hint="a number over 0, or off")
    return number


def _rate(text: str | None) -> tuple[int, int] | None:
    from backplane.errors import ConfigError

    if text is None or text == "off":
        return None
    count, _, seconds = text.partition("/")
    try:
        most, span_s = _number(count, "--rate", int), _number(seconds, "--rate", float)
    except ConfigError:
        most = span_s = None
    if most is None or span_s is None:
        raise ConfigError("config_invalid", f"--rate {text}", hint="for example 10/60: ten in a minute, or off")
    return most, scaled(seconds, 1000, "--rate")


async def _prune(options: Options, engine: DurableEngine) -> int:
    removed = await engine.prune(options.keep)
    streams.write(f"{removed} ended orders removed\n")
    return 0


async def _events(options: Options, engine: DurableEngine) -> int:
    from backplane.errors import ConfigError

    if not options.follow and (await engine.status(options.order)).state not in ("done", "broken"):
        raise ConfigError("config_invalid", "the order has not ended", hint="--follow waits for its events")
    if not options.follow or options.after:
        async for event in engine.events(options.order, after=options.after):
            await _write_event(event)
        return 0
    from backplane.scale.mirror import bring

    job = await engine.job(options.order)
    row, result = await bring(engine, job, find_content(options), _home(), _write_event)
    streams.complain(_ended(row, result) + "\n")
    return 0


async def _write_event(event: Event) -> None:
    head = f'{{"attempt":"{event.attempt}","seq":{event.seq},"cursor":{event.cursor},'
    if event.superseded is not None:
        head += f'"superseded":"{event.superseded}",'
    streams.write_json(head.encode() + b'"event":' + event.record.rstrip() + b"}\n")


async def _status(options: Options, engine: DurableEngine) -> int:
    orders = await engine.list(limit=LISTED_MAX, label=options.label)
    workers = [one for one in await engine.workers() if options.label in (None, one.label)]
    ended = sorted(status.ended_ms_ago for status in orders if status.ended_ms_ago is not None)
    for state in ("waiting", "running", "done", "broken"):
        ages = [status.waiting_ms // 1000 for status in orders if status.state == state]
        oldest = f"  oldest {max(ages)} s" if ages and state in ("waiting", "running") else ""
        streams.write(f"{state:<8} {len(ages)}{oldest}\n")
    within = ", ".join(f"{sum(ago <= 1000 * s for ago in ended)} in {s} s" for s in (60, 600, 3600))
    streams.write(f"ended    {within}\n")
    for worker in workers:
        beat = f"{worker.slots} slots  beat {worker.age_ms / 1000:.1f} s ago"
        streams.write(streams.one_line(f"worker   {worker.id}  {worker.label}  {beat}") + "\n")
    return 0


def _worker(options: Options) -> int:
    import os

    import anyio

    from backplane.runtime.plane import ControlPlane
    from backplane.scale.runner import Runner

    _within("--slots", options.slots, 1, 1024)
    streams.require_descriptors()
    _share_a_heap()
    settings, content, engine, home = _settings(options), find_content(options), open_engine(options), _home()

    async def work() -> int:
        async with ControlPlane(settings, home, dict(os.environ)) as plane, anyio.create_task_group() as tasks:
            with anyio.CancelScope() as taking:
                tasks.start_soon(_end_on_signal, taking)
                await engine.serve(Runner(plane, content), slots=options.slots, label=options.label)
            tasks.cancel_scope.cancel()
        return 0

    return _do(work, engine)


def _share_a_heap() -> None:
    """Have all threads take memory from one heap: of one each, as glibc would, much is held and not used."""
    import ctypes
    from contextlib import suppress

    with suppress(AttributeError, OSError):  # Another C library has no such option.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


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
