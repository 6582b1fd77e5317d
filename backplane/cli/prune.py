"""`prune`: remove the files of older runs."""

from __future__ import annotations

import re
from typing import Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.errors import StoreError
from backplane.receipts.database import is_full

HELP = "Remove the files of older runs. Their places in the chain of receipts stay, and it still verifies."
EXAMPLE = "backplane prune --older 90d --dry-run\nbackplane prune --keep 1000 --size 2g"

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def options(p: Parser) -> None:
    add.value(p, "--keep", metavar="N", type=add.number, help="keep the newest N runs")
    add.value(p, "--older", metavar="SPAN", type=add.ago, help="prune runs that ended longer ago, as 12h or 90d")
    add.value(p, "--size", metavar="BYTES", help="keep run files of at most this total size, as 500m or 2g")
    add.flag(p, "--dry-run", help="say how many runs would be pruned; remove nothing")


def _bounds(args: Args) -> dict[str, int]:
    """Return the arguments of `Store.prune`."""
    found: dict[str, int] = {}
    if args.keep is not None:
        found["keep"] = args.keep
    if args.older is not None:
        found["ended_before_ms"] = args.older
    if args.size is not None:
        size = re.fullmatch(r"([0-9]{1,12})([kmgt]?)b?", args.size.strip().lower())
        if size is None:
            raise wrong_words(f"--size {args.size!r} is not a size", "give a size as 500m or 2g")
        found["bytes_max"] = int(size[1]) * _UNITS[size[2]]
    if not found:
        raise wrong_words("no option says which runs to prune", "give --keep N, --older SPAN or --size BYTES")
    return found


def run(args: Args) -> int:
    bounds = _bounds(args)
    if args.dry_run:
        with open_store() as store:
            count = store.count_prunable(**bounds)
        streams.write(f"{streams.count(count, 'run')} would be pruned; nothing was removed\n")
        return 0
    try:
        with open_store(readonly=False) as store:
            count = store.prune(**bounds)
    except StoreError as error:
        if not is_full(error):
            raise
        with open_store() as store:
            store.make_room(**bounds)
        with open_store(readonly=False) as store:
            count = store.prune(**bounds)
    streams.write(f"{streams.count(count, 'run')} pruned; the chain still verifies\n")
    return 0
