"""Workers and lost attempts, in some small tables beside the engine's own, by the database's clock alone.

A worker sends heartbeats; if the last is older than the lease, the worker is dead, and another one claims its orders.
The engine's fence prevents a second receipt, so a wrong suspicion costs only an attempt. An attempt gets a row when it
is lost: its id follows from order and worker, so that the usual order costs one read and no write. All calls block.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from backplane.contract.approval import Decision
from backplane.errors import StoreError
from backplane.scale.engine import Attempt, Budget, Worker

BEAT_S: Final = 2.0
"""Seconds between two heartbeats, and the delay of a cancel; each is one small transaction."""
LEASE_S: Final = 20.0
"""Seconds without a heartbeat after which a worker is dead: ten heartbeats, so a short outage is harmless."""
LOCK_WAIT_S: Final = 30.0
"""Seconds to wait for a locked SQLite file; transactions take milliseconds."""
AGAIN_S: Final = 0.5
"""Seconds between two tries to reach the database; the watchdog ends a worker after a long outage."""
_ATTEMPTS: Final = uuid.UUID("7d5f7a52-6c0c-4c11-9c1e-3a0f2f4b8f2d")
"""The namespace of attempts' ids: random, and fixed for ever."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS backplane_worker (id VARCHAR(64) PRIMARY KEY, label VARCHAR(64) NOT NULL, "
    "slots INTEGER NOT NULL, beat_ms BIGINT NOT NULL, claimed_ms BIGINT NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS backplane_lost (order_id VARCHAR(64) NOT NULL, worker VARCHAR(64) NOT NULL, "
    "number INTEGER NOT NULL, lost_ms BIGINT NOT NULL, PRIMARY KEY (order_id, worker))",
    "CREATE TABLE IF NOT EXISTS backplane_cancel (order_id VARCHAR(64) PRIMARY KEY, why VARCHAR(1000) NOT NULL)",
    "CREATE TABLE IF NOT EXISTS backplane_answer (order_id VARCHAR(64) NOT NULL, attempt VARCHAR(64) NOT NULL, "
    "ask VARCHAR(200) NOT NULL, decision TEXT NOT NULL, PRIMARY KEY (attempt, ask))",
    "CREATE TABLE IF NOT EXISTS backplane_budget (id INTEGER PRIMARY KEY, limit_usd_micros BIGINT, "
    "spent_usd_micros BIGINT NOT NULL)",
    "INSERT INTO backplane_budget VALUES (1, NULL, 0) ON CONFLICT (id) DO NOTHING",
)
_LOSE: Final = (
    "INSERT INTO backplane_lost (order_id, worker, number, lost_ms) "
    "SELECT CAST(:order AS VARCHAR), CAST(:worker AS VARCHAR), COUNT(*) + 1, {now} FROM backplane_lost "
    "WHERE order_id = :order ON CONFLICT (order_id, worker) DO NOTHING"
)
_FACTS: Final = (
    "SELECT 'lost' AS kind, worker AS text, CAST(number AS BIGINT) AS number FROM backplane_lost "
    "WHERE order_id = :order "
    "UNION ALL SELECT 'cancel', why, 0 FROM backplane_cancel WHERE order_id = :order "
    "UNION ALL SELECT 'left', '', limit_usd_micros - spent_usd_micros FROM backplane_budget "
    "WHERE limit_usd_micros IS NOT NULL "
    "UNION ALL SELECT 'alive', '', 0 FROM backplane_worker WHERE id = :worker AND claimed_ms = 0 ORDER BY 3"
)
"""Reads all facts for an attempt in one statement without a transaction, most of our cost beside the engine's."""
_NEWS: Final = (
    "SELECT order_id, '' AS attempt, '' AS ask, why AS text FROM backplane_cancel WHERE order_id IN :ids "
    "UNION ALL SELECT order_id, attempt, ask, decision FROM backplane_answer WHERE order_id IN :ids"
)
_TAKE: Final = (
    "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :wanted WHERE limit_usd_micros IS NULL "
    "OR spent_usd_micros + :wanted <= limit_usd_micros"
)
_CLOCKS: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}


class News(msgspec.Struct, frozen=True):
    """The answer to a heartbeat."""

    is_alive: bool
    """False if the other workers declared this one dead; its attempts are void then."""
    cancelled: dict[str, str]
    """Cancelled order → the reason."""
    answers: dict[str, dict[str, Decision]]
    """Attempt → ask → decision."""


class Ledger:
    """The tables.

    Args:
        url: the database's, in SQLAlchemy's form.
        lease_s: see `LEASE_S`; all workers of a queue need the same.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S) -> None:
        self.lease_ms = int(lease_s * 1000)
        wait: Any = {"connect_args": {"timeout": LOCK_WAIT_S}} if url.startswith("sqlite") else {}
        # Each statement is a transaction of its own; none of ours needs two. A connection is tried before its use.
        self._engine: sa.Engine = sa.create_engine(
            url, pool_size=2, max_overflow=0, pool_pre_ping=True, isolation_level="AUTOCOMMIT", **wait
        )
        self._now = _CLOCKS[self._engine.dialect.name]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def prepare(self) -> None:
        """Create missing tables. Raises StoreError `receipt_store_failed`."""
        try:
            with self._engine.connect() as connection:
                if self._engine.dialect.name == "sqlite":
                    # A commit waits for the disk once instead of four times, and readers block no writer.
                    with suppress(sa.exc.OperationalError):  # Another process does it at this moment.
                        connection.execute(sa.text("PRAGMA journal_mode = WAL"))
                for statement in _TABLES:
                    connection.execute(sa.text(statement))
        except sa.exc.SQLAlchemyError as error:
            # Two processes that create the tables at once collide in the catalogue of Postgres; the tables exist then.
            if not sa.inspect(self._engine).has_table("backplane_budget"):
                raise StoreError("receipt_store_failed", f"the queue's tables cannot be made: {error}") from error

    def enter(self, worker: str, label: str, slots: int) -> None:
        """Register a worker, before it takes its first order."""
        insert = f"INSERT INTO backplane_worker (id, label, slots, beat_ms) VALUES (:id, :label, :slots, {self._now})"
        self._do(insert, id=worker, label=label, slots=slots)

    def leave(self, worker: str) -> None:
        """Let other workers take over the orders of this one at once; it sends no more heartbeats."""
        self._do("UPDATE backplane_worker SET beat_ms = 0 WHERE id = :id", id=worker)

    def forget(self, worker: str) -> None:
        """Remove the row of a worker without orders."""
        self._do("DELETE FROM backplane_worker WHERE id = :id", id=worker)

    def beat(self, worker: str, orders: Collection[str]) -> News:
        """Send a heartbeat, and return news of the worker's orders."""
        update = f"UPDATE backplane_worker SET beat_ms = {self._now} WHERE id = :id AND claimed_ms = 0"
        news = News(self._do(update, id=worker) == 1, {}, {})
        for order, attempt, ask, text in self._rows(_NEWS, ids=orders):
            if ask:
                news.answers.setdefault(attempt, {})[ask] = msgspec.json.decode(text, type=Decision)
            else:
                news.cancelled[order] = text
        return news

    def now_ms(self) -> int:
        """Return the time by the database's clock, in milliseconds since 1970."""
        ((now_ms,),) = self._rows(f"SELECT {self._now}")
        return int(now_ms)

    def workers(self) -> Sequence[Worker]:
        """Return all workers, also dead ones whose orders are still theirs."""
        select = f"SELECT id, label, slots, {self._now} - beat_ms FROM backplane_worker ORDER BY id"
        return [Worker(*row) for row in self._rows(select)]

    def claim_dead(self, owners: Collection[str]) -> Sequence[str]:
        """Claim dead workers, to resume their orders; one worker claims each of them, once per lease.

        Args:
            owners: workers that have orders in the engine's tables. A worker without a row gets a lease from now.
        """
        workers = self.workers()
        for owner in set(owners) - {worker.id for worker in workers}:
            self.enter(owner, "?", 0)
        claim = (
            f"UPDATE backplane_worker SET claimed_ms = {self._now} WHERE id = :id "
            f"AND beat_ms < {self._now} - :lease AND claimed_ms < {self._now} - :lease"
        )
        dead = [worker.id for worker in workers if worker.age_ms > self.lease_ms]
        return [one for one in dead if self._do(claim, id=one, lease=self.lease_ms) == 1]

    def lose(self, order_id: str, worker: str) -> None:
        """Record that a dead worker's attempt at an order is void; repeated calls have no effect."""
        self._do(_LOSE.format(now=self._now), order=order_id, worker=worker)

    def begin(self, order_id: str, worker: str, wanted_usd_micros: int = 0) -> Attempt | None:
        """Return a new attempt: its predecessors, whether it is cancelled, and whether the budget covers it.

        The wanted amount is reserved until `settle`, and for ever if the attempt is lost, as its cost is unknown.
        Waits for a database that is away.

        Returns:
            None if this worker was declared dead.
        """
        facts = self._rows(_FACTS, is_patient=True, order=order_id, worker=worker)
        if not any(kind == "alive" for kind, _, _ in facts):
            return None
        earlier = tuple(attempt_id(order_id, lost) for kind, lost, _ in facts if kind == "lost")
        why = next((text for kind, text, _ in facts if kind == "cancel"), None)
        left = next((number for kind, _, number in facts if kind == "left"), None)
        # An attempt cancelled before its start costs nothing.
        wanted = 0 if why is not None else wanted_usd_micros
        denied = None if why is not None else self._reserve(wanted, left)
        reserved = 0 if denied is not None else wanted
        return Attempt(attempt_id(order_id, worker), order_id, earlier, why, denied, reserved)

    def _reserve(self, wanted: int, left: int | None) -> str | None:
        """Reserve an attempt's share of the budget; return the reason if there is none."""
        if not wanted and (left is None or left > 0):
            return None
        if wanted and self._do(_TAKE, is_patient=True, wanted=wanted):
            return None
        asked = f"${wanted / 1e6:.6f}" if wanted else "something"
        return f"the order may cost {asked}, but only ${max(left or 0, 0) / 1e6:.6f} of the queue's budget is left"

    def settle(self, reserved_usd_micros: int, cost_usd_micros: int) -> None:
        """Replace an attempt's reservation by its cost. Waits for a database that is away."""
        more = cost_usd_micros - reserved_usd_micros
        if more:
            add = "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :more"
            self._do(add, is_patient=True, more=more)

    def budget(self) -> Budget:
        """Return the budget of the whole queue and its cost so far."""
        (row,) = self._rows("SELECT limit_usd_micros, spent_usd_micros FROM backplane_budget")
        return Budget(*row)

    def set_budget(self, limit_usd_micros: int | None) -> None:
        """Set the budget of the whole queue, past cost included."""
        self._do("UPDATE backplane_budget SET limit_usd_micros = :limit", limit=limit_usd_micros)

    def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> bool:
        """Store an answer for the attempt's worker; return False if there is one already, which stays."""
        insert = (
            "INSERT INTO backplane_answer (order_id, attempt, ask, decision) "
            "VALUES (:order, :attempt, :ask, :decision) ON CONFLICT (attempt, ask) DO NOTHING"
        )
        text = msgspec.json.encode(decision).decode()
        return self._do(insert, order=order_id, attempt=attempt, ask=ask, decision=text) == 1

    def remove(self, orders: Collection[str]) -> None:
        """Remove orders that have ended; their cost stays counted."""
        for table in ("lost", "cancel", "answer"):
            self._do(f"DELETE FROM backplane_{table} WHERE order_id IN :ids", ids=orders)

    def lost(self, orders: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the lost attempts of these orders, oldest first."""
        found: dict[str, tuple[str, ...]] = {}
        select = "SELECT order_id, worker FROM backplane_lost WHERE order_id IN :ids ORDER BY number"
        for order_id, worker in self._rows(select, ids=orders):
            found[order_id] = (*found.get(order_id, ()), attempt_id(order_id, worker))
        return found

    def cancels(self, orders: Collection[str]) -> dict[str, str]:
        """Return the reasons of cancelled orders among these."""
        return dict(self._rows("SELECT order_id, why FROM backplane_cancel WHERE order_id IN :ids", ids=orders))

    def cancel(self, order_id: str, why: str) -> None:
        """Cancel an order; the first reason stays."""
        insert = "INSERT INTO backplane_cancel (order_id, why) VALUES (:id, :why) ON CONFLICT (order_id) DO NOTHING"
        self._do(insert, id=order_id, why=why[:1000])

    def _rows(self, statement: str, *, is_patient: bool = False, **values: Any) -> Sequence[Any]:
        return self._run(statement, values, is_patient)[0]

    def _do(self, statement: str, *, is_patient: bool = False, **values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        return self._run(statement, values, is_patient)[1]

    def _run(self, statement: str, values: dict[str, Any], is_patient: bool) -> tuple[Sequence[Any], int]:
        """Run a statement.

        Args:
            values: by name; `ids` is a collection.
            is_patient: repeat while the database is away. A statement whose answer was cut off runs twice: the budget
                then counts too much, never too little.
        """
        text = sa.text(statement)
        if "ids" in values:
            # Postgres needs the type of an empty list.
            text = text.bindparams(sa.bindparam("ids", type_=sa.String, expanding=True))
            values["ids"] = list(values["ids"])
        while True:
            try:
                with self._engine.connect() as connection:
                    done = connection.execute(text, values)
                    return done.all() if done.returns_rows else (), done.rowcount
            except (sa.exc.OperationalError, sa.exc.InterfaceError):
                if not is_patient:
                    raise
                time.sleep(AGAIN_S)


def attempt_id(order_id: str, worker: str) -> str:
    """Return the id of a worker's attempt at an order; a worker has one at most, as a resume needs its death."""
    return str(uuid.uuid5(_ATTEMPTS, f"{order_id}/{worker}"))
