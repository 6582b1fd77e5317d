"""Check any program that claims to be a host, rule by rule of `contracts/sidecar.md`.

A command goes in, a report with a level comes out. The program is started many times, with small orders in an empty
folder; a program that hangs, dies or floods ends each check within its bound. Levels: `speaks` (a plain run works),
`behaves` (what a good host does, announced extensions included), `robust` (hostile input, signals, a listener that goes
away), `complete` (cancel, ping, ask and many runs at once).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import anyio
import msgspec

from backplane.config import child_environment
from backplane.conform.link import Bounds, Program, vendor_of
from backplane.conform.plain import DID, NOISE, PLAIN_RULES, Plain, record
from backplane.conform.rules import NEEDED, HostRule, rules
from backplane.conform.steps import Bench
from backplane.conform.verdict import LEVELS, Report, Result, RuleLevel, Unfit, shown
from backplane.errors import BackendError

__all__ = ["LEVELS", "Bounds", "Report", "Result", "checks", "conform"]

TASK: Final = "Reply with the single word ready. Change no file."
"""A small, harmless task for any agent."""

AT_ONCE: Final = 3
"""Number of rules tried at the same time; a trial is mostly waiting."""

_MUTE: Final = "not tried: the host does not speak the protocol"


def checks() -> tuple[tuple[str, RuleLevel, str], ...]:
    """Return name, level and rule of every check, in their order."""
    plain = ((name, level, number) for name, level, number, _ in PLAIN_RULES)
    return (*plain, *((rule.name, rule.level, rule.rule) for rule in rules()))


async def conform(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    bounds: Bounds | None = None,
    task: str = TASK,
    only: Collection[str] | None = None,
    progress: Callable[[Result], object] | None = None,
) -> Report:
    """Start a program many times and check it by the rules.

    Args:
        command: program and arguments.
        env: its whole environment; None gives it the variables that a run gives a host.
        cwd: the folder in which it starts; None for our own.
        bounds: its limits; None for the defaults.
        task: the task of the orders.
        only: names or numbers of the rules to try after the plain run; None means all. The level is that of the
            checks made.
        progress: called with each result at once.

    Raises:
        BackendError: `sidecar_spawn_failed`, the program cannot be started at all.
    """
    own = child_environment({}, {}, os.environ) if env is None else env
    program = Program(tuple(command), own, cwd or os.getcwd(), bounds or Bounds())
    results: dict[str, Result] = {}

    def note(result: Result, follows: str | None = None) -> None:
        if result.verdict == "fail" and follows in results and results[follows].verdict == "fail":
            result = msgspec.structs.replace(result, follows=follows)
        results[result.name] = result
        if progress is not None:
            progress(result)

    with tempfile.TemporaryDirectory(prefix="backplane-conform-") as root:
        plain = await record(program, root, task)
        for result in _plain_results(plain):
            note(result)
        announced: Any = plain.greeting.get("extensions")
        extensions = tuple(name for name in announced if isinstance(name, str)) if isinstance(announced, list) else ()
        bench = Bench(program, root, task, extensions, vendor_of(plain.greeting))
        wanted = [rule for rule in rules() if only is None or rule.rule in only or rule.name in only]
        if _level(results.values(), extensions) != "none":
            await _try_rules(wanted, bench, note)
        else:
            for rule in wanted:
                note(rule.result("skip", _MUTE))
    backend: Any = plain.greeting.get("backend")
    name = backend.get("id") if isinstance(backend, dict) else None
    level = _level(results.values(), extensions)
    return Report(tuple(command), level, name if isinstance(name, str) else None, extensions, tuple(results.values()))


def _plain_results(plain: Plain) -> Iterator[Result]:
    mute = False
    for name, level, rule, check in PLAIN_RULES:
        result = partial(Result, name, level, rule, DID)
        if mute:
            yield result("skip", _MUTE)
        elif found := list(check(plain)):
            # Later checks build on this one: a host without a hello has no receipt to be checked.
            mute = level == "speaks"
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            yield result("fail", found[0][0] + more, shown(found[0][1], plain.stderr))
        else:
            yield result("pass", f"{len(plain.lines)} lines, {len(plain.events)} of them events")


async def _try_rules(wanted: Sequence[HostRule], bench: Bench, note: Callable[[Result, str | None], None]) -> None:
    """Try some rules at a time, and note their results in the order of the rules."""
    places, tried = anyio.Semaphore(AT_ONCE), [anyio.Event() for _ in wanted]
    made = dict[int, tuple[Result, str | None]]()

    async def make(number: int, rule: HostRule) -> None:
        async with places:
            folder = str(bench.place(str(number)))
            made[number] = await _try_rule(rule, msgspec.structs.replace(bench, root=folder))
        tried[number].set()

    async with anyio.create_task_group() as tasks:
        for number, rule in enumerate(wanted):
            tasks.start_soon(make, number, rule)
        for number, event in enumerate(tried):
            await event.wait()
            note(*made[number])


async def _try_rule(rule: HostRule, bench: Bench) -> tuple[Result, str | None]:
    """Return the result, and the name of the rule whose failure would explain a failure."""
    for extension in rule.needs:
        if extension not in bench.extensions:
            return rule.result("skip", f"{extension} is not announced"), None
    try:
        return rule.result("pass", await rule.play(bench)), None
    except Unfit as unfit:
        return rule.result(
            "fail", unfit.seen, shown(unfit.lines, unfit.stderr)
        ), NOISE if unfit.is_noise else rule.follows
    except BackendError as error:
        return rule.result("fail", f"the host could not be started again: {error}"), None


def _level(results: Collection[Result], extensions: Collection[str]) -> Literal["none"] | RuleLevel:
    reached: Literal["none"] | RuleLevel = "none"
    for level in LEVELS:
        failed = any(result.verdict == "fail" for result in results if result.level == level)
        if failed or (level == "complete" and not set(NEEDED) <= set(extensions)):
            break
        reached = level
    return reached
