"""`validate`, `schema` and `conform`: the contract, held against files and programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.errors import ConfigError

if TYPE_CHECKING:
    from backplane.conform.runner import Result


def validate_files(options: Options) -> int:
    from backplane.schemas.validate import BYTES_MAX, validate

    wrong = 0
    for name in options.files:
        shown = streams.source(name)
        data = streams.read_input(name, BYTES_MAX)
        found = validate(data, name)
        refused = _refused_options(data, shown) if found.valid and found.kind == "configuration" else []
        if found.valid and not refused:
            streams.write(f"{shown}: {found.kind}, valid\n")
        else:
            wrong += 1
        for line in refused:
            streams.write(f"{shown}: configuration: {streams.one_line(line)}\n")
        for finding in found.findings:
            line = f"line {finding.line}: " if finding.line is not None else ""
            place = f"{streams.one_line(finding.pointer)}: " if finding.pointer else ""
            place = f"note: {place}" if finding.note else place
            streams.write(f"{shown}: {found.kind}: {line}{place}{streams.one_line(finding.message)}\n")
        if found.omitted:
            streams.write(f"{shown}: {found.omitted} more\n")
    return 1 if wrong else 0


def _refused_options(data: bytes, source: str) -> list[str]:
    """What the shipped hosts would say of their options, which no schema knows; and what only the whole file shows."""
    from backplane import config
    from backplane.runtime import backends

    try:
        settings = config.parse(data, source=source, folder=Path.cwd())
    except ConfigError as error:
        return [error.message]
    return [f"/backends/{name}: {why}" for name, why in backends.option_faults(settings)]


def print_schema(options: Options) -> int:
    from backplane.schemas import build

    if options.name is None:
        streams.write("".join(f"{name}\n" for name in build.names()))
        return 0
    streams.write_bytes(build.load_schema(options.name))
    return 0


def conform_host(options: Options) -> int:
    import anyio

    from backplane.conform.runner import conform

    progress, cwd = None if options.json else _say, str(streams.folder())
    report = anyio.run(partial(conform, options.command, cwd=cwd, progress=progress))
    failed = report.count("fail")
    if options.json:
        streams.write_record(report)
    else:
        counts = f"{report.count('pass')} passed, {failed} failed, {report.count('skip')} do not apply"
        streams.write(f"level: {report.level}  ({counts})\n")
    return 1 if failed else 0


def _say(result: Result) -> None:
    """One check, as soon as it is made: all of them take some seconds."""
    why = "" if result.verdict == "pass" else f": {streams.one_line(result.seen)}"
    streams.write(f"{result.verdict:<5} {result.level:<8} {result.rule:<5} {result.name}{why}\n")
    for line in result.lines if result.verdict == "fail" else ():
        streams.write(f"      {streams.one_line(line)}\n")
