"""Answers to what a run asks: always no, always yes, or whatever a person types.

The person is asked on the terminal itself, so that neither piped input nor piped output is
mixed with the conversation.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from backplane.cli import streams
from backplane.contract.approval import Decision
from backplane.contract.events import Approval
from backplane.errors import ConfigError

TERMINAL: Final = "/dev/tty"

LINE_BYTES_MAX: Final = 4096
"""One answer: a terminal hands over no longer line."""

SHOWN_LINES_MAX: Final = 40
"""Lines of a proposed patch or input shown with the question."""


def callback(how: str, clear: Callable[[], str]) -> Callable[[Approval], Awaitable[Decision]]:
    """What answers the asks of a run.

    Args:
        how: deny, allow or prompt.
        clear: gives what must be written before the question, to remove a live line.

    Raises:
        ConfigError: `config_invalid`, to prompt there must be a terminal.
    """
    if how == "prompt":
        return _Person(clear).answer
    decision = Decision(decision="allow" if how == "allow" else "deny", reason=f"--on-ask {how}")

    async def always(_ask: Approval) -> Decision:
        return decision

    return always


class _Person:
    def __init__(self, clear: Callable[[], str]) -> None:
        self._clear = clear
        self._turn = anyio.Lock()
        try:
            self._fd = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            if not os.isatty(streams.STDIN):
                raise ConfigError(
                    "config_invalid", "--on-ask prompt needs a terminal", hint="--on-ask deny or --on-ask allow"
                ) from None
            self._fd = streams.STDIN

    async def answer(self, ask: Approval) -> Decision:
        """Put one question; two at once wait for each other."""
        async with self._turn:
            body = ask.body
            self._say(self._clear() + question(ask.message, body))
            if body.get("kind") == "input":
                return _reply(await self._line())
            while True:
                self._say("[y]es, [n]o, [a]lways in this run, or no and why: ")
                decision = judge(await self._line())
                if decision is not None:
                    return decision

    def _say(self, text: str) -> None:
        fd = self._fd if self._fd != streams.STDIN else streams.STDERR
        os.write(fd, text.encode("utf-8", "backslashreplace"))

    async def _line(self) -> str | None:
        """One line from the terminal; None at its end."""
        await anyio.wait_readable(self._fd)
        data = os.read(self._fd, LINE_BYTES_MAX)
        return data.decode("utf-8", "replace").strip() if data else None


def question(message: str, body: dict[str, Any]) -> str:
    """The question as it stands on the terminal."""
    lines = [f"? {streams.one_line(body.get('question') or message)}"]
    for name in ("command", "cwd"):
        if isinstance(body.get(name), str):
            lines.append(f"  {name}: {streams.one_line(body[name])}")
    shown = body.get("diff")
    if isinstance(shown, str):
        lines += ["  " + streams.printable(line) for line in shown.splitlines()[:SHOWN_LINES_MAX]]
    elif isinstance(body.get("input"), dict) and "command" not in body:
        lines += [f"  {streams.one_line(key, 40)}: {streams.one_line(value)}" for key, value in body["input"].items()]
    options = body.get("options")
    if isinstance(options, list | tuple):
        lines += [f"  {number}. {streams.one_line(_label(option))}" for number, option in enumerate(options, 1)]
    return "\n".join(lines[:SHOWN_LINES_MAX]) + "\n"


def _label(option: Any) -> Any:
    return option.get("label", option) if isinstance(option, dict) else option


def judge(line: str | None) -> Decision | None:
    """What a typed line decides; None when nothing was typed."""
    if line is None:
        return Decision(decision="deny", reason="the terminal was closed")
    word, _, why = line.partition(" ")
    word = word.lower().rstrip(",.:")
    if word in ("y", "yes"):
        return Decision(decision="allow", reason="a person said yes")
    if word in ("a", "always"):
        return Decision(decision="allow", reason="a person said yes for this run", remember="run")
    if word in ("n", "no"):
        return Decision(decision="deny", reason=why.strip() or "a person said no")
    return Decision(decision="deny", reason=line) if line else None


def _reply(line: str | None) -> Decision:
    if line is None:
        return Decision(decision="deny", reason="the terminal was closed")
    return Decision(decision="allow", text=line, reason="a person answered")
