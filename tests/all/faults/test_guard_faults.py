"""Hosts that turn against their own guard: cases the catalogue does not name."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from tests.all.faults.ground import OFF, UGLY, Ended, Ground

TURNING = """
hello(); take(); event()
import ctypes
libc, guard, taken = ctypes.CDLL(None), os.getppid(), []
if {forging}:
    held = libc.syscall(434, guard, 0)
    fds = [libc.syscall(438, held, number, 0) for number in range(3, 16)]
    taken = [fd for fd in fds if fd >= 0 and os.readlink(f"/proc/self/fd/{{fd}}").startswith("socket")]
    event(f"took {{len(taken)}}")
hear, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.close(tell)
        os.read(hear, 1)
        for fd in taken:
            os.write(fd, b"exit 0"), os.write(fd, b"swept 0")
        os.kill(guard, signal.SIGKILL)
        time.sleep(60)
    os._exit(0)
os.wait(); final(); os.write(tell, b"x"); time.sleep(60)
"""
"""A host that kills its guard after its final, by a daemon without any tie to it; and before that says in the guard's
name that all is well."""


def ended_with_its_guard_killed(ground: Ground, *, forging: bool) -> Ended:
    ended = ground.run(TURNING.format(forging=forging), env=OFF)
    for line in ended.left:
        with suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
            os.waitpid(int(line.split()[0]), 0)
    assert not any(word in ended.stderr for word in UGLY)
    return ended


@pytest.mark.parametrize("forging", [False, True])
def test_a_guard_that_was_killed_is_told_and_no_clean_up_is_claimed(ground: Ground, forging: bool) -> None:
    ended = ended_with_its_guard_killed(ground, forging=forging)
    assert (ended.code, ended.receipt["outcome"], ended.own["guard"]) == (0, "complete", "lost")
    assert ended.receipt["verification"]["harness_ok"] is False
    assert "if the guard itself is killed" in ended.own["enforcement"]["kinds"]["processes"]["gap"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may trace whom it likes")
def test_f05_an_ordinary_users_host_cannot_speak_in_its_guards_name(ground: Ground) -> None:
    ended = ended_with_its_guard_killed(ground, forging=True)
    assert [event["text"] for event in ended.events][1:] == ["took 0"]
