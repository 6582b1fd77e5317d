"""Workers and attempts, in some small tables beside the engine's own, by the database's clock alone.

A worker beats; one whose last beat is older than the lease is dead, and one of the others claims what it had. The
engine's fence is what keeps a second receipt away: a wrong suspicion costs an attempt. Everything here blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from backplane.contract.approval import Decision
from backplane.errors import StoreError
from backplane.scale.engine import Attempt, Budget, Worker

BEAT_S: Final = 2.0
"""Between two beats, which is also how soon a cancel is seen: one small transaction each."""
LEASE_S: Final = 20.0
"""Without a beat a worker is dead: ten beats, so that a database away for a few seconds costs nobody's work."""
LOCK_WAIT_S: Final = 30.0
"""For a SQLite file that others write to; their transactions take milliseconds."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS backplane_worker (id VARCHAR(64) PRIMARY KEY, label VARCHAR(64) NOT NULL, "
    "slots INTEGER NOT NULL, beat_ms BIGINT NOT NULL, claimed_ms BIGINT NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS backplane_attempt (order_id VARCHAR(64) NOT NULL, number INTEGER NOT NULL, "
    "id VARCHAR(64) NOT NULL, worker VARCHAR(64) NOT NULL, begun_ms BIGINT NOT NULL, "
    "reserved_usd_micros BIGINT NOT NULL, PRIMARY KEY (order_id, number))",
    "CREATE TABLE IF NOT EXISTS backplane_cancel (order_id VARCHAR(64) PRIMARY KEY, why VARCHAR(1000) NOT NULL)",
    "CREATE TABLE IF NOT EXISTS backplane_answer (order_id VARCHAR(64) NOT NULL, attempt VARCHAR(64) NOT NULL, "
    "ask VARCHAR(200) NOT NULL, decision TEXT NOT NULL, PRIMARY KEY (attempt, ask))",
    "CREATE TABLE IF NOT EXISTS backplane_budget (id INTEGER PRIMARY KEY, limit_usd_micros BIGINT, "
    "spent_usd_micros BIGINT NOT NULL)",
    "INSERT INTO backplane_budget VALUES (1, NULL, 0) ON CONFLICT (id) DO NOTHING",
)
_BEGIN: Final = (
    "INSERT INTO backplane_attempt (order_id, number, id, worker, begun_ms, reserved_usd_micros) "
    "SELECT CAST(:order AS VARCHAR), COUNT(*) + 1, CAST(:id AS VARCHAR), CAST(:worker AS VARCHAR), {now}, "
    "CAST(:wanted AS BIGINT) FROM backplane_attempt WHERE order_id = :order"
)
_FACTS: Final = (
    "SELECT 'attempt' AS kind, id AS text, CAST(number AS BIGINT) AS number FROM backplane_attempt "
    "WHERE order_id = :order "
    "UNION ALL SELECT 'cancel', why, 0 FROM backplane_cancel WHERE order_id = :order "
    "UNION ALL SELECT 'left', '', limit_usd_micros - spent_usd_micros FROM backplane_budget "
    "WHERE limit_usd_micros IS NOT NULL ORDER BY 3"
)
"""All that an attempt is to know, in one round trip: it is a third of what the queue adds to its engine."""
_TAKE: Final = (
    "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :wanted WHERE limit_usd_micros IS NULL "
    "OR spent_usd_micros + :wanted <= limit_usd_micros"
)
_CLOCKS: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}


class News(msgspec.Struct, frozen=True):
    """What a beat brings back."""

    is_alive: bool
    """False: the others took this worker for dead, and what it does does not count any more."""
    cancelled: dict[str, str]
    """Of the orders asked about: why they are to end."""
    newest: dict[str, str]
    """Of the same: the id of the newest attempt."""
    answers: dict[str, dict[str, Decision]]
    """Attempt → ask → what was decided."""


class Ledger:
    """The tables.

    Args:
        url: of the database, for SQLAlchemy.
        lease_s: see `LEASE_S`; all workers of a queue need the same.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S) -> None:
        self.lease_ms = int(lease_s * 1000)
        wait = {"connect_args": {"timeout": LOCK_WAIT_S}} if url.startswith("sqlite") else {"pool_pre_ping": True}
        self._engine: sa.Engine = sa.create_engine(url, pool_size=2, max_overflow=0, **wait)
        self._now = _CLOCKS[self._engine.dialect.name]

    def close(self) -> None:
        """Let the connections go."""
        self._engine.dispose()

    def prepare(self) -> None:
        """Make the tables where they are missing. Raises StoreError `receipt_store_failed`."""
        try:
            with self._engine.begin() as connection:
                for statement in _TABLES:
                    connection.execute(sa.text(statement))
        except sa.exc.SQLAlchemyError as error:
            # Two that make them at once meet in the catalogue of Postgres: then they are there.
            if not sa.inspect(self._engine).has_table("backplane_budget"):
                raise StoreError("receipt_store_failed", f"the queue's tables cannot be made: {error}") from error

    def enter(self, worker: str, label: str, slots: int) -> None:
        """Make a worker known, before it takes its first order."""
        insert = f"INSERT INTO backplane_worker (id, label, slots, beat_ms) VALUES (:id, :label, :slots, {self._now})"
        self._do(insert, id=worker, label=label, slots=slots)

    def leave(self, worker: str) -> None:
        """Have the others take over at once what this worker still has: it beats no more."""
        self._do("UPDATE backplane_worker SET beat_ms = 0 WHERE id = :id", id=worker)

    def forget(self, worker: str) -> None:
        """Remove the row of a worker that has nothing any more."""
        self._do("DELETE FROM backplane_worker WHERE id = :id", id=worker)

    def beat(self, worker: str, orders: Collection[str]) -> News:
        """Say that this worker is alive, and hear of its orders."""
        with self._engine.begin() as connection:
            update = f"UPDATE backplane_worker SET beat_ms = {self._now} WHERE id = :id AND claimed_ms = 0"
            alive = connection.execute(sa.text(update), {"id": worker}).rowcount == 1
            if not orders:
                return News(alive, {}, {}, {})
            asked = {"ids": list(orders)}
            cancels = sa.text("SELECT order_id, why FROM backplane_cancel WHERE order_id IN :ids")
            numbered = sa.text("SELECT order_id, id FROM backplane_attempt WHERE order_id IN :ids ORDER BY number")
            ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
            cancelled = {row[0]: row[1] for row in connection.execute(cancels.bindparams(ids), asked)}
            newest = {row[0]: row[1] for row in connection.execute(numbered.bindparams(ids), asked)}
            answers: dict[str, dict[str, Decision]] = {}
            told = sa.text("SELECT attempt, ask, decision FROM backplane_answer WHERE order_id IN :ids")
            for attempt, ask, decision in connection.execute(told.bindparams(ids), asked):
                answers.setdefault(attempt, {})[ask] = msgspec.json.decode(decision, type=Decision)
            return News(alive, cancelled, newest, answers)

    def workers(self) -> Sequence[Worker]:
        """All workers, dead ones that nobody has taken over from included."""
        select = f"SELECT id, label, slots, {self._now} - beat_ms FROM backplane_worker ORDER BY id"
        return [Worker(*row) for row in self._all(select)]

    def claim_dead(self, owners: Collection[str]) -> Sequence[str]:
        """Claim the dead whose orders are to be resumed; each is claimed by one worker, once a lease.

        Args:
            owners: workers that hold orders by the engine's word. One that has no row here is given a lease from now.
        """
        known = {worker.id for worker in self.workers()}
        for owner in set(owners) - known:
            self.enter(owner, "?", 0)
        claim = (
            f"UPDATE backplane_worker SET claimed_ms = {self._now} WHERE id = :id "
            f"AND beat_ms < {self._now} - :lease AND claimed_ms < {self._now} - :lease"
        )
        dead = [worker.id for worker in self.workers() if worker.age_ms > self.lease_ms]
        return [one for one in dead if self._do(claim, id=one, lease=self.lease_ms) == 1]

    def begin(self, order_id: str, attempt: str, worker: str, wanted_usd_micros: int = 0) -> Attempt:
        """Note a new attempt; it knows those before it, whether the order was cancelled, and whether it may cost this.

        What it wants is reserved until `settle`; for good where the attempt is lost, as nobody knows its bill.
        """
        row = {"order": order_id, "id": attempt, "worker": worker, "wanted": wanted_usd_micros}
        with self._engine.begin() as connection:
            # The insert first: it is what keeps two workers of one order, and of one budget, apart.
            connection.execute(sa.text(_BEGIN.format(now=self._now)), row)
            facts = connection.execute(sa.text(_FACTS), row).all()
            earlier = tuple(id for kind, id, _ in facts if kind == "attempt" and id != attempt)
            why = next((why for kind, why, _ in facts if kind == "cancel"), None)
            left = next((left for kind, _, left in facts if kind == "left"), None)
            denied = self._reserve(connection, attempt, wanted_usd_micros, left)
            return Attempt(attempt, order_id, earlier, why, denied)

    def _reserve(self, connection: sa.Connection, attempt: str, wanted: int, left: int | None) -> str | None:
        """Take an attempt's share of the budget, or say why there is none."""
        taken = bool(wanted) and connection.execute(sa.text(_TAKE), {"wanted": wanted}).rowcount == 1
        if taken or (not wanted and (left is None or left > 0)):
            return None
        connection.execute(
            sa.text("UPDATE backplane_attempt SET reserved_usd_micros = 0 WHERE id = :id"), {"id": attempt}
        )
        asked = f"${wanted / 1e6:.6f}" if wanted else "something"
        return f"the order may cost {asked}, and ${max(left or 0, 0) / 1e6:.6f} of the queue's budget is left"

    def settle(self, attempt: str, cost_usd_micros: int) -> None:
        """Put what an attempt has cost in the place of what it had reserved."""
        with self._engine.begin() as connection:
            select = sa.text("SELECT reserved_usd_micros FROM backplane_attempt WHERE id = :id")
            reserved = connection.execute(select, {"id": attempt}).scalar() or 0
            if cost_usd_micros != reserved:
                add = "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :more"
                connection.execute(sa.text(add), {"more": cost_usd_micros - reserved})

    def budget(self) -> Budget:
        """What the whole queue may cost and has cost."""
        with self._engine.begin() as connection:
            return self._budget(connection)

    def _budget(self, connection: sa.Connection) -> Budget:
        select = sa.text("SELECT limit_usd_micros, spent_usd_micros FROM backplane_budget")
        return Budget(*connection.execute(select).one())

    def set_budget(self, limit_usd_micros: int | None) -> None:
        """Set what the whole queue may cost from its beginning on; what it has cost stays counted."""
        self._do("UPDATE backplane_budget SET limit_usd_micros = :limit", limit=limit_usd_micros)

    def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> None:
        """Keep an answer for whoever runs the attempt; the first one stays."""
        insert = (
            "INSERT INTO backplane_answer (order_id, attempt, ask, decision) "
            "VALUES (:order, :attempt, :ask, :decision) ON CONFLICT (attempt, ask) DO NOTHING"
        )
        self._do(insert, order=order_id, attempt=attempt, ask=ask, decision=msgspec.json.encode(decision).decode())

    def remove(self, orders: Collection[str]) -> None:
        """Forget orders that have ended; what they have cost stays counted."""
        ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
        with self._engine.begin() as connection:
            for table in ("attempt", "cancel", "answer"):
                statement = sa.text(f"DELETE FROM backplane_{table} WHERE order_id IN :ids").bindparams(ids)
                connection.execute(statement, {"ids": list(orders)})

    def attempts(self, orders: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The attempts of these orders, oldest first."""
        found: dict[str, tuple[str, ...]] = {}
        for order_id, attempt in self._in("SELECT order_id, id FROM backplane_attempt", orders, "ORDER BY number"):
            found[order_id] = (*found.get(order_id, ()), attempt)
        return found

    def cancels(self, orders: Collection[str]) -> dict[str, str]:
        """Why these orders are to end, those of them that are."""
        return dict(self._in("SELECT order_id, why FROM backplane_cancel", orders))

    def cancel(self, order_id: str, why: str) -> None:
        """Have an order end; the first reason stays."""
        insert = "INSERT INTO backplane_cancel (order_id, why) VALUES (:id, :why) ON CONFLICT (order_id) DO NOTHING"
        self._do(insert, id=order_id, why=why[:1000])

    def _in(self, select: str, orders: Collection[str], order: str = "") -> Sequence[Any]:
        if not orders:
            return []
        statement = sa.text(f"{select} WHERE order_id IN :ids {order}").bindparams(sa.bindparam("ids", expanding=True))
        with self._engine.begin() as connection:
            return list(connection.execute(statement, {"ids": list(orders)}))

    def _do(self, statement: str, **values: Any) -> int:
        with self._engine.begin() as connection:
            return connection.execute(sa.text(statement), values).rowcount

    def _all(self, statement: str) -> Sequence[Any]:
        with self._engine.begin() as connection:
            return list(connection.execute(sa.text(statement)))
