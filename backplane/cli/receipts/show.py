"""`receipts show`: print one receipt."""

from __future__ import annotations

from backplane.cli import ended, streams, terminal
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, open_store
from backplane.receipts.pieces import canonical_chunks

HELP = "Print the events of a receipt, how the run ended, and its patch."
EXAMPLE = "backplane receipts show last --json | jq .usage"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.json(p, "the whole receipt as canonical JSON", "receipt")


def run(args: Args) -> int:
    with open_store() as store:
        row = store.find(args.run)
        receipt, patch = store.load(row.run_id), store.patch(row)
        if args.json:
            for chunk in canonical_chunks(receipt):
                streams.write_bytes(chunk)
            streams.write("\n")
            return 0
        look = terminal.look()
        for event in receipt.trace:
            streams.write(look.event(event))
        streams.write(look.end_line() + ended.summary(receipt, look, patch))
    return 0
