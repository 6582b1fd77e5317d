"""Checkpoints of a run: the state of its workspace before each tool that may write.

How a state is kept is in `workspace.checkpoints`; `backplane rewind` returns an ended run to one.
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
"""Checkpoints that could not be made, listed in a receipt; all are counted."""

_COMMAND: Final = "bash"
"""The tool whose input does not show which files it changes."""

Say = Callable[[dict[str, Json], str], None]
"""Adds an event of ours: what it carries, and one line for people."""


def may_write(ask: wire.Ask) -> bool:
    """Return True if what a host asks about may change files; also for an unknown tool."""
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
        workspace: the workspace whose state is kept.
        run_dir: where it is kept.
        now: the present time in the contract's print form.
        say: see `Say`.
        keep: called with the receipt's member whenever that changes.
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
        from backplane.workspace.checkpoints import Checkpoints  # Most runs keep none.

        self._kept = Checkpoints(workspace, run_dir)
        self._now = now
        self._say = say
        self._keep = keep
        self._ended = False
        self._reading = anyio.Lock()
        """Held while the tree is read."""
        self._failed: list[Json] = []
        self._failures = 0

    async def close(self) -> None:
        """Wait until nothing reads the tree; the run is about to be sealed."""
        self._ended = True
        async with self._reading:
            pass

    async def before(self, ask: wire.Ask) -> None:
        """Keep the present state before a tool runs, unless it is what was kept last.

        A failure does not stop the tool: it is reported and counted in the receipt.
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
