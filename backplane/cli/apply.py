"""`apply`: put a run's patch into the workspace it was made for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong
from backplane.cli.console import is_bare, violations
from backplane.cli.rewind import named
from backplane.errors import ConfigError, PolicyError, WorkspaceError
from backplane.receipts.audit import patch_hash, record_hash
from backplane.runtime.state import StateFolder, refuse_unknown, settle
from backplane.workspace import apply_bare, apply_patch
from backplane.workspace.checkpoints import load
from backplane.workspace.patch import SavedPatch

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt


def _at(args: Args) -> SavedPatch:
    """What the run had changed at a checkpoint."""
    _, folder, checkpoint = named(args.run, args.at)
    if checkpoint is None:
        fact = "at the start the run had changed nothing"
        raise WorkspaceError("execution_workspace_error", fact, hint="to undo what was applied: backplane rewind")
    return load(folder, checkpoint)


def _refuse_violations(args: Args, receipt: Receipt) -> None:
    """Refuse the patch of a run that did what its policy forbids, until somebody has accepted that."""
    found = violations(receipt)
    if found and not args.accept_violations:
        hint = f"read the patch, then: backplane apply {receipt.meta.run_id[:8]} --accept-violations"
        raise PolicyError("policy_denied", f"the run did not keep its policy: {'; '.join(found)}", hint=hint)


def _no_root(patch: Path) -> ConfigError:
    """The error for a patch from elsewhere without a folder."""
    fact = "the run was made elsewhere: which folder here its patch is for is not known"
    hint = f"--root DIR names it; or there: git apply {streams.one_line(str(patch))}"
    return wrong(fact, hint)


HELP = "Apply a run's patch to the original workspace: all of it or nothing."
EXAMPLE = "backplane apply last --check\nbackplane apply last\nbackplane apply 3f2a --root ~/project"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.value(p, "-C", "--root", metavar="DIR", help="apply to this folder (default: the one the run was made for)")
    add.value(p, "--at", metavar="NAME", help="apply the state at this checkpoint (default: the final one)")
    add.flag(p, "--check", help="only say whether the patch would apply")
    add.flag(p, "--accept-violations", help="apply although the run did not keep its policy")
    add.flag(p, "--merge", help="merge where files have changed since")


def run(args: Args) -> int:
    home = config.home_path(os.environ)
    for found in settle(home):
        streams.note(found.describe())
    with open_store() as store:
        row = store.find(args.run)
        folder, patch = store.folder(row.run_id), store.patch(row)
        receipt = store.load(row.run_id)
        promised = any(artifact.kind == "patch" for artifact in receipt.artifacts)
    saved = _at(args) if args.at is not None else None
    # Whether the file is still what the receipt promises is looked at where it is read.
    if saved is None and not promised and (patch is None or not patch.stat().st_size):
        refuse_unknown(StateFolder(home), row.run_id)
        streams.write("the run changed nothing\n")
        return 0
    _refuse_violations(args, receipt)
    root = Path(args.root).expanduser() if args.root is not None else None
    if saved is None and patch is not None and is_bare(patch):
        if root is None:
            raise _no_root(patch)
        named = patch_hash(receipt) or ""
        applied = apply_bare(folder, named, root, check=args.check, merge=args.merge)
    else:
        applied = apply_patch(
            folder, record_sha256=record_hash(receipt), saved=saved, root=root, check=args.check,
            merge=args.merge,
        )  # fmt: skip
    verb = "would change" if args.check else "changed"
    streams.write(
        f"{verb} {streams.count(len(applied.files), 'file')}{', some by a merge' if applied.merged else ''}\n"
    )
    for file in applied.files:
        streams.write(f"  {streams.one_line(file)}\n")
    return 0
