"""Receipts, events and runs made for tests, and a program that writes runs until it is killed.

The program is a control plane reduced to its writing, see `main`; it imports nothing that is slow to start.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, AssistantDelta
from backplane.contract.receipt import CONTRACT_VERSION, BackendIdentity, Receipt, RunMetadata, Usage, Verification
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.pieces import seal
from backplane.receipts.store import Store

TS = "2025-01-15T12:00:00.200Z"
ORDER = WorkOrder(task="tidy up", config=RuntimeConfig(env={"API_KEY": "geheim-1234"}))


def delta(text: str) -> AssistantDelta:
    return AssistantDelta(ts=TS, text=text)


def line(event: AgentEvent) -> bytes:
    return canonical.encode(event) + b"\n"


def receipt_of(trace: Sequence[AgentEvent], run_id: str | None = None, **changes: Any) -> Receipt:
    meta = RunMetadata(
        run_id=run_id or str(uuid.uuid4()),
        work_order_id=ORDER.id,
        contract_version=CONTRACT_VERSION,
        started_at="2025-01-15T12:00:00.120Z",
        finished_at="2025-01-15T12:00:00.500Z",
        duration_ms=380,
    )
    whole: dict[str, Any] = {
        "meta": meta,
        "backend": BackendIdentity("mock"),
        "capabilities": {"streaming": "native"},
        "usage_raw": {"backplane": {"end": {"reason": "complete"}}},
        "usage": Usage(),
        "trace": trace,
        "artifacts": (),
        "verification": Verification(harness_ok=True),
        "outcome": "complete",
    }
    return Receipt(**(whole | changes))


def open_journal(home: Path, run_id: str | None = None) -> Journal:
    run_id = run_id or str(uuid.uuid4())
    return Journal.create(
        home, run_id, head_fact(ORDER, run_id=run_id, started_at="2025-01-15T12:00:00Z", backend="mock")
    )


def past_run(
    store: Store,
    task: str = "task",
    *,
    root: str = "/w",
    backend: str = "mock",
    model: str | None = None,
    order: WorkOrder | None = None,
    said: str = "",
    ago_ms: int = 0,
    duration_ms: int = 1000,
    **changes: Any,
) -> ReceiptRow:
    """A run that ended so long ago, as its control plane leaves it; `changes` are members of its receipt."""
    run_id = str(uuid.uuid4())
    order = order or WorkOrder(task, workspace=WorkspaceSpec(root), config=RuntimeConfig(model=model))
    at = canonical.timestamp_at(time.time_ns() - ago_ms * 1_000_000)
    journal = Journal.create(store.home, run_id, head_fact(order, run_id=run_id, started_at=at, backend=backend))
    with closing(journal):
        if said:
            journal.append(line(delta(said)))
        receipt = receipt_of(journal.trace, run_id, **changes)
        times = {"started_at": at, "finished_at": at, "duration_ms": duration_ms}
        meta = msgspec.structs.replace(receipt.meta, work_order_id=order.id, **times)
        return store.append(seal(msgspec.structs.replace(receipt, meta=meta)), journal)


def stored_run(store: Store, texts: Sequence[str], **changes: Any) -> ReceiptRow:
    """One whole run: journal, events, seal, append."""
    journal = open_journal(store.home)
    try:
        for text in texts:
            journal.append(line(delta(text)))
        return store.append(seal(receipt_of(journal.trace, journal.run_id, **changes)), journal)
    finally:
        journal.close()


def puts(path: Path, kind: str) -> None:
    """Put something in the place of a file of a run's folder."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to(kind)


@contextmanager
def memory_of(bytes_max: int) -> Iterator[None]:
    """Let this process have so much more address space, for a while."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes_max, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def whole(store: Store, *, receipts: int) -> None:
    """Check that the store holds so many receipts and that every one of them is right."""
    audit = store.verify_all()
    assert audit.findings == ()
    assert audit.checked == receipts


# A writer to be killed ------------------------------------------------------------------------------------------------


def main(home: str, runs: str, events_each: str) -> int:
    """Store runs one after the other and say each thing only when it is promised.

    Prints `event RUN COUNT` when events are journalled and `stored RUN SHA256` when a receipt is acknowledged;
    on an error `error CODE MESSAGE`, once, and goes on with the next run.
    """
    with Store.open(Path(home)) as store:
        for _ in range(int(runs)):
            journal = None
            try:
                journal = open_journal(store.home)
                for number in range(1, int(events_each) + 1):
                    journal.append(line(delta(f"text {number}")))
                    print("event", journal.run_id, number, flush=True)
                row = store.append(seal(receipt_of(journal.trace, journal.run_id)), journal)
                print("stored", row.run_id, row.sha256, flush=True)
            except BackplaneError as error:
                print("error", error.code, error.message, flush=True)
            finally:
                if journal is not None:
                    journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
