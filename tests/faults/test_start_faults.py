"""How the command itself is started, and what it finds where its store should be: cases the catalogue does not name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults import hosts
from tests.faults.ground import UGLY, Ground
from tests.faults.test_resource_faults import limited


def ignore_everything() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)


STARTS: dict[str, Callable[[], object]] = {
    "ends of children ignored": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "every signal ignored": ignore_everything,
    "every signal blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    "a small stack": limited(RLIMIT_STACK=256 << 10),
    "half a gibibyte": limited(RLIMIT_AS=512 << 20),
    "all rights for new files": lambda: os.umask(0),
    "a group in the background": lambda: os.setpgid(0, 0),
}


@pytest.mark.parametrize("how", STARTS)
def test_however_it_is_started_a_run_completes_and_leaves_nothing(ground: Ground, how: str) -> None:
    def start() -> None:
        STARTS[how]()

    ended = ground.run(hosts.GOOD, preexec_fn=start)
    ground.std(ended, outcome="complete", accepted=2)
    assert (ground.home / "receipts.sqlite").stat().st_mode & 0o077 == 0


def test_an_umask_that_takes_every_right_is_a_clear_error_for_who_needs_them(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, preexec_fn=lambda: os.umask(0o777) and None)
    assert (ended.error, ended.left) == (None if os.geteuid() == 0 else "receipt_store_failed", [])
    assert not any(word in ended.stderr for word in UGLY)


def test_names_that_are_no_utf_8_are_a_clear_error(ground: Ground) -> None:
    odd = os.fsdecode(os.fsencode(ground.folder) + b"/\xff\xfe")
    os.mkdir(odd)
    root = ground.run(hosts.GOOD, "--root", odd)
    assert (root.code, root.error) == (2, "config_invalid")
    assert b"\\xff\\xfe" in root.stderr
    home = ground.run(hosts.GOOD, env={"BACKPLANE_HOME": odd})
    assert home.error == "receipt_store_failed"
    assert b"point BACKPLANE_HOME elsewhere" in home.stderr


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "noise", "log"])
def test_a_store_that_is_none_is_a_clear_error_for_every_command(ground: Ground, kind: str) -> None:
    ground.run(hosts.GOOD)
    store = ground.home / "receipts.sqlite"
    make: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "folder": Path.mkdir,
        "loop": lambda path: path.symlink_to(path),
        "noise": lambda path: path.write_bytes(os.urandom(5000)),
    }
    if kind == "log":
        store.with_name("receipts.sqlite-wal").write_bytes(os.urandom(100_000))
    else:
        store.unlink()
        make[kind](store)
    for words in (("receipts", "list"), ("receipts", "verify"), ("doctor",)):
        ended = ground.start(*words).end(30)
        assert ended.left == []
        assert not any(word in ended.stderr for word in UGLY)
        assert ended.error in ("receipt_store_failed", None)
    ended = ground.run(hosts.GOOD)
    if kind == "log":
        ground.std(ended, outcome="complete", accepted=2)
    else:
        assert ended.error == "receipt_store_failed"
        assert ended.left == []


def test_a_first_start_of_eight_at_once_makes_one_store(ground: Ground) -> None:
    running = [ground.started(hosts.GOOD) for _ in range(8)]
    assert [one.end().code for one in running] == [0] * 8
    assert len(ground.rows()) == 8
    assert ground.call("receipts", "verify").code == 0
