"""Keys of a terminal as lines: what is typed, what is pasted as a whole, and Ctrl-C as a word of its own.

The terminal's own line mode cuts a line at 4,096 bytes, so it is off here. `Keys` is pure: bytes in, events out;
`KeyTerminal` switches the mode and reads.
"""

from __future__ import annotations

import codecs
import os
import re
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import anyio
import msgspec

PASTE_BEGINS: Final = "\x1b[200~"
PASTE_ENDS: Final = "\x1b[201~"
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.")
_UNFINISHED: Final = re.compile(r"\x1b(\[[0-9;?]*[ -/]*|O)?\Z")
READ_BYTES_MAX: Final = 64 * 1024
TEXT_CHARS_MAX: Final = 8 * 1024 * 1024
"""Of what is typed and pasted before it is sent: half of the longest line of an order."""
SHOWN_LINES_MAX: Final = 3
"""Lines of a paste that are shown; a longer one is told by its size."""

Kind = Literal["line", "interrupt", "end"]


class Key(msgspec.Struct, frozen=True):
    """Something that was finished: a line, Ctrl-C, or Ctrl-D at the beginning of a line."""

    kind: Kind
    text: str = ""
    pasted: bool = False
    """Some of the line was pasted."""


class Keys:
    """Bytes of a terminal to keys. `echo` collects what the terminal is to show of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._parts: list[str] = []
        self._pasting: list[str] | None = None
        self._pasted = False
        self.echo = ""

    def feed(self, data: bytes) -> list[Key]:
        """Take the next bytes; return what was finished by them."""
        text, self._rest = self._rest + self._decoder.decode(data), ""
        found: list[Key] = []
        at = 0
        while at < len(text):
            if self._pasting is not None:
                at = self._paste(text, at)
                continue
            if text[at] != "\x1b":
                key = self._typed(text[at])
                at += 1
                found += [key] if key is not None else []
                continue
            if text.startswith(PASTE_BEGINS, at):
                self._pasting, at = [], at + len(PASTE_BEGINS)
                continue
            control = _CONTROL.match(text, at)
            if control is None and _UNFINISHED.match(text, at):
                self._rest = text[at:]
                break
            at = control.end() if control is not None else at + 1  # Cursor keys and the like do nothing here.
        return found

    def _paste(self, text: str, at: int) -> int:
        """Take pasted text up to the end of the paste; return where to go on."""
        assert self._pasting is not None
        end = text.find(PASTE_ENDS, at)
        if end < 0:
            # The mark of the end may be cut.
            cut = next((n for n in range(len(PASTE_ENDS) - 1, 0, -1) if text.endswith(PASTE_ENDS[:n])), 0)
            cut = min(cut, len(text) - at)
            self._pasting.append(text[at : len(text) - cut])
            self._rest = text[len(text) - cut :]
            return len(text)
        self._pasting.append(text[at:end])
        whole = "".join(self._pasting).replace("\r\n", "\n").replace("\r", "\n")
        self._pasting = None
        self._add(whole)
        self._pasted = True
        lines = whole.count("\n") + 1
        shown = whole if lines == 1 and len(whole) <= 200 else f"[{lines} lines, {len(whole)} characters]"
        self.echo += "".join(character for character in shown if character.isprintable())
        return end + len(PASTE_ENDS)

    def _add(self, text: str) -> None:
        if sum(map(len, self._parts)) + len(text) <= TEXT_CHARS_MAX:
            self._parts.append(text)

    def _typed(self, character: str) -> Key | None:
        if character in "\r\n":
            self.echo += "\r\n"
            return self._finished()
        if character == "\x03":
            self.drop()
            self.echo += "^C\r\n"
            return Key("interrupt")
        if character == "\x04":
            return Key("end") if not self._parts else None
        if character in "\x7f\b":
            if self._parts:  # A paste is taken back whole.
                gone = self._parts.pop()
                self.echo += "\b \b" if len(gone) == 1 else "\r\n"
        elif character == "\x15":
            self.drop()
            self.echo += "\r\n"
        elif character.isprintable() or character == "\t":
            self._add(character)
            self.echo += character
        return None

    def _finished(self) -> Key:
        key = Key("line", "".join(self._parts), self._pasted)
        self.drop()
        return key

    def drop(self) -> None:
        """Forget what was typed and not sent."""
        self._parts, self._pasted = [], False


class KeyTerminal:
    """A terminal that is read key by key.

    Args:
        fd: for reading and writing.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._keys = Keys()
        self._ready: list[Key] = []
        self.shows = True
        """What is typed is shown; not while an answer is."""

    @contextmanager
    def opened(self) -> Iterator[KeyTerminal]:
        """Switch line mode, echo and signals off, and marks of pastes on; and back, however the block is left."""
        before = termios.tcgetattr(self.fd)
        mode = termios.tcgetattr(self.fd)
        mode[0] &= ~(termios.ICRNL | termios.IXON)
        mode[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self.fd, termios.TCSADRAIN, mode)
        self.write("\x1b[?2004h")
        try:
            yield self
        finally:
            self.write("\x1b[?2004l")
            termios.tcsetattr(self.fd, termios.TCSADRAIN, before)

    def write(self, text: str) -> None:
        """Write all of a text."""
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(self.fd, data) :]

    async def key(self) -> Key:
        """Wait for the next key; the end of the terminal is `end`."""
        while not self._ready:
            await anyio.wait_readable(self.fd)
            try:
                data = os.read(self.fd, READ_BYTES_MAX)
            except OSError:  # Its window was closed.
                data = b""
            if not data:
                return Key("end")
            self._ready += self._keys.feed(data)
            if self.shows:
                self.write(self._keys.echo)
            self._keys.echo = ""
        return self._ready.pop(0)

    def forget(self) -> None:
        """Drop what was typed before now: it was no answer to what is asked next."""
        termios.tcflush(self.fd, termios.TCIFLUSH)
        self._keys.drop()
        self._ready = []
