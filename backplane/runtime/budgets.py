"""Limits the money and tokens of an order over all its attempts, and those of a run's children together.

A child's share is fixed when the child starts: its row is checked and written in one transaction, so any number of
processes keep to one budget. When another child asks, the row is settled from the child's receipt, which frees what the
child did not use. A process that was killed before its run had a folder keeps its share.
"""

from __future__ import annotations

import functools
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

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
from backplane.contract.unknown import check_settings
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.errors import ConfigError, PolicyError, StoreError
from backplane.receipts.database import BUSY_TIMEOUT_S, transaction, translated
from backplane.receipts.folded import Folded, fold
from backplane.receipts.journal import read_head
from backplane.receipts.recovery import is_run_id
from backplane.receipts.store import Store

FILE: Final = "spend.sqlite"

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS shares (
  run_id TEXT PRIMARY KEY,
  parent TEXT NOT NULL,
  usd_micros INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  settled INTEGER NOT NULL
)
"""

MICROS: Final = 1_000_000

UNBILLED: Final = frozenset({"backend_rate_limited", "backend_unavailable"})
"""Error codes of requests that a service refuses without billing them."""

ANSWERS: Final = (AssistantDelta, AssistantMessage, ToolCall, FileChanged, CommandExecuted)
"""Kinds of events that show that a model has answered."""

COUNTED: Final = frozenset({"complete", "partial", "budget", "max_turns"})
"""Ends of a run whose reported usage is complete; after any other end, a last call may be missing."""

_OWN: Final = {"usd_micros": "max_budget_usd", "tokens": "budget_tokens"}
"""Kinds of amounts → the settings that limit them for an order's own agent."""


class Amount(NamedTuple):
    """Money in millionths of a dollar, and input plus output tokens; None if unknown, or without a limit."""

    usd_micros: int | None = None
    tokens: int | None = None

    def minus(self, used: Amount) -> Amount:
        """Return what is left of this limit; negative if more was used."""
        return Amount(*(has if has is None else has - (less or 0) for has, less in zip(self, used, strict=True)))


def used_by(receipt: Receipt, code: str | None, *, was_sent: bool) -> Amount:
    """Return the money and tokens that a run has used according to its receipt; None for what is unknown.

    A call that the service refused is not billed, and a host that never got its order has called no model.

    Args:
        code: the code of the run's error.
    """
    answered = any(isinstance(event, ANSWERS) for event in receipt.trace)
    reported = last_usage(receipt.trace)
    if not was_sent or (code in UNBILLED and not answered and receipt.usage == reported == Usage()):
        return Amount(0, 0)
    return amount_of(receipt.usage, reported)


def amount_of(usage: Usage, before: Usage | None = None) -> Amount:
    """Return the money and the tokens that count for a budget; None for what is unknown.

    Args:
        before: usage reported earlier; if its cost is higher, that cost counts.
    """
    reported = (usage.estimated_cost_usd, before.estimated_cost_usd if before is not None else None)
    costs = [cost for cost in reported if cost is not None]
    usd_micros = math.ceil(round(max(costs) * MICROS, 3)) if costs else None
    return Amount(usd_micros, _tokens(usage.input_tokens, usage.output_tokens))


def _tokens(sent: int | None, got: int | None) -> int | None:
    return None if sent is None or got is None else sent + got


def last_usage(events: Iterable[AgentEvent]) -> Usage:
    """Return the latest usage that a run's events reported."""
    return functools.reduce(fold, events, Folded()).usage


def own_budget(order: WorkOrder) -> Amount:
    """Return the limits of an order's own agent."""
    usd = order.config.max_budget_usd
    return Amount(None if usd is None else round(usd * MICROS), order.abp("budget_tokens"))


def children_budget(order: WorkOrder) -> Amount:
    """Return the limits that an order's children share."""
    return Amount(order.abp("children_budget_usd_micros"), order.abp("children_budget_tokens"))


def _with_budget(order: WorkOrder, own: Amount) -> WorkOrder:
    if own.usd_micros is not None:
        order = replace(order, config=replace(order.config, max_budget_usd=own.usd_micros / MICROS))
    return order if own.tokens is None else order.with_abp("budget_tokens", own.tokens)


def after_run(store: Store, order: WorkOrder, run_id: str, used: Amount) -> WorkOrder:
    """Return an order whose budgets are reduced by what one of its runs and the run's children used. Blocks.

    Raises:
        PolicyError: `policy_denied`, nothing is left, or the run's usage is unknown.
        StoreError: `receipt_store_failed`.
    """
    check_settings(order)
    own, below = own_budget(order), children_budget(order)
    for kind, limit, has_used in zip(_OWN, own, used, strict=True):
        if limit is None:
            continue
        name = _OWN[kind]
        if has_used is None:
            fact = f"the usage of this attempt is unknown, and so is what is left of the order's {name}"
            raise PolicyError("policy_denied", fact, hint=f"look at the run, then give the order again without {name}")
        if has_used >= limit:
            words = f"{_words(kind, has_used)} of {_words(kind, limit)}"
            fact = f"{words} are used up ({name}, one for all attempts of the order)"
            raise PolicyError("policy_denied", fact, hint=f"raise {name}")
    order = _with_budget(order, own.minus(used))
    if below != Amount():
        with _opened(store.home) as connection:
            left = below.minus(_used(connection, store, run_id))
        for name, has in left._asdict().items():
            order = order if has is None else order.with_abp(f"children_budget_{name}", max(has, 0))
    return order


def reserve(store: Store, order: WorkOrder, run_id: str) -> tuple[WorkOrder, dict[str, Json]]:
    """Reserve the share of a child in its parent's budget. Blocks.

    The share is the child's `max_budget_usd` and `budget_tokens` plus the budget of its own children. A child without a
    limit reserves all that is left, which becomes its limit.

    Returns:
        The child's order with its limits, and the receipt's member `budget`.

    Raises:
        ConfigError: `config_invalid`, the parent is unknown here or has no budget for children, or a setting is wrong.
        PolicyError: `policy_denied`, less than this share is left; nothing was reserved.
        StoreError: `receipt_store_failed`.
    """
    check_settings(order)
    parent = order.abp("parent")
    limit, own, below = _limit_of(store, parent), own_budget(order), children_budget(order)
    with _opened(store.home) as connection:
        left = limit.minus(_used(connection, store, parent))
        share = Amount(*map(_share, Amount._fields, left, own, below))
        row = (run_id, parent, share.usd_micros or 0, share.tokens or 0)
        connection.execute("INSERT INTO shares VALUES (?, ?, ?, ?, 0)", row)
    missing = (None if has is not None else less for has, less in zip(own, share.minus(below), strict=True))
    after = left.minus(share)
    return _with_budget(order, Amount(*missing)), {
        "parent": parent,
        "reserved_usd_micros": share.usd_micros,
        "left_usd_micros": after.usd_micros,
        "reserved_tokens": share.tokens,
        "left_tokens": after.tokens,
    }


def _share(kind: str, left: int | None, own: int | None, below: int | None) -> int | None:
    """Return the amount to reserve for a child; None if the parent has no limit. Raises PolicyError `policy_denied`."""
    if left is None:
        return None
    below = below or 0
    share = max(left, 0) if own is None else own + below
    if below < share <= left:
        return share
    asked = "something" if own is None else _words(kind, share)
    fact = f"a child wants {asked} of its parent's budget, {_words(kind, max(left, 0))} of it is left"
    hint = f"lower its {_OWN[kind]}, wait for other children to end, or raise children_budget_{kind}"
    raise PolicyError("policy_denied", fact, hint=hint)


def _words(kind: str, amount: int) -> str:
    return f"{amount} tokens" if kind == "tokens" else f"${amount / MICROS:.6f}"


def _limit_of(store: Store, parent: object) -> Amount:
    """Return the limits that the parent's order sets for its children. Raises ConfigError: `config_invalid`."""
    if not isinstance(parent, str) or not is_run_id(parent):
        fact = f"config.vendor.abp.parent is {str(parent)[:80]!r}"
        raise ConfigError("config_invalid", fact, hint="give the whole id of a run")
    try:
        vendor = read_head(store.folder(parent)).order.config.vendor
    except (OSError, msgspec.MsgspecError) as error:
        fact = f"the parent {parent} is no run that is known here"
        raise ConfigError("config_invalid", fact, hint="backplane runs lists them") from error
    limit = children_budget(WorkOrder("", config=RuntimeConfig(vendor=vendor)))
    if limit == Amount():
        fact = f"the run {parent} has no budget for children"
        hint = "its order needs config.vendor.abp.children_budget_usd_micros, or children_budget_tokens"
        raise ConfigError("config_invalid", fact, hint=hint)
    return limit


def _used(connection: sqlite3.Connection, store: Store, parent: str) -> Amount:
    """Settle the children that have ended, and return what all children have used or may still use."""
    open_shares = "SELECT run_id, usd_micros, tokens FROM shares WHERE parent = ? AND settled = 0"
    for run_id, *share in connection.execute(open_shares, (parent,)).fetchall():
        if store.has(run_id):
            used = _used_of(store, run_id, Amount(*share))
            settle = "UPDATE shares SET usd_micros = ?, tokens = ?, settled = 1 WHERE run_id = ?"
            connection.execute(settle, (*used, run_id))
    total = "SELECT coalesce(sum(usd_micros), 0), coalesce(sum(tokens), 0) FROM shares WHERE parent = ?"
    return Amount(*connection.execute(total, (parent,)).fetchone())


def _used_of(store: Store, run_id: str, share: Amount) -> Amount:
    """Return what an ended child has used; for an uncertain amount, at least its share."""
    row = store.find(run_id)
    if row.reason == "refused":
        return Amount(0, 0)
    try:
        receipt = store.load(run_id)
    except StoreError:  # Pruned or altered.
        return share
    is_whole = row.reason in COUNTED  # Otherwise the reported usage may lack a last call.
    proxy = receipt.backplane.get("key_proxy")
    # The proxy's cost includes the most that a cut answer can cost, but no counter has its tokens.
    is_cut = isinstance(proxy, dict) and proxy["answers"]["uncounted"] > 0
    used, is_known = amount_of(receipt.usage), Amount(is_whole, is_whole and not is_cut)
    return Amount(
        *(
            has if is_sure and has is not None else max(has or 0, most or 0)
            for has, is_sure, most in zip(used, is_known, share, strict=True)
        )
    )


@contextmanager
def _opened(home: Path) -> Iterator[sqlite3.Connection]:
    """Open the database of shares for one transaction."""
    path = home / FILE
    with translated(path):
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(_TABLE)
            with transaction(connection):
                yield connection
        finally:
            connection.close()
