"""How the command itself is started, and what it finds where its store should be: cases the catalogue does not name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.all.faults import hosts
from tests.all.faults.ground import PROGRAM, ROOT, UGLY, Ground
from tests.all.faults.test_resource_faults import limited


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
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    assert (ground.home / "receipts.sqlite").stat().st_mode & 0o077 == 0


def test_a_root_whose_name_is_no_utf_8_is_a_clear_error(ground: Ground) -> None:
    odd = os.fsdecode(os.fsencode(ground.folder) + b"/\xff\xfe")
    os.mkdir(odd)
    root = ground.run(hosts.GOOD, "--root", odd)
    assert (root.code, root.error) == (2, "config_invalid")
    assert b"\\xff\\xfe" in root.stderr


@pytest.mark.parametrize("kind", ["noise", "log"])
def test_a_store_that_is_none_is_a_clear_error_for_every_command(ground: Ground, kind: str) -> None:
    ground.run(hosts.GOOD)
    store = ground.home / "receipts.sqlite"
    if kind == "log":
        store.with_name("receipts.sqlite-wal").write_bytes(os.urandom(100_000))
    else:
        store.write_bytes(os.urandom(5000))
    for words in (("runs",), ("receipts", "verify"), ("doctor",)):
        ended = ground.start(*words).end(30)
        assert ended.left == []
        assert not any(word in ended.stderr for word in UGLY)
        assert ended.error in ("receipt_store_failed", None)
    ended = ground.run(hosts.GOOD)
    if kind == "log":
        assert not ground.amiss(ended, outcome="complete", accepted=2)
    else:
        assert ended.error == "receipt_store_failed"
        assert ended.left == []


def test_a_first_start_of_eight_at_once_makes_one_store(ground: Ground) -> None:
    running = [ground.started(hosts.GOOD) for _ in range(8)]
    assert [one.end().code for one in running] == [0] * 8
    assert len(ground.rows()) == 8
    assert ground.call("receipts", "verify").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [("conform", "--", "sh", "-c", "sleep 60"), ("serve",), ("mcp",)], ids=lambda w: w[0])
def test_a_signal_ends_every_command_in_order_and_its_code_says_which(
    ground: Ground, words: tuple[str, ...], number: signal.Signals
) -> None:
    reader, writer = os.pipe()
    running = ground.start(
        *words, stdin=reader, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None
    )
    os.close(reader)
    # At work: a hello, the children of a check, or signals taken over by the loop.
    begun = {
        "conform": lambda: any(ground.tmp.iterdir()),
        "serve": lambda: b'"hello"' in running.output(),
        "mcp": lambda: _heeds(running.pid, signal.SIGHUP),
    }
    running.until(begun[words[0]])
    running.process.send_signal(number)
    ended = running.end(30)
    os.close(writer)
    assert (ended.code, ended.left, list(ground.tmp.iterdir())) == (128 + number, [], [])
    assert not any(word in ended.stderr for word in UGLY)


@pytest.mark.parametrize("words", [("serve",), ("mcp",)], ids=lambda w: w[0])
def test_a_server_keeps_to_the_signals_that_it_was_started_to_ignore(ground: Ground, words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    running = ground.start(
        *words, stdin=reader, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None
    )
    os.close(reader)
    running.until(lambda: _heeds(running.pid, signal.SIGQUIT))
    assert not _heeds(running.pid, signal.SIGHUP)
    running.process.send_signal(signal.SIGQUIT)
    ended = running.end(30)
    os.close(writer)
    assert (ended.code, ended.left) == (128 + signal.SIGQUIT, [])


def _heeds(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    rows = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(rows["SigCgt"], 16) & 1 << (number - 1))


@pytest.mark.needs("bwrap")
def test_without_a_folder_for_temporary_files_a_command_says_so(ground: Ground) -> None:
    closed = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--")
    ended = ground.start("conform", "--", "true", program=(*closed, *PROGRAM), env={"TMPDIR": "/nowhere"}).end(60)
    assert (ended.code, ended.left) == (1, [])
    assert b"set TMPDIR to" in ended.stdout + ended.stderr
    assert not any(word in ended.stderr for word in (*UGLY, b"internal:"))


@pytest.mark.parametrize("search", [".:{}", ""])
def test_no_program_of_the_folder_it_stands_in_is_run_whatever_path_says(ground: Ground, search: str) -> None:
    known = os.environ["PATH"] if not search.startswith("{") else "/nowhere"
    for name in ("bwrap", "git"):
        planted = ground.work / name
        planted.write_text(f"#!/bin/sh\necho {name} >> {ground.folder / 'sprung'}\necho bubblewrap 9.9\n")
        planted.chmod(0o755)
    for words in (("doctor",), ("run", "x", "--sidecar", ground.host(hosts.GOOD), "--json")):
        ground.start(*words, env={"PATH": search.format(known)}).end(60)
        assert not (ground.folder / "sprung").exists()


@pytest.mark.parametrize("words", [("serve",), ("doctor",)], ids=" ".join)
def test_a_command_bears_a_folder_that_is_gone_and_outputs_that_are(ground: Ground, words: tuple[str, ...]) -> None:
    gone = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *PROGRAM)
    seen = [ground.start(*words, program=gone, env={"PYTHONPATH": str(ROOT)}).end(60)]
    streams = {"closed": "<&- >&- 2>&-", "full": ">/dev/full 2>/dev/full"}
    for name, how in streams.items():
        ended = ground.start(*words, program=("sh", "-c", f'exec "$@" {how}', "sh", *PROGRAM)).end(60)
        seen.append(ended)
        assert 0 <= ended.code <= 4, (name, ended)
    reader, writer = os.pipe()
    os.close(reader)
    seen.append(ground.start(*words, stdout=writer).end(60))
    os.close(writer)
    for ended in seen:
        assert (ended.left, [word for word in (*UGLY, b"internal:") if word in ended.stderr]) == ([], []), ended.stderr
        assert ended.code in (0, 1, 2, 3, 4, 141), ended


@pytest.mark.parametrize("above", ["a file", "a closed folder"])
@pytest.mark.parametrize("words", [("runs",), ("doctor",)], ids=" ".join)
def test_a_command_whose_state_folder_is_out_of_its_reach_has_no_bug(
    ground: Ground, words: tuple[str, ...], above: str
) -> None:
    place = ground.work / "a.txt"
    if above == "a closed folder":  # As root it is open; see `test_ordinary_user`.
        place = ground.work / "closed"
        place.mkdir(mode=0)
    ended = ground.call(*words, env={"BACKPLANE_HOME": str(place / "state")})
    assert not any(word in ended.stderr for word in (*UGLY, b"internal:")), ended.stderr


@pytest.mark.parametrize("name", ["x" * 300, *(["loop"] if os.geteuid() == 0 else ["loop", "closed/below"])])
def test_a_command_with_a_name_that_leads_nowhere_says_so(ground: Ground, name: str) -> None:
    (ground.work / "loop").symlink_to("loop")
    (ground.work / "closed").mkdir(mode=0)
    run_id = ground.run(hosts.GOOD, "--include", "a.txt").messages[-1]["ref_id"]
    commands = [
        ("receipts", "import", name), ("receipts", "export", run_id, "--to", f"{name}/to"), ("mcp", "--root", name),
        ("run", "x", "--sidecar", "true", "--root", name), ("run", "x", "--sidecar", "true", "--context", name),
    ]  # fmt: skip
    for words in commands:
        ended = ground.call(*words)
        assert (ended.left, b"internal:" in ended.stderr) == ([], False), ended.stderr
        assert (ended.code in (1, 2), bool(ended.error)) == (True, True), ended
