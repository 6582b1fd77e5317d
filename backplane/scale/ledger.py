"""Stores the workers and the budget of a queue in two small tables beside the engine's own.

A worker sends heartbeats; if the last one is older than the lease by the database's clock, the worker is dead, and
another one claims its orders. The engine's fence prevents a second receipt, so a wrong suspicion costs only an attempt.
All calls block.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa

from backplane.scale.engine import Share, Worker

BEAT_S: Final = 2.0
"""Seconds between two heartbeats, each a small transaction; a cancel reaches the worker with the next one."""
LEASE_S: Final = 20.0
"""Seconds without a heartbeat after which a worker is dead: ten heartbeats, so a short outage is harmless."""
LOCK_WAIT_S: Final = 30.0
"""Seconds to wait for a locked SQLite file; transactions take milliseconds."""
AGAIN_S: Final = 0.5
"""Seconds between two tries to reach the database; the watchdog ends a worker after a long outage."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS backplane_worker (id VARCHAR(64) PRIMARY KEY, label VARCHAR(64) NOT NULL, "
    "slots INTEGER NOT NULL, beat_ms BIGINT NOT NULL, claimed_ms BIGINT NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS backplane_budget (id INTEGER PRIMARY KEY, limit_usd_micros BIGINT, "
    "spent_usd_micros BIGINT NOT NULL)",
    "INSERT INTO backplane_budget VALUES (1, NULL, 0) ON CONFLICT (id) DO NOTHING",
)
_TAKE: Final = (
    "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :wanted WHERE limit_usd_micros IS NULL "
    "OR spent_usd_micros + :wanted <= limit_usd_micros"
)
_CLOCKS: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}


class Ledger:
    """The two tables of a queue.

    Args:
        url: URL of the database, in SQLAlchemy's form.
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
        """Create missing tables."""
        try:
            with self._engine.connect() as connection:
                if self._engine.dialect.name == "sqlite":
                    # A commit waits for the disk once instead of four times, and readers block no writer.
                    with suppress(sa.exc.OperationalError):  # Another process does it at this moment.
                        connection.execute(sa.text("PRAGMA journal_mode = WAL"))
                for statement in _TABLES:
                    connection.execute(sa.text(statement))
        except sa.exc.SQLAlchemyError:
            # Two processes that create the tables at once collide in the catalogue of Postgres; the tables exist then.
            if not sa.inspect(self._engine).has_table("backplane_budget"):
                raise

    def now_ms(self) -> int:
        """Return the time by the database's clock, in milliseconds since 1970."""
        ((now_ms,),) = self._rows(f"SELECT {self._now}")
        return int(now_ms)

    # Workers.

    def enter(self, worker: str, label: str, slots: int) -> None:
        """Register a worker; called before it takes its first order."""
        insert = f"INSERT INTO backplane_worker (id, label, slots, beat_ms) VALUES (:id, :label, :slots, {self._now})"
        self._do(insert, id=worker, label=label, slots=slots)

    def leave(self, worker: str) -> None:
        """Let other workers take over the orders of this one at once; it sends no more heartbeats."""
        self._do("UPDATE backplane_worker SET beat_ms = 0 WHERE id = :id", id=worker)

    def forget(self, worker: str) -> None:
        """Remove the row of a worker without orders."""
        self._do("DELETE FROM backplane_worker WHERE id = :id", id=worker)

    def beat(self, worker: str) -> bool:
        """Send a heartbeat; return False if the other workers declared this one dead."""
        update = f"UPDATE backplane_worker SET beat_ms = {self._now} WHERE id = :id AND claimed_ms = 0"
        return self._do(update, id=worker) == 1

    def workers(self) -> Sequence[Worker]:
        """Return all workers, including dead ones that still own orders."""
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

    # The budget.

    def begin(self, worker: str, wanted_usd_micros: int = 0) -> Share | None:
        """Reserve an attempt's share of the budget until `settle`; that of a lost attempt stays reserved.

        Waits for a database that is away.

        Returns:
            None if this worker was declared dead.
        """
        alive = "SELECT 1 FROM backplane_worker WHERE id = :id AND claimed_ms = 0"
        if not self._rows(alive, is_patient=True, id=worker):
            return None
        if wanted_usd_micros and self._do(_TAKE, is_patient=True, wanted=wanted_usd_micros):
            return Share(wanted_usd_micros)
        limit, spent = self.budget(is_patient=True)
        if limit is None:
            return Share()
        left = max(limit - spent, 0)
        if not wanted_usd_micros and left:
            return Share()
        asked = f"${wanted_usd_micros / 1e6:.6f}" if wanted_usd_micros else "something"
        return Share(0, f"the order may cost {asked}, but only ${left / 1e6:.6f} of the queue's budget is left")

    def settle(self, reserved_usd_micros: int, cost_usd_micros: int) -> None:
        """Replace an attempt's reservation by its cost. Waits for a database that is away."""
        more = cost_usd_micros - reserved_usd_micros
        if more:
            add = "UPDATE backplane_budget SET spent_usd_micros = spent_usd_micros + :more"
            self._do(add, is_patient=True, more=more)

    def budget(self, *, is_patient: bool = False) -> tuple[int | None, int]:
        """Return the budget of the whole queue, None for no limit, and its cost so far, in millionths of a dollar."""
        select = "SELECT limit_usd_micros, spent_usd_micros FROM backplane_budget"
        ((limit, spent),) = self._rows(select, is_patient=is_patient)
        return limit, spent

    def set_budget(self, limit_usd_micros: int | None) -> None:
        """Set the budget of the whole queue, which includes past costs; None removes it."""
        self._do("UPDATE backplane_budget SET limit_usd_micros = :limit", limit=limit_usd_micros)

    def _rows(self, statement: str, *, is_patient: bool = False, **values: Any) -> Sequence[Any]:
        return self._run(statement, values, is_patient)[0]

    def _do(self, statement: str, *, is_patient: bool = False, **values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        return self._run(statement, values, is_patient)[1]

    def _run(self, statement: str, values: dict[str, Any], is_patient: bool) -> tuple[Sequence[Any], int]:
        """Run a statement; a patient one is repeated while the database is away.

        A statement whose answer was cut off runs twice: the budget then counts too much, never too little.
        """
        while True:
            try:
                with self._engine.connect() as connection:
                    done = connection.execute(sa.text(statement), values)
                    return done.all() if done.returns_rows else (), done.rowcount
            except (sa.exc.OperationalError, sa.exc.InterfaceError):
                if not is_patient:
                    raise
                time.sleep(AGAIN_S)
