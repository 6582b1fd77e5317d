"""`runs` and `why`: what was asked, where it stands, what it cost, and why it waits or failed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from backplane import config
from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.show import Look, names
from backplane.cli.start import before_ms, open_store, wrong, wrong_words
from backplane.errors import CODES, BackplaneError, ConfigError
from backplane.receipts.memory import Remembered, find, mentions, remembered
from backplane.receipts.store import Store
from backplane.shown import picture_of, why
from backplane.view.columns import fitted, padded, width
from backplane.view.diff import changes
from backplane.view.figures import ago, count, lasting, milliseconds, money, standing
from backplane.view.values import as_list, as_object
from backplane.view.why import HEALTHY, Diagnosis, Evidence, Moment

if TYPE_CHECKING:
    from backplane.view.picture import Picture


ROWS_MAX: Final = (1 << 63) - 1

ID_CHARS: Final = 8
"""Of a run's id in a list; any beginning that only one run has names it."""

TASK_CHARS_MAX: Final = 400

ROW_COLUMNS: Final = 80

_FROM_COLUMNS: Final = {"when": 50, "backend": 60, "cost": 70}
"""Width from which on a list has a column; the task needs the room else."""

FILES_SHOWN: Final = 10

MESSAGE_LINES_MAX: Final = 12

LABEL_COLUMNS: Final = 8

STEPS_SHOWN: Final = 3
"""Next steps of `why`: the likeliest stand first."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# The list -------------------------------------------------------------------------------------------------------------


def list_runs(options: Options) -> int:
    if not 0 <= options.limit <= ROWS_MAX:
        raise wrong_words(f"--limit {options.limit} is no number of runs", "0 lists none of them")
    look = Look.here()
    with open_store() as store:
        chosen = islice(_waiting_first(_chosen(store, options), options), options.limit)
        streams.write_rows(chosen, lambda run: row(run, look, _now_ms()), "no runs", as_json=options.json)
    return 0


def _waiting_first(runs: Iterator[Remembered], options: Options) -> Iterator[Remembered]:
    return iter(sorted(runs, key=lambda run: not run.waits)) if options.live else runs


def _chosen(store: Store, options: Options) -> Iterator[Remembered]:
    """The runs that the filters leave; those that cost nothing come first."""
    words = options.text.split() if options.text is not None else []
    folder = os.path.realpath(options.folder) if options.folder is not None else None
    since = before_ms("--since", options.since) if options.since is not None else None
    for run in remembered(store):
        if options.failed and not run.has_failed:
            continue
        if options.live and run.state != "live":
            continue
        if options.backend is not None and run.backend != options.backend:
            continue
        if since is not None and (milliseconds(run.started_at) or 0) < since:
            continue
        if options.tag is not None and not any(_has_tag(tag, options.tag) for tag in run.tags):
            continue
        if folder is not None and not _is_below(run.root, folder):
            continue
        if mentions(store, run, words):
            yield run


def _has_tag(tag: str, wanted: str) -> bool:
    return tag == wanted or tag.partition("=")[0] == wanted


def _is_below(root: str | None, folder: str) -> bool:
    return root is not None and (os.path.realpath(root) + "/").startswith(folder.rstrip("/") + "/")


def row(run: Remembered, look: Look, now_ms: int) -> str:
    """One run on one line: on a terminal as wide as that, elsewhere as long as it is."""
    word, colour = _standing(run)
    started_ms = milliseconds(run.started_at)
    when = ago(now_ms - started_ms) if started_ms is not None else "?"
    columns = streams.columns() if look.terminal else ROW_COLUMNS
    cells = {
        "id": padded(streams.one_line(run.run_id)[:ID_CHARS], ID_CHARS),
        "when": padded(when, 10),
        "state": padded(word, 11),
        "backend": padded(streams.one_line(run.backend), 10),
        "cost": f"{money(run.cost_usd_micros):>8}",
    }
    cells = {name: cell for name, cell in cells.items() if columns >= _FROM_COLUMNS.get(name, 0)}
    text = streams.one_line(run.task, TASK_CHARS_MAX) if run.task is not None else "(its task is not known here)"
    if run.check_of is not None:
        text = f"(check of {streams.one_line(run.check_of)[:ID_CHARS]}) {text}"
    if run.tags:
        text += f"  [{', '.join(streams.one_line(tag) for tag in run.tags)}]"
    if run.cause is not None:
        text += f" — {streams.one_line(run.cause, TASK_CHARS_MAX)}"
    if look.terminal:
        text = fitted(text, max(columns - width("  ".join(cells.values())) - 2, 0))
    cells["state"] = look.dress(colour, cells["state"])
    return "  ".join([*cells.values(), text])


def _standing(run: Remembered) -> tuple[str, str]:
    """How a run stands in a word, and that word's colour."""
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    return word, _COLOURS[tone]


_COLOURS: Final = {"good": "green", "warn": "yellow", "bad": "red", "live": "cyan"}


# One run --------------------------------------------------------------------------------------------------------------


def show_run(options: Options) -> int:
    with open_store() as store:
        run = find(store, options.run)
        if options.json:
            streams.write_record(run)
            return 0
        picture = picture_of(store, run)
    look = Look.here()
    for line in _told(run, picture, look):
        streams.write(line + "\n")
    return 0


def _told(run: Remembered, picture: Picture, look: Look) -> Iterator[str]:
    def line(label: str, text: str) -> str:
        return f"{look.dress('dim', f'{label:<{LABEL_COLUMNS}}')}{text}"

    started_ms = milliseconds(run.started_at)
    when = ago(_now_ms() - started_ms) if started_ms is not None else "at an unknown time"
    took = f", took {lasting(run.duration_ms)}" if run.duration_ms is not None else ""
    word, colour = _standing(run)
    yield line("run", f"{streams.one_line(run.run_id)}  ({when}{took})")
    yield line("task", streams.one_line(run.task, 4000) if run.task is not None else "(not known here)")
    if run.tags:
        yield line("tags", ", ".join(streams.one_line(tag) for tag in run.tags))
    if run.root is not None:
        yield line("folder", f"{streams.one_line(run.root)}  ({streams.one_line(run.mode)})")
    model = f"  model {streams.one_line(run.model)}" if run.model else ""
    yield line("backend", f"{streams.one_line(run.backend)}{model}")
    outcome = f"  ({streams.one_line(run.outcome)})" if run.outcome not in (None, word) else ""
    yield line("state", look.dress(colour, word) + outcome)
    yield from (line(label, text) for label, text in _cause(run, picture))
    added = picture.ended.added if picture.ended is not None else {}
    if unnamed := as_list(as_object(added.get("claimed")).get("unexplained")):
        yield line("unnamed", f"changed, and named by no event: {names(list(map(str, unnamed)))}")
    usage = picture.usage
    tokens = f"{count(usage.input_tokens)} in, {count(usage.output_tokens)} out"
    yield line("tokens", f"{tokens}, {money(picture.cost_usd_micros)}")
    yield line(
        "did",
        f"{streams.count(picture.calls, 'call')} of tools, {picture.calls_failed} failed, "
        f"{picture.denials} denied; {streams.count(picture.events, 'event')}",
    )
    yield from (line(label, text) for label, text in _files(picture, look))
    said = picture.message.strip().splitlines()
    for number, text in enumerate(said[-MESSAGE_LINES_MAX:]):
        yield line("" if number else "says", streams.one_line(text))
    receipt = f", backplane receipts show {run.run_id[:ID_CHARS]}" if run.state == "ended" else ""
    yield line("more", f"backplane why {run.run_id[:ID_CHARS]}{receipt}")


def _cause(run: Remembered, picture: Picture) -> Iterator[tuple[str, str]]:
    if run.code is not None or run.cause is not None:
        code = f"{streams.one_line(run.code)}: " if run.code else ""
        yield "cause", f"{code}{streams.one_line(run.cause or '')}"
    if picture.ended is not None and picture.ended.hint:
        yield "next", streams.one_line(picture.ended.hint)


def _files(picture: Picture, look: Look) -> Iterator[tuple[str, str]]:
    """Changed files: of the patch once there is one, until then as the agent names them."""
    if picture.ended is None:
        named = list(picture.files)
        for number, path in enumerate(named[:FILES_SHOWN]):
            yield "" if number else "claims", streams.one_line(path)
        return
    found = changes(picture.ended.diff.splitlines()) if picture.ended.diff else []
    for number, file in enumerate(found[:FILES_SHOWN]):
        added, removed = look.dress("green", f"+{file.added}"), look.dress("red", f"−{file.removed}")
        yield "" if number else "files", f"{streams.one_line(file.path)}  {added} {removed}"
    if len(found) > FILES_SHOWN:
        yield "", f"and {len(found) - FILES_SHOWN} more"


def _more_known(picture: Picture, moment: Moment, found: Diagnosis) -> Moment:
    """What this machine says of a refused key, a model that nobody knows, or a backend that may be left alone."""
    code = picture.ended.code if picture.ended is not None else None
    if code in CODES and CODES[code].retryable:
        return msgspec.structs.replace(moment, circuit_until_ms=_circuit_until_ms(picture.backend))
    if found.kind == "model_unknown":
        from backplane.upstream.cost import known_models

        return msgspec.structs.replace(moment, models=known_models())
    return msgspec.structs.replace(moment, logins=_logins(picture.backend)) if found.kind == "key_refused" else moment


def _circuit_until_ms(backend: str) -> int:
    """Until when the router leaves a backend alone; 0 where it does not, or does not know it."""
    from backplane.routing.driver import look_around

    try:
        settings = config.load(None, os.environ, Path.cwd())
        world = look_around(settings, os.environ, config.home_path(os.environ))
    except BackplaneError:  # The configuration is not here any more.
        return 0
    return next((one.circuit_until_ms for one in world.candidates if one.name == backend), 0)


def _logins(backend: str) -> tuple[str, ...]:
    """Key and kept logins that the agent of a backend may take, as far as they are here."""
    from backplane.runtime import backends
    from backplane.sandbox.credentials import store_of

    try:
        named = backends.find(backend, config.load(None, os.environ, Path.cwd()), os.environ)
    except BackplaneError:  # Named by a configuration that is not here any more.
        return ()
    agent = named.agent
    if agent is None:
        return ()
    key = [f"the variable {agent.key_env}"] if agent.key_env and agent.key_env in {**os.environ, **named.env} else []
    login = store_of(agent.row)
    return (*key, f"the login in {login}") if login is not None else tuple(key)


# Why ------------------------------------------------------------------------------------------------------------------


def _of_queue(store: Store, options: Options) -> tuple[Remembered, Diagnosis] | None:
    """An order that was submitted, as a run, and what it waits for; None where no queue here knows it.

    Raises:
        ConfigError: `config_invalid`: it has ended, and its receipt was not brought here.
    """
    from backplane.cli import queue

    known = queue.look_up(options.run, options.engine)
    if known is None:
        return None
    status, job, waits = known
    if status.attempts:
        with suppress(ConfigError):
            run = find(store, status.attempts[-1])
            return run, why(store, run, _more_known)
    if status.state in ("done", "broken"):
        fact = f"the order {status.order_id} is {status.state}, and its run is not kept here"
        raise wrong(fact, f"backplane queue show {status.order_id}, which brings it")
    run = Remembered(
        run_id=status.order_id, state="live", started_at="", task=job.order.task, root=None, mode=None, model=None,
        backend=job.backend or f"any of {status.label}",
    )  # fmt: skip
    found = Diagnosis(
        run_id=status.order_id, kind=waits.kind, sure=True, since_ms=status.waiting_ms,
        verdict=streams.one_line(waits.verdict), evidence=(Evidence(streams.one_line(waits.fact)),),
        next=(waits.step,),
    )  # fmt: skip
    return run, found


def explain(options: Options) -> int:
    with open_store() as store:
        try:
            run = find(store, options.run)
            found = why(store, run, _more_known)
            if options.engine is not None:
                streams.complain("--engine was not asked: this run is kept here\n")
        except ConfigError:  # An order of the queue may have no run here.
            order = _of_queue(store, options)
            if order is None:
                raise
            run, found = order
    if options.json:
        streams.write_record(found)
        return 0
    look = Look.here()

    def cut(text: str, used: int, rows: int = 2) -> str:
        """On a terminal two rows at most, so that all of it fits one of 80 by 24; `--json` has all of it."""
        return fitted(text, rows * streams.columns() - used) if look.terminal else text

    task = streams.one_line(run.task, 120) if run.task is not None else "(its task is not known here)"
    head = cut(f"{run.run_id[:ID_CHARS]}  {streams.one_line(run.backend)}  {task}", 0, rows=1)
    streams.write(look.dress("dim", head) + "\n")
    since = f", for {lasting(found.since_ms)}" if found.since_ms is not None else ""
    likely = "" if found.sure else "probably: "
    colour = "green" if found.kind in HEALTHY else "red"
    streams.write(f"{look.dress(colour, cut(likely + found.verdict, len(since)))}{since}\n")
    for one in found.evidence:
        place = f"event {one.event}: " if one.event is not None else ""
        streams.write(f"  {look.dress('dim', place)}{cut(one.text, 2 + len(place))}\n")
    for step in found.next[:STEPS_SHOWN]:
        streams.write(f"  {look.dress('blue', 'next:')} {cut(step, 8)}\n")
    if found.also:
        streams.write(look.dress("dim", f"  also: {', '.join(found.also)}") + "\n")
    return 0
