"""`prune`: remove the files of older runs."""

from __future__ import annotations

import os
import re
from typing import Final

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, open_store, wrong_words
from backplane.gateway.journal import prune
from backplane.receipts.store import Store

HELP = "Remove the files of older runs. Their entries stay in the chain of receipts, which can still be verified."
EXAMPLE = "backplane prune --older 90d --dry-run\nbackplane prune --keep 1000 --size 2g"

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise ValueError
    return int(found[1]) * _UNITS[found[2]]


def options(p: Parser) -> None:
    add.value(p, "--keep", metavar="N", type=add.number, help="keep the newest N runs")
    add.value(
        p, "--older", metavar="SPAN", dest="ended_before_ms", type=add.ago,
        help="prune runs that ended longer ago than SPAN, such as 12h or 90d, and records of the gateway",
    )  # fmt: skip
    add.value(
        p, "--size", metavar="BYTES", dest="bytes_max", type=size,
        help="keep the newest runs whose files fit into BYTES, such as 500m or 2g",
    )  # fmt: skip
    add.flag(p, "--dry-run", help="print how many runs would be pruned; remove nothing")


def run(args: Args) -> int:
    bounds = {name: vars(args)[name] for name in ("keep", "ended_before_ms", "bytes_max")}
    if set(bounds.values()) == {None}:
        raise wrong_words("no option says which runs to prune", "give --keep N, --older SPAN or --size BYTES")
    if args.dry_run:
        with open_store() as store:
            count = store.prune(**bounds, dry_run=True)
        streams.write(f"{streams.count(count, 'run')} would be pruned; nothing was removed\n")
        _prune_gateway(args, "would be pruned")
        return 0
    with Store.open(config.home(os.environ)) as store:
        count = store.prune(**bounds)
    streams.write(f"{streams.count(count, 'run')} pruned; the chain of receipts can still be verified\n")
    _prune_gateway(args, "pruned")
    return 0


def _prune_gateway(args: Args, done: str) -> None:
    if args.ended_before_ms is None:
        return
    count = prune(config.home_path(os.environ), args.ended_before_ms, dry_run=args.dry_run)
    if count:
        streams.write(f"{streams.count(count, 'record')} of the gateway {done}\n")
