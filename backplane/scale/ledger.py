"""Workers and lost attempts, in some small tables beside the engine's own, by the database's clock alone.

A worker beats; one whose last beat is older than the lease is dead, and one of the others claims what it had. The
engine's fence is what keeps a second receipt away: a wrong suspicion costs an attempt. An attempt has no row of its own
until it is lost: its id follows from order and worker, so that the common order costs one read here and no write.
Everything here blocks.
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
"""Between two beats, which is also how soon a cancel is seen: one small transaction each."""
LEASE_S: Final = 20.0
"""Without a beat a worker is dead: ten beats, so that a database away for a few seconds costs nobody's work."""
LOCK_WAIT_S: Final = 30.0
"""For a SQLite file that others write to; their transactions take milliseconds."""
AGAIN_S: Final = 0.5
"""Between two tries of an attempt that meets no database; the watchdog ends a worker for which that takes too long."""
_ATTEMPTS: Final = uuid.UUID("7d5f7a52-6c0c-4c11-9c1e-3a0f2f4b8f2d")
"""The namespace of attempts' ids: random, and never to change."""

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
"""All that an attempt is to know, in one statement without a transaction: it is most of what we add to the engine."""
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
    """What a beat brings back."""

    is_alive: bool
    """False: the others took this worker for dead, and what it does does not count any more."""
    cancelled: dict[str, str]
    """Of the orders asked about: why they are to end."""
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
        wait: Any = {"connect_args": {"timeout": LOCK_WAIT_S}} if url.startswith("sqlite") else {}
        # Each statement is a transaction of its own, as none of ours needs another beside it.
        self._engine: sa.Engine = sa.create_engine(
            url, pool_size=2, max_overflow=0, isolation_level="AUTOCOMMIT", **wait
        )
        self._now = _CLOCKS[self._engine.dialect.name]

    def close(self) -> None:
        """Let the connections go."""
        self._engine.dispose()

    def prepare(self) -> None:
        """Make the tables where they are missing. Raises StoreError `receipt_store_failed`."""
        try:
            with self._engine.connect() as connection:
                if self._engine.dialect.name == "sqlite":
                    # One wait for the disk a commit in place of four, and readers keep nobody from writing.
                    with suppress(sa.exc.OperationalError):  # Another does it at this moment.
                        connection.execute(sa.text("PRAGMA journal_mode = WAL"))
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
        """All workers, dead ones that nobody has taken over from included."""
        select = f"SELECT id, label, slots, {self._now} - beat_ms FROM backplane_worker ORDER BY id"
        return [Worker(*row) for row in self._rows(select)]

    def claim_dead(self, owners: Collection[str]) -> Sequence[str]:
        """Claim the dead whose orders are to be resumed; each is claimed by one worker, once a lease.

        Args:
            owners: workers that hold orders by the engine's word. One that has no row here is given a lease from now.
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
        """Note that a dead worker's attempt at an order does not count any more; once, however often it is said."""
        self._do(_LOSE.format(now=self._now), order=order_id, worker=worker)

    def begin(self, order_id: str, worker: str, wanted_usd_micros: int = 0) -> Attempt | None:
        """Return the attempt that a worker begins: those before it, whether it is cancelled, whether it may cost this.

        What it wants is reserved until `settle`; for good where the attempt is lost, as nobody knows its bill. A
        database that is away is waited for.

        Returns:
            None where this worker was taken for dead.
        """
        by_kind: dict[str, list[Any]] = {}
        for kind, text, number in self._rows(_FACTS, is_patient=True, order=order_id, worker=worker):
            by_kind.setdefault(kind, []).append(number if kind == "left" else text)
        if "alive" not in by_kind:
            return None
        earlier = tuple(attempt_id(order_id, lost) for lost in by_kind.get("lost", ()))
        (why,), (left,) = by_kind.get("cancel", (None,)), by_kind.get("left", (None,))
        # An attempt that was cancelled before it began costs nothing.
        wanted = 0 if why is not None else wanted_usd_micros
        denied = None if why is not None else self._reserve(wanted, left)
        reserved = 0 if denied is not None else wanted
        return Attempt(attempt_id(order_id, worker), order_id, earlier, why, denied, reserved)

    def _reserve(self, wanted: int, left: int | None) -> str | None:
        """Take an attempt's share of the budget, or say why there is none."""
        if not wanted and (left is None or left > 0):
            return None
        if wanted and self._do(_TAKE, is_patient=True, wanted=wanted):
            return None
        asked = f"${wanted / 1e6:.6f}" if wanted else "something"
        return f"the order may cost {asked}, and ${max(left or 0, 0) / 1e6:.6f} of the queue's budget is left"

    def settle(self, reserved_usd_micros: int, cost_usd_micros: int) -> None:
        """Put what an attempt has cost in the place of what it had reserved; a database that is away is waited for."""
        more = cost_usd_micros - reserved_usd_micros
        if more:
            add = "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :more"
            self._do(add, is_patient=True, more=more)

    def budget(self) -> Budget:
        """What the whole queue may cost and has cost."""
        (row,) = self._rows("SELECT limit_usd_micros, spent_usd_micros FROM backplane_budget")
        return Budget(*row)

    def set_budget(self, limit_usd_micros: int | None) -> None:
        """Set what the whole queue may cost from its beginning on; what it has cost stays counted."""
        self._do("UPDATE backplane_budget SET limit_usd_micros = :limit", limit=limit_usd_micros)

    def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> bool:
        """Keep an answer for whoever runs the attempt; False where there is one, which stays."""
        insert = (
            "INSERT INTO backplane_answer (order_id, attempt, ask, decision) "
            "VALUES (:order, :attempt, :ask, :decision) ON CONFLICT (attempt, ask) DO NOTHING"
        )
        text = msgspec.json.encode(decision).decode()
        return self._do(insert, order=order_id, attempt=attempt, ask=ask, decision=text) == 1

    def remove(self, orders: Collection[str]) -> None:
        """Forget orders that have ended; what they have cost stays counted."""
        for table in ("lost", "cancel", "answer"):
            self._do(f"DELETE FROM backplane_{table} WHERE order_id IN :ids", ids=orders)

    def lost(self, orders: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The lost attempts of these orders, oldest first."""
        found: dict[str, tuple[str, ...]] = {}
        select = "SELECT order_id, worker FROM backplane_lost WHERE order_id IN :ids ORDER BY number"
        for order_id, worker in self._rows(select, ids=orders):
            found[order_id] = (*found.get(order_id, ()), attempt_id(order_id, worker))
        return found

    def cancels(self, orders: Collection[str]) -> dict[str, str]:
        """Why these orders are to end, those of them that are."""
        return dict(self._rows("SELECT order_id, why FROM backplane_cancel WHERE order_id IN :ids", ids=orders))

    def cancel(self, order_id: str, why: str) -> None:
        """Have an order end; the first reason stays."""
        insert = "INSERT INTO backplane_cancel (order_id, why) VALUES (:id, :why) ON CONFLICT (order_id) DO NOTHING"
        self._do(insert, id=order_id, why=why[:1000])

    def _rows(self, statement: str, *, is_patient: bool = False, **values: Any) -> Sequence[Any]:
        return self._run(statement, values, is_patient)[0]

    def _do(self, statement: str, *, is_patient: bool = False, **values: Any) -> int:
        """Run a statement; return how many rows it changed."""
        return self._run(statement, values, is_patient)[1]

    def _run(self, statement: str, values: dict[str, Any], is_patient: bool) -> tuple[Sequence[Any], int]:
        """Run a statement, on a fresh connection where the first has ended since it was last used.

        Args:
            values: by name; `ids` is a collection.
            is_patient: again for as long as the database is away. A statement whose answer was cut off is done twice:
                then the budget counts too much, never too little.
        """
        text = sa.text(statement)
        if "ids" in values:
            # Postgres asks for the type where there are none.
            text = text.bindparams(sa.bindparam("ids", type_=sa.String, expanding=True))
            values["ids"] = list(values["ids"])
        may_be_old = True
        while True:
            try:
                with self._engine.connect() as connection:
                    done = connection.execute(text, values)
                    return done.all() if done.returns_rows else (), done.rowcount
            except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
                if may_be_old and error.connection_invalidated:
                    may_be_old = False
                elif is_patient:
                    time.sleep(AGAIN_S)
                else:
                    raise


def attempt_id(order_id: str, worker: str) -> str:
    """The id of a worker's attempt at an order. It has one at most: it is dead before the order is given away again."""
    return str(uuid.uuid5(_ATTEMPTS, f"{order_id}/{worker}"))
