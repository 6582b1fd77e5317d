"""`receipts export`: write receipt, patch and journal as one folder."""

from __future__ import annotations

from pathlib import Path

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store
from backplane.receipts.bundle import export

HELP = "Write a run's receipt, patch and journal to a new folder."
EXAMPLE = "backplane receipts export last --to ./evidence"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.value(p, "--to", metavar="DIR", help="write to this new folder (default: ./RUN-ID)")


def run(args: Args) -> int:
    with open_store() as store:
        run_id = store.find(args.run).run_id
        folder = export(store, run_id, Path(run_id if args.to is None else args.to))
    streams.write(f"{streams.one_line(folder)}\n")
    return 0
