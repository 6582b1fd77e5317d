"""Lines that a person types or a program writes into stdin, one at a time.

With the extra `chat` they can be edited: cursor keys, history, pastes of several lines. Without it the terminal's own
line mode edits them.
"""

from __future__ import annotations

import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.command import wrong
from backplane.errors import install_hint
from backplane.process.pipes import Pair
from backplane.protocol.lines import Lines, Overlong

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

MESSAGE: Final = "> "
"""The prompt of a message."""

HISTORY: Final = "chat_history"
"""Name of the history in the state folder, which only its user can read."""


class Interrupted(Exception):
    """Ctrl-C was typed in place of a line."""


class Reader:
    """Reads lines: with an editor on a terminal that it can draw on, if the extra is installed, else whole ones."""

    def __init__(self, home: Path) -> None:
        self._ends, self._lines = Pair(-1, streams.STDIN), Lines(streams.INPUT_BYTES_MAX)
        self._ready: list[bytes | Overlong] = []
        self._ended = False
        self._editors: tuple[PromptSession[str], ...] = ()
        """One for messages, one for answers, which do not go into the history."""
        if streams.is_interactive() and streams.is_painted(streams.STDOUT):
            try:
                self._editors = _editors(home)
            except ImportError:
                streams.note(f"no line editing and no history: {install_hint('chat')}")

    async def line(self, prompt: str) -> str | None:
        """Return the next line; None at the end of the input.

        Raises:
            Interrupted: Ctrl-C was typed.
            ConfigError: `config_invalid`, the line is too long.
        """
        if self._editors:
            try:
                return await self._editors[prompt != MESSAGE].prompt_async(prompt, handle_sigint=False)
            except EOFError:
                return None
        if streams.is_interactive():
            streams.write(prompt)
        while not self._ready and not self._ended:
            data = await self._ends.more()
            self._ended = not data
            self._ready += self._lines.feed(data) if data else filter(None, [self._lines.end()])
        line = self._ready.pop(0) if self._ready else None
        if isinstance(line, Overlong):
            raise wrong(f"a line of stdin is over {streams.INPUT_BYTES_MAX} bytes", "write shorter lines")
        return line.decode("utf-8", "replace").removeprefix("\ufeff") if line is not None else None

    def drop(self) -> None:
        """Forget what was typed before now: it is no answer to the next question."""
        if self._editors:
            from prompt_toolkit.input.typeahead import clear_typeahead

            for editor in self._editors:
                clear_typeahead(editor.input)
        self._ready = []
        if streams.is_terminal(streams.STDIN):
            termios.tcflush(streams.STDIN, termios.TCIFLUSH)


def _editors(home: Path) -> tuple[PromptSession[str], PromptSession[str]]:
    """Return line editors in which Enter sends a paste of several lines as a whole. Raises ImportError."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    (home / HISTORY).touch(0o600)
    given: dict[str, Any] = {"interrupt_exception": Interrupted, "enable_suspend": True}
    return PromptSession(history=FileHistory(str(home / HISTORY)), **given), PromptSession(**given)


@contextmanager
def unseen() -> Iterator[None]:
    """Echo nothing of what is typed inside the block; it is read after it."""
    if not streams.is_terminal(streams.STDIN):
        yield
        return
    before = termios.tcgetattr(streams.STDIN)
    mode = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(streams.STDIN, termios.TCSADRAIN, mode)
    try:
        yield
    finally:
        termios.tcsetattr(streams.STDIN, termios.TCSADRAIN, before)
