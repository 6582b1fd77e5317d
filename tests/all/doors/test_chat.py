"""`chat` through a real pseudo-terminal: turns, approvals, Ctrl-C, pastes, resize; and its keys as pure functions."""

from __future__ import annotations

import hashlib
import itertools
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli.keys import PASTE_BEGINS, PASTE_ENDS, Key, Keys
from backplane.providers import store
from tests.peers import PYTHON, ROOT
from tests.terminal import Window

WAIT_S = 30.0
HOST = """
import hashlib, json, os
from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, main

async def work(run):
    task = run.order.task
    last = task.rpartition("\\n\\n")[2] if task.startswith("What was said") else task
    if last.startswith("ask"):
        decision = await run.may("deploy", {"to": "prod"}, command="deploy prod")
        await run.message(f"decided {decision.decision} {decision.reason}")
    elif last == "wait":
        import anyio
        await run.delta("working...")
        await anyio.sleep_forever()
    elif last == "edit":
        with open(os.path.join(run.order.workspace.root, "made.txt"), "w") as file:
            file.write("made")
        await run.message("edited")
    else:
        await run.message(f"heard {len(last)} {hashlib.sha256(last.encode()).hexdigest()[:12]}")
    return Done()

main(Host(id="talks", capabilities={"streaming": NATIVE}, heeds=("context",)), work)
"""


class Pty(Window):
    """A chat on a terminal; what was waited for is behind."""

    at = 0

    def wait(self, words: str) -> str:
        """Read until these words come, after those that were waited for before."""
        self.until(lambda: words in self.text[self.at :])
        began, self.at = self.at, self.text.index(words, self.at) + len(words)
        return self.text[began : self.at]

    def paste(self, text: str) -> None:
        self.type(f"{PASTE_BEGINS}{text}{PASTE_ENDS}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "talks.py").write_text(HOST)
    row = f'[backends.talks]\ncommand = ["{sys.executable}", "{tmp_path}/talks.py"]\n'
    (work / "backplane.toml").write_text(f'isolation = "off"\ndefault_backend = "talks"\n{row}')
    (work / "policy.json").write_text('{"require_approval_for": ["deploy"]}')
    return work


@pytest.fixture
def chat(folder: Path, backplane_home: Path) -> Iterator[Pty]:
    made = Pty(["chat", "--policy", "policy.json"], cwd=folder)
    try:
        made.wait("> ")
        yield made
        made.type("/quit\r")
        made.wait("backplane chat --resume")
        assert made.ends() == 0
    finally:
        if made.child.poll() is None:
            made.child.kill()
            made.child.wait(WAIT_S)


def heard(text: str) -> str:
    return f"heard {len(text)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def test_a_turn_is_said_and_answered_and_its_session_kept(chat: Pty, backplane_home: Path) -> None:
    chat.type("hello\r")
    chat.wait(heard("hello"))
    chat.wait("> ")
    chat.type("/history\r")
    assert "> hello" in chat.wait(heard("hello"))
    chat.resize(40, 10)
    chat.type("again\r")
    chat.wait(heard("again"))
    (file,) = store.listed(backplane_home)
    assert not isinstance(file, Exception)
    assert len(file.turns) >= 1


def test_a_paste_arrives_whole_and_is_sent_by_enter_alone(chat: Pty) -> None:
    for text in ("\n".join(f"line {number}" for number in range(100)), "ü😀" * 300):
        chat.paste(text)
        time.sleep(0.3)
        chat.shows("")
        assert "heard" not in chat.text[chat.at :]
        chat.type("\r")
        chat.wait(heard(text))
        chat.wait("> ")


def test_a_paste_that_ends_in_a_newline_answers_no_approval(chat: Pty) -> None:
    chat.type("ask\r")
    chat.wait("or no and why: ")
    chat.paste("y\n")
    chat.type("\r")
    chat.wait("a paste is no answer")
    chat.wait("or no and why: ")
    chat.type("n not today\r")
    chat.wait("decided deny not today")


def test_what_was_typed_before_a_question_is_no_answer_to_it(chat: Pty) -> None:
    chat.type("ask\ry\r")
    chat.wait("or no and why: ")
    chat.type("y\r")
    chat.wait("decided allow")
    chat.wait("> ")


def test_ctrl_c_stops_the_turn_and_not_the_session(chat: Pty) -> None:
    chat.type("wait\r")
    chat.wait("working...")
    chat.type("\x03")
    chat.wait("ended: user_interrupt")
    chat.wait("> ")
    chat.type("ask\r")
    chat.wait("or no and why: ")
    chat.type("\x03")
    chat.wait("> ")
    chat.type("on\r")
    chat.wait(heard("on"))


def test_what_a_turn_changed_is_in_the_folder_and_shown(chat: Pty, folder: Path) -> None:
    chat.type("edit\r")
    chat.wait("edited")
    chat.wait("> ")
    chat.type("/diff\r")
    chat.wait("+made")
    assert (folder / "made.txt").read_text() == "made"
    for command, said in (("/usage", "tokens in"), ("/nonsense", "/nonsense"), ("/handover none", "backend_not_found")):
        chat.type(f"{command}\r")
        chat.wait(said)


def test_the_terminal_is_as_before_at_the_end(folder: Path, backplane_home: Path) -> None:
    main, end = pty.openpty()
    before = termios.tcgetattr(end)
    child = subprocess.Popen([*PYTHON, "-m", "backplane", "chat"], stdin=end, stdout=end, stderr=end, cwd=folder,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    seen, ends = b"", time.monotonic() + WAIT_S
    while b"> " not in seen and time.monotonic() < ends:
        seen += os.read(main, 65536)
    assert termios.tcgetattr(end) != before
    os.write(main, b"\x04")
    assert child.wait(WAIT_S) == 0
    assert termios.tcgetattr(end) == before
    while not seen.endswith(b"\x1b[?2004l"):
        seen += os.read(main, 65536)
    os.close(main)
    os.close(end)


# Keys -----------------------------------------------------------------------------------------------------------------

TYPED = "hi\x7f\x7fho\r" + "\x1b[A" + f"{PASTE_BEGINS}a\r\nb{PASTE_ENDS}" + "!\r\x03ü\x15x\r\x04"
EXPECTED = [
    Key("line", "ho"), Key("line", "a\nb!", pasted=True), Key("interrupt"), Key("line", "x"), Key("end")
]  # fmt: skip


@given(st.lists(st.integers(0, len(TYPED.encode()))))
def test_keys_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    keys, data, found = Keys(), TYPED.encode(), []
    places = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        found += keys.feed(data[begin:end])
    assert found == EXPECTED


def test_without_a_terminal_each_line_is_answered_when_it_comes(folder: Path, backplane_home: Path) -> None:
    words = [*PYTHON, "-m", "backplane", "chat", "--backend", "shell"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"echo one\n")
    child.stdin.flush()
    while b"tool done: one" not in (line := child.stdout.readline()):
        assert line
    child.stdin.write(b"echo two")
    rest, complaints = child.communicate(timeout=60)
    assert child.returncode == 0
    assert b"tool done: two" in rest
    assert complaints.splitlines()[-1].startswith(b"session ")
