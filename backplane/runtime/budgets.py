"""What the children of one run may spend together, in money and in tokens: reserved before it is spent, settled after.

A reservation is a row that is checked and written in one transaction, so any number of processes keep to one limit. It
is settled from the child's receipt when somebody looks next, so a kill leaves nothing to be put right.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    FileChanged,
    ToolCall,
)
from backplane.contract.receipt import Receipt, Usage
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.errors import ConfigError, PolicyError
from backplane.receipts.database import BUSY_TIMEOUT_S, transaction, translated
from backplane.receipts.folded import Folded, fold
from backplane.receipts.journal import read_head
from backplane.receipts.memory import of_row
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store

FILE: Final = "spend.sqlite"

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS reservations (
  run_id TEXT PRIMARY KEY,
  parent TEXT NOT NULL,
  usd_micros INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  below_usd_micros INTEGER NOT NULL,
  below_tokens INTEGER NOT NULL,
  settled INTEGER NOT NULL,
  open INTEGER NOT NULL,
  pid INTEGER NOT NULL
)
"""

MICROS: Final = 1_000_000

UNBILLED: Final = frozenset({"backend_rate_limited", "backend_unavailable"})
"""Error codes with which a service refuses a request and bills nothing for it."""

_ANSWERS: Final = (AssistantDelta, AssistantMessage, ToolCall, FileChanged, CommandExecuted)
"""Events after which a model has answered."""

COUNTED: Final = frozenset({"complete", "partial", "budget", "max_turns"})
"""Ends after which all that a run has used was told; after any other a last call may be missing."""

BY_CALL: Final = (
    "every call of its model was reserved before it was made, at the most that it could cost, and counts so until its "
    "usage is known: nothing goes beyond the budget"
)
BY_SHARE: Final = (
    "its share was reserved before it started; its agent reports usage afterwards, so the call of its model that used "
    "it up goes beyond it, and one that was begun before it was ended"
)
SETTLED: Final = "; settled by the receipt: what is unknown, or was cut off, counts as all that was reserved"


class Amount(msgspec.Struct, frozen=True):
    """Money in millionths of a dollar, and tokens sent and got."""

    usd_micros: int = 0
    tokens: int = 0


class Limit(msgspec.Struct, frozen=True):
    """What is allowed of each; None is without a bound."""

    usd_micros: int | None = None
    tokens: int | None = None

    def less(self, used: Amount) -> Limit:
        """What is left, below nothing where more was used."""
        return Limit(
            None if self.usd_micros is None else self.usd_micros - used.usd_micros,
            None if self.tokens is None else self.tokens - used.tokens,
        )


def used_by(receipt: Receipt, code: str | None, *, was_sent: bool) -> Limit:
    """Return what a run has used by its receipt; None is unknown.

    A call that its service refused is not billed, and a host that was never sent its order has called no model.

    Args:
        code: of the run's error.
    """
    answered = any(isinstance(event, _ANSWERS) for event in receipt.trace)
    if not was_sent or (code in UNBILLED and not answered and receipt.usage == Usage()):
        return Limit(0, 0)
    return limit_of(receipt.usage, last_usage(receipt.trace))


def limit_of(usage: Usage, before: Usage | None = None) -> Limit:
    """Return the money and the tokens that count for a budget; None is unknown.

    Args:
        before: reported earlier; a lower number at the end gives nothing of a budget back.
    """
    known = (usage,) if before is None else (usage, before)
    costs = [one.estimated_cost_usd for one in known if one.estimated_cost_usd is not None]
    sent, got = usage.input_tokens, usage.output_tokens
    tokens = None if sent is None or got is None else sent + got
    return Limit(math.ceil(round(max(costs) * MICROS, 3)) if costs else None, tokens)


def last_usage(events: Iterable[AgentEvent]) -> Usage:
    """Return the usage that a run's events reported last."""
    folded = Folded()
    for event in events:
        folded = fold(folded, event)
    return folded.usage


def has_budget(order: WorkOrder) -> bool:
    """Return True if an order limits its own money or tokens."""
    return order.config.max_budget_usd is not None or order.abp("budget_tokens") is not None


def after_run(store: Store, order: WorkOrder, run_id: str, used: Limit) -> WorkOrder:
    """Return an order with what one of its runs has left of its budgets, its children's included. Blocks.

    Raises:
        PolicyError: `policy_denied`, nothing is left, or what the run has used is unknown.
        StoreError: `receipt_store_failed`.
    """
    usd, tokens = order.config.max_budget_usd, _amount(order, "budget_tokens")
    if usd is not None:
        left = _left("usd_micros", round(usd * MICROS), used.usd_micros, "max_budget_usd")
        order = replace(order, config=replace(order.config, max_budget_usd=left / MICROS))
    if tokens is not None:
        order = order.with_abp("budget_tokens", _left("tokens", tokens, used.tokens, "budget_tokens"))
    limit = children_budget(order)
    if limit is None:
        return order
    with _opened(store.home) as connection, transaction(connection):
        rest = limit.less(_used(connection, store, run_id))
    for name in ("usd_micros", "tokens"):
        if (has := getattr(rest, name)) is not None:
            order = order.with_abp(f"children_budget_{name}", max(has, 0))
    return order


def _left(kind: str, limit: int, used: int | None, name: str) -> int:
    if used is None:
        fact = f"the usage of this attempt is unknown, and so is what is left of the order's {name}"
        raise PolicyError("policy_denied", fact, hint=f"look at the run, then give the order again without {name}")
    if used >= limit:
        fact = f"{_words(kind, used)} of {_words(kind, limit)} are used up ({name}, one for all attempts of the order)"
        raise PolicyError("policy_denied", fact, hint=f"raise {name}")
    return limit - used


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a child holds of its parent's budget, as its receipt tells it; null is without a bound."""

    parent: str
    reserved_usd_micros: int | None
    """For its own host and all its own children."""
    left_usd_micros: int | None
    """Of the parent's budget, once this was taken."""
    reserved_tokens: int | None
    left_tokens: int | None
    rule: str


def children_budget(order: WorkOrder) -> Limit | None:
    """What an order allows its children to use together; None where it says nothing.

    Raises:
        ConfigError: `config_invalid`, it is no such amount.
    """
    limit = Limit(_amount(order, "children_budget_usd_micros"), _amount(order, "children_budget_tokens"))
    return None if limit == Limit() else limit


def _amount(order: WorkOrder, name: str) -> int | None:
    value = order.abp(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        unit = "tokens" if name.endswith("tokens") else "millionths of a dollar"
        fact = f"config.vendor.abp.{name} is {str(value)[:40]!r}"
        raise ConfigError("config_invalid", fact, hint=f"give {unit}, a whole number from 0 on")
    return value


def reserve(
    store: Store, order: WorkOrder, run_id: str, *, by_call: bool = False
) -> tuple[WorkOrder, Reservation] | None:
    """Take a child's share of its parent's budget; None for an order without a parent, or a turn's. Blocks.

    A child takes its `max_budget_usd` and `budget_tokens`, and its own children's budget; without one of the former
    all that is left, which then is its own.

    Args:
        by_call: its host has each call reserved (`hold`), so that only its own children's budget is taken now.

    Returns:
        The order as it may run, and the reservation.

    Raises:
        ConfigError: `config_invalid`, the parent is not known here or allows no children.
        PolicyError: `policy_denied`, so much is not left; nothing was reserved.
        StoreError: `receipt_store_failed`.
    """
    parent = order.abp("parent")
    if parent is None or isinstance(parent, dict):
        return None
    below = children_budget(order) or Limit()
    limit = _limit_of(store, parent)
    usd, tokens = order.config.max_budget_usd, _amount(order, "budget_tokens")
    with _opened(store.home) as connection, transaction(connection):
        left = limit.less(_used(connection, store, parent))
        wants = [
            _share("usd_micros", left, None if usd is None else round(usd * MICROS), below.usd_micros, by_call),
            _share("tokens", left, tokens, below.tokens, by_call),
        ]
        row = (run_id, parent, *wants, below.usd_micros or 0, below.tokens or 0, 0, 0, os.getpid())
        connection.execute("INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    if not by_call and usd is None and limit.usd_micros is not None:
        own = (wants[0] - (below.usd_micros or 0)) / MICROS
        order = replace(order, config=replace(order.config, max_budget_usd=own))
    if not by_call and tokens is None and limit.tokens is not None:
        order = order.with_abp("budget_tokens", wants[1] - (below.tokens or 0))
    return order, _told(parent, limit, Amount(*wants), left, BY_CALL if by_call else BY_SHARE)


def _share(name: str, left: Limit, own: int | None, below: int | None, by_call: bool) -> int:
    """What a child takes at its start. Raises PolicyError: `policy_denied`."""
    has = getattr(left, name)
    if has is None:
        return 0
    below = below or 0
    amount = below if by_call else max(has, 0) if own is None else own + below
    if amount > has or has <= below or (amount <= below and not by_call):
        asked = "something" if own is None or by_call else _words(name, amount)
        fact = f"a child wants {asked} of its parent's budget, {_words(name, max(has, 0))} of it is left"
        raise PolicyError("policy_denied", fact, hint=_LOWER[name])
    return int(amount)


_LOWER: Final = {
    "usd_micros": "lower its max_budget_usd, wait for other children to end, or raise children_budget_usd_micros",
    "tokens": "lower its budget_tokens, wait for other children to end, or raise children_budget_tokens",
}


def _words(name: str, amount: int) -> str:
    return f"{amount} tokens" if name == "tokens" else f"${amount / MICROS:.6f}"


def _told(parent: str, limit: Limit, taken: Amount, left: Limit, rule: str) -> Reservation:
    after = left.less(taken)
    return Reservation(
        parent=parent,
        reserved_usd_micros=None if limit.usd_micros is None else taken.usd_micros,
        left_usd_micros=after.usd_micros,
        reserved_tokens=None if limit.tokens is None else taken.tokens,
        left_tokens=after.tokens,
        rule=rule + SETTLED,
    )


class ReservationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a host asks before a call of its model, of each kind: what it has used at most, and what the call may."""

    class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        usd_micros: int | None = None
        tokens: int | None = None

    spent: Figures
    most: Figures


def hold(store: Store, run_id: str, asked: Json, *, patient: bool) -> tuple[Decision, Reservation] | None:
    """Reserve what the next call of a child's model may cost, beside what its calls so far have. Blocks.

    What is granted is `most`, or what is left where that is less; the row then holds all that the child may have used,
    so it is right whenever somebody is killed. A call that may cost nothing is none: it settles the one before.

    Args:
        patient: give None where the rest is held by calls of other children on their way, which need less as a rule.

    Raises:
        PolicyError: `policy_denied`, nothing is left, or what the call may cost is unknown.
        ConfigError: `config_invalid`, it is no such question.
        StoreError: `receipt_store_failed`.
    """
    try:
        ask = msgspec.convert(asked, ReservationRequest)
    except msgspec.ValidationError as error:
        raise ConfigError("config_invalid", f"the question cannot be read: {error}") from error
    with _opened(store.home) as connection, transaction(connection):
        parent, *below = connection.execute(
            "SELECT parent, below_usd_micros, below_tokens FROM reservations WHERE run_id = ?", (run_id,)
        ).fetchone()
        limit = _limit_of(store, parent)
        left = limit.less(_used(connection, store, parent, but=run_id))
        others = "SELECT count(*) FROM reservations WHERE parent = ? AND run_id != ? AND open = 1 AND settled = 0"
        waits = patient and connection.execute(others, (parent, run_id)).fetchone()[0] > 0
        granted: list[int | None] = []
        holds: list[int] = []
        for name, kept in zip(("usd_micros", "tokens"), below, strict=True):
            has, spent, most = getattr(left, name), getattr(ask.spent, name), getattr(ask.most, name)
            if has is None:
                granted, holds = [*granted, most], [*holds, 0]
                continue
            if spent is None or most is None or spent < 0 or most < 0:
                fact = f"what its next call may cost is unknown ({name}), so it cannot be reserved"
                raise PolicyError("policy_denied", fact, hint="options = {prices = {input = …, output = …}}")
            room = has - kept - spent
            if waits and most > max(room, 0):
                return None
            if room <= 0 < most:
                fact = f"its parent's budget is used up: {_words(name, max(has - kept, 0))} is left for all it did"
                raise PolicyError("policy_denied", fact, hint=_LOWER[name])
            more = max(min(most, room), 0)
            granted, holds = [*granted, more], [*holds, kept + spent + more]
        is_open = int(any(granted))
        row = (holds[0], holds[1], is_open, run_id)
        connection.execute("UPDATE reservations SET usd_micros = ?, tokens = ?, open = ? WHERE run_id = ?", row)
    told = _told(parent, limit, Amount(*holds), left, BY_CALL)
    return Decision("modify", "reserved", {"usd_micros": granted[0], "tokens": granted[1]}), told


def _limit_of(store: Store, parent: object) -> Limit:
    """What the parent's order allows. Raises ConfigError."""
    if not isinstance(parent, str) or not is_run_id(parent):
        fact = f"config.vendor.abp.parent is {str(parent)[:80]!r}"
        raise ConfigError("config_invalid", fact, hint="give the whole id of a run")
    try:
        vendor = read_head(store.folder(parent)).order.config.vendor
    except (OSError, msgspec.MsgspecError) as error:
        fact = f"the parent {parent} is no run that is known here"
        raise ConfigError("config_invalid", fact, hint="backplane runs lists them") from error
    limit = children_budget(WorkOrder("", config=RuntimeConfig(vendor=vendor)))
    if limit is None:
        fact = f"the run {parent} has no budget for children"
        hint = "its order needs config.vendor.abp.children_budget_usd_micros, or children_budget_tokens"
        raise ConfigError("config_invalid", fact, hint=hint)
    return limit


def _used(connection: sqlite3.Connection, store: Store, parent: str, but: str = "") -> Amount:
    """What the children have used or may still use; those that have ended meanwhile are settled."""
    total = Amount()
    rows: list[Any] = connection.execute(
        "SELECT run_id, usd_micros, tokens, settled, pid FROM reservations WHERE parent = ? AND run_id != ?",
        (parent, but),
    ).fetchall()
    for run_id, usd_micros, tokens, settled, pid in rows:
        used = Amount(usd_micros, tokens)
        if not settled and (ended := _settled(store, run_id, used, pid)) is not None:
            used = ended
            connection.execute(
                "UPDATE reservations SET usd_micros = ?, tokens = ?, settled = 1 WHERE run_id = ?",
                (used.usd_micros, used.tokens, run_id),
            )
        total = Amount(total.usd_micros + used.usd_micros, total.tokens + used.tokens)
    return total


def _settled(store: Store, run_id: str, reserved: Amount, pid: int) -> Amount | None:
    """What a child has used, all that was reserved where that is not known for sure; None while it may go on."""
    if not store.has(run_id):
        # Whoever was to start it died before there was a journal: so it never began.
        never_began = not os.path.lexists(store.folder(run_id)) and not _is_alive(pid)
        return Amount() if never_began else None
    run = of_row(store, store.find(run_id))
    if run.reason == "refused":
        return Amount()
    told = run.reason in COUNTED
    sent, got = run.input_tokens, run.output_tokens
    tokens = None if sent is None or got is None else sent + got
    return Amount(_counted(run.cost_usd_micros, reserved.usd_micros, told), _counted(tokens, reserved.tokens, told))


def _counted(used: int | None, reserved: int, told: bool) -> int:
    return used if used is not None and told else max(reserved, used or 0)


def _is_alive(pid: int) -> bool:
    """Whether there is such a process; another one of the same number only keeps a reservation longer."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _opened(home: Path) -> Iterator[sqlite3.Connection]:
    path = home / FILE
    with translated(path):
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(_TABLE)
            yield connection
        finally:
            connection.close()
