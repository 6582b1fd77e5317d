"""`validate`: check files by their schemas, and by what a run would refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.errors import BackplaneError, ConfigError

HELP = """Check files: work order, receipt, event, envelope, transcript (.jsonl), policy or configuration, recognised
by their content. Prints every fault with its JSON pointer."""
EXAMPLE = "backplane validate order.json backplane.toml"


def options(p: Parser) -> None:
    add.value(p, "files", metavar="FILE", nargs="+", help="file to check; - for stdin")


def run(args: Args) -> int:
    from backplane.schemas.validate import BYTES_MAX, validate

    wrong = 0
    for name in args.files:
        shown = streams.source(name)
        data = streams.read_input(name, BYTES_MAX)
        found = validate(data, name)
        refused = _refused(found.kind, data, name) if found.valid else []
        if found.valid and not refused:
            streams.write(f"{shown}: {found.kind}, valid\n")
        else:
            wrong += 1
        for line in refused:
            streams.write(f"{shown}: {found.kind}: {streams.one_line(line)}\n")
        for finding in found.findings:
            line = f"line {finding.line}: " if finding.line is not None else ""
            place = f"{streams.one_line(finding.pointer)}: " if finding.pointer else ""
            place = f"note: {place}" if finding.note else place
            streams.write(f"{shown}: {found.kind}: {line}{place}{streams.one_line(finding.message)}\n")
    return 1 if wrong else 0


def _refused(kind: str, data: bytes, name: str) -> list[str]:
    """Return the errors that a run would have with a file that fits its schema."""
    if kind == "configuration":
        return _refused_settings(data, name)
    if kind == "policy":
        from backplane.policy.rules import parse_policy

        return _words_of(partial(parse_policy, data, streams.source(name)))
    if kind == "work_order":
        from backplane.protocol import strict
        from backplane.runtime.faults import check_read

        return _words_of(lambda: check_read(strict(data)))
    return []


def _words_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except BackplaneError as error:
        return [_in_words(error)]
    return []


def _in_words(error: BackplaneError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _refused_settings(data: bytes, name: str) -> list[str]:
    """Return the errors in options of shipped hosts, which no schema describes, and in the file as a whole."""
    from backplane import config
    from backplane.runtime import backends
    from backplane.runtime.faults import setting_faults

    folder = streams.folder() if name == "-" else Path(name).absolute().parent
    try:
        settings = config.parse(data, source=streams.source(name), folder=folder)
    except ConfigError as error:
        return [error.message]
    faults = [f"/backends/{backend}: {why}" for backend, why in backends.option_faults(settings)]
    return faults + [f"{place}: {_in_words(fault)}" for place, fault in setting_faults(settings, os.environ)]
