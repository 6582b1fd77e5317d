"""`receipts import`: store a receipt from elsewhere, once it verifies."""

from __future__ import annotations

from pathlib import Path

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.receipts.bundle import import_bundle

HELP = "Verify a receipt from another machine, and store it on this one."
EXAMPLE = "backplane receipts import ./3f2a1b0c-…"


def options(p: Parser) -> None:
    add.value(p, "file", metavar="FILE", help="folder that `receipts export` wrote, or one receipt file")


def run(args: Args) -> int:
    with open_store(readonly=False) as store:
        row = import_bundle(store, Path(args.file))
    streams.write(f"{row.run_id}\n")
    return 0
