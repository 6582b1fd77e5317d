"""Prepares one run: its journal, its workspace, and the folders and sandbox of its host.

An order and a backend come in; an open connection and a workspace come out. `runtime.drive` exchanges the messages and
ends the run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.from_thread
import anyio.to_thread

from backplane.config import Limits
from backplane.contract.canonical import Json
from backplane.contract.work import Mode
from backplane.errors import BackplaneError, WorkspaceError, unforeseen
from backplane.policy.rules import has_rules_of
from backplane.process.aio import Flag, LoopTask
from backplane.receipts.enforcement import held_by
from backplane.receipts.journal import held_fact, host_fact
from backplane.receipts.state import RunState
from backplane.runtime.backends import Link, ProcessBackend
from backplane.runtime.setup import HostSetup, HostStart
from backplane.runtime.state import STAGED_FOR
from backplane.workspace import Quota, archive, open_workspace

if TYPE_CHECKING:
    from backplane.gateway.key_proxy import KeyUse
    from backplane.receipts.journal import Journal
    from backplane.runtime.warm import WarmHosts
    from backplane.workspace import Workspace

CAUSE_S: Final = 1.0
"""Seconds to wait for the copy's own error once the sandbox around it has failed; it usually takes milliseconds."""

_ISOLATION_OFF: Final = ("isolation is off", "leave it on where bubblewrap is installed")
"""The shortfall of a run without isolation, as in `Contained`: the reason and the next step."""


def quota_of(limits: Limits) -> Quota:
    """Return the size limits of a workspace."""
    return Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)


@asynccontextmanager
async def incoming(home: Path) -> AsyncIterator[Path]:
    """Make a temporary folder in the state folder, and remove it after the block."""
    opened = archive.incoming(home)
    folder = await anyio.to_thread.run_sync(opened.__enter__)
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(opened.__exit__, None, None, None)


class RunPlace:
    """Makes the journal, workspace and host of one run, and removes the host's folders.

    Attributes:
        journal: the run's journal; None until the host is about to be started.
        setup: the host's command, sandbox and folders; None until then, and for a host on another machine.
        made: the workspace; None until it is made, and if it is on another machine.
        hidden_servers: names of MCP servers → the file of each that the sandbox hides from the agent.
        on_spent: called after each counted answer of the model's service.

    Args:
        ended: returns True once the copy in progress is to be abandoned; called in any thread.
    """

    def __init__(self, facts: RunState, limits: Limits, start: HostStart, ended: Callable[[], bool]) -> None:
        self._facts, self._limits, self._start, self._ended = facts, limits, start, ended
        self.journal: Journal | None = None
        self.setup: HostSetup | None = None
        self.hidden_servers: Mapping[str, str] = {}
        self.on_spent: Callable[[], None] | None = None
        self._unused: HostSetup | None = None
        """The setup that was planned for this run, but not used, as the run took a waiting host; otherwise None."""
        self._making: LoopTask | None = None
        self._staged, self._made = Flag(), Flag()
        self.made: Workspace | None = None
        self._error: BackplaneError | None = None
        """The error of making the workspace or opening the store."""

    @asynccontextmanager
    async def open_host(self, mode: Mode | None, warm: WarmHosts | None) -> AsyncIterator[Link]:
        """Start the host or take a waiting one, and end it after the block; the workspace is made meanwhile.

        Args:
            mode: how to make the workspace; None if it is on another machine.
            warm: hosts that wait for an order; None always starts a host.

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
                if link.pid != os.getpid():  # A host that is a function of this process has no pid.
                    self.journal.note(host_fact(link.pid, link.start))
                yield link
        except BackplaneError as error:
            if was_opened:
                raise
            # If the copy fails, the sandbox may fail first: wait for the copy's error, which is the cause.
            with anyio.move_on_after(CAUSE_S):
                await self._made.wait()
            if self._error is not None:
                raise self._error from error
            raise

    def note(self, fact: dict[str, Json]) -> None:
        """Write a fact about the run to its journal."""
        assert self.journal is not None
        self.journal.note(fact)

    async def _find_way(self, mode: Mode | None, warm: WarmHosts | None) -> AbstractAsyncContextManager[Link]:
        facts, start = self._facts, self._start
        if mode is not None:  # Otherwise the other machine makes the agent's sandbox.
            self.setup = await self._plan()
        # Noted before the host starts, so that the receipt has it even if this process is killed.
        self.note(held_fact(facts.redactor.json(held_by(facts))[0]))
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

    def _spent(self, use: KeyUse) -> None:
        """Compare the service's usage so far with the order's budgets; a lost answer counts at its maximum."""
        facts, meter = self._facts, use.meter
        facts.spent(meter.tokens_most, 0, meter.spent.usage().estimated_cost_usd, meter.unknown)
        if facts.limit is not None:
            use.over = facts.limit[1]  # Refuses requests of the agent until it is stopped.
        if self.on_spent is not None:
            self.on_spent()

    async def _stage_first(self) -> Workspace:
        self._begin_making("staged")
        workspace = await self.workspace()
        assert workspace is not None
        return workspace

    def _begin_making(self, mode: Mode | None) -> None:
        """Start the worker thread that makes the workspace and opens the store, unless it was started before."""
        if self._making is None:
            self._making = LoopTask(functools.partial(self._make, mode))

    async def _make(self, mode: Mode | None) -> None:
        try:
            await anyio.to_thread.run_sync(self._make_all, mode)
        except Exception as error:  # Raised by the methods that wait for the workspace.
            self._error = unforeseen(error)
        finally:
            self._staged.set()
            self._made.set()

    def _make_all(self, mode: Mode | None) -> None:
        if self._unused is not None:  # First: its folders have the name that this run's work is kept under.
            self._unused.remove(with_tree=True)
        if mode is not None:
            self._make_workspace(mode)
            anyio.from_thread.run_sync(self._staged.set)
        self._start.state.store()

    def _make_workspace(self, mode: Mode) -> None:
        state, spec, run_id = self._start.state, self._facts.order.workspace, self._facts.run_id
        assert self.journal is not None
        root = os.path.abspath(spec.root)
        state.refuse_own(Path(root))
        # The copy for a warm host is made in the folder of its sandbox, which has the name of the host's setup.
        name = self.setup.name if self.setup is not None and self.setup.tree is not None else run_id
        self.made = open_workspace(
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
            # Written before the order is sent, so that the run's work is kept even if this process is killed.
            mark = state.stage_of(name) / STAGED_FOR
            try:
                mark.write_text(run_id)
            except OSError as error:
                raise WorkspaceError("workspace_staging_failed", f"{mark}: {error.strerror}") from error

    async def _wait_staged(self) -> None:
        """Wait until the copy is made, but not for the store. Raises BackplaneError if the copy was not made."""
        await self._staged.wait()
        if self.made is None:
            raise self._error or WorkspaceError("workspace_staging_failed", "the copy was not made")

    async def workspace(self) -> Workspace | None:
        """Wait for the workspace and return it; None if it is on another machine.

        Raises:
            BackplaneError: the store cannot be opened, or the workspace cannot be made.
        """
        await self._made.wait()
        if self._error is not None:
            raise self._error
        return self.made

    async def settled(self) -> None:
        """Wait for the end of the worker thread that makes the workspace."""
        if self._making is not None:
            await self._making.wait()

    def check_asks(self, extensions: tuple[str, ...]) -> None:
        """Refuse a host that does not ask before tools run, if the order demands it. Raises CapabilityError."""
        if self.setup is not None and self.setup.sandbox is not None:
            self.setup.sandbox.check_asks(extensions)

    def report(self, added: dict[str, Json]) -> None:
        """Add the facts about a host that has ended to `added`, the members of `usage_raw.backplane`; blocking."""
        facts, setup = self._facts, self.setup
        if setup is None:
            return
        if setup.sandbox is not None:
            setup.sandbox.close(added)
            self._start.state.drop_scratch(setup.name)  # The host may have filled the disk, and the receipt needs room.
        if "network" in added:  # The host chose the addresses, so they may contain secrets.
            added["network"] = facts.clean_json(added["network"])
        if setup.key_use is not None:
            seen = facts.contained["kinds"]["environment"] if facts.contained else {"state": "none"}
            kept = {name: seen[name] for name in ("state", "gap") if name in seen}
            facts.usage_seen = setup.key_use.meter.usage
            added["key_proxy"] = facts.clean_json(kept | setup.key_use.to_wire())

    def remove(self) -> None:
        """Remove the copy and the host's folders, and close the journal; blocking. The next start removes the rest."""
        state, workspace = self._start.state, self.made
        try:
            if self.setup is not None:
                self.setup.remove(with_tree=workspace is None)
            if workspace is not None:
                state.close_workspace(workspace)
            if self.journal is not None:  # Last: its lock keeps other control planes from removing the same folders.
                self.journal.close()
        except Exception as error:
            state.add_problems(f"{self._facts.run_id}: after its receipt was sealed: {unforeseen(error)}")
