"""The state folder of a control plane."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane.contract import canonical
from backplane.errors import StoreError, WorkspaceError
from backplane.process.locks import try_lock
from backplane.receipts.build import RunState
from backplane.receipts.journal import Journal, applied_fact, failed_fact, head_fact
from backplane.receipts.recovery import describe, is_live, note_late
from backplane.receipts.store import Store
from backplane.workspace import collect, transaction
from backplane.workspace.tree import open_root, opened

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt
    from backplane.receipts.recovery import Orphan
    from backplane.receipts.signatures import Signer
    from backplane.workspace import Workspace


_COPIES: Final = (("stage",), ("scratch",), ("incoming",))
"""Folders of the state folder that agents work in."""


STAGED_FOR: Final = "run"
"""File beside a finished copy with the id of its run; what is newer than this file was changed since."""
KEPT: Final = "kept"
"""The same file for a run that was cut off: its copy stays as long as the run's folder."""

_AT_WORK: Final = (b'"tool_call"', b'"file_changed"')
"""Kinds of events after which a change in the clock tick of the mark's own is taken for the agent's."""


def _staged_for(stage: Path) -> str | None:
    try:
        return (stage / STAGED_FOR).read_text()[:40]
    except (OSError, ValueError):
        return None


def _has_work(stage: Path, run_dir: Path) -> bool:
    """Return True if anything in a copy but git's own files was changed after it was made, or cannot be looked at."""
    try:
        made_ns = (stage / STAGED_FOR).stat().st_mtime_ns
    except OSError:
        return False  # The order was not sent yet, or there is no copy.
    try:
        with (run_dir / "trace.jsonl").open("rb") as lines:
            made_ns -= any(kind in line for line in lines for kind in _AT_WORK)
        tree = stage / "tree"
        for folder, folders, files in os.walk(tree, onerror=raise_error):
            if Path(folder) == tree and ".git" in folders:
                folders.remove(".git")
            for name in ("", *folders, *files):
                if os.lstat(os.path.join(folder, name)).st_ctime_ns > made_ns:
                    return True
    except OSError:
        return True
    return False


def raise_error(error: OSError) -> None:
    """Raise what `os.walk` would pass over."""
    raise error


class StateFolder:
    """The state folder of a control plane: its store, journals and staged trees."""

    def __init__(self, home: Path, signer: Signer | None = None) -> None:
        self.home = home
        self._signer = signer
        self.notes: list[str] = []
        """Leftovers of a killed control plane that are settled now, one line each."""
        self.problems: list[str] = []
        """Leftovers that could not be sealed or removed, one line each with its next step."""
        self._store: Store | None = None
        self._opening = threading.RLock()

    def store(self) -> Store:
        """The open store; the first caller opens it and seals what a killed control plane left behind.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        with self._opening:
            if self._store is None:
                store = Store.open(self.home)
                try:
                    self.settle()
                    recovery = store.recover(self._clean)
                    self.add_problems(*recovery.problems)
                    for row in recovery.rows:
                        self.sign(store.load(row.run_id))
                    self._sweep_stages(store)
                except BaseException:
                    store.close()
                    raise
                self._store = store
            return self._store

    def add_problems(self, *lines: str) -> None:
        """Add lines to `problems`, each once. Callable in any thread."""
        self.problems.extend(line for line in lines if line not in self.problems)

    def sign(self, receipt: Receipt) -> None:
        """Keep a signature of a sealed receipt beside the store, where there is a key. Raises StoreError."""
        if self._signer is not None:
            from backplane.receipts import signatures

            signatures.keep(self.home, receipt.meta.run_id, self._signer.receipt(receipt))

    def settle(self) -> None:
        """Undo or finish what a killed control plane was applying to an original, before another run works on that.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        with self._opening:
            marks = transaction.pending(self.home / "runs")
            for found in transaction.settle(marks, lambda run, files: note_late(self.home, run, applied_fact(files))):
                if found.problem or found.kept:
                    self.add_problems(found.describe())
                else:
                    self.notes.append(found.describe())

    def _sweep_stages(self, store: Store) -> None:
        """Remove what is left of runs that were sealed, but killed before they were cleaned up."""

        def is_used(place: str) -> bool:
            return is_live(self.home, place) or self._is_locked(place)

        def is_wanted(stage: Path) -> bool:
            run_id = _staged_for(stage)
            if run_id is None:
                return (stage / KEPT).exists() and (self.home / "runs" / stage.name).exists()
            # It could not be sealed yet.
            return (self.home / "runs" / run_id).exists() and not store.has(run_id)

        for stages in (self.home / "stage", self.home / "scratch"):
            for stage in stages.iterdir() if stages.is_dir() else ():
                if not is_used(stage.name) and not is_wanted(stage):
                    self._collect(stage)

    def make_scratch(self, name: str, *, lock: bool) -> int:
        """Make the folder for the temporary files of a contained host. Blocks.

        Args:
            lock: keep the folders of this name from being swept until the descriptor that comes back is closed: no
                journal of a run keeps those of a host that waits for its order.

        Raises:
            WorkspaceError: `workspace_staging_failed`.
        """
        scratch, folder = self.scratch_of(name), -1
        try:
            os.makedirs(scratch, 0o700)
            if lock:
                folder = open_root(scratch)
                if not try_lock(folder) or not scratch.exists():
                    raise FileNotFoundError(errno.ENOENT, "it was swept while it was made")
        except OSError as error:
            if folder >= 0:
                os.close(folder)
            fact = f"no folder for temporary files can be made at {scratch}: {error.strerror}"
            fix = "free some space, or set BACKPLANE_HOME"
            raise WorkspaceError("workspace_staging_failed", fact, hint=fix) from error
        return folder

    def drop_scratch(self, name: str) -> None:
        """Remove the temporary files of a contained host; what cannot be removed is the next start's."""
        with suppress(WorkspaceError):
            collect(self.scratch_of(name))

    def _is_locked(self, name: str) -> bool:
        """Return True if a host that waits for its order has the folders of this name."""
        with suppress(OSError), opened(open_root(self.scratch_of(name))) as folder:
            return not try_lock(folder)
        return False  # It is not there, or on a network file system, which locks no folders.

    def _clean(self, orphan: Orphan) -> None:
        self._keep_work(orphan)
        self._collect(self.scratch_of(orphan.run_id))

    def _keep_work(self, orphan: Orphan) -> None:
        """Keep the copy of a run that was cut off at work, as nothing else has what it changed; else remove it."""
        if self.kept_of(orphan.run_id) is not None:
            return  # By a start that was killed before it had sealed the run.
        stage = self._stage_in_use(orphan.run_id)
        taken = any(fact.get("fact") in ("sealed", "applied") for fact in orphan.facts)
        if taken or not _has_work(stage, orphan.folder):
            self._collect(stage)
            return
        try:
            # In this order: a kept copy has its run's name, or the next start would take it for nobody's.
            stage = stage.rename(self.stage_of(orphan.run_id))
            (stage / STAGED_FOR).rename(stage / KEPT)
        except OSError as error:
            self.add_problems(f"{stage}: {error.strerror}; it has what run {orphan.run_id} changed")
            return
        fact = f"run {orphan.run_id} ended before what it changed was taken: its copy is {stage / 'tree'}"
        self.add_problems(f"{fact}; take from there what you need, `backplane prune` removes it with the run")

    def _stage_in_use(self, run_id: str) -> Path:
        """Return a run's stage; it has another name if its host had waited for the order."""
        stages = self.stage_of(run_id).parent
        for mark in stages.glob(f"*/{STAGED_FOR}"):
            if _staged_for(mark.parent) == run_id:
                return mark.parent
        return self.stage_of(run_id)

    def kept_of(self, run_id: str) -> Path | None:
        """Return the copy of a run that was cut off; None if what it changed is not only there."""
        stage = self.stage_of(run_id)
        return stage / "tree" if (stage / KEPT).exists() else None

    def _collect(self, stage: Path) -> None:
        """Remove what a dead run left; what cannot be removed is a problem, and no other run fails for it."""
        try:
            collect(stage)
        except (WorkspaceError, OSError) as error:
            self.add_problems(f"{stage.name}: {error}")

    def stage_of(self, run_id: str) -> Path:
        """Return the folder of a run's copy and its baseline, which may be on another disk."""
        stages = self.home / "stage"
        # A cage covers the state folder with every link in it: there the copy is found by its own path alone.
        return (stages.resolve() if stages.is_symlink() and stages.is_dir() else stages) / run_id

    def tree_of(self, run_id: str) -> Path:
        """Return the folder of a run's copy."""
        return self.stage_of(run_id) / "tree"

    def make_tree(self, run_id: str) -> Path | None:
        """Make the folder that a run's copy will fill, so that a sandbox can be made around it before the copy is.

        It has those of git's own files that the shipped policies name. If it cannot be made, that returns None, and
        the error comes when the copy is made.
        """
        stage, tree = self.stage_of(run_id), self.tree_of(run_id)
        try:
            stage.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (stage, tree, tree / ".git", tree / ".git/hooks"):
                folder.mkdir(mode=0o700)
            (tree / ".git/config").touch(mode=0o600)
        except OSError:
            self._collect(stage)
            return None
        return tree

    def refuse_own(self, root: Path) -> None:
        """Refuse to work in the state folder itself; the copies in it are workspaces, which may be worked in.

        Raises:
            WorkspaceError: `workspace_init_failed`.
        """
        with suppress(OSError, RuntimeError):  # A path that leads nowhere is refused when it is opened.
            root, home = root.resolve(strict=True), self.home.stat()
            for above in (root, *root.parents):
                if os.path.samestat(above.stat(), home) and root.relative_to(above).parts[:1] not in _COPIES:
                    fact = f"the workspace '{root}' is part of the state folder"
                    raise WorkspaceError("workspace_init_failed", fact, hint="point BACKPLANE_HOME elsewhere")

    def drop_stage(self, run_id: str) -> None:
        """Remove what is left of a run's stage that never became a workspace."""
        self._collect(self.stage_of(run_id))

    def scratch_of(self, run_id: str) -> Path:
        """Return the folder for the temporary files of a contained host."""
        return self.home / "scratch" / run_id

    def close_workspace(self, workspace: Workspace) -> None:
        """Remove a run's stage; what cannot be removed is a problem, and the run keeps its result."""
        try:
            workspace.close()
        except WorkspaceError as error:
            self.add_problems(f"{error.message}; the next start tries again, or {error.hint}")

    def is_new(self, run_id: str) -> bool:
        """Return True if no run of this id is known here, or if the store cannot be opened, at which the run will fail.

        Blocks.
        """
        with suppress(StoreError):
            return not ((self.home / "runs" / run_id).exists() or self.store().has(run_id))
        return True

    def journal(self, facts: RunState) -> Journal:
        """Make a run's journal, with what is known of the run. Raises StoreError `receipt_store_failed`."""
        started_at, backend = canonical.timestamp_at(facts.started_ns), facts.backend.id
        known = {name: facts.added.get(name) for name in ("route", "check")}
        head = head_fact(facts.order, run_id=facts.run_id, started_at=started_at, backend=backend, **known)
        return Journal.create(self.home, facts.run_id, facts.redactor.json(head)[0])

    def seal_failed(self, run_id: str, code: str) -> Receipt:
        """Seal a run of ours as failed, from its journal alone; one that is stored already keeps its receipt. Blocks.

        Raises:
            StoreError: `receipt_store_failed`; the next start seals the run.
        """
        note_late(self.home, run_id, failed_fact(code))
        receipt = self.store().settle(run_id, self._clean)
        self.sign(receipt)
        return receipt

    def close(self) -> None:
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None


def left_behind(home: Path, store: Store) -> tuple[str, ...]:
    """Return what killed control planes left and no start has settled yet, a line each. Changes nothing.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    return (
        *map(describe, store.orphans()),
        *(f"{line}; the next run or `apply` here settles it" for line in transaction.unsettled(home / "runs")),
    )


def refuse_unknown(state_folder: StateFolder, run_id: str) -> None:
    """Refuse to take a run that was cut off at work for one that changed nothing. Raises WorkspaceError."""
    tree = state_folder.kept_of(run_id)
    if tree is not None:
        fact = f"what it changed is not known, as it was cut off; its copy is {tree}"
        hint = f"look there, and take what you need; `backplane receipts show {run_id[:8]}` tells what it did"
        raise WorkspaceError("execution_workspace_error", fact, hint=hint)
