"""The rules of `contracts/conform.toml`: transcripts, and how one is played against fresh hosts."""

from __future__ import annotations

import functools
import tomllib
from typing import Any, Final

import msgspec

from backplane.conform.link import Program, Wire, linked
from backplane.conform.steps import VERBS, Bench
from backplane.conform.verdict import Result, RuleLevel, Unasked, Unfit, Verdict
from backplane.resources import find

Step = dict[str, Any]
"""A verb with its value, and options."""

FILE: Final = "conform.toml"
NEEDED: Final = ("cancel/1", "ping/1", "many/1")
"""What a host must announce to be complete; an agent with tools announces `ask/1`, too."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    alone: bool = False
    follows: str | None = None

    def result(self, verdict: Verdict, seen: str, lines: tuple[str, ...] = ()) -> Result:
        return Result(self.name, self.level, self.rule, self.did, verdict, seen, lines)

    async def play(self, bench: Bench) -> str:
        """Play all cases and return what was seen.

        Raises:
            Unfit: the host broke the rule.
            Unasked: the rule does not apply to this host.
            BackendError: `sidecar_spawn_failed`.
        """
        for extension in self.needs:
            if extension not in bench.extensions:
                raise Unasked(f"{extension} is not announced")
        for folder in self.folders:
            bench.place(folder)
        program = bench.program
        if self.start_in is not None:
            program = program.started_in(str(bench.place(self.start_in)))
        if not self.cases:
            return await _played(program, bench, [self.steps])
        parts = [(*case.get("steps", [case]), *self.steps) for case in self.cases]
        if not self.alone:
            try:
                return await _played(program, bench, parts)
            except Unfit:
                pass  # One process for all is quick; a process for each names the case, and serves only one run.
        faults = [
            fault
            for case, part in zip(self.cases, parts, strict=True)
            if (fault := await _fault(program, bench, case, part))
        ]
        if faults:
            first = faults[0]
            first.seen += f" (and {len(faults) - 1} more cases)" if len(faults) > 1 else ""
            raise first
        return f"{len(parts)} cases, a process for each"


async def _fault(program: Program, bench: Bench, case: Step, steps: tuple[Step, ...]) -> Unfit | None:
    try:
        await _played(program, bench, [steps])
    except Unfit as unfit:
        unfit.seen = f"{case['what']}: {unfit.seen}"
        return unfit
    return None


async def _played(program: Program, bench: Bench, parts: list[tuple[Step, ...]]) -> str:
    """Play transcripts one after the other against one fresh host; return what was seen last."""
    async with linked(program) as link:
        try:
            if await link.until(lambda line: line.t == "hello", link.bounds.hello_s) is None:
                raise Unfit("this time no hello came", link.lines)
            seen = ""
            for steps in parts:
                link.mark = len(link.lines)
                for step in steps:
                    seen = await _step(link, bench, step) or seen
        except Unfit as unfit:
            await link.child.stop(grace_s=0)
            unfit.stderr = bytes(link.child.stderr_tail)
            raise
        return seen


async def _step(link: Wire, bench: Bench, step: Step) -> str | None:
    (verb,) = VERBS.keys() & step.keys()
    options = {name: value for name, value in step.items() if name not in (verb, "what")}
    return await VERBS[verb](link, bench, step[verb], **options)


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Read the rules, in the order in which they are tried."""
    table = tomllib.loads((find("contracts") / FILE).read_text(encoding="utf-8"))
    return msgspec.convert(table["rules"], tuple[Rule, ...])
