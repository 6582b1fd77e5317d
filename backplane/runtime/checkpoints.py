"""Checkpoints of a run while it goes on: made before tools or by name, and the way back to one.

Asks and wishes come in, events of our own and a member of the receipt come out. How a state is kept is
in `workspace.checkpoints`; here is when, and that nobody goes back under the hands of an agent at work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, ToolCall, ToolResult
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, CapabilityError, ConfigError, WorkspaceError
from backplane.policy.paths import TOOLS
from backplane.policy.rules import tool_names
from backplane.process.aio import in_order

if TYPE_CHECKING:
    from backplane.workspace import Workspace
    from backplane.workspace.checkpoints import Checkpoint, Checkpoints, Why

FAILURES_MAX: Final = 10
"""Checkpoints that could not be made, listed in a receipt; all are counted."""

REWINDS_MAX: Final = 1000
"""Ways back listed in a receipt."""

_COMMAND: Final = "bash"
"""What a command does to files is not in its text."""

Say = Callable[[dict[str, Json], str], None]
"""Adds an event of ours: what it carries, and one line for people."""


def automatic(order: WorkOrder) -> bool:
    """Whether an order wants a checkpoint before every tool that may write (`config.vendor.abp.checkpoints`).

    Raises:
        ConfigError: `config_invalid`.
    """
    setting = order.abp("checkpoints")
    if setting not in (None, "named", "auto"):
        fact = f"config.vendor.abp.checkpoints is {str(setting)[:40]!r}"
        raise ConfigError("config_invalid", fact, hint="auto, before every tool that may write, or named, only by name")
    return bool(setting == "auto")


def may_write(ask: wire.Ask) -> bool:
    """Whether what a host asks about may change files; of an unknown tool nobody knows."""
    if ask.kind == "patch":
        return True
    if ask.kind != "tool":
        return False
    names = tool_names(ask.name if isinstance(ask.name, str) else "")
    shapes = [TOOLS[name] for name in names if name in TOOLS]
    return not shapes or _COMMAND in names or any(shape.writes for shape in shapes)


class RunCheckpoints:
    """The checkpoints of one run.

    Args:
        auto: one before every tool that may write.
        now: the present time in the contract's print form.
        say: see `Say`.
        keep: told what the receipt is to say of them, whenever that changes.
    """

    def __init__(self, auto: bool, now: Callable[[], str], say: Say, keep: Callable[[dict[str, Json]], None]) -> None:
        self.auto = auto
        self._now = now
        self._say = say
        self._keep = keep
        self._place: tuple[Workspace, Path] | None = None
        self._of: Checkpoints | None = None
        """Made when the first is asked for: most runs keep none."""
        self._closed = "the run has not begun"
        self._calls_open = 0
        self.is_resting = False
        """The last thing that came was the end of a turn."""
        self._rewound: list[Json] = []
        self._failed: list[Json] = []
        self._failures = 0

    @functools.cached_property
    def turn(self) -> anyio.Lock:
        """One look at the tree at a time; the end of the run is one, too."""
        return anyio.Lock()

    def check_asks(self, extensions: tuple[str, ...], backend_id: str) -> None:
        """Refuse a host that would never ask. Raises CapabilityError `capability_unsupported`."""
        if self.auto and "ask/1" not in extensions:
            raise CapabilityError(
                "capability_unsupported",
                f"{backend_id!r} does not ask before a tool runs (ask/1), so there is no moment for checkpoints",
                hint="set config.vendor.abp.checkpoints to named, or choose another backend",
            )

    def open(self, workspace: Workspace | None, run_dir: Path) -> None:
        """The order goes out: from here on the place to work in is what checkpoints are of."""
        if workspace is None:
            self._closed = "the agent works on another machine"
            return
        self._place, self._closed = (workspace, run_dir), ""

    def close(self) -> None:
        """The run is being sealed."""
        self._closed = "the run has ended"

    @property
    def made(self) -> tuple[Checkpoint, ...]:
        return tuple(self._of.made) if self._of is not None else ()

    def look(self, event: AgentEvent) -> None:
        """Follow whether a tool is at work."""
        if isinstance(event, ToolCall):
            self._calls_open += 1
        elif isinstance(event, ToolResult):
            self._calls_open = max(0, self._calls_open - 1)

    async def before(self, ask: wire.Ask) -> None:
        """A host asks about a tool: keep what is there, unless it is what was kept last."""
        if not self.auto or not may_write(ask):
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
        async with self.turn:
            of = self._opened()
            with anyio.CancelScope(shield=True):
                made = await anyio.to_thread.run_sync(of.make, name, why, self._now())
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
        async with self.turn:
            of = self._opened()
            if self._calls_open > asks_open or not (asks_open or self.is_resting):
                raise WorkspaceError(
                    "execution_workspace_error",
                    "the agent is at work, and nobody goes back under its hands",
                    hint="rewind while it waits for the answer to an ask, or between two turns",
                )
            with anyio.CancelScope(shield=True):
                done = await anyio.to_thread.run_sync(of.rewind, name)
        to: dict[str, Json] = {"name": name, "files": done.files}
        if done.to is not None:
            to |= {"name": done.to.name, "id": done.to.id, "tree": done.to.tree}
        if len(self._rewound) < REWINDS_MAX:
            self._rewound.append({"at": self._now(), **to})
        self._say({"what": "rewound", **to}, f"rewound to {to['name']} ({done.files} files)")
        self._tell()
        return done.to

    def _opened(self) -> Checkpoints:
        if self._place is None or self._closed:
            hint = "`backplane rewind` and `backplane apply --at` work on a run that has ended"
            fact = f"no checkpoint can be used now: {self._closed}"
            raise WorkspaceError("execution_workspace_error", fact, hint=hint)
        if self._of is None:
            from backplane.workspace.checkpoints import Checkpoints

            self._of = Checkpoints(*self._place)
        return self._of

    def _tell(self) -> None:
        of: Any = self._of
        told: dict[str, Json] = {"made": [msgspec.to_builtins(one) for one in of.made]}
        if of.dropped:
            told["dropped"] = of.dropped
        if self._rewound:
            told["rewound"] = self._rewound
        if self._failures:
            told["failed"], told["failures"] = self._failures, self._failed
        self._keep(told)
