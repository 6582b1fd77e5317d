"""Git that is kept at work by somebody else's ignore rules, end to end: who waits for it, and what ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from backplane.process import guard
from backplane.workspace import repository
from tests.all.faults.ground import GRACE_S, LADDER_S, Ended, Ground, Running, kill_9

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the process table is Linux's")

RULE = "**/" * 60 + "x\n"
"""Git tries every way to share a path's folders out among the stars."""

DEEP = "/".join("abcdefghijklmnopqrstuvwxyzabcd")

RULES_S = 5.0
BOUNDED = f"""
import sys
from backplane.__main__ import main
from backplane.workspace import repository
repository.RULES_S_MAX = {RULES_S}
sys.exit(main())
"""
"""The program with a shorter bound: git takes a core until then."""

HURRIED_S = 2.0
"""From a signal in the end of a run to its receipt."""

IN_STAGE = "hello(); take(); os.chdir(RUN['work_order']['workspace']['root']); event();"
PLANTED = f"{IN_STAGE} open('.gitignore', 'w').write({RULE!r}); os.makedirs({DEEP!r}); open({DEEP + '/q'!r}, 'w');"


@pytest.fixture
def slow(ground: Ground) -> Iterator[Ground]:
    """A ground on which no git is left at work, however a case ends."""
    yield ground
    for pid in _gits(os.getpid()):
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _gits(parent: int) -> list[int]:
    return [pid for pid, row in guard.look().items() if row[guard.PARENT] == parent and _asks_rules(pid)]


def _asks_rules(pid: int) -> bool:
    with suppress(OSError):
        return b"check-ignore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def plant(root: Path) -> None:
    """The same in the tree that is staged."""
    (root / ".gitignore").write_text(RULE)
    (root / DEEP).mkdir(parents=True)
    (root / DEEP / "q").write_text("1")


def at_git(running: Running) -> Running:
    running.until(lambda: bool(_gits(running.pid)))
    return running


def in_the_end(ground: Ground, *words: str) -> Running:
    """A run whose host is gone, and whose difference waits for git."""
    return at_git(ground.started(f"{PLANTED} final(); rest()", *words))


def in_staging(ground: Ground, *words: str) -> Running:
    plant(ground.work)
    return at_git(ground.started(f"{IN_STAGE} final(); rest()", *words))


def hurried(ground: Ground, running: Running) -> Ended:
    """What a signal made of it; in time, with a receipt, and with nothing left."""
    running.process.send_signal(signal.SIGINT)
    ended = running.end(HURRIED_S + 5)
    assert (ended.code, ended.left, ground.litter()) == (130, [], [])
    (row,) = ground.rows()
    # Git was at work before the order was sent, or after the final.
    assert (row.outcome, row.reason) in [("failed", "cancelled"), ("partial", "cancelled"), ("partial", "partial")]
    return ended


@pytest.mark.parametrize("begun", [in_staging, in_the_end])
def test_git_dies_with_a_control_plane_that_is_killed(slow: Ground, begun: Callable[[Ground], Running]) -> None:
    running = begun(slow)
    kill_9(running)
    assert running.end().left == []


def test_a_signal_in_the_end_of_a_run_gives_the_difference_up(slow: Ground) -> None:
    running = in_the_end(slow)
    before_s = running.age_s
    ended = hurried(slow, running)
    assert ended.wall_s - before_s < HURRIED_S + GRACE_S
    assert not slow.amiss(
        ended,
        code="execution_workspace_error",
        exit_code=130,
        outcome="partial",
        accepted=1,
        bound_s=before_s + HURRIED_S,
    )


def test_a_signal_while_the_workspace_is_staged_ends_git_at_once(slow: Ground) -> None:
    running = in_staging(slow)
    before_s = running.age_s
    assert hurried(slow, running).wall_s - before_s < HURRIED_S + GRACE_S


def test_the_deadline_ends_git_while_the_workspace_is_staged(slow: Ground) -> None:
    plant(slow.work)
    ended = slow.run(f"{IN_STAGE} final()", "--timeout", "1.5")
    assert not slow.amiss(ended, code="backend_timeout", accepted=0, bound_s=1.5 + GRACE_S + LADDER_S)


def test_rules_that_take_too_long_are_named_and_cost_no_more_than_their_bound(slow: Ground) -> None:
    assert repository.RULES_S_MAX > RULES_S
    bounded = (sys.executable, "-P", "-c", BOUNDED)
    ended = slow.run(f"{PLANTED} final(); rest()", "--timeout", "5", program=bounded)
    assert not slow.amiss(ended, code="execution_workspace_error", outcome="partial", accepted=1, bound_s=RULES_S)
    assert b"simplify it, or leave the '.gitignore' out with --exclude" in ended.stderr
