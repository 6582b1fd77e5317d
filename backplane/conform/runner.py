"""Check any program that claims to be a host, rule by rule of `contracts/sidecar.md`.

A command goes in, a report with a level comes out. The program is started many times, with small
orders in an empty folder; a program that hangs, dies or floods ends each check within its bound.
Levels: `speaks` (one plain run works), `behaves` (every rule a good host needs, announced
extensions included), `robust` (hostile input, signals, a listener that goes away), `complete`
(cancel, ping, ask and many runs at once, under everything that can come together).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import anyio
import msgspec

from backplane.config import child_environment
from backplane.conform.link import Bounds, Program, vendor_of
from backplane.conform.plain import DID, NOISE, PLAIN_RULES, Plain, look, record
from backplane.conform.rules import NEEDED, RULES
from backplane.conform.steps import Bench, Case
from backplane.conform.verdict import LEVELS, Report, Result, RuleLevel, Unasked, Unfit
from backplane.errors import BackendError

__all__ = ["CHECKS", "LEVELS", "Bounds", "Report", "Result", "conform"]

TASK: Final = "Reply with the single word ready. Change no file."
"""Small and harmless, whatever agent is behind the host."""

AT_ONCE: Final = 3
"""Checks made at the same time: most of one is waiting, and a host that only manages alone is told by its own check."""

CHECKS: Final[tuple[tuple[str, RuleLevel, str], ...]] = (
    *((name, level, number) for name, level, number, _ in PLAIN_RULES),
    *((rule.name, rule.level, rule.number) for rule in RULES),
)
"""Name, level and rule of every check, in the order in which they are made."""


async def conform(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    bounds: Bounds | None = None,
    task: str = TASK,
    rules: Collection[str] | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Start the program again and again and hold it against the rules.

    Args:
        command: program and arguments.
        env: its whole environment; None gives it the variables that a run gives a host.
        cwd: where it is started; None for our own folder.
        bounds: how long it may take; None for the defaults.
        task: what the orders ask for.
        rules: only checks of these rules get a child of their own; None means all. The level is then
            that of the checks made.
        progress: called with each result as it is there.

    Raises:
        BackendError: `sidecar_spawn_failed`, the program cannot be started at all.
    """
    own = child_environment({}, {}, os.environ) if env is None else env
    program = Program(tuple(command), own, cwd or os.getcwd(), bounds or Bounds())
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if progress is not None:
            progress(result)

    with tempfile.TemporaryDirectory(prefix="backplane-conform-") as root:
        plain = await record(program, root, task)
        for result in _plain_results(plain):
            note(result)
        extensions = _extensions(plain)
        is_noisy = any(result.name == NOISE and result.verdict == "fail" for result in results)
        bench = Bench(program, root, task, extensions, vendor_of(plain.greeting), is_noisy)
        speaks = all(result.verdict != "fail" for result in results if result.level == "speaks")
        wanted = [rule for rule in RULES if rules is None or rule.number in rules]
        if speaks:
            await _alive_results(wanted, bench, note)
        else:
            for rule in wanted:
                note(rule.result("skip", _MUTE))
    return Report(tuple(command), _level(results, extensions), _backend(plain), extensions, tuple(results))


_MUTE: Final = "not tried: it does not speak the protocol"


def _plain_results(plain: Plain) -> Iterator[Result]:
    mute = False
    for name, level, rule, check in PLAIN_RULES:
        if mute:
            yield Result(name, level, rule, DID, "skip", _MUTE)
            continue
        try:
            yield Result(name, level, rule, DID, "pass", look(check, plain))
        except Unfit as unfit:
            # What follows builds on it: a host without a hello has no receipt to be praised for.
            mute = level == "speaks"
            yield Result(name, level, rule, DID, "fail", unfit.seen, unfit.shown())


async def _alive_results(rules: Sequence[Case], bench: Bench, note: Callable[[Result], None]) -> None:
    """Try some rules at a time, and tell of them in their order."""
    places, made = anyio.Semaphore(AT_ONCE), dict[int, Result]()
    told = iter(range(len(rules)))
    following = next(told, None)

    async def make(number: int, rule: Case) -> None:
        nonlocal following
        async with places:
            folder = str(bench.place(str(number)))
            made[number] = await _alive_result(rule, msgspec.structs.replace(bench, root=folder))
        while following in made:
            note(made[following])
            following = next(told, None)

    async with anyio.create_task_group() as tasks:
        for number, rule in enumerate(rules):
            tasks.start_soon(make, number, rule)


async def _alive_result(rule: Case, bench: Bench) -> Result:
    try:
        return rule.result("pass", await rule.play(bench))
    except Unasked as unasked:
        return rule.result("skip", str(unasked))
    except Unfit as unfit:
        failed = rule.result("fail", unfit.seen, unfit.shown())
        return msgspec.structs.replace(failed, follows=NOISE if unfit.is_noise and bench.is_noisy else None)
    except BackendError as error:
        return rule.result("fail", f"it could not be started again: {error}")


def _level(results: Sequence[Result], extensions: Collection[str]) -> Literal["none"] | RuleLevel:
    reached: Literal["none"] | RuleLevel = "none"
    for level in LEVELS:
        if any(result.verdict == "fail" for result in results if result.level == level):
            break
        if level == "complete" and not set(NEEDED) <= set(extensions):
            break
        reached = level
    return reached


def _extensions(plain: Plain) -> tuple[str, ...]:
    announced: Any = plain.greeting.get("extensions")
    return tuple(name for name in announced if isinstance(name, str)) if isinstance(announced, list) else ()


def _backend(plain: Plain) -> str | None:
    backend: Any = plain.greeting.get("backend")
    name = backend.get("id") if isinstance(backend, dict) else None
    return name if isinstance(name, str) else None
