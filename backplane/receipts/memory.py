"""Lists runs, live and ended, with task, state and cost.

It stores nothing: the order is read from the journal's head, cost and cause from the sealed receipt.
A pruned or imported run has no journal, and so no task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
    """`live`, `ended`, or `cut_off` if the control plane died and the run is not sealed yet."""
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
    """Outcome; None until the run has ended, and so are `reason`, `duration_ms` and `files`."""
    reason: str | None = None
    code: str | None = None
    """Error code if the run did not complete; `cause` has the message."""
    cause: str | None = None
    duration_ms: int | None = None
    files: int | None = None
    """Number of files that its patch changes."""
    tags: tuple[str, ...] = ()
    cost_usd_micros: int | None = None
    """Cost in millionths of a US dollar; None if unknown."""
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
    """True if it repeats a stored run, as a replay or for an equal pure order, and so costs nothing."""
    retry_after_ms: int | None = None
    """Milliseconds that the model's service asked to wait before another request."""

    @property
    def has_failed(self) -> bool:
        """Return True if the run has ended and is not complete."""
        return self.outcome not in (None, "complete")


class _Body(msgspec.Struct, frozen=True):
    """The members of a stored receipt that a list needs."""

    usage: dict[str, Json] = {}
    usage_raw: Json = None


_read_body: Final = msgspec.json.Decoder(_Body).decode


def remembered(store: Store) -> Iterator[Remembered]:
    """Yield every run: live ones, then those that were cut off, then ended ones; the newest first in each group.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    # Read folders before rows: a run that ends meanwhile is then found twice, but never missed.
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
    opening, is_live = opening_of(folder), not is_abandoned(folder)
    return Remembered(
        run_id=folder.name,
        state="live" if is_live else "cut_off",
        waits=is_live and _is_waiting(folder / TRACE),
        cause=_limit_in(folder / TRACE) if is_live else None,
        started_at=opening.started_at,
        backend=opening.backend.id if opening.backend is not None else "",
        **_asked(opening),
    )


def of_row(store: Store, row: ReceiptRow) -> Remembered:
    """Read a run with a receipt from its row in the store."""
    folder = store.folder(row.run_id) if is_run_id(row.run_id) else None
    opening, body = opening_of(folder) if folder is not None else JournalHead(), _Body()
    # An altered or missing receipt gives no members; `verify` reports it.
    with suppress(msgspec.MsgspecError, StoreError):
        body = _read_body(store.body(row) or b"{}")
    added, asked = _member(body.usage_raw, "backplane"), _asked(opening)
    code, cause = _cause(folder, row, added)
    cost, after = body.usage.get("estimated_cost_usd"), _number(added, "retry_after_ms")
    return Remembered(
        run_id=row.run_id,
        state="ended",
        started_at=row.started_at,
        backend=opening.backend.id if opening.backend is not None else row.backend,
        **asked
        | {
            "session": asked["session"] or _text(added, "parent", "session") or _text(added, "session", "id"),
            "check_of": asked["check_of"] or _text(added, "check", "of"),
            "is_retold": asked["is_retold"] or bool(_member(added, "replay")),
        },
        outcome=row.outcome,
        reason=row.reason,
        code=code or _text(added, "end", "code"),
        cause=cause,
        duration_ms=row.duration_ms,
        files=_number(_member(added, "patch"), "files"),
        cost_usd_micros=round(cost * 1_000_000) if isinstance(cost, int | float) and cost < 1e9 else None,
        input_tokens=_number(body.usage, "input_tokens"),
        output_tokens=_number(body.usage, "output_tokens"),
        task_type=_text(added, "route", "task", "type"),
        model_told=_model_told(body.usage_raw) or _text(added, "route", "chosen", "model"),
        retry_after_ms=after if after is not None and 0 <= after < 1 << 53 else None,
    )


def _asked(opening: JournalHead) -> dict[str, Any]:
    """Return the members that are read from the order."""
    order, is_known = opening.order, opening.order.task is not None
    return {
        "task": order.task,
        "root": order.workspace.root or None if is_known else None,
        "mode": order.workspace.mode if is_known else None,
        "model": order.config.model,
        "tags": tags_of(order.config.vendor),
        "check_of": _text(opening.check, "of"),
        "queued": order.id if is_known and opening.fact == COPIED else None,
        "is_retold": opening.backend is not None and opening.backend.id.startswith(REPLAY),
        "session": _text(order.config.vendor, "abp", "parent", "session"),
    }


def _model_told(usage_raw: Json) -> str | None:
    """Return the model that a host reported; None if it named none or several."""
    by_model = list(_member(usage_raw, "model_usage_since_last_result"))
    return _text(usage_raw, "model") or (by_model[0] if len(by_model) == 1 else None)


def _cause(folder: Path | None, row: ReceiptRow, added: Json) -> tuple[str | None, str | None]:
    """Return code and message of a run's failure: the control plane's, else those that the agent reported last."""
    if row.outcome == "complete":
        return None, None
    code, message = _text(added, "error", "code"), _text(added, "error", "message")
    if message is None and row.trace_count and folder is not None:
        for event in _late_events(folder / TRACE, b'"type":"error"'):
            if event.get("type") == "error":
                return code or _text(event, "error_code"), _text(event, "message")
    return code, message


# JSON of the journal and the receipt ----------------------------------------------------------------------------------


def _member(value: Json, *names: str) -> dict[str, Any]:
    """Return the nested member with these names; empty if there is no such object."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _text(value: Json, *names: str) -> str | None:
    found = _member(value, *names[:-1]).get(names[-1])
    return found if isinstance(found, str) else None


def _number(value: dict[str, Any], name: str) -> int | None:
    found = value.get(name)
    return found if isinstance(found, int) else None


def _is_waiting(trace: Path) -> bool:
    """Return True if one of the questions near a trace's end has no answer."""
    answered: set[str | None] = {None}
    for event in _late_events(trace, b'"ask"', b'"answer"'):
        answered.add(_text(event, "ext", "answer", "id"))
        if _text(event, "ext", "ask", "id") not in answered:
            return True
    return False


def _limit_in(trace: Path) -> str | None:
    """Return "waiting until …" if a live run waits for a rate limit of its model's service, else None."""
    last = next(_late_events(trace, b'"type"'), None)
    until = _text(last, "ext", "retry", "until")
    return None if until is None else f"waiting until {until}"


def _late_events(trace: Path, *words: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events within `END_BYTES_MAX` of a trace's end with one of these words in them, the last first."""
    lines: list[bytes] = []
    with suppress(OSError), open_plain(trace) as file:
        file.seek(max(0, file.seek(0, 2) - END_BYTES_MAX))
        lines = file.read(END_BYTES_MAX).split(b"\n")
    for line in reversed(lines):
        if any(word in line for word in words):
            with suppress(msgspec.DecodeError):  # The first line may be cut.
                yield _decode_event(line)


_decode_event: Final = msgspec.json.Decoder(dict[str, Any]).decode


# Looking for one ------------------------------------------------------------------------------------------------------


def find(store: Store, name: str) -> Remembered:
    """Find a run by its id, by a beginning of it that no other run has, or by `last` or `last~2`.

    If no run's id has this beginning, the newest run of the order whose id has it is found.
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
        ConfigError: `config_invalid`, several orders have this beginning.
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
