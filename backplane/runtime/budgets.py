"""What the children of one run may cost together: a share reserved before a child starts, settled when it has ended.

A reservation is a row that is checked and written in one transaction, so any number of processes keep to one limit.
It is settled from the child's receipt when somebody looks next, so a kill leaves nothing to be put right.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.errors import ConfigError, PolicyError
from backplane.receipts.database import BUSY_TIMEOUT_S, transaction, translated
from backplane.receipts.journal import read_head
from backplane.receipts.memory import of_row
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store

FILE: Final = "budgets.sqlite"

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS reservations (
  run_id TEXT PRIMARY KEY,
  parent TEXT NOT NULL,
  reserved_usd_micros INTEGER NOT NULL,
  settled_usd_micros INTEGER,
  pid INTEGER NOT NULL
)
"""

MICROS: Final = 1_000_000


COUNTED: Final = frozenset({"complete", "partial", "budget", "max_turns"})
"""Ends after which all that a run has cost was told; after any other a last call may be missing."""


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A child's share of its parent's budget, as its receipt tells it."""

    parent: str
    reserved_usd_micros: int
    """For its own host and all its own children."""
    left_usd_micros: int
    """Of the parent's budget, once this was taken."""
    rule: str = (
        "settled by the receipt; where its cost is unknown or the run was cut off, as all that was reserved. Beyond it "
        "goes nothing where usage_raw.budget_rule says so, else one model call at most"
    )


def children_budget(order: WorkOrder) -> int | None:
    """What an order allows its children to cost together, in millionths of a dollar; None where it says nothing.

    Raises:
        ConfigError: `config_invalid`, it is no such amount.
    """
    value = order.abp("children_budget_usd_micros")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        fact = f"config.vendor.abp.children_budget_usd_micros is {str(value)[:40]!r}"
        raise ConfigError("config_invalid", fact, hint="give millionths of a dollar, a whole number from 0 on")
    return value


def reserve(store: Store, order: WorkOrder, run_id: str) -> tuple[WorkOrder, Reservation] | None:
    """Take a child's share of its parent's budget; None for an order without a parent, or a turn's. Blocks.

    A child takes its `max_budget_usd` and its own children's budget; without the former all that is left, which then
    is its `max_budget_usd`.

    Returns:
        The order as it may run, and the reservation.

    Raises:
        ConfigError: `config_invalid`, the parent is not known here or allows no children.
        PolicyError: `policy_denied`, so much is not left; nothing was reserved.
        StoreError: `receipt_store_failed`.
    """
    parent = order.abp("parent")
    below = children_budget(order) or 0
    if parent is None or isinstance(parent, dict):
        return None
    limit = _limit_of(store, parent)
    own = order.config.max_budget_usd
    wanted = None if own is None else round(own * MICROS) + below
    with _opened(store.home) as connection, transaction(connection):
        left = limit - _used(connection, store, parent)
        amount = max(left, 0) if wanted is None else wanted
        if amount > left or amount <= below:
            asked = "something" if wanted is None else f"${amount / MICROS:.6f}"
            fact = f"a child wants {asked} of its parent's budget, ${max(left, 0) / MICROS:.6f} of it is left"
            hint = "lower its max_budget_usd, wait for other children to end, or raise children_budget_usd_micros"
            raise PolicyError("policy_denied", fact, hint=hint)
        connection.execute("INSERT INTO reservations VALUES (?, ?, ?, NULL, ?)", (run_id, parent, amount, os.getpid()))
    if wanted is None:
        replace = msgspec.structs.replace
        order = replace(order, config=replace(order.config, max_budget_usd=(amount - below) / MICROS))
    return order, Reservation(parent=parent, reserved_usd_micros=amount, left_usd_micros=left - amount)


def _limit_of(store: Store, parent: object) -> int:
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
        raise ConfigError("config_invalid", fact, hint="its order needs config.vendor.abp.children_budget_usd_micros")
    return limit


def _used(connection: sqlite3.Connection, store: Store, parent: str) -> int:
    """What the children have cost or may still cost; those that have ended meanwhile are settled."""
    used = 0
    rows = connection.execute(
        "SELECT run_id, reserved_usd_micros, settled_usd_micros, pid FROM reservations WHERE parent = ?", (parent,)
    ).fetchall()
    for run_id, reserved, settled, pid in rows:
        if settled is None:
            settled = _cost(store, run_id, reserved, pid)
            connection.execute("UPDATE reservations SET settled_usd_micros = ? WHERE run_id = ?", (settled, run_id))
        used += reserved if settled is None else settled
    return used


def _cost(store: Store, run_id: str, reserved: int, pid: int) -> int | None:
    """What a child has cost, all that was reserved where that is not known for sure; None while it may go on."""
    if not store.has(run_id):
        # Whoever was to start it died before there was a journal: so it never began.
        never_began = not os.path.lexists(store.folder(run_id)) and not _is_alive(pid)
        return 0 if never_began else None
    run = of_row(store, store.find(run_id))
    if run.reason == "refused":
        return 0
    cost = run.cost_usd_micros
    if cost is None or run.reason not in COUNTED:
        return max(reserved, cost or 0)
    return cost


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
