"""Real children of a few lines, good and hostile ones, on both event loops."""

from __future__ import annotations

import errno
import os
import posix
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from backplane.errors import BackendError
from backplane.process import guard
from backplane.process.child import STDERR_BYTES_MAX, Child, Exit, kill_exactly, open_child, start_of
from backplane.process.guard import PARENT, look
from backplane.process.launch import StartCommand
from backplane.process.programs import run_program
from backplane.process.tool import run_tool

WAIT_S = 5.0
"""The bound of every wait here."""

SLACK_S = 2.5
"""What a loaded machine may add to a deadline."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard and the process table are Linux's")

FORGET = "import os, signal, sys, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
"""First lines of one that ignores what it is told."""

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    if {quiet}:
        null = os.open('/dev/null', os.O_RDWR)
        for fd in (0, 1, 2): os.dup2(null, fd)
    open({mark!r}, 'w').close()
    time.sleep(60)
    os._exit(0)
while not os.path.exists({mark!r}): time.sleep(0.001)
"""
"""One that leaves session and parents and lives on; says so by a file."""


class Place:
    """A mark in the environment by which all descendants of a test are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.env = {"PATH": "/usr/bin:/bin", "PLACE": self.token}

    def python(self, code: str, **values: object) -> StartCommand:
        lines = "import os, signal, sys, time\n" + (code.format(**values) if values else code)
        return StartCommand((sys.executable, "-I", "-S", "-c", lines), self.env)

    def daemon(self, quiet: bool, then: str = "") -> StartCommand:
        mark = str(self.folder / uuid.uuid4().hex)
        return self.python(FORGET + DAEMON.format(quiet=quiet, mark=mark) + "print('up', flush=True)\n" + then)

    def alive(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and self._is_ours(name)]

    def _is_ours(self, pid: str) -> bool:
        try:
            ours = self.token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
            return ours and state_of(int(pid)) not in "ZX"
        except OSError:
            return False


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


async def read(fd: int, bytes_max: int = 65536) -> bytes:
    with anyio.fail_after(WAIT_S):
        await anyio.wait_readable(fd)
    return os.read(fd, bytes_max)


async def read_all(fd: int) -> bytes:
    whole = b""
    while chunk := await read(fd):
        whole += chunk
    return whole


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S):
        while not true():
            await anyio.sleep(0.002)


def children() -> list[int]:
    """Our children, zombies included."""
    return [pid for pid, row in look().items() if row[PARENT] == os.getpid()]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ending", "how", "words"),
    [
        ("os._exit(0)", Exit(code=0), "exit code 0"),
        ("sys.exit(3)", Exit(code=3), "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Exit(signal=11), "signal 11 (SIGSEGV)"),
    ],
)
async def test_the_end_of_a_child_is_named_by_code_or_signal(place: Place, ending: str, how: Exit, words: str) -> None:
    async with open_child(place.python(ending)) as child:
        assert await child.wait(WAIT_S) == how
        assert how.describe() == words
        assert child.swept == 0


@pytest.mark.anyio
async def test_bytes_go_in_and_come_out(place: Place) -> None:
    async with open_child(StartCommand(("cat",), place.env)) as child:
        os.write(child.stdin, b"hello\n")
        assert await read(child.stdout) == b"hello\n"
        child.close_stdin()
        child.close_stdin()
        assert await read(child.stdout) == b""
        assert await child.wait(WAIT_S) == Exit(code=0)
        assert child.stdin == -1


@pytest.mark.anyio
async def test_a_wait_for_a_living_child_ends_in_time_without_an_answer(place: Place) -> None:
    async with open_child(place.python("time.sleep(60)")) as child:
        assert await child.wait(0.01) is None
        assert child.exit is None
    assert place.alive() == []


@pytest.mark.anyio
async def test_32_mib_of_stderr_before_the_first_word_are_drained_and_the_tail_kept(place: Place) -> None:
    code = "for _ in range(512): os.write(2, b'x' * 65536)\nos.write(2, b'the end'); print('up')"
    async with open_child(place.python(code)) as child:
        assert await read(child.stdout) == b"up\n"
        await child.wait(WAIT_S)
        await child.stop(grace_s=0)
        assert len(child.stderr_tail) == STDERR_BYTES_MAX
        assert child.stderr_tail.endswith(b"xthe end")
        assert child.stderr_dropped == 32 * 1024 * 1024 + len("the end") - STDERR_BYTES_MAX


@pytest.mark.anyio
async def test_a_child_that_ignores_everything_is_killed_after_the_grace(place: Place) -> None:
    async with open_child(place.python(FORGET + "print('up', flush=True); time.sleep(60)")) as child:
        await read(child.stdout)
        began = time.monotonic()
        await child.stop(grace_s=0.3)
        assert 0.8 <= time.monotonic() - began < 0.8 + SLACK_S
        assert child.exit == Exit(signal=9)
        assert place.alive() == []


@pytest.mark.anyio
async def test_a_child_that_ends_at_the_end_of_input_costs_no_grace(place: Place) -> None:
    async with open_child(place.python("sys.stdin.read(); print('bye')")) as child:
        began = time.monotonic()
        await child.stop(grace_s=30)
        assert time.monotonic() - began < SLACK_S
        assert child.exit == Exit(code=0)
        assert await read_all(child.stdout) == b"bye\n"


@pytest.mark.anyio
async def test_what_a_slow_child_says_at_its_end_can_still_be_read(place: Place) -> None:
    code = """
def late(*_):
    time.sleep(0.2)
    os.write(1, b'late'); os._exit(0)
signal.signal(15, late)
print('up', flush=True)
while True: time.sleep(60)
"""
    async with open_child(place.python(code)) as child:
        assert await read(child.stdout) == b"up\n"
        await child.stop(grace_s=WAIT_S)
        assert child.exit == Exit(code=0)
        assert await read_all(child.stdout) == b"late"


@pytest.mark.anyio
async def test_a_stopped_child_is_woken_to_be_terminated(place: Place) -> None:
    async with open_child(place.python("print('up', flush=True); time.sleep(60)")) as child:
        await read(child.stdout)
        os.kill(child.pid, signal.SIGSTOP)
        await until(lambda: state_of(child.pid) == "T")
        child.terminate()
        assert await child.wait(WAIT_S) == Exit(signal=15)


@pytest.mark.anyio
async def test_a_grandchild_that_holds_both_pipes_does_not_hide_its_leaders_end(place: Place) -> None:
    code = "if os.fork() == 0:\n    print('up', flush=True); time.sleep(60)\nelse: sys.stdin.readline()"
    async with open_child(place.python(code)) as child:
        assert await read(child.stdout) == b"up\n"
        os.write(child.stdin, b"\n")
        assert await child.wait(WAIT_S) == Exit(code=0)
        began = time.monotonic()
        await child.stop(grace_s=30)
        assert time.monotonic() - began < SLACK_S
        assert await read(child.stdout) == b""
        assert child.swept == 1
        assert place.alive() == []


@pytest.mark.anyio
@pytest.mark.parametrize("leader_stays", [True, False])
async def test_a_daemon_that_left_its_session_is_gone_too(place: Place, leader_stays: bool) -> None:
    async with open_child(place.daemon(True, "time.sleep(60)" if leader_stays else "")) as child:
        assert await read(child.stdout) == b"up\n"
        assert await child.wait(0 if leader_stays else WAIT_S) == (None if leader_stays else Exit(code=0))
        await child.stop(grace_s=0)
        assert child.swept == 1
        assert place.alive() == []


@pytest.mark.anyio
async def test_one_that_forks_into_a_new_session_every_millisecond_is_caught(place: Place) -> None:
    code = """
print('up', flush=True)
while True:
    time.sleep(0.001)
    if os.fork(): os._exit(0)
    os.setsid()
"""
    async with open_child(place.python(code)) as child:
        await read(child.stdout)
        await child.wait(WAIT_S)
    assert place.alive() == []


@pytest.mark.anyio
@pytest.mark.parametrize("word", ["SIGKILL", "SIGSTOP"])
async def test_a_host_that_fells_its_guard_gains_nothing(place: Place, word: str) -> None:
    code = (
        FORGET + "if os.fork() == 0:\n    print('up', flush=True); time.sleep(60)\n"
        "sys.stdin.readline(); os.kill(os.getppid(), signal.{word}); print('done', flush=True); time.sleep(60)"
    )
    async with open_child(place.python(code, word=word)) as child:
        assert await read(child.stdout) == b"up\n"
        os.write(child.stdin, b"\n")
        if word == "SIGKILL":
            assert await child.wait(WAIT_S) == Exit()
        began = time.monotonic()
        await child.stop(grace_s=0.1)
        assert time.monotonic() - began < 0.6 + SLACK_S
        assert place.alive() == []
    assert child.exit in (Exit(), Exit(signal=9))


@pytest.mark.anyio
async def test_a_child_that_closed_its_output_is_at_its_end_of_file_and_lives(place: Place) -> None:
    async with open_child(place.python("os.close(1); time.sleep(60)")) as child:
        assert await read(child.stdout) == b""
        assert child.exit is None


@pytest.mark.anyio
async def test_a_full_pipe_does_not_block_its_writer(place: Place) -> None:
    async with open_child(place.python("time.sleep(60)")) as child:
        os.write(child.stdin, b"x" * 2_000_000)
        with pytest.raises(BlockingIOError):
            os.write(child.stdin, b"x")


def broken_command(kind: str, place: Place) -> StartCommand:
    script = place.folder / "script"
    if kind == "shebang":
        script.write_text("#!/nowhere/interpreter\n")
        script.chmod(0o755)
    elif kind == "no shebang":
        script.write_bytes(b"\x00\x01")
        script.chmod(0o755)
    elif kind == "not executable":
        script.write_text("#!/bin/sh\n")
        script.chmod(0o644)
    argv = {"missing": ("/nowhere/host",), "cwd": ("true",),
            "3 MB": ("true", "x" * 3_000_000), "zero byte": ("true", "\0"),
            "no argv": ()}.get(kind, (str(script),))  # fmt: skip
    return StartCommand(argv, place.env, "/nowhere" if kind == "cwd" else None)


BROKEN = {
    "missing": "ENOENT",
    "shebang": "ENOENT",
    "no shebang": "ENOEXEC",
    "not executable": "EACCES",
    "cwd": "ENOENT",
    "3 MB": "E2BIG",
    "zero byte": "EINVAL (a word of its command has a NUL character)",
    "no argv": "EINVAL",
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", BROKEN)
async def test_a_program_that_cannot_start_is_sidecar_spawn_failed_with_the_errno(place: Place, kind: str) -> None:
    before = open_fds()
    with pytest.raises(BackendError) as caught:
        async with open_child(broken_command(kind, place)):
            pytest.fail("it cannot have started")
    assert caught.value.code == "sidecar_spawn_failed"
    assert BROKEN[kind] in caught.value.message
    assert len(caught.value.message) < 400
    assert ("/nowhere" in caught.value.message) == (kind in ("cwd", "missing"))
    assert open_fds() == before


@pytest.mark.anyio
async def test_a_program_is_started_once_what_it_needs_is_there(place: Place) -> None:
    needed = place.folder / "needed"

    async def ready() -> None:
        assert place.alive() == []
        await anyio.sleep(0.05)
        needed.write_text("there")

    async with open_child(place.python("print(open({path!r}).read())", path=str(needed)), ready=ready) as child:
        assert await read_all(child.stdout) == b"there\n"
    assert children() == []


@pytest.mark.anyio
async def test_a_program_whose_needs_cannot_be_had_is_never_started(place: Place) -> None:
    before, started = open_fds(), place.folder / "started"

    async def ready() -> None:
        raise BackendError("backend_timeout", "nothing came")

    with pytest.raises(BackendError, match="nothing came"):
        async with open_child(place.python("open({path!r}, 'w')", path=str(started)), ready=ready):
            pytest.fail("it cannot have started")
    assert (open_fds(), children(), started.exists()) == (before, [], False)


@pytest.mark.anyio
async def test_failed_starts_leave_no_descriptor_and_no_child(place: Place) -> None:
    before = open_fds()
    for _ in range(50):
        with pytest.raises(BackendError):
            async with open_child(StartCommand(("/nowhere/host",), place.env)):
                pass
    assert open_fds() == before
    assert children() == []


@pytest.mark.anyio
async def test_a_child_costs_four_descriptors_at_most_and_no_thread(place: Place) -> None:
    async with open_child(StartCommand(("cat",), place.env)) as first:
        assert first.exit is None
        before, threads = open_fds(), threading.active_count()
        async with open_child(StartCommand(("cat",), place.env)):
            assert len(open_fds() - before) <= 4
            assert threading.active_count() == threads
        assert open_fds() == before


@pytest.mark.anyio
async def test_a_child_gets_its_environment_umask_and_folder_and_no_descriptors(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    ends = os.pipe()
    command = place.python(
        "def is_open(fd):\n"
        "    try: return bool(os.fstat(fd))\n"
        "    except OSError: return False\n"
        "print(os.getcwd(), [fd for fd in range(64) if is_open(fd)], oct(os.umask(0)))\n"
        "print(sorted(os.environ), os.getsid(0) == os.getpid())"
    )
    command = StartCommand(command.argv, command.env, str(place.folder))
    async with open_child(command) as child:
        said = (await read_all(child.stdout)).decode().splitlines()
    for end in ends:
        os.close(end)
    assert said[0] == f"{place.folder} [0, 1, 2] 0o77"
    assert said[1] in ("['PATH', 'PLACE'] True", "['LC_CTYPE', 'PATH', 'PLACE'] True")  # Python itself adds the latter.


@pytest.mark.anyio
async def test_cancel_is_asked_first_and_its_time_is_the_grace(place: Place) -> None:
    asked: list[float] = []

    async def never(grace_s: float) -> None:
        asked.append(grace_s)
        await anyio.sleep_forever()

    async with open_child(place.python(FORGET + "print('up', flush=True); time.sleep(60)")) as child:
        await read(child.stdout)
        began = time.monotonic()
        await child.stop(grace_s=0.2, cancel=never)
        assert 0.7 <= time.monotonic() - began < 0.7 + SLACK_S
        assert asked == [0.2]
        assert child.exit == Exit(signal=9)


@pytest.mark.anyio
async def test_cancel_is_not_waited_for_once_the_child_has_ended(place: Place) -> None:
    async with open_child(place.python("sys.stdin.readline()")) as child:

        async def ask(grace_s: float) -> None:
            os.write(child.stdin, b"cancel\n")
            await anyio.sleep_forever()

        began = time.monotonic()
        await child.stop(grace_s=30, cancel=ask)
        assert time.monotonic() - began < SLACK_S
        assert child.exit == Exit(code=0)


@pytest.mark.anyio
async def test_a_cancel_that_fails_does_not_stop_the_ladder(place: Place) -> None:
    async def broken(grace_s: float) -> None:
        raise BackendError("stream_closed", "nobody there")

    async with open_child(place.python("time.sleep(60)")) as child:
        with pytest.raises(BackendError):
            await child.stop(grace_s=30, cancel=broken)
        assert place.alive() == []


@pytest.mark.anyio
async def test_two_who_stop_at_once_wait_for_one_ladder(place: Place) -> None:
    asked: list[float] = []

    async def cancel(grace_s: float) -> None:
        asked.append(grace_s)

    async def stop(child: Child) -> None:
        await child.stop(grace_s=0, cancel=cancel)
        assert place.alive() == []

    async with open_child(place.python("time.sleep(60)")) as child:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop, child)
            tasks.start_soon(stop, child)
        assert asked == [0]


@pytest.mark.anyio
async def test_a_cancelled_owner_still_walks_down_the_whole_ladder(place: Place) -> None:
    async with open_child(place.python(FORGET + "print('up', flush=True); time.sleep(60)")) as child:
        await read(child.stdout)
        with anyio.move_on_after(0) as scope:
            await child.stop(grace_s=0.1)
        assert child.exit == Exit(signal=9)
        assert place.alive() == []
    assert not scope.cancelled_caught


@pytest.mark.anyio
async def test_a_block_cancelled_from_outside_leaves_nothing(place: Place) -> None:
    before = open_fds()
    with anyio.move_on_after(WAIT_S) as scope:
        async with open_child(place.daemon(False, "time.sleep(60)")) as child:
            await read(child.stdout)
            scope.cancel()
            await anyio.sleep_forever()
    assert place.alive() == []
    assert open_fds() == before


@pytest.mark.anyio
async def test_a_start_cancelled_at_once_leaves_nothing(place: Place) -> None:
    before = open_fds()
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with open_child(place.python("time.sleep(60)")):
            await anyio.sleep_forever()
    assert place.alive() == []
    assert open_fds() == before


@pytest.mark.anyio
async def test_an_error_in_the_block_arrives_as_it_was_raised(place: Place) -> None:
    with pytest.raises(KeyError):
        async with open_child(place.python("time.sleep(60)")):
            raise KeyError("x")
    assert place.alive() == []


@pytest.mark.anyio
async def test_a_stranger_with_the_number_of_a_child_is_not_killed(place: Place) -> None:
    async with open_child(place.python("time.sleep(60)")) as child:
        kill_exactly(child.pid, child.start + 1)
        assert await child.wait(0.05) is None
        kill_exactly(child.pid, child.start)
        assert await child.wait(WAIT_S) == Exit(signal=9)


@pytest.mark.anyio
async def test_a_child_that_is_gone_gets_no_more_signals(place: Place) -> None:
    async with open_child(place.python("pass")) as child:
        await child.wait(WAIT_S)
        assert state_of(child.pid) == "Z"  # So nobody else can have its number.
        await child.stop(grace_s=0)
        child.terminate()
    child.terminate()
    assert start_of(child.pid) == 0


@pytest.mark.anyio
async def test_a_python_without_pidfds_and_memory_files_guards_as_well(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pythons that were compiled on old systems lack both, whatever the kernel has."""
    monkeypatch.delattr(posix, "pidfd_open")
    monkeypatch.delattr(os, "memfd_create")
    async with open_child(place.daemon(True)) as child:
        assert await read(child.stdout) == b"up\n"
        ended = guard.pidfd_open(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        with anyio.fail_after(WAIT_S):
            await anyio.wait_readable(ended)
        os.close(ended)
    assert (child.swept, place.alive()) == (1, [])
    assert run_tool(["true"], env=place.env).code == 0


@pytest.mark.anyio
async def test_a_system_without_guards_starts_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.process.spawn.GUARD_WORKS", False)
    with pytest.raises(BackendError, match="no guard") as caught:
        async with open_child(place.python("pass")):
            pytest.fail("it cannot have started")
    assert caught.value.code == "sidecar_spawn_failed"
    with pytest.raises(BackendError, match="no guard"):
        run_tool(["true"], env=place.env)


PLANE = """
import os, signal, sys, anyio
from backplane.process.child import open_child
from backplane.process.launch import StartCommand
async def main():
    async with open_child(StartCommand(tuple(sys.argv[1:]), dict(os.environ))) as child:
        await anyio.wait_readable(child.stdout)
        os.write(1, os.read(child.stdout, 100))
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.anyio
async def test_kill_9_of_the_control_plane_leaves_nothing(place: Place) -> None:
    argv = [sys.executable, "-c", PLANE, *place.daemon(True, "time.sleep(60)").argv]
    plane = subprocess.Popen(argv, env=place.env, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert plane.stdout is not None
    assert plane.stdout.readline() == b"up\n"
    try:
        # Plane, child and daemon; what stood between the last two may still be on its way out.
        await until(lambda: len(place.alive()) == 3)
    finally:
        plane.kill()
        plane.wait(WAIT_S)
        plane.stdout.close()
    await until(lambda: place.alive() == [])


OF_GLIBC = 1 << 31 | 1 << 32
"""Signals 32 and 33, which are glibc's own: its `posix_spawn` may leave them ignored, and they are nobody else's."""
HARDENED = """
import os, signal, sys, anyio
from backplane.process.child import open_child
from backplane.process.launch import StartCommand
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1): signal.signal(number, signal.SIG_IGN)
env = dict(os.environ)
argv = ("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")
async def main():
    async with open_child(StartCommand(argv, env)) as child:
        await child.wait(5)
        sys.stdout.write(os.read(child.stdout, 1000).decode())
    try:
        async with open_child(StartCommand(("true",), env, "/nowhere")): pass
    except Exception as fault: sys.stdout.write(str(fault) + "\\n")
anyio.run(main)
"""


def test_signals_that_the_control_plane_ignores_are_heard_by_its_children(place: Place) -> None:
    done = subprocess.run([sys.executable, "-c", HARDENED], env=place.env, capture_output=True, timeout=30, check=False)
    lines = done.stdout.decode().splitlines()
    masks = [int(line.split()[1], 16) & ~OF_GLIBC for line in lines if line.startswith("Sig")]
    assert masks == [0] * 2
    assert sum("ENOENT" in line and "/nowhere" in line for line in lines) == 1
    assert done.stderr == b""


@pytest.mark.anyio
async def test_output_in_pieces_is_heard_in_whole_characters(place: Place) -> None:
    text = "a\u00e9\u20ac\U0001f600"
    code = f"for byte in {text!a}.encode(): os.write(1, bytes([byte])); time.sleep(0.02)\nos.write(1, b'\\xe2')"
    heard: list[str] = []

    async def hear(text: str) -> None:
        heard.append(text)

    done = await run_program(place.python(code).argv, env=place.env, cwd="/", timeout_s=WAIT_S, hear=hear)
    assert (done.exit, "".join(heard)) == (Exit(code=0), text + "\ufffd")
    assert all("\ufffd" not in piece for piece in heard[:-1])


def test_a_tool_gives_its_output_and_its_code(place: Place) -> None:
    done = run_tool(["sh", "-c", "cat; echo no >&2; exit 3"], env=place.env, stdin=b"x" * 300_000)
    assert (done.code, len(done.stdout), done.stderr) == (3, 300_000, b"no\n")


def test_a_tool_writes_a_file(place: Place) -> None:
    sink = place.folder / "out"
    assert run_tool(["cat"], env=place.env, stdin=b"y" * 100_000, stdout_path=str(sink)).stdout == b""
    assert sink.read_bytes() == b"y" * 100_000
    assert sink.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("argv", "limits", "code"),
    [
        (["sleep", "60"], {"timeout_s": 0.1}, "backend_timeout"),
        (["sh", "-c", "exec >&- 2>&-; sleep 60"], {"timeout_s": 0.1}, "backend_timeout"),
        (["yes"], {"output_bytes_max": 1_000_000}, "execution_tool_failed"),
        (["no-such-tool"], {}, "sidecar_spawn_failed"),
        (["true", "x" * 3_000_000], {}, "sidecar_spawn_failed"),
    ],
)
def test_a_tool_beyond_its_limits_is_killed_and_named(
    place: Place, argv: list[str], limits: dict[str, float], code: str
) -> None:
    before = open_fds()
    began = time.monotonic()
    with pytest.raises(BackendError) as caught:
        run_tool(argv, env=place.env, **limits)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert argv[0] in caught.value.message
    assert time.monotonic() - began < 0.1 + SLACK_S
    assert place.alive() == []
    assert open_fds() == before


TOOL_IN_A_THREAD = """
import os, signal, sys, threading
from backplane.process.tool import run_tool
for number in {ignored}: signal.signal(number, signal.SIG_IGN)
def work():
    say = lambda: print("begun", flush=True)
    run_tool(["sh", "-c", "sleep 60 & sleep 60"], env=dict(os.environ), timeout_s=60, stopped=say)
threading.Thread(target=work).start()
sys.stdin.read()
"""


@pytest.mark.parametrize("ignored", ["()", "(signal.SIGHUP,)"])
def test_a_tool_dies_with_a_control_plane_that_is_killed(place: Place, ignored: str) -> None:
    words = [sys.executable, "-c", TOOL_IN_A_THREAD.format(ignored=ignored)]
    plane = subprocess.Popen(words, env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert plane.stdout is not None
    assert plane.stdout.readline() == b"begun\n"
    anyio.run(until, lambda: len(place.alive()) == 4)
    plane.kill()
    plane.communicate(timeout=WAIT_S)
    try:
        anyio.run(until, lambda: place.alive() == [])
    finally:
        for pid in place.alive():
            os.kill(pid, signal.SIGKILL)


def test_a_tool_that_is_stopped_is_killed_at_once(place: Place) -> None:
    before, began = open_fds(), time.monotonic()
    with pytest.raises(BackendError, match="'sleep' was stopped"):
        run_tool(["sleep", "60"], env=place.env, stopped=lambda: time.monotonic() > began + 0.2)
    assert time.monotonic() - began < 0.2 + SLACK_S
    assert place.alive() == []
    assert open_fds() == before


def test_what_a_tool_left_in_the_background_neither_delays_nor_outlives_it(place: Place) -> None:
    began = time.monotonic()
    done = run_tool(["sh", "-c", "sleep 60 & echo done"], env=place.env)
    assert done.stdout == b"done\n"
    assert time.monotonic() - began < SLACK_S
    assert place.alive() == []


def test_a_missing_folder_of_a_tool_is_named(place: Place) -> None:
    with pytest.raises(BackendError, match=errno.errorcode[errno.ENOENT]) as caught:
        run_tool(["true"], env=place.env, cwd="/nowhere")
    assert "'/nowhere'" in caught.value.message
