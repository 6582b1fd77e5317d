"""`rewind`: list a run's checkpoints, or restore the workspace to one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.contract.events import CheckpointReported, carried
from backplane.errors import StoreError
from backplane.receipts.audit import record_hash
from backplane.runtime.state import settle
from backplane.workspace.checkpoints import Checkpoint, found, rewind_original, told

if TYPE_CHECKING:
    from backplane.contract.receipt import Receipt


HELP = "Restore the workspace that has a run's result to one of the run's checkpoints. Without NAME, list these."
EXAMPLE = """
backplane rewind last
backplane rewind last before-the-tests
backplane rewind 3f2a start --check
"""


def options(p: Parser) -> None:
    add.run_id(p)
    add.value(p, "name", metavar="NAME", nargs="?", help="name or id of a checkpoint, or `start`")
    add.flag(p, "--check", help="only say whether it would work")
    add.json(p, "one JSON object per line and checkpoint", "cli_checkpoints")


def kept(receipt: Receipt) -> tuple[Checkpoint, ...]:
    """The checkpoints of a run, by its receipt; of one that was cut off by its events.

    Raises:
        StoreError: `receipt_store_failed`, the receipt says of them what we never write.
    """
    said, end = receipt.backplane.get("checkpoints"), receipt.backplane.get("end")
    rows = said.get("made") if isinstance(said, dict) else said
    if rows is None and isinstance(end, dict) and end.get("reason") == "interrupted":
        events = [carried(event) for event in receipt.trace]
        bodies = [event.body for event in events if isinstance(event, CheckpointReported)]
        rows = [{name: body[name] for name in body if name != "what"} for body in bodies if body.get("what") == "made"]
    try:
        return told(() if rows is None else rows)
    except ValueError as error:
        fact = f"the checkpoints in the receipt of run {receipt.meta.run_id} cannot be read: {error}"
        hint = f"nothing was changed; see where it comes from: backplane receipts show {receipt.meta.run_id}"
        raise StoreError("receipt_store_failed", fact, hint=hint) from error


def named(run: str, name: str) -> tuple[Receipt, Path, Checkpoint | None]:
    """A run's receipt and folder, and the checkpoint of this name; None for the start.

    Raises:
        WorkspaceError, ConfigError: there is no such run, or checkpoint.
        StoreError: as `kept`.
    """
    with open_store() as store:
        receipt = store.load(run)
        return receipt, store.folder(receipt.meta.run_id), found(kept(receipt), name)


def _line(one: Checkpoint) -> str:
    why = "by name" if one.why == "asked" else "before a tool"
    own_id, at, name, tree = map(streams.one_line, (one.id, one.at[:19], one.name, one.tree))
    return f"{own_id:<5} {at}Z  {name:<24} {streams.count(one.files, 'file'):>12}  {why}  tree {tree}"


def run(args: Args) -> int:
    if args.name is None:
        with open_store() as store:
            made = kept(store.load(args.run))
        streams.write_rows(made, _line, "no checkpoints; `run --checkpoints` makes them", as_json=args.json)
        return 0
    for left in settle(config.home_path(os.environ)):
        streams.note(left.describe())
    receipt, folder, to = named(args.run, args.name)
    done = rewind_original(folder, to, record_sha256=record_hash(receipt), check=args.check)
    streams.write(f"{'would change' if args.check else 'changed'} {streams.count(len(done.files), 'file')}\n")
    for file in done.files:
        streams.write(f"  {streams.one_line(file)}\n")
    return 0
