"""Makes the checkpoints of a run, which save its workspace's state before each tool that may write.

`workspace.checkpoints` stores them; `backplane rewind` restores one after the run's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.errors import BackplaneError
from backplane.policy.capabilities import supplied
from backplane.policy.paths import TOOLS
from backplane.policy.rules import tool_names
from backplane.receipts.state import RunState
from backplane.runtime.events import RunRecord, now

if TYPE_CHECKING:
    from backplane.workspace import Workspace

_COMMAND: Final = "bash"
"""The tool whose input does not show which files it changes."""


def may_write(ask: wire.Ask) -> bool:
    """Return True if an ask is for a patch, or for a tool that may change files or is unknown."""
    if ask.kind == "patch":
        return True
    if ask.kind != "tool":
        return False
    names = tool_names(ask.name if isinstance(ask.name, str) else "")
    shapes = [TOOLS[name] for name in names if name in TOOLS]
    return not shapes or _COMMAND in names or any(shape.writes for shape in shapes)


class RunCheckpoints:
    """Makes the checkpoints of one run.

    Args:
        workspace: the workspace to save.
        record: reports each checkpoint and each failure.
    """

    def __init__(self, workspace: Workspace, facts: RunState, record: RunRecord) -> None:
        from backplane.workspace.checkpoints import Checkpoints  # Imported here, as most runs make none.

        self._kept = Checkpoints(workspace)
        self._facts, self._record = facts, record
        self._failed = 0
        self._ended = False
        self._reading = anyio.Lock()
        """Locked while the workspace is read."""

    async def close(self) -> None:
        """Make no further checkpoint, and wait until the current one is made."""
        self._ended = True
        async with self._reading:
            pass

    async def before(self, ask: wire.Ask) -> None:
        """Save the workspace's state before a tool runs, unless it is the same as at the last checkpoint.

        If that fails, the tool runs all the same; the failure is reported and counted in the receipt.
        """
        if not may_write(ask):
            return
        try:
            async with self._reading:
                if self._ended:
                    return
                with anyio.CancelScope(shield=True):
                    made = await anyio.to_thread.run_sync(self._kept.make, now())
        except BackplaneError as error:
            self._failed += 1
            self._report({"what": "failed", "reason": error.message}, f"no checkpoint: {error.message}")
            return
        if made is not None:
            body = {"what": "made", **msgspec.to_builtins(made)}
            self._report(body, f"checkpoint {made.name} ({made.files} files differ from the start)")

    def _report(self, body: dict[str, Json], message: str) -> None:
        self._record.report("checkpoint", body, message)
        counts = {"dropped": self._kept.dropped, "failed": self._failed}
        member = {"made": msgspec.to_builtins(self._kept.made)} | {
            name: count for name, count in counts.items() if count
        }
        self._facts.added["checkpoints"] = self._facts.clean_json(member)
        self._facts.manifest = supplied(self._facts.manifest, ("checkpointing",))
