"""Section Process of the fault catalogue: what a host's own life and death may do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.all.faults.ground import GRACE_S, LADDER_S, OFF, Ground

STOP_S = GRACE_S + LADDER_S

SILENT_S = 0.5
SILENT = {"BACKPLANE_IDLE_S": str(SILENT_S)}
"""How a run is stopped that has said its event. A deadline for the whole run would count the host's start, too, and
on a loaded machine come before the event."""


# F01: no hello --------------------------------------------------------------------------------------------------------


def test_f01_a_host_that_never_says_hello_is_found_at_its_deadline(ground: Ground) -> None:
    ended = ground.run("time.sleep(60)", env={"BACKPLANE_HELLO_S": "0.5"})
    assert not ground.amiss(ended, code="protocol_handshake_failed", bound_s=0.5 + STOP_S, accepted=0)
    assert b"hello_s" in ended.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (r"os.write(2, b'no key \x1b[31m given\n'); sys.exit(7)", rb"no key \x1b[31m given"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", b"signal 11 (SIGSEGV)"),
    ],
    ids=["exit-7-with-a-reason", "segv"],
)
def test_f01_a_host_that_ends_before_its_hello_is_named_with_its_last_words(
    ground: Ground, body: str, words: bytes
) -> None:
    ended = ground.run(body)
    assert not ground.amiss(ended, code="protocol_handshake_failed", accepted=0, bound_s=LADDER_S)
    assert words in ended.stderr
    assert b"\x1b" not in ended.stderr


# F02: dies mid-run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "words", "end"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", b"signal 11 (SIGSEGV)", {"signal": 11}),
        ("os._exit(0)", b"exit code 0", {"exit_code": 0}),
    ],
    ids=["segv", "exit-0"],
)
def test_f02_a_host_that_dies_in_the_middle_is_named_by_code_or_signal(
    ground: Ground, death: str, words: bytes, end: dict[str, int]
) -> None:
    ended = ground.run(f"hello(); take(); event('a'); event('b'); {death}")
    assert not ground.amiss(ended, code="backend_crashed", accepted=2, bound_s=STOP_S)
    assert words in ended.stderr
    assert ended.own["end"].items() >= {"reason": "host_exit", **end}.items()


# F03: the ladder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["after final", "at cancel"])
def test_f03_a_host_that_ignores_everything_is_killed_after_the_grace(ground: Ground, when: str) -> None:
    if when == "after final":
        ended = ground.run("deaf(); hello(); take(); event(); final(); time.sleep(60)")
        assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S)
    else:
        ended = ground.run("deaf(); hello(); take(); event(); time.sleep(60)", env=SILENT)
        assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=SILENT_S + STOP_S)


SLOW = """
hello(extensions=["cancel/1"]); take(); event('first')
line(); time.sleep(1.5); event('late'); final("partial")
"""


def test_f03_a_slow_host_has_its_late_event_and_its_partial_final_kept(ground: Ground) -> None:
    ended = ground.run(SLOW, env={**SILENT, "BACKPLANE_CANCEL_GRACE_S": "3"})
    assert not ground.amiss(
        ended, code="backend_timeout", outcome="partial", accepted=2, bound_s=SILENT_S + 1.5 + LADDER_S
    )
    assert [event["text"] for event in ended.events] == ["first", "late"]


def test_f03_nobody_waits_for_a_host_that_has_ended(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); rest()", env={**SILENT, "BACKPLANE_CANCEL_GRACE_S": "30"})
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=SILENT_S)


# F04, F05: descendants ------------------------------------------------------------------------------------------------


def test_f04_a_launcher_whose_grandchild_is_the_agent_ends_with_its_final(ground: Ground) -> None:
    # The leader stays until the order was taken, as `npx` does; then only the grandchild holds the pipes.
    ended = ground.run("hello(); take(); event()\nif os.fork():\n    os._exit(0)\nfinal(); deaf(); time.sleep(60)")
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=2.0)


def test_f04_a_grandchild_that_holds_both_pipes_after_a_crash_delays_nothing(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event()\nif os.fork():\n    os._exit(3)\ndeaf(); time.sleep(60)")
    assert not ground.amiss(ended, code="backend_crashed", accepted=1, bound_s=2.0)


DAEMON = """
hello(); take(); event()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    deaf()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.closerange(3, 100)
    open(sys.argv[0] + ".pid", "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[0] + ".pid") or not open(sys.argv[0] + ".pid").read():
    time.sleep(0.01)
final(); rest()
"""


def test_f05_a_daemon_that_left_session_and_pipes_is_gone_and_counted(ground: Ground) -> None:
    ended = ground.run(DAEMON, env=OFF)
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S)
    pid = int((ground.folder / "host.py.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


FORKS = """
hello(); take(); event()
if os.fork() == 0:
    deaf()
    while True:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(0.002)
final(); time.sleep(60)
"""


def test_f05_one_that_forks_into_a_new_session_again_and_again_is_caught(ground: Ground) -> None:
    ended = ground.run(FORKS)
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S)


def test_a_host_that_kills_its_guard_is_a_crash_and_leaves_nothing(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); os.kill(os.getppid(), 9); deaf(); time.sleep(60)", env=OFF)
    assert not ground.amiss(ended, code="backend_crashed", accepted=1, bound_s=2.0 + STOP_S)
    assert ended.own["guard"] == "lost"


# F12: spawn fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "not executable"])
def test_f12_a_host_that_cannot_start_is_named_with_the_errno(ground: Ground, kind: str) -> None:
    path = ground.folder / "program"
    if kind == "not executable":
        path.write_text("#!/bin/sh\n")
    ended = ground.call("run", "do it", "--sidecar", str(path), "--json")
    assert not ground.amiss(ended, code="sidecar_spawn_failed", accepted=0)
    assert (b"ENOENT" if kind == "missing" else b"EACCES") in ended.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="as root no mode stops anybody; see `test_ordinary_user`")
def test_f12_a_host_nobody_may_read_is_named(ground: Ground) -> None:
    path = ground.folder / "program"
    path.write_text("#!/bin/sh\n")
    path.chmod(stat.S_IXUSR)
    ended = ground.call("run", "do it", "--sidecar", str(path), "--json")
    assert ended.code != 0
