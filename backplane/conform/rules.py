"""The rules of `contracts/conform.toml`: transcripts, and how one is played against fresh hosts."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backplane.conform.link import Program, linked
from backplane.conform.steps import VERBS, Bench, Play
from backplane.conform.verdict import Result, RuleLevel, Unfit, Verdict
from backplane.resources import find

Step = dict[str, Any]
"""A verb with its value, and options."""

FILE: Final = "conform.toml"
NEEDED: Final = ("cancel/1", "ping/1", "many/1")
"""Extensions that a complete host announces; one with tools announces `ask/1`, too."""


class HostRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule with the transcript that tries it; the file explains the members."""

    name: str
    level: RuleLevel
    rule: str
    did: str
    steps: tuple[Step, ...] = ()
    cases: tuple[Step, ...] = ()
    needs: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    start_in: str | None = None
    follows: str | None = None

    def result(self, verdict: Verdict, seen: str, lines: tuple[str, ...] = ()) -> Result:
        return Result(self.name, self.level, self.rule, self.did, verdict, seen, lines)

    async def play(self, bench: Bench) -> str:
        """Play each case against a fresh host and return the last observation.

        Raises:
            Unfit: the host broke the rule.
            BackendError: `sidecar_spawn_failed`.
        """
        for folder in self.folders:
            bench.place(folder)
        program = bench.program
        if self.start_in is not None:
            program = program.started_in(str(bench.place(self.start_in)))
        seen = ""
        for case in self.cases or ({},):
            try:
                seen = await _played(program, bench, (*case.get("steps", [case] if case else ()), *self.steps))
            except Unfit as unfit:
                unfit.seen = f"{case['what']}: {unfit.seen}" if case else unfit.seen
                raise
        return seen


async def _played(program: Program, bench: Bench, steps: Sequence[Step]) -> str:
    """Play a transcript against a fresh host and return the last observation."""
    async with linked(program) as link:
        play, seen = Play(link, bench), ""
        try:
            if await link.until(lambda line: line.t == "hello", link.bounds.hello_s) is None:
                raise Unfit("no hello came when the host was started again", link.lines)
            play.mark = len(link.lines)
            for step in steps:
                (verb,) = VERBS.keys() & step.keys()
                options = {name: value for name, value in step.items() if name not in (verb, "what")}
                seen = await VERBS[verb](play, step[verb], **options) or seen
        except Unfit as unfit:
            await link.child.stop(grace_s=0)
            unfit.stderr = bytes(link.child.stderr_tail)
            raise
        return seen


@functools.cache
def rules() -> tuple[HostRule, ...]:
    """Read the rules, in the order in which they are tried."""
    table = tomllib.loads((find("contracts") / FILE).read_text(encoding="utf-8"))
    return msgspec.convert(table["rules"], tuple[HostRule, ...])
