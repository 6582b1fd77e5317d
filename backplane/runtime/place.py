"""The place of one run: its journal, its workspace, and what its host is started in.

An order and a backend come in; an open link and a workspace come out. What is said on the link and how the run ends
are the affair of `runtime.drive`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.from_thread
import anyio.to_thread

from backplane.config import Limits
from backplane.contract.canonical import Json
from backplane.contract.receipt import Usage
from backplane.contract.work import Mode
from backplane.errors import BackplaneError, StoreError, WorkspaceError, unforeseen
from backplane.policy.rules import has_rules_of
from backplane.process.aio import LoopTask
from backplane.receipts.build import RunState
from backplane.receipts.journal import held_fact, hooks_fact, host_fact
from backplane.runtime.backends import Link, ProcessBackend
from backplane.runtime.setup import HostSetup, HostStart
from backplane.runtime.state import STAGED_FOR
from backplane.workspace import Quota, open_workspace

if TYPE_CHECKING:
    from backplane.receipts.journal import Journal
    from backplane.runtime.warm import WarmHosts
    from backplane.workspace import Workspace

CAUSE_S: Final = 1.0
"""Seconds for the copy to fail once the sandbox around it has failed; milliseconds are usual."""

_ISOLATION_OFF: Final = ("isolation is off", "leave it on where bubblewrap is installed")
"""A shortfall, as `Contained` has it: why, and the next step."""


def quota_of(limits: Limits) -> Quota:
    """Return how large a workspace may be."""
    return Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)


class RunPlace:
    """The place of one run.

    Attributes:
        journal: None until the host is about to be started.
        setup: what the host is started in; None until then, and for a host on another machine.
        hidden_servers: MCP servers with a file that the sandbox hides from the agent: name → the file.
        on_spent: called when the model's service has counted more for this run.

    Args:
        ended: returns True if the copy that is being made is to be abandoned; called in any thread.
    """

    def __init__(self, facts: RunState, limits: Limits, start: HostStart, ended: Callable[[], bool]) -> None:
        self._facts, self._limits, self._start, self._ended = facts, limits, start, ended
        self.journal: Journal | None = None
        self.setup: HostSetup | None = None
        self.hidden_servers: Mapping[str, str] = {}
        self.on_spent: Callable[[], None] | None = None
        self._unused: HostSetup | None = None
        """The setup of this run, where it took a host that waited."""
        self._making: LoopTask | None = None
        self._staged, self._made = anyio.Event(), anyio.Event()
        self._workspace: Workspace | None = None
        self._error: BackplaneError | None = None
        """Why there is no workspace, or no store."""

    @asynccontextmanager
    async def open_host(self, mode: Mode | None, warm: WarmHosts | None) -> AsyncIterator[Link]:
        """Start the host, or take one that waits, for the time of the block; the workspace is made meanwhile.

        Args:
            mode: how the workspace is made; None if it is on another machine.
            warm: hosts that wait for an order; None for none.

        Raises:
            BackplaneError: the host cannot be started, or its workspace cannot be made.
        """
        self.journal = self._start.state.journal(self._facts)
        opening = await self._find_way(mode, warm)
        self._begin_making(mode)
        was_opened = False
        try:
            async with opening as link:
                was_opened = True
                if link.pid != os.getpid():  # A function of this process has none of its own.
                    self.journal.note(host_fact(link.pid, link.start))
                yield link
        except BackplaneError as error:
            if was_opened:
                raise
            # If the copy cannot be made, the sandbox around it may fail first.
            with anyio.move_on_after(CAUSE_S):
                await self._made.wait()
            if self._error is not None:
                raise self._error from error
            raise

    async def _find_way(self, mode: Mode | None, warm: WarmHosts | None) -> AbstractAsyncContextManager[Link]:
        facts, start = self._facts, self._start
        assert self.journal is not None
        if mode is not None:  # Else the agent's sandbox is made where it works.
            self.setup = await self._plan()
        # Noted before the host starts: if we are killed, the receipt says it all the same.
        self.journal.note(held_fact(facts.redactor.json(facts.held())[0]))
        if self.setup is None:
            return start.backend.open(facts.order, start.environ)
        host = await warm.take(self.setup) if warm is not None else None
        if host is not None:
            facts.start = "warm"
            self._unused, self.setup = self.setup, host.setup
        setup = self.setup
        if setup.key_use is not None:
            setup.key_use.on_answer = self._spent
        return host.open() if host is not None else setup.open(self._wait_staged if setup.tree is not None else None)

    async def _plan(self) -> HostSetup:
        facts, start = self._facts, self._start
        assert facts.policy is not None
        setup = self.setup = HostSetup(start, facts.order, facts.policy, facts.run_id)
        facts.guarded, facts.isolation = isinstance(start.backend, ProcessBackend), setup.isolation
        if setup.isolation == "off" and (setup.key_use is not None or has_rules_of(facts.policy.profile, "strict")):
            facts.shortfall = _ISOLATION_OFF
        await setup.plan(self._stage_first)
        if (held := setup.contained) is not None:
            facts.contained, facts.held_by_system, facts.shortfall = held.label, held.gaps, held.shortfall
            self.hidden_servers = held.hidden_servers
            if held.policy is not None:
                facts.added["endpoints"] = list(held.endpoints)
        return setup

    def _spent(self, so_far: Usage) -> None:
        self._facts.spent(so_far.input_tokens, so_far.output_tokens, so_far.estimated_cost_usd)
        if self._facts.limit is not None and self.setup is not None and self.setup.key_use is not None:
            self.setup.key_use.over = self._facts.limit[1]  # The agent may ask once more before it is ended.
        if self.on_spent is not None:
            self.on_spent()

    async def _stage_first(self) -> Workspace:
        self._begin_making("staged")
        workspace = await self.workspace()
        assert workspace is not None
        return workspace

    def _begin_making(self, mode: Mode | None) -> None:
        """Open the store and make the workspace in a worker thread, once."""
        if self._making is None:
            self._making = LoopTask(functools.partial(self._make, mode))

    async def _make(self, mode: Mode | None) -> None:
        try:
            await anyio.to_thread.run_sync(self._make_all, mode)
        except Exception as error:  # Raised where the workspace is waited for.
            self._error = unforeseen(error)
        finally:
            self._staged.set()
            self._made.set()

    def _make_all(self, mode: Mode | None) -> None:
        if self._unused is not None:  # First, as its folders have the run's name, under which cut off work is kept.
            self._unused.close({}, with_tree=True)
        if mode is not None:
            self._make_workspace(mode)
            anyio.from_thread.run_sync(self._staged.set)
        self._start.state.store()

    def _make_workspace(self, mode: Mode) -> None:
        state, spec, run_id = self._start.state, self._facts.order.workspace, self._facts.run_id
        assert self.journal is not None
        root = os.path.abspath(spec.root)
        state.refuse_own(Path(root))
        state.settle()
        # The sandbox of a host that waited is around a copy of its own name.
        name = self.setup.name if self.setup is not None and self.setup.tree is not None else run_id
        self._workspace = open_workspace(
            root,
            mode=mode,
            include=spec.include,
            exclude=spec.exclude,
            run_dir=self.journal.folder,
            stage_dir=state.stage_of(name),
            tree=state.tree_of(name),
            quota=quota_of(self._limits),
            stopped=self._ended,
            state=state.home,
            unread=self._facts.order.policy.deny_read,
        )
        if mode == "staged":
            # Written before the order is sent: if we are killed, the work of this run is kept.
            mark = state.stage_of(name) / STAGED_FOR
            try:
                mark.write_text(run_id)
            except OSError as error:
                raise WorkspaceError("workspace_staging_failed", f"{mark}: {error.strerror}") from error

    async def _wait_staged(self) -> None:
        """Wait for the copy alone. Raises BackplaneError if it was not made."""
        await self._staged.wait()
        if self._workspace is None:
            raise self._error or WorkspaceError("workspace_staging_failed", "the copy was not made")

    async def workspace(self) -> Workspace | None:
        """Wait for the workspace; None if it is on another machine.

        Raises:
            BackplaneError: of the store or the workspace.
        """
        await self._made.wait()
        if self._error is not None:
            raise self._error
        return self._workspace

    async def settled(self) -> None:
        """Wait until nothing is being made any more."""
        if self._making is not None:
            await self._making.wait()

    def note_hooks(self, ask: str, names: Sequence[str]) -> None:
        """Note that hooks take long over an ask; no names once they have answered."""
        if self.journal is not None:
            with suppress(StoreError):  # Only for a look at the live run.
                self.journal.note(hooks_fact(self._facts.redactor.text(ask)[0], names))

    def check_asks(self, extensions: tuple[str, ...]) -> None:
        """Refuse a host that does not ask first where the order demands it. Raises CapabilityError."""
        if self.setup is not None and self.setup.sandbox is not None:
            self.setup.sandbox.check_asks(extensions)

    def close(self, added: dict[str, Json], *, used: bool) -> Workspace | None:
        """Remove what the host was started in; blocking.

        Args:
            added: members of the receipt's own part.
            used: the order was sent.

        Returns:
            The workspace; None if there is none, or if the order was not sent, which removes it.
        """
        facts, setup, workspace = self._facts, self.setup, self._workspace
        if setup is not None:
            setup.close(added, with_tree=workspace is None)
            if "network" in added:  # Where the host wanted to go, in its own words.
                added["network"] = facts.clean_json(added["network"])
            if setup.key_use is not None:
                seen = facts.contained["kinds"]["environment"] if facts.contained else {"state": "none"}
                kept = {name: seen[name] for name in ("state", "gap") if name in seen}
                facts.usage_seen = setup.key_use.meter.usage
                added["key_proxy"] = facts.clean_json(kept | setup.key_use.to_wire())
        if workspace is not None and not used:
            workspace.close()
            return None
        return workspace
