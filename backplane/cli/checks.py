"""`validate`, `schema` and `conform`: the contract, held against files and programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane.cli import streams
from backplane.cli.parser import Options, did_you_mean
from backplane.cli.start import wrong_words
from backplane.errors import BackplaneError, ConfigError

if TYPE_CHECKING:
    from backplane.conform.runner import Result

RULES_SHOWN: Final = 8
"""Rules that a line of `conform` names; more of them are counted."""


def validate_files(options: Options) -> int:
    from backplane.schemas.validate import BYTES_MAX, validate

    wrong = 0
    for name in options.files:
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
        if found.omitted:
            streams.write(f"{shown}: {found.omitted} more\n")
    return 1 if wrong else 0


def _refused(kind: str, data: bytes, name: str) -> list[str]:
    """What a run would say of a file that fits its schema."""
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
    """What the shipped hosts would say of their options, which no schema knows; and what only the whole file shows."""
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


def print_schema(options: Options) -> int:
    from backplane.schemas import build

    if options.name is None:
        streams.write("".join(f"{name}\n" for name in build.names()))
        return 0
    try:
        schema = build.load_schema(options.name)
    except ConfigError as error:
        near = did_you_mean(options.name, build.names())
        raise wrong_words(error.message, f"{near}`backplane schema` lists all {len(build.names())}") from error
    streams.write_bytes(schema)
    return 0


def conform_host(options: Options) -> int:
    import anyio

    from backplane.conform.runner import conform

    skipped: dict[str, list[Result]] = {}
    progress = None if options.json else partial(_say, skipped=skipped, only_failed=options.failed)
    cwd = str(streams.folder())
    report = anyio.run(partial(conform, options.command, cwd=cwd, progress=progress))
    failed = report.count("fail")
    if options.json:
        streams.write_record(report)
    else:
        for reason, results in skipped.items() if not options.failed else ():
            streams.write(_skip_line(reason, results))
        follow = sum(result.follows is not None for result in report.results)
        also = f" ({follow} of them follow from another)" if follow else ""
        counts = f"{report.count('pass')} passed, {failed} failed{also}, {report.count('skip')} do not apply"
        streams.write(f"level: {report.level}  ({counts})\n")
    return 1 if failed else 0


def _say(result: Result, *, skipped: dict[str, list[Result]], only_failed: bool) -> None:
    """Print one check as soon as it is made, as all of them take some seconds; keep those that do not apply."""
    if result.verdict == "skip":
        skipped.setdefault(result.seen, []).append(result)
        return
    if only_failed and result.verdict != "fail":
        return
    if result.follows is not None:
        streams.write(f"fail  {result.level:<8} {result.rule:<5} {result.name}: follows from {result.follows!r}\n")
        return
    why = "" if result.verdict == "pass" else f": {streams.one_line(result.seen)}"
    streams.write(f"{result.verdict:<5} {result.level:<8} {result.rule:<5} {result.name}{why}\n")
    for line in result.lines if result.verdict == "fail" else ():
        streams.write(f"      {streams.one_line(line)}\n")


def _skip_line(reason: str, results: list[Result]) -> str:
    """Return one line for all checks that do not apply for the same reason, with their rules."""
    rules = list(dict.fromkeys(result.rule for result in results))
    named = ", ".join(rules[:RULES_SHOWN]) + (f" and {len(rules) - RULES_SHOWN} more" * (len(rules) > RULES_SHOWN))
    return f"skip  {streams.count(len(results), 'check')} ({named}): {streams.one_line(reason)}\n"
