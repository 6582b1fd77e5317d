"""The list of runs, live and ended: the task of each, its state and its cost.

It stores nothing: the order is read from the journal's head, cost and cause from the sealed receipt.
A pruned or imported run has no journal, and so no task.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, tags_of
from backplane.errors import ConfigError, StoreError
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import COPIED, TRACE, JournalHead, opening_of
from backplane.receipts.recovery import is_abandoned, is_live, is_run_id
from backplane.receipts.store import Store, only, steps_back
from backplane.receipts.trace import open_plain

State = Literal["live", "cut_off", "ended"]

END_BYTES_MAX: Final = 64 * 1024
"""Bytes at the end of a trace that are searched for the last error and for open questions."""

SEARCH_BYTES: Final = 1 << 20
"""Bytes of a trace that are read and searched at a time."""

WORD_BYTES_MAX: Final = 4096
"""Maximum bytes of a search word; a longer one is cut to this length."""


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """One run as a list shows it."""

    run_id: str
    state: State
    """live; cut_off, if its control plane died and it is not sealed yet; or ended."""
    waits: bool = False
    """True while a live run waits for a person's answer."""
    started_at: str
    task: str | None
    """None if the order is not stored: pruned, imported or unreadable. The same for `root` and `mode`."""
    root: str | None
    mode: str | None
    model: str | None
    """Name of the model in the order."""
    backend: str
    """Id of the backend in the journal, else in the receipt."""
    outcome: str | None = None
    """None until the run has ended; the same for `reason`, `duration_ms` and `files`."""
    reason: str | None = None
    code: str | None = None
    """Error code if the run did not complete; `cause` has the message."""
    cause: str | None = None
    duration_ms: int | None = None
    files: int | None = None
    """Number of files that its patch changes."""
    tags: tuple[str, ...] = ()
    cost_usd_micros: int | None = None
    """None if the cost is unknown."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    task_type: str | None = None
    """Type of the task for the router; None if the order named a backend."""
    session: str | None = None
    """Session of which the run is a turn, else the id of the conversation that the agent kept; None without either."""
    model_told: str | None = None
    """Model in the receipt: the one that the host reported, else the one that the router chose."""
    check_of: str | None = None
    """Id of the run whose result it checks in a comparison; None if it is not a check."""
    queued: str | None = None
    """Id of the queue's order if the run was copied from a queue; None if it ran on this machine."""
    is_retold: bool = False
    """True if it repeats a stored run, as a replay or as the answer to the same pure order; it costs nothing."""
    retry_after_ms: int | None = None
    """Milliseconds that the model's service asked to wait before another request."""

    @property
    def has_failed(self) -> bool:
        """Return True if the run has ended and is not complete."""
        return self.outcome not in (None, "complete")


class _Error(msgspec.Struct, frozen=True):
    code: str | None = None
    message: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int | None = None
    output_tokens: int | None = None
    estimated_cost_usd: Json = None


class _Body(msgspec.Struct, frozen=True):
    """The members of a stored receipt that a list needs."""

    usage: _Usage = _Usage()
    usage_raw: Json = None


_read_body: Final = msgspec.json.Decoder(_Body).decode


def remembered(store: Store) -> Iterator[Remembered]:
    """Yield every run: live ones, then those that were cut off, then ended ones; the newest first in each group.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    # Folders before rows: a run that ends meanwhile is then found twice; in the other order it could be missed.
    begun = unsettled(store)
    yield from begun
    told = {run.run_id for run in begun}
    yield from (of_row(store, row) for row in store.newest() if row.run_id not in told)


def unsettled(store: Store) -> list[Remembered]:
    """Return the runs without a receipt: live ones, then those that were cut off; the newest first in each group."""
    found = [of_folder(folder) for folder in store.unknown_folders()]
    return sorted(
        (run for run in found if run is not None),
        key=lambda run: (run.state == "live", run.started_at, run.run_id),
        reverse=True,
    )


def state_of(store: Store, run_id: str) -> State:
    """Return the present state of a run."""
    if is_live(store.home, run_id):
        return "live"
    return "ended" if store.has(run_id) else "cut_off"


def of_folder(folder: Path) -> Remembered | None:
    """Read a run without a receipt from its folder; None if that is no run's folder, or is gone."""
    if not is_run_id(folder.name) or folder.is_symlink() or not folder.is_dir():
        return None
    opening, abandoned = opening_of(folder), is_abandoned(folder)
    return Remembered(
        run_id=folder.name,
        state="cut_off" if abandoned else "live",
        waits=not abandoned and _is_waiting(folder / TRACE),
        cause=None if abandoned else _limit_in(folder / TRACE),
        started_at=opening.started_at,
        backend=opening.backend.id if opening.backend is not None else "",
        **_asked(opening),
    )


def of_row(store: Store, row: ReceiptRow) -> Remembered:
    """Read a run with a receipt from its row in the store."""
    opening, body = JournalHead(), _Body()
    if is_run_id(row.run_id):
        opening = opening_of(store.folder(row.run_id))
    try:
        data = store.body(row)
        body = _read_body(data) if data else body
    except (msgspec.MsgspecError, StoreError):  # An altered or missing receipt: `verify` finds it.
        pass
    added = _member(body.usage_raw, "backplane")
    asked = _asked(opening)
    error, cost = _cause(store, row, added), body.usage.estimated_cost_usd
    files, after = _member(added, "patch").get("files"), added.get("retry_after_ms")
    return Remembered(
        run_id=row.run_id,
        state="ended",
        started_at=row.started_at,
        backend=opening.backend.id if opening.backend is not None else row.backend,
        **{
            **asked,
            "session": asked["session"]
            or _text(_member(added, "parent").get("session"))
            or _text(_member(added, "session").get("id")),
            "check_of": asked["check_of"] or _text(_member(added, "check").get("of")),
            "is_retold": asked["is_retold"] or bool(_member(added, "replay")),
        },
        outcome=row.outcome,
        reason=row.reason,
        code=error.code or _text(_member(added, "end").get("code")),
        cause=error.message,
        duration_ms=row.duration_ms,
        files=files if isinstance(files, int) else None,
        cost_usd_micros=round(cost * 1_000_000) if isinstance(cost, int | float) and cost < 1e9 else None,
        input_tokens=body.usage.input_tokens,
        output_tokens=body.usage.output_tokens,
        task_type=_text(_member(_member(added, "route"), "task").get("type")),
        model_told=_model_told(body.usage_raw, added),
        retry_after_ms=after if isinstance(after, int) and 0 <= after < 1 << 53 else None,
    )


def _asked(opening: JournalHead) -> dict[str, Any]:
    order = opening.order
    known, own = order.task is not None, _member(order.config.vendor, "abp")
    return {
        "task": order.task,
        "root": order.workspace.root or None if known else None,
        "mode": order.workspace.mode if known else None,
        "model": order.config.model,
        "tags": tags_of(order.config.vendor),
        "check_of": _text((opening.check or {}).get("of")),
        "queued": order.id if known and opening.fact == COPIED else None,
        "is_retold": opening.backend is not None and opening.backend.id.startswith(REPLAY),
        "session": _text(_member(own, "parent").get("session")),
    }


def _model_told(usage_raw: Json, added: dict[str, Any]) -> str | None:
    """Return the model of a receipt; None if it names none or several."""
    by_model = list(_member(usage_raw, "model_usage_since_last_result"))
    told = usage_raw.get("model") if isinstance(usage_raw, dict) else None
    told = told or (by_model[0] if len(by_model) == 1 else None)
    return _text(told) or _text(_member(_member(added, "route"), "chosen").get("model"))


def _cause(store: Store, row: ReceiptRow, added: dict[str, Any]) -> _Error:
    """Return why a run did not complete: the control plane's error, else the last one that the agent reported."""
    if row.outcome == "complete":
        return _Error()
    try:
        error = msgspec.convert(added.get("error"), _Error)
    except msgspec.ValidationError:
        error = _Error()
    if error.message is None and row.trace_count and is_run_id(row.run_id):
        told = _last_fault(store.folder(row.run_id) / TRACE)
        return _Error(error.code or told.code, told.message)
    return error


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


class _TraceError(msgspec.Struct, frozen=True):
    type: str = ""
    message: str | None = None
    error_code: str | None = None


class _Carrying(msgspec.Struct):
    """The member of an event that has its questions and answers."""

    ext: Any = None


_read_ext: Final = msgspec.json.Decoder(_Carrying).decode
_read_event: Final = msgspec.json.Decoder(_TraceError).decode


def _is_waiting(trace: Path) -> bool:
    """Return True if one of the questions within `END_BYTES_MAX` of a trace's end has no answer."""
    opened: set[object] = set()
    for line in _end_of(trace):
        if b'"ask"' in line or b'"answer"' in line:
            try:
                ext = _read_ext(line).ext
            except msgspec.MsgspecError:  # The first line may be cut.
                continue
            opened |= {_member(ext, "ask").get("id")}
            opened -= {_member(ext, "answer").get("id")}
    return bool(opened - {None})


def _limit_in(trace: Path) -> str | None:
    """Return "waiting until …" if a live run waits for a rate limit of its model's service, else None."""
    lines = [line for line in _end_of(trace) if line]
    if not lines or b'"until"' not in lines[-1]:
        return None
    try:
        until = _member(_read_ext(lines[-1]).ext, "retry").get("until")
    except msgspec.MsgspecError:
        return None
    return f"waiting until {until}" if isinstance(until, str) else None


def _end_of(trace: Path) -> list[bytes]:
    """Return the last lines of a trace, the first of which may be cut."""
    try:
        with open_plain(trace) as file:
            file.seek(max(0, file.seek(0, 2) - END_BYTES_MAX))
            return file.read(END_BYTES_MAX).split(b"\n")
    except OSError:
        return []


def _last_fault(trace: Path) -> _Error:
    """Return the last error within `END_BYTES_MAX` of a trace's end; an empty one if there is none."""
    for line in reversed(_end_of(trace)):
        if b'"type":"error"' in line:
            try:
                event = _read_event(line)
            except msgspec.MsgspecError:  # The first line may be cut.
                continue
            if event.type == "error":
                return _Error(event.error_code, event.message)
    return _Error()


def _member(value: Json, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


# Looking for one ------------------------------------------------------------------------------------------------------


def find(store: Store, name: str) -> Remembered:
    """Find a run by its id, by the beginning of it if only one run begins so, or by `last` or `last~2`.

    If no run's id begins so, an order's id or its beginning names the newest run of that order.
    `last` is the newest run, a live one before any that has ended; `last~1` the one before it. The checks of a
    comparison are skipped.

    Raises:
        ConfigError: `config_invalid`: the name is too short, names no run, or several.
        StoreError: `receipt_store_failed`.
    """
    back = steps_back(name)
    if back is not None:
        for number, run in enumerate(run for run in remembered(store) if run.check_of is None):
            if number == back:
                return run
        fact = f"{name!r}: there are not so many runs" if back else "there is no run yet"
        hint = "backplane runs" if back else "backplane run TASK makes one"
        raise ConfigError("config_invalid", fact, hint=hint)
    rows = {row.run_id: row for row in store.beginning(name)}
    begun = {run.run_id: run for run in unsettled(store) if run.run_id.startswith(name.strip().lower())}
    ids = [*(id for id in begun if id not in rows), *rows]
    if not ids:
        return _of_order(store, name.strip().lower()) or of_row(store, store.find(name))
    id = only(name, ids)
    return of_row(store, rows[id]) if id in rows else begun[id]


def _of_order(store: Store, name: str) -> Remembered | None:
    """Return the newest run of the order whose id begins with this name; None if there is no such order.

    Raises:
        ConfigError: `config_invalid`, several orders begin so.
    """
    rows = {row.work_order_id: row for row in store.of_orders(name)}
    begun = {opening_of(store.folder(run.run_id)).order.id: run for run in reversed(unsettled(store))}
    begun = {id: run for id, run in begun.items() if id.startswith(name)}
    ids = sorted({*rows, *begun})
    if not ids:
        return None
    id = only(name, ids, "orders")
    return begun[id] if id in begun else of_row(store, rows[id])


def mentions(store: Store, run: Remembered, words: list[str]) -> bool:
    """Return True if a run's task, tags and events together contain all these words; ASCII case is ignored.

    Raises:
        StoreError: `receipt_store_failed`, its trace cannot be read.
    """
    left = {word.lower().encode("utf-8", "replace")[:WORD_BYTES_MAX] for word in words if word}
    task = " ".join((run.task or "", *run.tags)).lower().encode("utf-8", "replace")
    left = {word for word in left if word not in task}
    if not left or not is_run_id(run.run_id):
        return not left
    try:
        with open_plain(store.folder(run.run_id) / TRACE) as file:
            kept = b""
            while left and (block := file.read(SEARCH_BYTES)):
                window = (kept + block).lower()
                left = {word for word in left if word not in window}
                kept = window[-WORD_BYTES_MAX:]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError("receipt_store_failed", f"cannot search {run.run_id}: {error.strerror}") from error
    return not left
