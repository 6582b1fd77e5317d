"""Makes the checkpoints of a run, which save its workspace's state before each tool that may write.

`workspace.checkpoints` stores them; `backplane rewind` restores one after the run's end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.errors import BackplaneError
from backplane.policy.paths import TOOLS
from backplane.policy.rules import tool_names

if TYPE_CHECKING:
    from backplane.workspace import Workspace

FAILURES_MAX: Final = 10
"""Limit of failed checkpoints that a receipt lists; it counts them all."""

_COMMAND: Final = "bash"
"""The tool whose input does not show which files it changes."""

Say = Callable[[dict[str, Json], str], None]
"""Adds an event of the control plane with a body and a line of text for people."""


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
        run_dir: the run's folder, which stores the checkpoints.
        now: returns the present time in the contract's format.
        say: reports each checkpoint and each failure.
        keep: called with the receipt's member `checkpoints` after each change.
    """

    def __init__(
        self,
        workspace: Workspace,
        run_dir: Path,
        *,
        now: Callable[[], str],
        say: Say,
        keep: Callable[[dict[str, Json]], None],
    ) -> None:
        from backplane.workspace.checkpoints import Checkpoints  # Imported here, as most runs make none.

        self._kept = Checkpoints(workspace, run_dir)
        self._now = now
        self._say = say
        self._keep = keep
        self._ended = False
        self._reading = anyio.Lock()
        """Locked while the workspace is read."""
        self._failed: list[Json] = []
        self._failures = 0

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
                    made = await anyio.to_thread.run_sync(self._kept.make, self._now())
        except BackplaneError as error:
            self._failures += 1
            if len(self._failed) < FAILURES_MAX:
                self._failed.append({"at": self._now(), "ask": ask.id, "reason": error.message})
            self._say({"what": "failed", "reason": error.message}, f"no checkpoint: {error.message}")
            self._update()
            return
        if made is not None:
            body = {"what": "made", **msgspec.to_builtins(made)}
            self._say(body, f"checkpoint {made.name} ({made.files} files differ from the start)")
            self._update()

    def _update(self) -> None:
        kept = self._kept
        member: dict[str, Json] = {"made": [msgspec.to_builtins(one) for one in kept.made]}
        if kept.dropped:
            member["dropped"] = kept.dropped
        if self._failures:
            member["failed"], member["failures"] = self._failures, self._failed
        self._keep(member)
