"""`apply`: put a run's patch into the workspace it was made for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import streams
from backplane.cli.checkpoints import named
from backplane.cli.parser import Options
from backplane.cli.show import is_bare, violations
from backplane.cli.start import open_store, wrong
from backplane.errors import ConfigError, PolicyError, WorkspaceError
from backplane.receipts.audit import patch_hash, record_hash
from backplane.runtime.state import StateFolder, refuse_unknown, settle
from backplane.workspace import apply_bare, apply_patch
from backplane.workspace.checkpoints import load
from backplane.workspace.patch import SavedPatch

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt


def _at(options: Options) -> SavedPatch:
    """What the run had changed at a checkpoint."""
    _, folder, checkpoint = named(options.run, options.at)
    if checkpoint is None:
        fact = "at the start the run had changed nothing"
        raise WorkspaceError("execution_workspace_error", fact, hint="to undo what was applied: backplane rewind")
    return load(folder, checkpoint)


def _refuse_violations(options: Options, receipt: Receipt) -> None:
    """Refuse the patch of a run that did what its policy forbids, until somebody has accepted that."""
    found = violations(receipt)
    if found and not options.accept_violations:
        hint = f"read the patch, then: backplane apply {receipt.meta.run_id[:8]} --accept-violations"
        raise PolicyError("policy_denied", f"the run did not keep its policy: {'; '.join(found)}", hint=hint)


def _no_root(patch: Path) -> ConfigError:
    """The error for a patch from elsewhere without a folder."""
    fact = "the run was made elsewhere: which folder here its patch is for is not known"
    hint = f"--root DIR names it; or there: git apply {streams.one_line(str(patch))}"
    return wrong(fact, hint)


def apply(options: Options) -> int:
    home = config.home_path(os.environ)
    for found in settle(home):
        streams.note(found.describe())
    with open_store() as store:
        row = store.find(options.run)
        folder, patch = store.folder(row.run_id), store.patch(row)
        receipt = store.load(row.run_id)
        promised = any(artifact.kind == "patch" for artifact in receipt.artifacts)
    saved = _at(options) if options.at is not None else None
    # Whether the file is still what the receipt promises is looked at where it is read.
    if saved is None and not promised and (patch is None or not patch.stat().st_size):
        refuse_unknown(StateFolder(home), row.run_id)
        streams.write("the run changed nothing\n")
        return 0
    _refuse_violations(options, receipt)
    root = Path(options.root).expanduser() if options.root is not None else None
    if saved is None and patch is not None and is_bare(patch):
        if root is None:
            raise _no_root(patch)
        named = patch_hash(receipt) or ""
        applied = apply_bare(folder, named, root, check=options.check, merge=options.merge)
    else:
        applied = apply_patch(
            folder, record_sha256=record_hash(receipt), saved=saved, root=root, check=options.check,
            merge=options.merge,
        )  # fmt: skip
    verb = "would change" if options.check else "changed"
    streams.write(
        f"{verb} {streams.count(len(applied.files), 'file')}{', some by a merge' if applied.merged else ''}\n"
    )
    for file in applied.files:
        streams.write(f"  {streams.one_line(file)}\n")
    return 0
