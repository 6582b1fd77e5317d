"""`conform`: check any program that claims to be a host."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong_words

if TYPE_CHECKING:
    from backplane.conform.runner import Result

HELP = "Check whether a program follows the sidecar protocol. Exits with 1 if a check fails."
EXAMPLE = "backplane conform -- node my-host.mjs"


def options(p: Parser) -> None:
    add.json(p, "one JSON object with every result", "cli_conform")
    rule = "check only a plain run and this rule; give its name, or its number such as S19"
    add.many(p, "--rule", metavar="NAME", help=rule)
    add.value(p, "command", metavar="COMMAND", nargs="+", help="program to check, with its arguments, after `--`")


def run(args: Args) -> int:
    from backplane.conform.runner import checks, conform

    known = {word for name, _, rule in checks() for word in (name, rule)}
    for rule in args.rule:
        if rule not in known:
            raise wrong_words(f"no rule {rule!r}", "`backplane conform -- COMMAND` shows the names of all rules")
    progress = None if args.json else _write
    cwd = str(streams.folder())
    report = anyio.run(partial(conform, args.command, cwd=cwd, only=args.rule or None, progress=progress))
    failed = report.count("fail")
    if args.json:
        streams.write_record(report)
        return 1 if failed else 0
    skipped = Counter(result.seen for result in report.results if result.verdict == "skip")
    for reason, number in skipped.items():
        streams.write(f"skip  {streams.count(number, 'check')}: {streams.one_line(reason)}\n")
    counts = f"{report.count('pass')} passed, {failed} failed, {report.count('skip')} do not apply"
    # A level needs all rules.
    streams.write(f"{counts}\n" if args.rule else f"level: {report.level}  ({counts})\n")
    return 1 if failed else 0


def _write(result: Result) -> None:
    """Print one check as soon as it is made, as all of them take some seconds; skipped ones are counted at the end."""
    if result.verdict == "skip":
        return
    why = "" if result.verdict == "pass" else f": {streams.one_line(result.seen)}"
    if result.follows is not None:
        why = f": follows from {result.follows!r}"
    streams.write(f"{result.verdict:<5} {result.level:<8} {result.rule:<5} {result.name}{why}\n")
    for line in result.lines if result.verdict == "fail" and result.follows is None else ():
        streams.write(f"      {streams.one_line(line)}\n")
