"""`validate`, `schema` and `conform`: the contract, held against files and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_json

if TYPE_CHECKING:
    from backplane.conform.runner import Result


def parser(name: str) -> Parser:
    """The options of `validate`, `schema` or `conform`."""
    return {"validate": _for_validate, "schema": _for_schema, "conform": _for_conform}[name](name)


def _for_validate(name: str) -> Parser:
    about = (
        "Check files: work order, receipt, event, envelope, transcript (.jsonl), policy or configuration, "
        "recognised by content. Every fault with its JSON pointer."
    )
    made = Parser(f"backplane {name}", about, "backplane validate order.json backplane.toml", _validate)
    made.add_argument("files", nargs="+", metavar="FILE", help="- for stdin")
    return made


def _for_schema(name: str) -> Parser:
    made = Parser(
        f"backplane {name}", "Print a JSON Schema, or the names there are.", "backplane schema work_order", _schema
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="of one; without it all names are listed")
    return made


def _for_conform(name: str) -> Parser:
    made = Parser(
        f"backplane {name}",
        "Check any program that claims to be a host; exit code 1 when it does not behave.",
        "backplane conform -- node my-host.mjs",
        _conform,
    )
    add_json(made, "one JSON object with everything", "cli_conform")
    made.add_argument("command", nargs="+", metavar="COMMAND", help="after --: the program and its arguments")
    return made


def _validate(options: Options) -> int:
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
    from pathlib import Path

    from backplane import config
    from backplane.errors import ConfigError
    from backplane.runtime import backends

    try:
        settings = config.parse(data, source=source, folder=Path.cwd())
    except ConfigError as error:
        return [error.message]
    return [f"/backends/{name}: {why}" for name, why in backends.option_faults(settings)]


def _schema(options: Options) -> int:
    from backplane.schemas import build

    if options.name is None:
        streams.write("".join(f"{name}\n" for name in build.names()))
        return 0
    streams.write_bytes(build.load_schema(options.name))
    return 0


def _conform(options: Options) -> int:
    from functools import partial

    import anyio
    import msgspec

    from backplane.conform.runner import conform

    progress, cwd = None if options.json else _say, str(streams.folder())
    report = anyio.run(partial(conform, options.command, cwd=cwd, progress=progress))
    failed = report.count("fail")
    if options.json:
        streams.write_bytes(msgspec.json.encode(report) + b"\n")
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
