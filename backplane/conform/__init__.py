"""Check any program that claims to be a host, rule by rule of `contracts/sidecar.md`.

A command goes in, a report with a level comes out. The program is started many times, with small
orders in an empty folder; a program that hangs, dies or floods ends each check within its bound.
Levels: `speaks` (one plain run works), `behaves` (every rule a good host needs, announced
extensions included), `robust` (hostile input, signals, a listener that goes away).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from backplane.conform.bench import Bench, Check, Row
from backplane.conform.extended import EXTENDED_CHECKS
from backplane.conform.hostile import HOSTILE_CHECKS
from backplane.conform.link import Bounds, Program
from backplane.conform.odd import ODD_CHECKS
from backplane.conform.plain import DID, PLAIN_CHECKS, Plain, look, record
from backplane.conform.verdict import LEVELS, Level, Report, Result, Unasked, Unfit, shown
from backplane.errors import BackendError

__all__ = ["CHECKS", "LEVELS", "Bounds", "Report", "Result", "conform"]

TASK: Final = "Reply with the single word ready. Change no file."
"""Small and harmless, whatever agent is behind the host."""

_ALIVE: Final[tuple[Row, ...]] = (*ODD_CHECKS, *EXTENDED_CHECKS, *HOSTILE_CHECKS)

CHECKS: Final[tuple[tuple[str, Level, str], ...]] = (
    *((name, level, rule) for name, level, rule, _ in PLAIN_CHECKS),
    *((name, level, rule) for name, level, rule, _, _ in _ALIVE),
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
        env: its whole environment; None gives it ours, as the program is the caller's own.
        cwd: where it is started; None for our own folder.
        bounds: how long it may take; None for the defaults.
        task: what the orders ask for.
        rules: only checks of these rules get a child of their own; None means all. The level is then
            that of the checks made.
        progress: called with each result as it is there.

    Raises:
        BackendError: `sidecar_spawn_failed`, the program cannot be started at all.
    """
    program = Program(tuple(command), os.environ if env is None else env, cwd or os.getcwd(), bounds or Bounds())
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
        bench = Bench(program, root, task, extensions)
        speaks = all(result.verdict != "fail" for result in results if result.level == "speaks")
        for name, level, rule, did, check in _ALIVE:
            if rules is not None and rule not in rules:
                continue
            if speaks:
                note(await _alive_result(name, level, rule, did, check, bench))
            else:
                note(Result(name, level, rule, did, "skip", _MUTE))
    return Report(tuple(command), _level(results), _backend(plain), extensions, tuple(results))


_MUTE: Final = "not tried: it does not speak the protocol"


def _plain_results(plain: Plain) -> Iterator[Result]:
    mute = False
    for name, level, rule, check in PLAIN_CHECKS:
        if mute:
            yield Result(name, level, rule, DID, "skip", _MUTE)
            continue
        try:
            yield Result(name, level, rule, DID, "pass", look(check, plain))
        except Unfit as unfit:
            # What follows builds on it: a host without a hello has no receipt to be praised for.
            mute = level == "speaks"
            yield Result(name, level, rule, DID, "fail", unfit.seen, shown(unfit.lines))


async def _alive_result(name: str, level: Level, rule: str, did: str, check: Check, bench: Bench) -> Result:
    try:
        return Result(name, level, rule, did, "pass", await check(bench))
    except Unasked as unasked:
        return Result(name, level, rule, did, "skip", str(unasked))
    except Unfit as unfit:
        return Result(name, level, rule, did, "fail", unfit.seen, shown(unfit.lines))
    except BackendError as error:
        return Result(name, level, rule, did, "fail", f"it could not be started again: {error}")


def _level(results: Sequence[Result]) -> Literal["none", "speaks", "behaves", "robust"]:
    reached: Literal["none", "speaks", "behaves", "robust"] = "none"
    for level in LEVELS:
        if any(result.verdict == "fail" for result in results if result.level == level):
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
