"""`validate`: check files by their schemas, and by what a run would refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.errors import BackplaneError
from backplane.policy.rules import parse_policy
from backplane.protocol.lines import strict
from backplane.runtime import backends
from backplane.runtime.faults import check_read, setting_faults
from backplane.schemas.validate import BYTES_MAX, validate

HELP = """Check work orders, receipts, events, envelopes, transcripts (.jsonl), policies or configurations. The kind
of a file is recognised by its content. Prints every fault with its JSON pointer."""
EXAMPLE = "backplane validate order.json backplane.toml"


def options(p: Parser) -> None:
    add.value(p, "files", metavar="FILE", nargs="+", help="file to check; - for stdin")


def run(args: Args) -> int:
    code = 0
    for name in args.files:
        data = streams.read_input(name, BYTES_MAX)
        found = validate(data, name)
        lines = list(_refused(found.kind, data, name)) if found.valid else []
        if found.valid and not lines:
            streams.write(f"{streams.source(name)}: {found.kind}, valid\n")
        else:
            code = 1
        for one in found.findings:
            line = f"line {one.line}: " if one.line is not None else ""
            place = ("note: " if one.note else "") + (f"{one.pointer}: " if one.pointer else "")
            lines.append(f"{line}{place}{one.message}")
        for text in lines:
            streams.write(f"{streams.source(name)}: {found.kind}: {streams.one_line(text)}\n")
    return code


def _refused(kind: str, data: bytes, name: str) -> Iterator[str]:
    """Yield the errors that a run would have with a file that fits its schema."""
    try:
        if kind == "policy":
            parse_policy(data, streams.source(name))
        elif kind == "work_order":
            check_read(strict(data))
        elif kind == "configuration":
            folder = streams.folder() if name == "-" else Path(name).absolute().parent
            settings = config.parse(data, source=streams.source(name), folder=folder)
            yield from (f"/backends/{backend}: {why}" for backend, why in backends.option_faults(settings))
            yield from (f"{place}: {_words(fault)}" for place, fault in setting_faults(settings, os.environ))
    except BackplaneError as error:
        yield _words(error)


def _words(error: BackplaneError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
