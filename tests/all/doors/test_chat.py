"""`chat` through a real pseudo-terminal: turns, approvals, Ctrl-C, pastes, resize, edited lines."""

from __future__ import annotations

import hashlib
import os
import pty
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backplane.cli.lines import HISTORY
from backplane.providers import store
from tests.peers import PYTHON, ROOT
from tests.terminal import Window

WAIT_S = 30.0
READY = "\x1b[?2004h"
"""The editor waits for a line: pastes are marked from here on."""
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
        self.type(f"\x1b[200~{text}\x1b[201~")


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
    made = Pty(["chat", "--policy", "policy.json"], cwd=folder, env={"PROMPT_TOOLKIT_NO_CPR": "1"})
    try:
        made.wait(READY)
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
    chat.wait(READY)
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
        chat.wait(READY)


def test_a_paste_that_ends_in_a_newline_answers_no_approval(chat: Pty) -> None:
    chat.type("ask\r")
    chat.wait("[?]:")
    chat.paste("y\n")
    chat.type("\r")
    chat.wait("[?]:")
    chat.type("n not today\r")
    chat.wait("decided deny not today")


def test_what_was_typed_before_a_question_is_no_answer_to_it(chat: Pty) -> None:
    chat.type("ask\ry\r")
    chat.wait("[?]:")
    chat.type("y\r")
    chat.wait("decided allow")
    chat.wait(READY)


def test_ctrl_c_stops_the_turn_and_not_the_session(chat: Pty) -> None:
    chat.type("wait\r")
    chat.wait("working...")
    chat.type("\x03")
    chat.wait("ended: user_interrupt")
    chat.wait(READY)
    chat.type("ask\r")
    chat.wait("[?]:")
    chat.type("\x03")
    chat.wait(READY)
    chat.type("on\r")
    chat.wait(heard("on"))


def test_what_a_turn_changed_is_in_the_folder_and_shown(chat: Pty, folder: Path) -> None:
    chat.type("edit\r")
    chat.wait("edited")
    chat.wait(READY)
    chat.type("/diff\r")
    chat.wait("+made")
    assert (folder / "made.txt").read_text() == "made"
    for command, said in (("/nonsense", "/handover NAME"), ("/handover none", "backend_not_found")):
        chat.type(f"{command}\r")
        chat.wait(said)


def test_the_terminal_is_as_before_at_the_end(folder: Path, backplane_home: Path) -> None:
    main, end = pty.openpty()
    before = termios.tcgetattr(end)
    child = subprocess.Popen([*PYTHON, "-m", "backplane", "chat"], stdin=end, stdout=end, stderr=end, cwd=folder,
                             env={**os.environ, "PYTHONPATH": str(ROOT), "PROMPT_TOOLKIT_NO_CPR": "1"})  # fmt: skip
    seen, ends = b"", time.monotonic() + WAIT_S
    while READY.encode() not in seen and time.monotonic() < ends:
        seen += os.read(main, 65536)
    assert termios.tcgetattr(end) != before
    os.write(main, b"\x04")
    assert child.wait(WAIT_S) == 0
    assert termios.tcgetattr(end) == before
    while b"\x1b[?2004l" not in seen:
        seen += os.read(main, 65536)
    os.close(main)
    os.close(end)


# Keys -----------------------------------------------------------------------------------------------------------------

LEFT, UP, HOME, CTRL_W, BACKSPACE = "\x1b[D", "\x1b[A", "\x01", "\x17", "\x7f"


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        (f"helo{LEFT}l", "hello"),
        (f"one two three{CTRL_W}four", "one two four"),
        (f"漢字{BACKSPACE}語", "漢語"),
        (f"é漢x{LEFT}{LEFT}{BACKSPACE}e", "e漢x"),
        (f"world{HOME}hello ", "hello world"),
    ],
)
def test_a_line_is_edited(chat: Pty, typed: str, sent: str) -> None:
    chat.type(f"{typed}\r")
    chat.wait(heard(sent))
    chat.wait(READY)
    chat.type(f"{UP}!\r")
    chat.wait(heard(f"{sent}!"))
    chat.wait(READY)


def test_the_history_stays_and_is_for_its_user_alone(chat: Pty, folder: Path, backplane_home: Path) -> None:
    chat.type("first\r")
    chat.wait(heard("first"))
    path = backplane_home / HISTORY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Pty(["chat"], cwd=folder, env={"PROMPT_TOOLKIT_NO_CPR": "1"})
    other.wait(READY)
    other.type(f"{UP}\r")
    other.wait(heard("first"))
    other.wait(READY)
    other.type("\x04")
    assert other.ends() == 0


def test_without_the_extra_the_terminal_edits_lines(folder: Path, tmp_path: Path, backplane_home: Path) -> None:
    absent = tmp_path / "absent" / "prompt_toolkit"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError")
    chat = Pty(["chat"], cwd=folder, env={"PYTHONPATH": f"{absent.parent}:{ROOT}"})
    chat.wait("'chat'")
    chat.wait("> ")
    chat.type(f"hellp{BACKSPACE}o\r")
    chat.wait(heard("hello"))
    chat.wait("> ")
    chat.type("wait\r")
    chat.wait("working...")
    chat.type("\x03")
    chat.wait("ended: user_interrupt")
    chat.wait("> ")
    chat.type("\x04")
    assert chat.ends() == 0


def test_a_dumb_terminal_gets_no_escape(folder: Path, backplane_home: Path) -> None:
    chat = Pty(["chat"], columns=40, cwd=folder, env={"TERM": "dumb"})
    chat.wait("> ")
    chat.type("hello\r")
    chat.wait(heard("hello"))
    chat.wait("> ")
    chat.type("\x04")
    assert chat.ends() == 0
    assert "\x1b" not in chat.text


def test_without_a_terminal_each_line_is_answered_when_it_comes(folder: Path, backplane_home: Path) -> None:
    words = [*PYTHON, "-m", "backplane", "chat", "--backend", "shell"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"echo one\n")
    child.stdin.flush()
    while (line := child.stdout.readline()) != b"one\n":
        assert line
    child.stdin.write(b"echo two")
    rest, complaints = child.communicate(timeout=60)
    assert child.returncode == 0
    assert b"\ntwo\n" in rest
    assert complaints.splitlines()[-1].startswith(b"to continue this session: ")
