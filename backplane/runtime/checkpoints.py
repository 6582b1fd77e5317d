"""Checkpoints of a run while it goes on: made before tools or by name, and the way back to one.

Asks and wishes come in, events of our own and a member of the receipt come out. How a state is kept is
in `workspace.checkpoints`; here is when, and that nobody goes back under the hands of an agent at work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.errors import BackplaneError, WorkspaceError
from backplane.policy.paths import TOOLS
from backplane.policy.rules import tool_names
from backplane.process.aio import in_order
from backplane.receipts.build import RunState

if TYPE_CHECKING:
    from backplane.workspace import Workspace
    from backplane.workspace.checkpoints import Checkpoint, Why

FAILURES_MAX: Final = 10
"""Checkpoints that could not be made, listed in a receipt; all are counted."""

REWINDS_MAX: Final = 1000
"""Ways back listed in a receipt."""

_COMMAND: Final = "bash"
"""What a command does to files is not in its text."""

Say = Callable[[dict[str, Json], str], None]
"""Adds an event of ours: what it carries, and one line for people."""


def may_write(ask: wire.Ask) -> bool:
    """Whether what a host asks about may change files; of an unknown tool nobody knows."""
    if ask.kind == "patch":
        return True
    if ask.kind != "tool":
        return False
    names = tool_names(ask.name if isinstance(ask.name, str) else "")
    shapes = [TOOLS[name] for name in names if name in TOOLS]
    return not shapes or _COMMAND in names or any(shape.writes for shape in shapes)


def unusable(why: str) -> WorkspaceError:
    """Make the error of whoever wants a checkpoint where there can be none."""
    hint = "`backplane rewind` and `backplane apply --at` work on a run that has ended"
    return WorkspaceError("execution_workspace_error", f"no checkpoint can be used now: {why}", hint=hint)


class RunCheckpoints:
    """The checkpoints of one run.

    Args:
        workspace: what they are of.
        run_dir: where they are kept.
        facts: of the run; they say whether a tool is at work.
        auto: one before every tool that may write.
        now: the present time in the contract's print form.
        say: see `Say`.
        keep: told what the receipt is to say of them, whenever that changes.
    """

    def __init__(
        self,
        workspace: Workspace,
        run_dir: Path,
        facts: RunState,
        *,
        auto: bool,
        now: Callable[[], str],
        say: Say,
        keep: Callable[[dict[str, Json]], None],
    ) -> None:
        from backplane.workspace.checkpoints import Checkpoints  # Most runs keep none.

        self.auto = auto
        self._of = Checkpoints(workspace, run_dir)
        self._facts = facts
        self._now = now
        self._say = say
        self._keep = keep
        self._ended = False
        self._turn = anyio.Lock()
        """One look at the tree at a time; the end of the run is one, too."""
        self._rewound: list[Json] = []
        self._failed: list[Json] = []
        self._failures = 0

    async def close(self) -> None:
        """The run is being sealed: wait until nobody looks at the tree."""
        self._ended = True
        async with self._turn:
            pass

    @property
    def made(self) -> tuple[Checkpoint, ...]:
        return tuple(self._of.made)

    async def before(self, ask: wire.Ask) -> None:
        """A host asks about a tool: keep what is there, unless it is what was kept last."""
        if not may_write(ask):
            return
        try:
            await self._make(None, "tool")
        except BackplaneError as error:
            # The tool is not held up for it: what was not kept is said instead.
            self._failures += 1
            if len(self._failed) < FAILURES_MAX:
                self._failed.append({"at": self._now(), "ask": ask.id, "reason": error.message})
            self._say({"what": "failed", "reason": error.message}, f"no checkpoint: {error.message}")
            self._tell()

    async def make(self, name: str | None) -> Checkpoint:
        """Keep the present state under a name. Raises WorkspaceError `execution_workspace_error`."""
        made = await self._make(name, "asked")
        assert made is not None, "only an automatic one is left out"
        return made

    async def _make(self, name: str | None, why: Why) -> Checkpoint | None:
        return await in_order(functools.partial(self._make_in_turn, name, why))

    async def _make_in_turn(self, name: str | None, why: Why) -> Checkpoint | None:
        async with self._turn:
            self._require_life()
            with anyio.CancelScope(shield=True):
                made = await anyio.to_thread.run_sync(self._of.make, name, why, self._now())
        if made is not None:
            body = {"what": "made", **msgspec.to_builtins(made)}
            self._say(body, f"checkpoint {made.name} ({made.files} files differ from the start)")
            self._tell()
        return made

    async def rewind(self, name: str, asks_open: int) -> Checkpoint | None:
        """Put the workspace back to a checkpoint; None is the start.

        Args:
            asks_open: asks about tools that wait for their answer, whose tools have not begun.

        Raises:
            WorkspaceError: `execution_workspace_error`: the agent is at work, there is no such checkpoint, or a file
                was changed meanwhile; then nothing was changed.
        """
        return await in_order(functools.partial(self._rewind_in_turn, name, asks_open))

    async def _rewind_in_turn(self, name: str, asks_open: int) -> Checkpoint | None:
        async with self._turn:
            self._require_life()
            if self._facts.calls_open > asks_open or not (asks_open or self._facts.resting):
                raise WorkspaceError(
                    "execution_workspace_error",
                    "the agent is at work, and nobody goes back under its hands",
                    hint="rewind while it waits for the answer to an ask, or between two turns",
                )
            with anyio.CancelScope(shield=True):
                done = await anyio.to_thread.run_sync(self._of.rewind, name)
        to: dict[str, Json] = {"name": name, "files": done.files}
        if done.to is not None:
            to |= {"name": done.to.name, "id": done.to.id, "tree": done.to.tree}
        if len(self._rewound) < REWINDS_MAX:
            self._rewound.append({"at": self._now(), **to})
        self._say({"what": "rewound", **to}, f"rewound to {to['name']} ({done.files} files)")
        self._tell()
        return done.to

    def _require_life(self) -> None:
        if self._ended:
            raise unusable("the run has ended")

    def _tell(self) -> None:
        of = self._of
        told: dict[str, Json] = {"made": [msgspec.to_builtins(one) for one in of.made]}
        if of.dropped:
            told["dropped"] = of.dropped
        if self._rewound:
            told["rewound"] = self._rewound
        if self._failures:
            told["failed"], told["failures"] = self._failures, self._failed
        self._keep(told)
