"""`apply`: put a run's patch into the workspace it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options, Parser

if TYPE_CHECKING:
    from pathlib import Path

    from backplane.contract.receipt import Receipt
    from backplane.errors import ConfigError
    from backplane.workspace.patch import SavedPatch


def parser(name: str) -> Parser:
    """The options of `apply`."""
    made = Parser(
        f"backplane {name}",
        "Apply a run's patch to the original workspace: all of it or nothing.",
        "backplane apply 3f2a --check\nbackplane apply 3f2a\nbackplane apply last --root ~/project",
        _apply,
    )
    made.add_argument("run", metavar="RUN", help="run id or its beginning")
    made.add_argument("--root", metavar="DIR", help="into this folder (the one that the run was made for)")
    made.add_argument("--at", metavar="NAME", help="as it was at a checkpoint, by name or id (the end)")
    made.add_argument("--check", action="store_true", help="only say whether it would apply")
    made.add_argument("--accept-violations", action="store_true", help="although the run did not keep its policy")
    made.add_argument("--merge", action="store_true", help="merge where the files have changed since")
    return made


def _at(options: Options) -> SavedPatch:
    """What the run had changed at a checkpoint."""
    from backplane.cli.checkpoints import named
    from backplane.errors import WorkspaceError
    from backplane.workspace.checkpoints import load

    _, folder, checkpoint = named(options.run, options.at)
    if checkpoint is None:
        fact = "at the start the run had changed nothing"
        raise WorkspaceError("execution_workspace_error", fact, hint="to undo what was applied: backplane rewind")
    return load(folder, checkpoint)


def _refuse_violations(options: Options, receipt: Receipt) -> None:
    """Refuse the patch of a run that did what its policy forbids, until somebody has accepted that."""
    from backplane.cli.show import violations
    from backplane.errors import PolicyError

    found = violations(receipt)
    if found and not options.accept_violations:
        hint = f"read the patch, then: backplane apply {receipt.meta.run_id[:8]} --accept-violations"
        raise PolicyError("policy_denied", f"the run did not keep its policy: {'; '.join(found)}", hint=hint)


def is_bare(patch: Path) -> bool:
    """Whether a patch came from another machine: the folder that it was made of is not known here."""
    import os

    from backplane.workspace.patch import RECORD_NAME

    return not os.path.lexists(patch.with_name(RECORD_NAME))


def _no_root(patch: Path) -> ConfigError:
    """The error for a patch from elsewhere without a folder."""
    from backplane.errors import ConfigError

    fact = "the run was made elsewhere: which folder here its patch is for is not known"
    hint = f"--root DIR names it; or there: git apply {streams.one_line(str(patch))}"
    return ConfigError("config_invalid", fact, hint=hint)


def _apply(options: Options) -> int:
    import os
    from pathlib import Path

    from backplane import config
    from backplane.receipts.audit import patch_hash, record_hash
    from backplane.receipts.store import Store
    from backplane.runtime.results import refuse_unknown
    from backplane.runtime.state import StateFolder, settle
    from backplane.workspace import apply_bare, apply_patch

    home = config.home_path(os.environ)
    for found in settle(home):
        streams.complain(streams.one_line(found.describe()) + "\n")
    with Store.open(home, readonly=True) as store:
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
