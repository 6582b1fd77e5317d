"""Section Process of the fault catalogue: what a host's own life and death may do."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.faults import hosts
from tests.all.faults.conftest import Figure
from tests.all.faults.ground import GRACE_S, LADDER_S, OFF, ROOT, Ground

STOP_S = GRACE_S + LADDER_S

SILENT_S = 0.5
SILENT = ("--idle-timeout", str(SILENT_S))
"""How a run is stopped that has said its event. A deadline for the whole run would count the host's start, too, and
on a loaded machine come before the event."""


# F01: no hello --------------------------------------------------------------------------------------------------------


def test_f01_a_host_that_never_says_hello_is_found_at_its_deadline(ground: Ground, figure: Figure) -> None:
    ended = ground.run("time.sleep(60)", "--hello-timeout", "0.5")
    assert not ground.amiss(ended, code="protocol_handshake_failed", bound_s=0.5 + STOP_S, accepted=0)
    assert b"hello_s" in ended.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(0)", b"exit code 0"),
        (r"os.write(2, b'no key \x1b[31m given\n'); sys.exit(7)", rb"no key \x1b[31m given"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", b"signal 11 (SIGSEGV)"),
    ],
    ids=["exit-0", "exit-7-with-a-reason", "segv"],
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
        ("os._exit(3)", b"exit code 3", {"exit_code": 3}),
        ("os.abort()", b"signal 6 (SIGABRT)", {"signal": 6}),
    ],
    ids=["segv", "exit-0", "exit-3", "abort"],
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
def test_f03_a_host_that_ignores_everything_is_killed_after_the_grace(
    ground: Ground, when: str, figure: Figure
) -> None:
    if when == "after final":
        ended = ground.run("deaf(); hello(); take(); event(); final(); time.sleep(60)")
        assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S)
    else:
        ended = ground.run("deaf(); hello(); take(); event(); time.sleep(60)", *SILENT)
        assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=SILENT_S + STOP_S)
    figure("C3", len(ended.left))


SLOW = """
hello(extensions=["cancel/1"]); take(); event('first')
line(); time.sleep(1.5); event('late'); final("partial")
"""


def test_f03_a_slow_host_has_its_late_event_and_its_partial_final_kept(ground: Ground) -> None:
    ended = ground.run(SLOW, *SILENT, env={"BACKPLANE_CANCEL_GRACE_S": "3"})
    assert not ground.amiss(
        ended, code="backend_timeout", outcome="partial", accepted=2, bound_s=SILENT_S + 1.5 + LADDER_S
    )
    assert [event["text"] for event in ended.events] == ["first", "late"]


def test_f03_nobody_waits_for_a_host_that_has_ended(ground: Ground, figure: Figure) -> None:
    ended = ground.run("hello(); take(); event(); rest()", *SILENT, env={"BACKPLANE_CANCEL_GRACE_S": "30"})
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=SILENT_S)


# F04, F05: descendants ------------------------------------------------------------------------------------------------

GRANDCHILD = "if os.fork():\n    os._exit(0)\n"


def test_f04_a_launcher_whose_grandchild_is_the_agent_ends_with_its_final(ground: Ground, figure: Figure) -> None:
    # The leader stays until the order was taken, as `npx` does; then only the grandchild holds the pipes.
    ended = ground.run("hello(); take(); event()\nif os.fork():\n    os._exit(0)\nfinal(); deaf(); time.sleep(60)")
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=2.0)
    figure("C3", len(ended.left))


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


def test_f05_a_daemon_that_left_session_and_pipes_is_gone_and_counted(ground: Ground, figure: Figure) -> None:
    ended = ground.run(DAEMON, env=OFF)
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S)
    pid = int((ground.folder / "host.py.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
    figure("C3", len(ended.left))


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


def test_a_host_that_becomes_another_program_is_still_held(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); os.execv('/bin/sleep', ['sleep', '60'])", *SILENT)
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=SILENT_S + STOP_S)


def test_a_host_that_stops_itself_is_woken_and_ended(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); os.kill(os.getpid(), signal.SIGSTOP)", "--idle-timeout", "0.6")
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", accepted=1, bound_s=0.6 + STOP_S)


def test_a_host_that_signals_whoever_started_it_harms_nobody(ground: Ground) -> None:
    body = "hello(); take(); event()\nfor n in (2, 15, 1, 3):\n    os.kill(os.getppid(), n)\nfinal(); rest()"
    ended = ground.run(body, env=OFF)
    assert not ground.amiss(ended, outcome="complete", accepted=1)


def test_a_host_that_kills_its_guard_is_a_crash_and_leaves_nothing(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); os.kill(os.getppid(), 9); deaf(); time.sleep(60)", env=OFF)
    assert not ground.amiss(ended, code="backend_crashed", accepted=1, bound_s=2.0 + STOP_S)


# F12: spawn fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["missing", "not executable", "bad shebang", "a folder", "3 MB argument", "no program"]
)
def test_f12_a_host_that_cannot_start_is_named_with_the_errno(ground: Ground, kind: str) -> None:
    path = ground.folder / "program"
    words, errno_name = [str(path)], "ENOENT"
    if kind == "not executable":
        path.write_text("#!/bin/sh\n")
        errno_name = "EACCES"
    elif kind == "bad shebang":
        path.write_text("#!/nowhere/interpreter\n")
        path.chmod(0o755)
    elif kind == "a folder":
        path.mkdir()
        errno_name = "EACCES"
    elif kind == "no program":
        path.write_bytes(b"\x00\x01\x02")
        path.chmod(0o755)
        errno_name = "ENOEXEC"
    if kind == "3 MB argument":
        # No command line of ours can be that long either, so it comes from the configuration.
        (ground.work / "backplane.toml").write_text(f'[backends.big]\ncommand = ["/bin/true", "{"x" * 900_000}"]\n')
        ended = ground.call("run", "do it", "--backend", "big", "--json")
        errno_name = "E2BIG"
    else:
        ended = ground.call("run", "do it", "--sidecar", shlex.join(words), "--json")
    assert not ground.amiss(ended, code="sidecar_spawn_failed", accepted=0)
    assert errno_name.encode() in ended.stderr


def test_f12_a_missing_workspace_is_its_own_error(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, "--root", str(ground.folder / "nowhere"))
    assert not ground.amiss(ended, code="workspace_init_failed", accepted=0, bound_s=STOP_S)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="as root no mode stops anybody; `xtask.py faults` runs it as an ordinary user"
)
def test_f12_a_host_nobody_may_read_is_named(ground: Ground) -> None:
    path = ground.folder / "program"
    path.write_text("#!/bin/sh\n")
    path.chmod(stat.S_IXUSR)
    ended = ground.call("run", "do it", "--sidecar", str(path), "--json")
    assert ended.code != 0


# F13: another one's number --------------------------------------------------------------------------------------------

REUSE = """
import json, os, pathlib, sys, time
import anyio, backplane
from backplane.runtime.backends import ProcessBackend
from backplane.config import Limits, Settings
home, work, guard, *argv = sys.argv[1:]

def stranger(pid):
    for _ in range(50):
        pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        made = os.fork()
        if made == 0:
            time.sleep(600)
        if made == pid:
            return made
        os.kill(made, 9); os.waitpid(made, 0)
    return None

async def main():
    backend = ProcessBackend(id="x", argv=tuple(argv), guard=guard == "guard")
    settings = Settings(limits=Limits(cancel_grace_s=0.3), isolation="off")
    order = backplane.WorkOrder("x", workspace=backplane.WorkspaceSpec(root=work))
    async with backplane.start(order, backend=backend, settings=settings, home=pathlib.Path(home)) as run:
        async for event in run:
            pid = int(event.text)
            row = pathlib.Path(f"/proc/{pid}/stat")
            while row.exists() and " Z " not in row.read_text():
                await anyio.sleep(0.001)
            other = stranger(pid)
            await run.cancel()
    alive = other is None or os.waitpid(other, os.WNOHANG) == (0, 0)
    if other is not None:
        os.kill(other, 9); os.waitpid(other, 0)
    print(json.dumps({"reused": other is not None, "alive": alive, "outcome": run.receipt.outcome}))

anyio.run(main)
"""


@pytest.mark.needs("unshare")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose the next pid")
@pytest.mark.parametrize("guard", ["guard", "no guard"])
def test_f13_a_stranger_with_the_number_of_the_host_gets_no_signal(ground: Ground, guard: str) -> None:
    program = ground.folder / "reuse.py"
    program.write_text(REUSE)
    # The leader is gone at once; who it leaves behind keeps the run going.
    host = "hello(); take(); pid = os.getpid()\nif os.fork():\n    os._exit(0)\nevent(str(pid)); time.sleep(30)"
    words = [str(ground.home), str(ground.work), guard, *hosts.script(ground.folder, host)]
    unshare = ["unshare", "-pf", "--mount-proc", sys.executable, "-P", str(program)]
    done = subprocess.run(
        [*unshare, *words],
        capture_output=True,
        cwd=ground.work,
        timeout=60,
        env=ground.environ(PYTHONPATH=str(ROOT)),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["alive"], said
    assert said["outcome"] in ("partial", "failed")
