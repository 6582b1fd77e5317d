"""Answers to what a run asks: always the same one, a person's on the terminal, or a program's.

A person is asked on the terminal itself, so that neither piped input nor piped output mixes with the question.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio

from backplane.cli import streams, terminal
from backplane.cli.command import wrong_words
from backplane.contract.approval import Decision, choices, chosen
from backplane.contract.events import Approval
from backplane.view.asked import decided
from backplane.view.ended import diff_line

if TYPE_CHECKING:
    from backplane.view.picture import ShownQuestion


LINE_BYTES_MAX: Final = 4096
"""Longest answer in bytes: a terminal hands over no longer line."""

SHOWN_LINES_MAX: Final = 40
"""Most lines of a proposed patch or input that are shown with the question."""

WORDS: Final = ("deny", "allow", "prompt", "wait")

KEYS: Final = "[y]es, [n]o and why, [a]lways in this run, [?]: "
HELP: Final = """\
  y          allow this once
  a          allow this, and calls like it, until the run ends
  n REASON   deny; the agent gets the reason
  ?          this help
"""
CLOSED: Final = Decision("deny", "the terminal was closed")

OnAsk = Callable[[Approval], Awaitable[Decision]]


def can_ask() -> bool:
    """Return True if a person can be asked, on the terminal that controls this process."""
    try:
        os.close(os.open(streams.TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return streams.is_interactive()


def chosen_way(given: str | None) -> str:
    """Return what answers questions: `--on-ask`, else a person if one can be asked."""
    return given or ("prompt" if can_ask() else "deny")


def callback(how: str | tuple[str, ...], clear: Callable[[], str], environ: Mapping[str, str]) -> OnAsk | None:
    """Return what answers the questions of a run; None if they wait for an answer from another terminal.

    Args:
        how: one of `WORDS`, or the words of a command, which reads a question as JSON and prints its decision.
        clear: gives the text to write before a question, which removes the foot of the terminal.

    Raises:
        ConfigError: `usage_invalid`, `prompt` without a terminal.
    """
    if how == "prompt":
        return Person(clear).answer

    async def always(asked: Approval) -> Decision:
        return Decision("allow" if how == "allow" else "deny", f"--on-ask {how}")

    async def by_program(asked: Approval) -> Decision:
        from backplane.redact.secrets import NO_SECRETS
        from backplane.runtime.hook_calls import HookFailed, ask_command

        assert isinstance(how, tuple)
        try:
            return await ask_command(how, {**asked.body, "message": asked.message}, environ, NO_SECRETS)
        except HookFailed as error:
            return Decision("deny", f"--on-ask {how[0]}: {error}")

    return None if how == "wait" else by_program if isinstance(how, tuple) else always


class Person:
    """Asks on the terminal, one question at a time."""

    def __init__(self, clear: Callable[[], str]) -> None:
        self._clear = clear
        self._turn = anyio.Lock()
        try:
            self._fd = os.open(streams.TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            raise wrong_words("--on-ask prompt needs a terminal", "give --on-ask deny or --on-ask allow") from None

    async def answer(self, asked: Approval | ShownQuestion) -> Decision:
        async with self._turn:
            self._write(self._clear())
            try:
                return await ask(asked, self._write, self._line)
            except anyio.get_cancelled_exc_class():  # Another terminal has answered, or the run has ended.
                self._write("\n")
                raise

    def _write(self, text: str) -> None:
        streams.write_to(self._fd, text.encode("utf-8", "backslashreplace"))

    async def _line(self, prompt: str) -> str | None:
        """Return one line from the terminal; None at its end."""
        self._write(prompt)
        await anyio.wait_readable(self._fd)
        data = os.read(self._fd, LINE_BYTES_MAX)
        return data.decode("utf-8", "replace").removesuffix("\n") if data else None


async def ask(
    asked: Approval | ShownQuestion, write: Callable[[str], None], line: Callable[[str], Awaitable[str | None]]
) -> Decision:
    """Ask a person until a line decides.

    Args:
        line: writes a prompt, and returns what was typed after it.
    """
    body = asked.body
    prompt, again = KEYS, HELP
    if body.get("kind") == "input":
        prompt, again = "", f"type a number from 1 to {len(choices(body.get('options')))}, or an answer in words\n"
    write(question(asked.message, body))
    while (decision := judge(await line(prompt), body)) is None:
        write(again)
    return decision


def question(message: str, body: Mapping[str, Any]) -> str:
    """Return a question as it stands on a terminal: with the command, the content or the change that it is about."""
    look, found = terminal.look(), decided(body)
    lines = found[:SHOWN_LINES_MAX]
    is_diff = any(line.startswith(("--- ", "@@ ")) for line in lines)
    shown = ["  " + (diff_line(line, look) if is_diff else line) for line in lines]
    if left := len(found) - len(lines):
        shown.append(f"  … {left} more lines, which the page of `backplane web` shows")
    return "\n".join([f"? {streams.one_line(body.get('question') or message)}", *shown]) + "\n"


def judge(line: str | None, body: Mapping[str, Any]) -> Decision | None:
    """Return the decision of a typed line; None if it is no answer: a slip of the finger or a paste decides nothing."""
    if line is None:
        return CLOSED
    if body.get("kind") == "input":
        text = chosen(line.strip(), body.get("options"))
        return None if text is None else Decision("allow", "a person answered", text=text)
    if "\n" in line:
        return None
    word, _, why = line.strip().partition(" ")
    match word.lower().rstrip(",.:"):
        case "y" | "yes":
            return Decision("allow", "a person said yes")
        case "a" | "always":
            return Decision("allow", "a person said yes for this run", remember="run")
        case "n" | "no":
            return Decision("deny", why.strip() or "a person said no")
    return None
