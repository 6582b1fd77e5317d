"""Replays a stored run as the backend `replay:RUN`: its events byte for byte, its outcome, and its patch on request.

A replay runs no tool and asks no question: its events report what the stored run did, as its receipt notes. What was
redacted in the stored run stays redacted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.capability import NATIVE, Manifest
from backplane.contract.receipt import (
    CONTRACT_VERSION,
    BackendIdentity,
    Outcome,
    Receipt,
    RunMetadata,
    Usage,
    Verification,
)
from backplane.contract.work import OF_HOST, REPLAY
from backplane.errors import BackplaneError, PolicyError, unforeseen
from backplane.process.pipes import Pair
from backplane.protocol.host import HostEnd
from backplane.receipts.audit import record_hash
from backplane.receipts.store import Store
from backplane.receipts.trace import Trace
from backplane.runtime.memory import MemoryBackend
from backplane.workspace import apply_patch

WRITE_BYTES: Final = 1 << 16
"""Minimum size of a block of events that is written at once, about what a pipe takes."""


def find_replay(name: str, home: Path, *, with_patch: bool = False, cached: bool = False) -> MemoryBackend:
    """Return the backend `replay:RUN`; RUN is an id, the beginning of one, `last` or `last~2`. Blocks.

    Args:
        home: the state folder with the run.
        with_patch: True applies the stored patch to the workspace of the replay.
        cached: True if the stored run answers the same order; its host's capabilities are then those of the replay.

    Raises:
        ConfigError: `config_invalid`, there is no such run.
        StoreError: `receipt_store_failed`, the run's content was pruned or cannot be read.
        PolicyError: `policy_denied`, the patch cannot be replayed: the run broke its policy, or the patch has secrets.
    """
    with Store.open(home, readonly=True) as store:
        receipt = store.load(store.find(name.removeprefix(REPLAY)).run_id)
        run_id = receipt.meta.run_id
        folder = store.folder(run_id)
    if with_patch:
        _check_patch(receipt)
    as_host = {"capabilities": receipt.capabilities, "heeds": tuple(OF_HOST)} if cached else {}
    hello = msgspec.structs.replace(_HELLO, mode=receipt.mode, **as_host)
    facts = {"run": run_id, "receipt_sha256": receipt.receipt_sha256, "with_patch": with_patch}

    async def serve(stdin: int, stdout: int) -> None:
        await _Replay(receipt, folder if with_patch else None, Pair(stdout, stdin)).serve(hello)

    return MemoryBackend(id=f"{REPLAY}{run_id}", serve=serve, replays=facts, cached=cached)


def _check_patch(receipt: Receipt) -> None:
    own = receipt.backplane
    enforcement, patch = own.get("enforcement"), own.get("patch")
    short = receipt.meta.run_id[:8]
    if isinstance(enforcement, dict) and enforcement.get("violations"):
        fact = f"run {short} did not keep its policy, so its patch is not replayed"
        raise PolicyError("policy_denied", fact, hint=f"read it first: backplane apply {short} --accept-violations")
    if isinstance(patch, dict) and patch.get("redacted"):
        fact = f"the patch of run {short} contains secrets, which a replay would show"
        raise PolicyError("policy_denied", fact, hint=f"in place of a replay: backplane apply {short}")


_HELLO: Final = wire.Hello(
    contract_version=CONTRACT_VERSION,
    backend=BackendIdentity("replay"),
    capabilities=Manifest({"streaming": NATIVE}).to_wire(),
    extensions=("cancel/1",),
    heeds=("mode",),  # The stored events ignore the model and limits of an order.
)


class _Replay:
    """The host of one replay.

    Args:
        folder: the stored run's folder, if its patch is to be applied; otherwise None.
    """

    def __init__(self, receipt: Receipt, folder: Path | None, ends: Pair) -> None:
        self._receipt, self._folder, self._ends = receipt, folder, ends
        self._end = HostEnd()
        self._cancelled = False

    async def serve(self, hello: wire.Hello) -> None:
        """Replay the run that is asked for, until the input ends."""
        await self._ends.write(self._end.send(hello))
        async with anyio.create_task_group() as tasks:
            while data := await self._ends.more():
                for message in self._end.receive(data):
                    if isinstance(message, wire.RunMessage):
                        tasks.start_soon(self._play, message)
                    self._cancelled = self._cancelled or isinstance(message, wire.Cancel)
            tasks.cancel_scope.cancel()

    async def _play(self, run: wire.RunMessage) -> None:
        try:
            for block in self._events(run.id):
                if self._cancelled:
                    break
                await self._ends.write(block)
            if self._folder is not None and not self._cancelled:
                await anyio.to_thread.run_sync(self._apply, self._folder, Path(run.work_order.workspace.root))
            outcome: Outcome = "partial" if self._cancelled else self._receipt.outcome
            last: wire.Final | wire.Fatal = wire.Final(ref_id=run.id, receipt=self._claim(run, outcome))
        except (BackplaneError, OSError) as error:  # An unreadable patch or trace ends this replay only.
            known = unforeseen(error)
            last = wire.Fatal(ref_id=run.id, error=known.message, error_code=known.code)
        await self._ends.write(self._end.send(last))

    def _events(self, run_id: str) -> Iterator[bytes]:
        """Yield the stored lines in blocks, each line in this run's envelope."""
        trace, block = self._receipt.trace, bytearray()
        for line in (trace if isinstance(trace, Trace) else Trace.of(trace)).lines():
            block += b'{"t":"event","ref_id":"%b","event":%b}\n' % (run_id.encode(), line)
            if len(block) >= WRITE_BYTES:
                yield bytes(block)
                block.clear()
        yield bytes(block)

    def _apply(self, folder: Path, root: Path) -> None:
        if any(artifact.kind == "patch" for artifact in self._receipt.artifacts):
            apply_patch(folder, record_sha256=record_hash(self._receipt), root=root)

    def _claim(self, run: wire.RunMessage, outcome: Outcome) -> object:
        """Return the replay's own receipt: with the stored outcome, and without usage, as a replay spends nothing."""
        then = self._receipt
        raw = then.usage_raw if isinstance(then.usage_raw, dict) else {"value": then.usage_raw}
        meta = {"run_id": run.id, "work_order_id": run.work_order.id}
        receipt = Receipt(
            meta=RunMetadata(**{**msgspec.structs.asdict(then.meta), **meta}),
            backend=_HELLO.backend,
            capabilities=_HELLO.capabilities,
            usage_raw={name: value for name, value in raw.items() if name != "backplane"},
            usage=Usage(),
            trace=[],
            artifacts=(),
            verification=Verification(harness_ok=False),
            outcome=outcome,
            mode=then.mode,
        )
        return msgspec.to_builtins(receipt)
