"""`submit`, `queue`, `worker`: the same orders on many machines. What an engine is lives in `backplane.scale`."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import anyio
import anyio.to_thread
import msgspec

from backplane import config
from backplane.cli import code_of, order, streams
from backplane.cli.parser import Options, scaled
from backplane.cli.show import patch_lines, remarks_on
from backplane.cli.start import load_settings, open_store, wrong, wrong_words
from backplane.contract import canonical
from backplane.errors import ConfigError, install_hint
from backplane.receipts.build import failure_of
from backplane.receipts.database import ReceiptRow
from backplane.runtime.door import AnswerCommand, CancelCommand, Request
from backplane.scale.engine import LabelLimits, State, Status, Worker, check_label, check_priority, unknown_order
from backplane.view.figures import elapsed
from backplane.view.findings import outcome_words
from backplane.workspace import Quota

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.contract.receipt import Receipt
    from backplane.contract.work import WorkOrder
    from backplane.runtime.plane import ControlPlane, Run
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine
    from backplane.scale.engine import Attempt, Event, Job, OrderResult

LISTED_MAX: Final = 10_000
"""Orders that `status` counts: more than that wait for a day."""
STATES: Final = get_args(State)
LEASE_S_MIN: Final = 1.0
"""Ten beats of a lease are ten transactions."""
POLL_S_MIN: Final = 0.05
SECONDS_MAX: Final = 3600.0
HELD_S: Final = 3.0
"""Between two looks at what holds an order that is followed: a beat is 2 s, so what is told is rarely over."""
ID_CHARS_MIN: Final = 4
"""Of an order's id, where its beginning names it."""
ID_CHARS_SHOWN: Final = 8
"""Characters of an order's id in the list of a worker's orders."""
ID_CHARS: Final = 36
"""Of a whole one."""
CLOCK_MS_MAX: Final = 60_000
"""Largest difference of two clocks that is not reported; a person would not notice it in a log."""
SECONDS_CHARS: Final = len("2026-01-01T00:00:00")
"""Characters of a timestamp up to its seconds."""
_M_ARENA_MAX: Final = -8
"""An option of glibc's `mallopt`, from its malloc.h."""


# What all of them need ------------------------------------------------------------------------------------------------


class QueuePlace:
    """Where a queue is: checked when made, opened and loaded later.

    Args:
        engine: URL of its engine; None is the file in this user's state folder.
        content: where its contents lie, a folder or a URL; None is beside the file.
        may_make: a file that is not there is made; a folder above it never is.

    Raises:
        ConfigError: `config_invalid`: no such engine or place; the extra is missing.
    """

    def __init__(self, engine: str | None, content: str | None = None, *, may_make: bool = True) -> None:
        if find_spec("dbos") is None:
            raise wrong("the queue's engine is not installed (dbos)", install_hint("scale"))
        self.url = engine if engine is not None else f"sqlite:///{config.home(os.environ) / 'queue.sqlite'}"
        self.content = content
        path = self.url.removeprefix("sqlite:///") if self.url.startswith("sqlite:///") else None
        self._file = Path(path.partition("?")[0]) if path is not None else None
        if path is None and not self.url.startswith("postgresql://"):
            fact = f"{self.url.partition(':')[0][:40]!r} is no kind of engine"
            raise wrong(fact, "sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
        if path is not None and not path.strip("/"):
            raise wrong(f"{self.url!r} names no file", "sqlite:///FILE")
        folder = Path(content) if content is not None and "://" not in content else None
        if folder is not None and not folder.exists():
            _require_folder(folder.parent if may_make else folder, "--content")
        self.is_new = self._file is not None and not self._file.exists()
        if self._file is not None and self.is_new:
            if may_make:
                _require_folder(self._file.parent, "--engine")
            elif engine is not None:
                raise self.none_there()

    def none_there(self) -> ConfigError:
        """What somebody is told who looks for a queue where there is none."""
        fact = f"there is no queue at {streams.one_line(str(self._file))}"
        return wrong(fact, "see --engine; `backplane submit`, `worker` and `queue limit` make a new one")

    def contents(self) -> Contents:
        """The content store. Raises ConfigError `config_invalid`: none is named, or there is no such place."""
        from backplane.scale.content import open_contents

        if self.content is None and self._file is None:
            fact = "an engine on a server needs a place for contents that all machines share"
            raise wrong(fact, "--content DIR or URL, the same for submitters and workers")
        beside = f"{self.url.removeprefix('sqlite:///')}.content"
        return open_contents(self.content if self.content is not None else beside, os.environ)

    def open(self, **settings: float) -> DurableEngine:
        """Load the engine and open it; takes about a second.

        Raises:
            ConfigError: `config_invalid`: this Python's SQLite is too old for it.
        """
        from backplane.scale.durable import DurableEngine

        engine = DurableEngine(self.url, **settings)
        if self.is_new:
            streams.note(f"the queue {self._file} is new")
        return engine


def find_queue(options: Options, *, may_make: bool = True) -> QueuePlace:
    """The queue that these options name.

    Raises:
        ConfigError: `config_invalid`: no such label or priority, or as `QueuePlace`.
    """
    place = QueuePlace(options.engine, getattr(options, "content", None), may_make=may_make)
    if getattr(options, "label", None) is not None:
        check_label(options.label)
    check_priority(getattr(options, "priority", None))
    return place


def _require_folder(folder: Path, option: str) -> None:
    if not folder.is_dir():
        raise wrong(f"there is no folder {streams.one_line(str(folder))}", f"see {option}, or make the folder")


def _within(options: Options, name: str, least: float, most: float = float("inf")) -> None:
    """Raise ConfigError `usage_invalid` for an option whose number is outside these bounds, or none."""
    value = getattr(options, name, None)
    if value is not None and not least <= value <= most:
        more = f"{least:g} to {most:g}" if most < float("inf") else f"{least:g} or more"
        raise wrong_words(f"--{name} {value:g}", more)


def _do(work: Callable[[], Awaitable[int]], engine: DurableEngine) -> int:
    try:
        return anyio.run(work)
    finally:
        engine.close()


# The commands ---------------------------------------------------------------------------------------------------------


def submit(options: Options) -> int:
    place = find_queue(options)
    settings, content, home = load_settings(options), place.contents(), config.home(os.environ)
    if options.jsonl is not None and (options.wait or options.task is not None or options.order is not None):
        raise wrong_words(
            "--jsonl is given with TASK, --order or --wait", "use --jsonl without them, then `queue list`"
        )
    given = _lines_of(options) if options.jsonl is not None else [None]
    jobs = [_job_of(options, each, settings, content, home) for each in given]
    engine = place.open()  # Last, so that a wrong order is refused without waiting for the engine.

    async def submit() -> int:
        for _, job in jobs:
            is_new = await engine.submit(job, priority=options.priority)
            streams.write(f"{job.order.id}\n")
            if not is_new:
                streams.complain(f"{job.order.id} was submitted before, and stays as it was\n")
        if not options.wait:
            return 0
        ((root, job),) = jobs
        async with _told_what_holds(engine, job.order.id):
            return await _brought(engine, job, content, home, root)

    return _do(submit, engine)


def _lines_of(options: Options) -> list[WorkOrder]:
    """Read a file of orders, one a line. Raises ConfigError `config_invalid`, before any of them is submitted."""
    data, source = streams.read_input(options.jsonl), streams.source(options.jsonl)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise wrong(f"{source} has no order", "write one work order a line, as JSON")
    return [order.read_order(line, f"{source}, line {number}", lenient=options.lenient) for number, line in lines]


def _job_of(
    options: Options, given: WorkOrder | None, settings: Settings, content: Contents, home: Path
) -> tuple[str, Job]:
    """Make a job of an order, and return it behind the folder that its patch is for.

    Args:
        given: None reads the order that the options name.
    """
    from backplane.runtime.faults import check_whole
    from backplane.scale.orders import make_job

    abp: dict[str, Any] = {}
    if options.secret:
        abp["secrets"] = options.secret
    if options.on_lost_worker is not None:
        abp["on_lost_worker"] = options.on_lost_worker
    built = order.build(options, dict(os.environ), streams.folder(), settings.policy, given)
    work = order.with_settings(built, abp)
    check_whole(work)
    limits = settings.limits
    quota = Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
    job = make_job(
        work, content, home, quota, backend=options.backend, label=options.label, ignored=options.with_ignored,
        asks=options.asks,
    )  # fmt: skip
    order.say_without_effect(work)
    return work.workspace.root, job


@asynccontextmanager
async def _told_what_holds(engine: DurableEngine, order_id: str) -> AsyncIterator[None]:
    """Say on stderr what an order waits for while the block follows it, and what becomes of it when that is left."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_tell_what_holds, engine, order_id)
        try:
            yield
        except anyio.get_cancelled_exc_class():
            show = f"backplane queue show {order_id}"
            streams.note(f"the order goes on: {show}; backplane queue cancel {order_id} ends it")
            raise
        tasks.cancel_scope.cancel()


async def _tell_what_holds(engine: DurableEngine, order_id: str) -> None:
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


async def _brought(
    engine: DurableEngine, job: Job, content: Contents, home: Path, root: str = "", status: Status | None = None
) -> int:
    """Keep an order's receipt here once it has ended, say so, and give the exit code of the run.

    Args:
        root: the folder that its patch is for, where it is known.
        status: the order's, where it is told as JSON.
    """
    from backplane.scale.mirror import bring

    row, result = await bring(engine, job, content, home, root=root)
    with open_store() as store:
        receipt = store.load(row.run_id)
        if status is not None:
            streams.write_record(QueuedOrder(status, None, row.outcome, row.run_id, row.sha256))
        else:
            patch = patch_lines(receipt, store.patch(row), root or "DIR")
            streams.write("\n".join((_ended(row, result, receipt), *patch)) + "\n")
        if (failure := failure_of(receipt)) is not None:
            streams.error(failure)
        for line in remarks_on(receipt):
            streams.note(line)
        return code_of(receipt)


def _ended(row: ReceiptRow, result: OrderResult, receipt: Receipt) -> str:
    tries = f"  attempt {len(result.attempts)}" if len(result.attempts) > 1 else ""
    return f"{outcome_words(row.outcome, receipt.findings)}{tries}\nrun {row.run_id}  receipt {row.sha256}"


def _queue(
    doing: Callable[[Options, DurableEngine, QueuePlace], Awaitable[int]],
    options: Options,
    empty: Callable[[], int] | None = None,
    *,
    may_make: bool = False,
) -> int:
    """Run a function on the queue that the options name.

    Args:
        empty: called instead if this user has no queue yet; None refuses.
        may_make: make a new queue if there is none.
    """
    _within(options, "keep", 0, LISTED_MAX)
    _within(options, "limit", 1, LISTED_MAX)
    _within(options, "after", 0)
    place = find_queue(options, may_make=may_make)
    if not place.is_new or may_make:
        engine = place.open()

        async def do() -> int:
            if getattr(options, "order", None) is not None:
                options.order = await _order_id(engine, options.order)
            return await doing(options, engine, place)

        return _do(do, engine)
    if empty is None:
        raise place.none_there()
    return empty()


async def _order_id(engine: DurableEngine, name: str) -> str:
    """Return the id that begins so.

    Raises:
        ConfigError: `config_invalid`, no order's does, or several do.
    """
    found = [name] if len(name) == ID_CHARS else await _ids(engine, name)
    if len(found) > 1:
        raise wrong(f"the ids of {len(found)} orders begin with {name!r}", "give more of it")
    if not found:
        raise unknown_order(name)
    return found[0]


async def _ids(engine: DurableEngine, name: str) -> list[str]:
    """The ids that begin so, of the newest `LISTED_MAX` orders; none where the name is too short to mean one."""
    if len(name) < ID_CHARS_MIN:
        return []
    return [one.order_id for one in await engine.list(limit=LISTED_MAX) if one.order_id.startswith(name)]


def list_orders(options: Options) -> int:
    def show(orders: Iterable[Status]) -> int:
        streams.write_rows(orders, _line, "no orders", as_json=options.json)
        return 0

    async def look(_: Options, engine: DurableEngine, __: QueuePlace) -> int:
        return show(await engine.list(limit=options.limit, label=options.label, outcomes=True))

    return _queue(look, options, lambda: show(()))


def _line(status: Status) -> str:
    is_cancelled = status.cancelled is not None and status.state in ("waiting", "running")
    word = "cancelling" if is_cancelled else status.outcome or status.state
    attempts = f"attempt {len(status.attempts)}" if status.attempts else ""
    age = elapsed(status.waiting_ms // 1000)
    return streams.one_line(f"{status.order_id}  {word:<10}  {status.label}  {age}  {attempts}".rstrip())


async def _show(options: Options, engine: DurableEngine, place: QueuePlace) -> int:
    status = await engine.status(options.order)
    if status.state == "done":
        if not options.json:
            streams.write(_line(status) + "\n")
        job, told = await engine.job(options.order), status if options.json else None
        return await _brought(engine, job, place.contents(), config.home(os.environ), status=told)
    if options.json:
        streams.write_record(QueuedOrder(status, None if status.state == "broken" else await held(engine, status)))
        return int(status.state == "broken")
    streams.write(_line(status) + "\n")
    if status.state == "broken":
        streams.write(f"{streams.one_line(status.error or '')}\n")
        return 1
    found = await held(engine, status)
    if found.kind != "nothing":
        streams.write(f"{streams.one_line(found.verdict)}: ")
    streams.write(f"{streams.one_line(found.fact)}\n")
    if found.kind in ("question_waits", "approval_waits"):
        streams.write(f"  {streams.one_line(found.step)}\n")
    return 0


class HoldReason(msgspec.Struct, frozen=True):
    """What an order that has not ended waits for, or that it is at work."""

    kind: str
    """As a diagnosis has it."""
    verdict: str
    fact: str
    step: str


class QueuedOrder(msgspec.Struct, frozen=True):
    """Where an order is; of a done one what its receipt, which is kept here then, says."""

    order: Status
    holds: HoldReason | None
    """None once it has ended."""
    outcome: str | None = None
    run_id: str | None = None
    receipt_sha256: str | None = None


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
        beat = f"did not beat for {elapsed(own.age_ms // 1000)}" if own is not None else "is not known any more"
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
    place = QueuePlace(url, may_make=False) if url is not None else None
    is_here = (config.home_path(os.environ) / "queue.sqlite").is_file() and find_spec("dbos") is not None
    if len(name) < ID_CHARS_MIN or (place is None and not is_here):
        return None
    engine = (place or QueuePlace(None)).open()

    async def look() -> tuple[Status, Job, HoldReason] | None:
        named = await _ids(engine, name)
        if len(named) != 1:
            return None
        status = await engine.status(named[0])
        return status, await engine.job(status.order_id), await held(engine, status)

    try:
        return anyio.run(look)
    finally:
        engine.close()


async def _cancel(options: Options, engine: DurableEngine, _: QueuePlace) -> int:
    return await _tell(options.order, engine, CancelCommand(reason=options.reason))


async def _answer(options: Options, engine: DurableEngine, _: QueuePlace) -> int:
    asked = AnswerCommand(ask=options.ask, decision=options.decision, reason=options.reason, text=options.text)
    return await _tell(options.order, engine, asked)


async def _tell(order_id: str, engine: DurableEngine, asked: Request) -> int:
    from backplane.scale.orders import tell

    streams.write(streams.one_line(await tell(engine, order_id, asked)) + "\n")
    return 0


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a label, and the budget of the whole queue; None is no limit."""

    label: str
    concurrency: int | None
    rate_orders: int | None
    """Orders begun at most in `rate_ms`."""
    rate_ms: int | None
    budget_usd_micros: int | None
    spent_usd_micros: int


def set_limits(options: Options) -> int:
    concurrency, rate, budget = _limits_of(options)

    async def set(_: Options, engine: DurableEngine, __: QueuePlace) -> int:
        limits = await engine.limits(options.label)
        if options.concurrency is not None or options.rate is not None:
            limits = LabelLimits(
                limits.concurrency if options.concurrency is None else concurrency,
                limits.rate if options.rate is None else rate,
            )
            await engine.set_limits(options.label, limits)
        if options.budget_usd is not None:
            await engine.set_budget(budget)
        orders, span_ms = limits.rate or (None, None)
        held = await engine.budget()
        now = QueueLimits(
            label=options.label,
            concurrency=limits.concurrency,
            rate_orders=orders,
            rate_ms=span_ms,
            budget_usd_micros=held.limit_usd_micros,
            spent_usd_micros=held.spent_usd_micros,
        )
        return _show_limits(now, as_json=options.json)

    given = (options.concurrency, options.rate, options.budget_usd)
    return _queue(set, options, may_make=any(one is not None for one in given))


def _show_limits(now: QueueLimits, *, as_json: bool) -> int:
    if as_json:
        streams.write_record(now)
        return 0
    rate = "no limit" if now.rate_ms is None else f"{now.rate_orders} in {now.rate_ms / 1000:g} s"
    budget = "no limit" if now.budget_usd_micros is None else f"of {_usd(now.budget_usd_micros)}"
    streams.write(f"label        {now.label}\nconcurrency  {now.concurrency or 'no limit'}\n")
    streams.write(f"rate         {rate}\nbudget       {_usd(now.spent_usd_micros)} spent, {budget}\n")
    return 0


def _limits_of(options: Options) -> tuple[int | None, tuple[int, int] | None, int | None]:
    """Concurrency, rate and budget of an option each, None for no limit. Raises ConfigError `usage_invalid`."""
    concurrency, rate = _number(options.concurrency, "--concurrency", int), _rate(options.rate)
    is_money = _number(options.budget_usd, "--budget-usd", float) is not None
    return concurrency, rate, scaled(options.budget_usd, 1_000_000, "--budget-usd") if is_money else None


def _usd(micros: int) -> str:
    """All of an amount, with two decimal places at least."""
    digits = f"${micros / 1e6:.6f}"
    return digits[:-4] + digits[-4:].rstrip("0")


def _number(text: str | None, name: str, kind: type[Any]) -> Any:
    """A positive number; None for none and for `off`. Raises ConfigError `usage_invalid`."""
    if text is None or text == "off":
        return None
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 < number < (1 << 31) or not math.isfinite(number):
        raise wrong_words(f"{name} {text}", "a number over 0, or off")
    return number


def _rate(text: str | None) -> tuple[int, int] | None:
    if text is None or text == "off":
        return None
    count, _, seconds = text.partition("/")
    try:
        most, span_s = _number(count, "--rate", int), _number(seconds, "--rate", float)
    except ConfigError:
        most = span_s = None
    if most is None or span_s is None:
        raise wrong_words(f"--rate {text}", "for example 10/60: ten in a minute, or off")
    return most, scaled(seconds, 1000, "--rate")


async def _prune(options: Options, engine: DurableEngine, _: QueuePlace) -> int:
    removed = await engine.prune(options.keep)
    streams.write(f"{removed} ended orders removed\n")
    return 0


async def _events(options: Options, engine: DurableEngine, place: QueuePlace) -> int:
    if not options.follow and (await engine.status(options.order)).state not in ("done", "broken"):
        raise wrong("the order has not ended", "--follow waits for its events")
    if not options.follow or options.after:
        async for event in engine.events(options.order, after=options.after):
            await _write_event(event)
        return 0
    from backplane.scale.mirror import bring

    job = await engine.job(options.order)
    async with _told_what_holds(engine, options.order):
        row, result = await bring(engine, job, place.contents(), config.home(os.environ), _write_event)
    with open_store() as store:
        streams.complain(_ended(row, result, store.load(row.run_id)) + "\n")
    return 0


async def _write_event(event: Event) -> None:
    head = f'{{"attempt":"{event.attempt}","seq":{event.seq},"cursor":{event.cursor},'
    if event.superseded is not None:
        head += f'"superseded":"{event.superseded}",'
    streams.write_json(head.encode() + b'"event":' + event.record.rstrip() + b"}\n")


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Orders by where they are, and the workers that beat. Ages are since an order was submitted."""

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


def count_orders(options: Options) -> int:
    async def look(_: Options, engine: DurableEngine, __: QueuePlace) -> int:
        await _name_clocks(engine)
        orders = await engine.list(limit=LISTED_MAX, label=options.label)
        workers = [one for one in await engine.workers() if options.label in (None, one.label)]
        return _show_counts(_counts(orders, workers), as_json=options.json)

    return _queue(look, options, lambda: _show_counts(_counts((), ()), as_json=options.json))


async def _name_clocks(engine: DurableEngine) -> None:
    """Warn on stderr if this machine's clock and the database's differ, as times in logs and receipts then do."""
    ahead_ms = await engine.clock_ahead_ms()
    if abs(ahead_ms) > CLOCK_MS_MAX:
        word = "behind" if ahead_ms > 0 else "ahead of"
        fact = f"this machine's clock is {elapsed(abs(ahead_ms) // 1000)} {word} the database's"
        streams.note(f"{fact}: times in its logs and receipts differ by that; set both clocks (NTP)")


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


def _show_counts(found: QueueCounts, *, as_json: bool) -> int:
    if as_json:
        streams.write_record(found)
        return 0
    oldest = {"waiting": found.oldest_waiting_ms, "running": found.oldest_running_ms}
    for state in STATES:
        age = oldest.get(state)
        more = f"  oldest {elapsed(age // 1000)}" if age is not None else ""
        streams.write(f"{state:<8} {getattr(found, state)}{more}\n")
    within = f"{found.ended_in_1_min} in 60 s, {found.ended_in_10_min} in 600 s, {found.ended_in_1_h} in 3600 s"
    streams.write(f"ended    {within}\n")
    for worker in found.workers:
        beat = f"{worker.slots} slots  beat {worker.age_ms / 1000:.1f} s ago"
        has = f"  runs {' '.join(order_id[:ID_CHARS_SHOWN] for order_id in worker.orders)}" if worker.orders else ""
        streams.write(streams.one_line(f"worker   {worker.id}  {worker.label}  {beat}{has}") + "\n")
    return 0


def work(options: Options) -> int:
    from backplane.runtime.plane import ControlPlane
    from backplane.scale.runner import Runner

    _within(options, "slots", 1, 1024)
    _within(options, "lease", LEASE_S_MIN, SECONDS_MAX)
    _within(options, "poll", POLL_S_MIN, SECONDS_MAX)
    streams.require_descriptors()
    _share_a_heap()
    place = find_queue(options)
    settings, content = load_settings(options), place.contents()
    given = {"lease_s": options.lease, "beat_s": options.lease and options.lease / 10, "poll_s": options.poll}
    engine = place.open(**{name: value for name, value in given.items() if value is not None})

    async def work() -> int:
        async with (
            ControlPlane(settings, config.home(os.environ), dict(os.environ)) as plane,
            anyio.create_task_group() as tasks,
        ):
            with anyio.CancelScope() as taking:
                tasks.start_soon(_end_on_signal, taking)
                await anyio.to_thread.run_sync(engine.prepare)  # Or it would be said of a database that is not there.
                await _name_clocks(engine)
                slots = streams.count(options.slots, "slot")
                streams.note(f"takes orders of the label {options.label}, {slots}; a signal ends it in order")
                runner = Runner(plane, content, _tell_attempt, _tell_delay)
                with _gauges(plane, engine, options.label):
                    await engine.serve(runner, slots=options.slots, label=options.label, say=_log)
            tasks.cancel_scope.cancel()
        return 0

    return _do(work, engine)


def _gauges(plane: ControlPlane, engine: DurableEngine, label: str) -> AbstractContextManager[None]:
    """Send the queue's depth to a collector while the block runs, where the environment names one."""
    if plane.sender is None:
        return nullcontext()
    from backplane.telemetry.queue import sending

    return sending(engine.depths, label, plane.environ)


def _tell_attempt(attempt: Attempt, run: Run | None) -> None:
    """Say on stderr that an attempt begins or how its run ended: a worker's log, which repeats nobody's words."""
    if run is None:
        _log(f"{attempt.order_id}  begins, attempt {attempt.number}: run {attempt.id}")
        return
    code = f" ({failure.code})" if (failure := failure_of(run.receipt)) is not None else ""
    _log(f"{attempt.order_id}  {run.receipt.outcome}{code}")


def _tell_delay(attempt: Attempt, why: str) -> None:
    _log(f"{attempt.order_id}  {why}")


def _log(text: str) -> None:
    """Write a line of a worker's log, with the time in UTC."""
    at = canonical.timestamp_at(time.time_ns())
    streams.note(f"{at[:SECONDS_CHARS]}Z  {text}")


def _share_a_heap() -> None:
    """Have all threads take memory from one heap: of one each, as glibc would, much is held and not used."""
    import ctypes

    with suppress(AttributeError, OSError):  # Another C library has no such option.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


async def _end_on_signal(taking: Any) -> None:
    """The first signal drains; the second leaves the orders to the others, as our death ends their hosts."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            if taking.cancel_called:
                os._exit(128 + number)
            streams.complain("no more orders are taken; waiting for those that run\n")
            taking.cancel()


show_order, cancel_order, answer_order, print_events, prune_orders = (
    partial(_queue, doing) for doing in (_show, _cancel, _answer, _events, _prune)
)
