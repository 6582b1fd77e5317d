"""Where one run happens on this machine: its journal, its place to work in, and the cage around its host.

An order and a way to start its host come in; an open link comes out, and a workspace. What is
said on the link is not known here, nor how the run ends.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from backplane.config import Isolation, Limits, tighter
from backplane.contract.canonical import Json
from backplane.contract.receipt import Usage
from backplane.contract.work import ContextPacket, Mode
from backplane.errors import BackplaneError, StoreError, WorkspaceError, unforeseen
from backplane.policy.rules import has_rules_of
from backplane.receipts.build import RunState
from backplane.receipts.journal import Facts, held_fact, hooks_fact, host_fact
from backplane.runtime.backends import Backend, Link, Opener, ProcessBackend
from backplane.runtime.limits import quota_of
from backplane.runtime.state import STAGED_FOR, StateFolder
from backplane.sandbox.credentials import read_names
from backplane.workspace import object_folders, open_workspace
from backplane.workspace.workspace import NAME_A_FOLDER

if TYPE_CHECKING:
    from backplane.process.launch import StartCommand
    from backplane.receipts.journal import Journal
    from backplane.runtime.warm import WarmHost
    from backplane.sandbox.key_proxy import KeyUse
    from backplane.sandbox.plan import Contained
    from backplane.sandbox.probe import Probe
    from backplane.sandbox.run import Sandbox
    from backplane.workspace import Workspace


CAUSE_S: Final = 1.0
"""For what is wrong with a place to be known, once its cage has failed: milliseconds are usual."""


_ISOLATION_OFF: Final = ("isolation is off", "leave it on where bubblewrap is installed")
"""A shortfall, as `Contained` has it: why, and the next step."""


class HostStart(msgspec.Struct, frozen=True):
    """Which host is started, and in what."""

    backend: Backend
    environ: Mapping[str, str]
    """What its environment is chosen from."""
    isolation: Isolation
    """The least that there is to be."""
    layers: Probe | None
    """What contains hosts on this machine; None finds out."""


class RunEnvironment:
    """The environment of one run.

    Args:
        ended: whether the run ends before its order was sent.
        place: names the folders of a host that is to wait for an order; None takes those of the run.
    """

    def __init__(
        self,
        state: StateFolder,
        facts: RunState,
        limits: Limits,
        start: HostStart,
        ended: Callable[[], bool],
        place: str | None = None,
    ) -> None:
        self.journal: Journal | None = None
        """None until something of the run is about to be started."""
        self._state = state
        self._facts = facts
        self._limits = limits
        self._start = start
        self._key_use: KeyUse | None = None
        self.on_spent: Callable[[], None] | None = None
        """Called when the model's service was seen to count more for this run."""
        self._ended = ended
        self.prepared = False
        """There is, or will be, a place to work in; or what is wrong with it."""
        self._workspace: Workspace | None = None
        self._error: BackplaneError | None = None
        """Why there is no place to work in, once that is known."""
        self._placed, self._done = anyio.Event(), anyio.Event()
        self._works = False
        """A thread makes the place to work in, or opens the store."""
        self._sandbox: Sandbox | None = None
        self.left = False
        """Whoever wanted the run has gone before it began."""
        self.hidden_servers: Mapping[str, str] = {}
        """MCP servers with a file that the cage hides from the agent: name → the file."""
        self._root = ""
        """Where a contained host works."""
        self._tree: Path | None = None
        """Where the copy will be, when the cage is put around it before that is made."""
        self._waits = place is not None
        self._place = place or facts.run_id
        self._lock = -1
        self._standing: tuple[object, ...] = ()
        """What a host that waits was started in: it is taken where this is equal."""

    def kind(self, key: str) -> Hashable:
        """What two orders must have in common to be given the same host; None where none can wait for them.

        A host in a cage around a copy must not race with the copying: one of ours does nothing before its order.

        Args:
            key: of the backend, as its program is now.
        """
        spec, backend = self._facts.order.workspace, self._start.backend
        isolation = tighter(self._start.isolation, self._facts.settings.get("isolation"))
        if not isinstance(backend, ProcessBackend) or backend.remote:
            return None
        if isolation != "off" and spec.mode == "staged" and not backend.is_ours:
            return None
        return key, isolation, spec.mode, os.path.abspath(spec.root)

    def for_next(self, place: str) -> RunEnvironment:
        """Return the environment of a host that is to wait for the next order like this one.

        Args:
            place: names its folders.
        """
        facts = self._facts
        order = msgspec.structs.replace(facts.order, task="", context=ContextPacket())
        waiting = RunState(run_id=place, order=order, backend=facts.backend, started_ns=0, policy=facts.policy)
        return RunEnvironment(self._state, waiting, self._limits, self._start, lambda: False, place)

    async def open(self, warm: WarmHost | None = None) -> AbstractAsyncContextManager[Link]:
        """The way to start the host, contained as far as was asked for and can be had.

        Args:
            warm: taken if it was started in the same, else ended.

        Raises:
            BackplaneError: refused; or the place to work in, which comes first then, could not be made.
        """
        opening = None
        if warm is not None:
            self._place, self._tree = warm.environment._place, warm.environment._tree
            try:
                opening = await self.find_way(warm)
            finally:
                if opening is None:
                    self._place, self._tree = self._facts.run_id, None
                    await warm.drop()
        if opening is None:
            opening = await self.find_way()
        assert opening is not None
        return opening

    async def find_way(self, warm: WarmHost | None = None) -> AbstractAsyncContextManager[Link] | None:
        """The way to start the host; None for one that waits and does not fit, and where none can wait."""
        order, backend, environ = self._facts.order, self._start.backend, self._start.environ
        program = backend if isinstance(backend, ProcessBackend) else None
        self._facts.guarded = program is not None
        settings = self._facts.settings
        demanded, asked = settings.get("enforcement"), settings.get("credentials")
        isolation = self._facts.isolation = tighter(self._start.isolation, settings.get("isolation"))
        plain = functools.partial(backend.open, order, environ)
        if isinstance(backend, ProcessBackend) and backend.held_key is not None:
            from backplane.sandbox.key_proxy import KeyUse

            self._key_use = KeyUse(backend.held_key.prices)
            self._key_use.on_answer = self._spent
            plain = functools.partial(plain, use=self._key_use)
        plainly: tuple[object, ...] = ()
        if program is not None and (self._waits or warm is not None):
            plainly = program.command(order, environ), order.policy, None
        assert self._facts.policy is not None
        if isolation == "off" and (self._key_use is not None or has_rules_of(self._facts.policy.profile, "strict")):
            self._facts.shortfall = _ISOLATION_OFF
        nothing_asked = isolation == "off" and demanded is None and asked is None
        if nothing_asked or self._facts.replayed:  # A replay does nothing that could be contained.
            return self._way(warm, plainly, plain)
        # Not before: who does not want it shall not pay for loading it.
        from backplane.sandbox.probe import try_layers

        contained = program is not None and isolation != "off"
        found = (self._start.layers or await try_layers(environ)) if contained else None
        from backplane.sandbox.run import Sandbox

        open_stores = read_names(asked, "config.vendor.abp.credentials")
        if program is not None:
            open_stores |= program.open_stores
        self._sandbox = Sandbox(self._facts.policy, isolation, demanded, found, open_stores=open_stores)
        if program is None or not contained:
            return self._way(warm, plainly, plain)
        if warm is not None and warm.environment._sandbox is not None:
            self._sandbox.adopt(warm.environment._sandbox)
        if not await self._choose_root(self._sandbox, waits=self._waits or warm is not None):
            return None
        opener, standing = await self._contain(program)
        return self._way(warm, standing, functools.partial(program.open, order, environ, opener, self._key_use))

    def _spent(self, so_far: Usage) -> None:
        self._facts.spent(so_far.input_tokens, so_far.output_tokens, so_far.estimated_cost_usd)
        if self._facts.limit is not None and self._key_use is not None:
            self._key_use.over = self._facts.limit[1]  # The agent may ask once more before it is ended.
        if self.on_spent is not None:
            self.on_spent()

    def _way(
        self, warm: WarmHost | None, standing: tuple[object, ...], cold: Callable[[], AbstractAsyncContextManager[Link]]
    ) -> AbstractAsyncContextManager[Link] | None:
        if warm is None:
            # Some ten kilobytes, which nobody would look at in a run.
            self._standing = standing if self._waits else ()
            return cold()
        if warm.environment._standing != standing:
            return None
        self._facts.start = "warm"
        self._lock, warm.environment._lock = warm.environment._lock, -1
        self._key_use = warm.environment._key_use
        if self._key_use is not None:
            self._key_use.on_answer = self._spent
        return warm.block

    async def _choose_root(self, sandbox: Sandbox, *, waits: bool) -> bool:
        """Know where the host will work; whether one that waits can.

        With rules on files what is staged must be there, or they would find nothing to cover.
        """
        state, spec = self._state, self._facts.order.workspace
        # First, as only what has a journal of a living run, or is locked, is safe from being swept as a leftover.
        if self._waits:
            self._lock = await anyio.to_thread.run_sync(state.lock_place, self._place)
        elif self.journal is None:
            self.journal = state.journal(self._facts)
        self._root = spec.root
        if spec.mode == "staged":
            # With rules on what is copied, only the copy knows whether it may have the original's history.
            ruled = bool(spec.include or spec.exclude)
            if not ruled and not await anyio.to_thread.run_sync(sandbox.needs_tree, spec.root):
                self._tree = self._tree or state.make_tree(self._place)
            elif waits:
                return False
            if self._tree is None:
                self._root = str((await self._stage_first()).root)
            else:
                self._root = str(self._tree)
        elif not await anyio.to_thread.run_sync(os.path.isdir, spec.root):
            # Said here, as a cage around a place that is not there would only fail to start.
            fact = f"the workspace {spec.root!r} is not a folder"
            raise WorkspaceError("workspace_init_failed", fact, hint=NAME_A_FOLDER)
        return True

    async def _contain(self, program: ProcessBackend) -> tuple[Opener, tuple[object, ...]]:
        """Work the cage out; return what starts a host in it, and all that this host is started in."""
        sandbox = self._sandbox
        assert sandbox is not None
        command, held, places = await anyio.to_thread.run_sync(self._put_on, program, sandbox)
        self._facts.contained, self._facts.held_by_system = held.label, held.gaps
        self._facts.shortfall = held.shortfall
        self.hidden_servers = held.hidden_servers
        if held.policy is not None:
            self._facts.added["endpoints"] = list(held.endpoints)
        standing = (command, self._facts.order.policy, msgspec.structs.replace(held, policy=None), places)
        if self.journal is not None:
            self.journal.note(self._held_fact())
        ready = self._wait_placed if self.holds_host and not self._waits else None
        return functools.partial(sandbox.open, held, ready), standing

    def _put_on(self, program: ProcessBackend, sandbox: Sandbox) -> tuple[StartCommand, Contained, tuple[object, ...]]:
        from backplane.sandbox.run import place_of

        state, order = self._state, self._facts.order
        original = order.workspace.root if order.workspace.mode == "staged" else None
        place = place_of(
            self._root,
            original=original,
            home=state.home,
            scratch=state.scratch_of(self._place),
            objects=self._objects(order.workspace.root),
        )
        command = program.command(order, self._start.environ)
        writable, servers = program.make_writable(order), program.servers(order, command)
        held = sandbox.put_on(place, command, writable, program.endpoints, servers, program.agent_path(command.env))
        mounted = [word for word in held.cage.wrapper if word.startswith("/")]  # A replaced file is not covered.
        return command, held, _identities([*held.writable, *mounted])

    def _objects(self, root: str) -> tuple[str, ...]:
        """Return the folders from which the repository at the place to work in takes objects."""
        return self._workspace.object_folders if self._workspace is not None else object_folders(root)

    async def _stage_first(self) -> Workspace:
        self.prepared = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._prepare, "staged")
            try:
                await self._done.wait()
            finally:
                self.left = True
        self.left = False
        workspace = await self.workspace()
        assert workspace is not None
        return workspace

    def prepare(self, start_soon: Callable[..., object], mode: Mode | None) -> None:
        """Journal, store and workspace begin while the host starts, unless they had to be there before it.

        Args:
            start_soon: starts the task in which they are made.
            mode: how the place to work in is made; None when it is not here.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        if not self.prepared:
            if self.journal is None:
                self.journal = self._state.journal(self._facts, self._held_fact())
            self.prepared = True
            start_soon(self._prepare, mode)

    async def _prepare(self, mode: Mode | None) -> None:
        """Open store and workspace in a worker thread while the host starts."""
        if self._done.is_set():
            return
        self._works = True
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._make, mode)
        except Exception as error:  # Whatever it is, it is the run's to tell.
            self._error = unforeseen(error)
        finally:
            self._works = False
            self.abandon()

    def _make(self, mode: Mode | None) -> None:
        if mode is not None:
            self._make_workspace(mode)
            anyio.from_thread.run_sync(self._placed.set)
        self._state.store()

    def _make_workspace(self, mode: Mode) -> None:
        state, limits, spec = self._state, self._limits, self._facts.order.workspace
        assert self.journal is not None
        root = os.path.abspath(spec.root)
        state.refuse_own(Path(root))
        state.settle()
        self._workspace = open_workspace(
            root,
            mode=mode,
            include=spec.include,
            exclude=spec.exclude,
            run_dir=self.journal.folder,
            stage_dir=state.stage_of(self._place),
            tree=state.tree_of(self._place),
            quota=quota_of(limits),
            stopped=self._ended,
            state=state.home,
            unread=self._facts.order.policy.deny_read,
        )
        if mode == "staged":
            # Whose the copy is, before its run is sent: should we be killed, its work is kept.
            mark = state.stage_of(self._place) / STAGED_FOR
            try:
                mark.write_text(self._facts.run_id)
            except OSError as error:
                raise WorkspaceError("workspace_staging_failed", f"{mark}: {error.strerror}") from error

    def _held_fact(self) -> Facts:
        """What is noted before the host starts in its cage: should we be killed, the receipt says it all the same."""
        return held_fact(self._facts.redactor.json(self._facts.held())[0])

    def note_host(self, pid: int, start: int) -> None:
        """Note which process it is, for who looks at the live run; a function of this process has none of its own."""
        if self.journal is not None and pid != os.getpid():
            self.journal.note(host_fact(pid, start))

    def note_hooks(self, ask: str, names: Sequence[str]) -> None:
        """Note that hooks take long over an ask; no names once they have answered."""
        if self.journal is not None:
            with suppress(StoreError):  # For a look at it alone.
                self.journal.note(hooks_fact(self._facts.redactor.text(ask)[0], names))

    @property
    def holds_host(self) -> bool:
        """The host is not started before its place to work in is there, which has to be begun before."""
        return self._tree is not None

    async def _wait_placed(self) -> None:
        """Wait for the place to work in alone. Raises WorkspaceError, also where nobody knows why there is none."""
        await self._placed.wait()
        if self._workspace is None:
            raise self._error or WorkspaceError("workspace_staging_failed", "the copy was not made")

    async def cause(self, error: BackplaneError) -> BackplaneError:
        """Why a start failed: where the place to work in cannot be made, the cage around it may fail before that."""
        with anyio.move_on_after(CAUSE_S):
            await self.settled()
        return self._error or error

    async def workspace(self) -> Workspace | None:
        """Wait for the place to work in; None when there is none here.

        Raises:
            BackplaneError: of the store or the workspace.
        """
        await self.settled()
        if self._error is not None:
            raise self._error
        return self._workspace

    def abandon(self) -> None:
        """Have nobody wait for a preparation that will not come, unless a thread works on it."""
        if not self._works:
            self._placed.set()
            self._done.set()

    async def settled(self) -> None:
        """Wait until nothing is being made here any more."""
        if self.prepared and not self._done.is_set():
            await self._done.wait()

    def check_asks(self, extensions: tuple[str, ...]) -> None:
        """Refuse a host that does not ask first where the order demands it. Raises CapabilityError."""
        if self._sandbox is not None:
            self._sandbox.check_asks(extensions)

    def unlock(self) -> None:
        """Let the folders of a host that waited be swept."""
        if self._lock >= 0:
            self._state.unlock_place(self._place, self._lock)
            self._lock = -1

    def leave(self, added: dict[str, Json], *, used: bool) -> Workspace | None:
        """The host is gone: take its cage away; what it was working in comes back. Blocking.

        Args:
            added: members of the receipt's own part.
            used: the order was sent. Else the place to work in is removed.
        """
        if self._sandbox is not None:
            self._sandbox.close(added)
            if "network" in added:  # Where the host wanted to go, in its own words.
                added["network"] = self._facts.clean_json(added["network"])
        if self._key_use is not None:
            held = self._facts.contained["kinds"]["environment"] if self._facts.contained else {"state": "none"}
            kept = {name: held[name] for name in ("state", "gap") if name in held}
            self._facts.usage_seen = self._key_use.meter.usage
            added["key_proxy"] = self._facts.clean_json(kept | self._key_use.to_wire())
        workspace = self._workspace
        if workspace is None and self._tree is not None:
            self._state.drop_stage(self._place)
        if workspace is not None and not used:
            workspace.close()
            return None
        return workspace


def _identities(paths: Sequence[str]) -> tuple[tuple[int, int] | None, ...]:
    """Which files and folders stand there now: a mount stays with those of its start, whatever takes their names."""
    found: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            here = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((here.st_dev, here.st_ino))
    return tuple(found)
