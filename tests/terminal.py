"""A command of ours in a pseudo-terminal, and the screen that a plain terminal would show of it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

WAIT_S = 30
_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|(\x1b.?)|([^\x1b\r\n]+)", re.S)


class Window:
    """A command in a pseudo-terminal, typed to while it runs, whose size changes."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        columns: int = 100,
        rows: int = 24,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        controls: bool = True,
    ) -> None:
        self.main, end = pty.openpty()
        self.resize(columns, rows)
        plain = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "backplane", *words], stdin=end, stdout=end, stderr=end, cwd=cwd,
            env={**plain, **(env or {})}, start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, end, termios.TIOCSCTTY, 0) if controls else None,
        )  # fmt: skip
        os.close(end)
        os.set_blocking(self.main, False)
        self.text = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Type these; what the command writes meanwhile is read, as a terminal does."""
        data = keys.encode()
        while data:
            select.select([], [self.main], [], WAIT_S)
            self.shows("")
            data = data[os.write(self.main, data[:1024]) :]

    def shows(self, words: str) -> bool:
        """Whether this has been written up to now."""
        try:
            while block := os.read(self.main, 65536):
                self.text += self.decoder.decode(block)
        except OSError:  # Nothing more for now, or nobody holds the other end any more.
            pass
        return words in self.text

    def until(self, done: Callable[[], bool]) -> None:
        """Read until this holds."""
        ends = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < ends, self.text
            select.select([self.main], [], [], 0.05)
            self.shows("")

    def ends(self) -> int:
        """Read to the end; the exit code."""
        self.until(lambda: self.child.poll() is not None)
        self.shows("")
        os.close(self.main)
        return self.child.wait(WAIT_S)


def typed(
    words: Sequence[str], *, columns: int = 80, rows: int = 24, cwd: Path | None = None, **env: str
) -> tuple[int, str]:
    """Run a command in a terminal of this size; its exit code and everything that it wrote."""
    window = Window(words, columns=columns, rows=rows, cwd=cwd, env=env)
    return window.ends(), window.text


def shown_on(words: Sequence[str], *, columns: int = 80, rows: int = 24) -> list[str]:
    """The lines that a command leaves on a terminal of this size, without colours."""
    _, text = typed(words, columns=columns, rows=rows)
    return screen(text)


def screen(text: str) -> list[str]:
    """What a terminal shows of this: lines, with cursor movements up and erased lines followed."""
    lines, row, column = [""], 0, 0
    for token in _TOKEN.finditer(text):
        number, letter, end, other, words = token.groups()
        if words is not None:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + words + line[column + len(words) :]
            column += len(words)
        elif end == "\r":
            column = 0
        elif end == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter == "K":
            lines[row] = lines[row][:column] if number in ("", "0") else ""
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "J":
            lines[row] = lines[row][:column]
            del lines[row + 1 :]
        elif letter not in ("m", "h", "l") or other is not None:
            raise AssertionError(f"unexpected on a terminal: {token[0]!r}")
    return lines
