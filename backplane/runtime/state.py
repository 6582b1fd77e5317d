"""Manages the state folder: its store, the folders of its runs, and what a killed control plane left there."""

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
from backplane.receipts.journal import RECEIPT, Journal, failed_fact, head_fact
from backplane.receipts.recovery import describe, is_live, note_late
from backplane.receipts.state import RunState
from backplane.receipts.store import Store
from backplane.workspace import collect, slim, writing
from backplane.workspace.tree import opened

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt
    from backplane.receipts.recovery import Orphan
    from backplane.receipts.signatures import Signer
    from backplane.workspace import Workspace


_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_COPIES: Final = (("stage",), ("scratch",), ("incoming",))
"""Folders of the state folder in which agents work."""


STAGED_FOR: Final = "run"
"""Name of the mark, a file beside a finished copy with its run's id; newer files have changed since."""
KEPT: Final = "kept"
"""Name of the mark once its run was cut off: the copy stays as long as the run's folder."""

_AT_WORK: Final = (b'"tool_call"', b'"file_changed"')
"""Kinds of events after which a file with the same time as the mark counts as changed by the agent."""


def _staged_for(stage: Path) -> str | None:
    try:
        return (stage / STAGED_FOR).read_text()[:40]
    except (OSError, ValueError):
        return None


def _has_work(stage: Path, run_dir: Path) -> bool:
    """Return True if a file of a run's copy has changed, or cannot be examined; git's own files do not count."""
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
    """Raise an error that `os.walk` would ignore."""
    raise error


def signer_of(key: str | None) -> Signer | None:
    """Return a signer of receipts for a key; None without a key.

    Raises:
        ConfigError: `config_invalid`, the key cannot be read, or the extra `sign` is not installed.
    """
    if key is None:
        return None
    from backplane.receipts.signatures import Signer  # Loads a library that most programs do not need.

    return Signer(key)


class StateFolder:
    """The state folder of a control plane: its store, its journals and its runs' copies."""

    def __init__(self, home: Path, signer: Signer | None = None) -> None:
        self.home = home
        self._signer = signer
        self.problems: list[str] = []
        """Leftovers that could not be sealed or removed, one line each with its next step."""
        self._store: Store | None = None
        self._opening = threading.RLock()

    def store(self) -> Store:
        """Return the open store; the first call opens it and seals the runs that a killed control plane left.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        with self._opening:
            if self._store is None:
                store = Store.open(self.home)
                try:
                    # Each result whose application to an original was cut off.
                    self.add_problems(*writing.cut_off(self.home / "runs"))
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
        """Store the signature of a sealed receipt beside the store, if there is a key. Raises StoreError."""
        if self._signer is not None:
            from backplane.receipts import signatures

            signatures.keep(self.home, receipt.meta.run_id, self._signer.receipt(receipt))

    def _sweep_stages(self, store: Store) -> None:
        """Remove the folders of sealed runs whose control plane was killed before it removed them."""
        for stages in (self.home / "stage", self.home / "scratch"):
            for stage in stages.iterdir() if stages.is_dir() else ():
                is_used = is_live(self.home, stage.name) or self._is_locked(stage.name)
                if not is_used and not self._is_wanted(store, stage):
                    self._collect(stage)

    def _is_wanted(self, store: Store, stage: Path) -> bool:
        """Return True if a copy belongs to a run that is not sealed yet, or was kept for a run that is still stored."""
        run_id = _staged_for(stage)
        if run_id is None:
            return (stage / KEPT).exists() and (self.home / "runs" / stage.name).exists()
        return (self.home / "runs" / run_id).exists() and not store.has(run_id)

    def make_scratch(self, name: str, *, lock: bool) -> int:
        """Make the folder for the temporary files of a host in a sandbox. Blocks.

        Args:
            lock: lock the folder, and return the descriptor that keeps folders of this name from being swept until it
                is closed; for a host that waits for its order, which has no journal to keep them.

        Raises:
            WorkspaceError: `workspace_staging_failed`.
        """
        scratch, folder = self.scratch_of(name), -1
        try:
            os.makedirs(scratch, 0o700)
            if lock:
                folder = os.open(scratch, _FOLDER_FLAGS)
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
        """Remove the temporary files of a host in a sandbox; the next start tries again if that fails."""
        with suppress(WorkspaceError):
            collect(self.scratch_of(name))

    def _is_locked(self, name: str) -> bool:
        """Return True if a host that waits for its order has locked the folders of this name."""
        with suppress(OSError), opened(os.open(self.scratch_of(name), _FOLDER_FLAGS)) as folder:
            return not try_lock(folder)
        return False  # The folder is missing, or on a network file system, which locks no folders.

    def _clean(self, orphan: Orphan) -> None:
        self._keep_work(orphan)
        self._collect(self.scratch_of(orphan.run_id))
        try:
            slim(orphan.folder)
        except (WorkspaceError, OSError) as error:
            self.add_problems(f"{orphan.run_id}: {error}; `backplane prune` removes it")

    def _keep_work(self, orphan: Orphan) -> None:
        """Keep the copy of a run that was cut off, if only the copy has the run's changes; otherwise remove it."""
        if self.kept_of(orphan.run_id) is not None:
            return  # An earlier start kept it and was killed before it had sealed the run.
        stage = self._stage_in_use(orphan.run_id)
        is_applied = any(fact.get("fact") == "applied" for fact in orphan.facts)
        taken = is_applied or os.path.lexists(orphan.folder / RECEIPT)
        if taken or not _has_work(stage, orphan.folder):
            self._collect(stage)
            return
        try:
            # The folder first: the next start would remove a kept copy that does not have its run's name.
            stage = stage.rename(self.stage_of(orphan.run_id))
            (stage / STAGED_FOR).rename(stage / KEPT)
        except OSError as error:
            self.add_problems(f"{stage}: {error.strerror}; it has what run {orphan.run_id} changed")
            return
        fact = f"run {orphan.run_id} ended before what it changed was taken: its copy is {stage / 'tree'}"
        self.add_problems(f"{fact}; take from there what you need, `backplane prune` removes it with the run")

    def _stage_in_use(self, run_id: str) -> Path:
        """Return the folder of a run's copy; it has another name if its host had waited for the order."""
        stages = self.stage_of(run_id).parent
        for mark in stages.glob(f"*/{STAGED_FOR}"):
            if _staged_for(mark.parent) == run_id:
                return mark.parent
        return self.stage_of(run_id)

    def kept_of(self, run_id: str) -> Path | None:
        """Return the copy that was kept of a run that was cut off; None if no copy was kept."""
        stage = self.stage_of(run_id)
        return stage / "tree" if (stage / KEPT).exists() else None

    def _collect(self, stage: Path) -> None:
        """Remove a folder of a dead run; add a failure to `problems`, so that no other run fails."""
        try:
            collect(stage)
        except (WorkspaceError, OSError) as error:
            self.add_problems(f"{stage.name}: {error}")

    def stage_of(self, run_id: str) -> Path:
        """Return the folder of a run's copy and its baseline, which may be on another disk."""
        stages = self.home / "stage"
        # A sandbox hides the state folder and the links in it, so that a copy behind a link needs its real path.
        return (stages.resolve() if stages.is_symlink() and stages.is_dir() else stages) / run_id

    def tree_of(self, run_id: str) -> Path:
        """Return the folder of a run's copy of its workspace."""
        return self.stage_of(run_id) / "tree"

    def make_tree(self, run_id: str) -> Path | None:
        """Make the folder that a run's copy will fill, so that a sandbox can be made around it before that.

        The folder gets the git files that the shipped policies name. If the folder cannot be made, return None: the
        error is raised when the copy is made.
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
        """Refuse a workspace in the state folder, unless it is in one of the copies there.

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
        """Remove the folder of a run's copy that never became a workspace."""
        self._collect(self.stage_of(run_id))

    def scratch_of(self, run_id: str) -> Path:
        """Return the folder for the temporary files of a host in a sandbox."""
        return self.home / "scratch" / run_id

    def close_workspace(self, workspace: Workspace) -> None:
        """Remove a run's copy; add a failure to `problems`, so that the run keeps its result."""
        try:
            workspace.close()
        except WorkspaceError as error:
            self.add_problems(f"{error.message}; the next start tries again, or {error.hint}")

    def is_new(self, run_id: str) -> bool:
        """Return True if the state folder has no run of this id, or if the store cannot be opened. Blocks.

        The run itself fails if the store cannot be opened.
        """
        with suppress(StoreError):
            return not ((self.home / "runs" / run_id).exists() or self.store().has(run_id))
        return True

    def journal(self, facts: RunState) -> Journal:
        """Make a run's journal with the first facts about the run. Raises StoreError: `receipt_store_failed`."""
        started_at, backend = canonical.timestamp_at(facts.started_ns), facts.backend.id
        known = {name: facts.added.get(name) for name in ("route", "check")}
        head = head_fact(facts.order, run_id=facts.run_id, started_at=started_at, backend=backend, **known)
        return Journal.create(self.home, facts.run_id, facts.redactor.json(head)[0])

    def seal_failed(self, facts: RunState, journal: Journal | None, code: str) -> Receipt:
        """Seal a run as failed from its journal alone: with all its events and no patch. Blocks.

        A run that is already stored keeps its receipt.

        Raises:
            StoreError: `receipt_store_failed`; the next start seals the run.
        """
        (journal or self.journal(facts)).close()
        note_late(self.home, facts.run_id, failed_fact(code))
        receipt = self.store().settle(facts.run_id, self._clean)
        self.sign(receipt)
        return receipt

    def close(self) -> None:
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None


def left_behind(home: Path, store: Store) -> tuple[str, ...]:
    """Describe what killed control planes left unsettled, one line each, and change nothing.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    return (
        *map(describe, store.orphans()),
        *writing.cut_off(home / "runs"),
    )


def refuse_unknown(state_folder: StateFolder, run_id: str) -> None:
    """Refuse a run that was cut off, because its changes are unknown. Raises WorkspaceError."""
    tree = state_folder.kept_of(run_id)
    if tree is not None:
        fact = f"what it changed is not known, as it was cut off; its copy is {tree}"
        hint = f"look there, and take what you need; `backplane receipts show {run_id[:8]}` tells what it did"
        raise WorkspaceError("execution_workspace_error", fact, hint=hint)
