"""Answers to what a run asks: always no, always yes, what a person types, or what a program says.

The person is asked on the terminal itself, so that neither piped input nor piped output is
mixed with the conversation. A program is started for each question, or writes `answer` lines into our stdin.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

import anyio
import msgspec

from backplane.cli import streams
from backplane.cli.command import wrong, wrong_words
from backplane.cli.console import Look, diff_line
from backplane.contract.approval import Decision, choices, chosen
from backplane.contract.events import Approval
from backplane.process.pipes import Pair
from backplane.protocol import Lines, Overlong, strict
from backplane.view.asked import decided

TERMINAL: Final = "/dev/tty"

LINE_BYTES_MAX: Final = 4096
"""One answer: a terminal hands over no longer line."""

SHOWN_LINES_MAX: Final = 40
"""Lines of a proposed patch or input shown with the question."""


WORDS: Final = ("deny", "allow", "prompt", "stdin", "wait")

KEYS: Final = "[y]es, [n]o and why, [a]lways in this run, [?]: "
HELP: Final = """\
  y          allow this once
  a          allow this tool until the run ends
  n REASON   deny; the agent is told the reason
  ?          this help
"""

ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""One `answer` line: as long as a hook's answer may be."""


def callback(
    how: str | tuple[str, ...], clear: Callable[[], str], environ: Mapping[str, str]
) -> Callable[[Approval], Awaitable[Decision]] | None:
    """Return what answers the asks of a run here; None where they wait for an answer from elsewhere.

    Args:
        how: one of `WORDS`, or the words of a command.
        clear: gives what must be written before the question, to remove a live line.
        environ: of the command.

    Raises:
        ConfigError: `usage_invalid`, to prompt there must be a terminal.
    """
    if how == "prompt":
        return _Person(clear).answer
    if how == "wait":
        return None
    if how == "stdin":
        return _AnswerLines(streams.STDIN).answer
    if isinstance(how, tuple):
        return _Command(how, environ).answer
    decision = Decision(decision="allow" if how == "allow" else "deny", reason=f"--on-ask {how}")

    async def always(_ask: Approval) -> Decision:
        return decision

    return always


class _Command:
    """Starts a program for each question: the ask as JSON on its stdin, its decision as JSON on its stdout."""

    def __init__(self, argv: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self._argv = argv
        self._environ = environ

    async def answer(self, ask: Approval) -> Decision:
        """Ask the program; one that fails denies."""
        from backplane.redact.secrets import NO_SECRETS
        from backplane.runtime.hook_calls import HookFailed, ask_command

        try:
            return await ask_command(self._argv, {**ask.body, "message": ask.message}, self._environ, NO_SECRETS)
        except HookFailed as error:
            return Decision("deny", f"--on-ask {self._argv[0]}: {error}")


class _AnswerLines:
    """Reads `answer` lines, whichever question they belong to; one of those that wait for an answer reads for all."""

    def __init__(self, fd: int) -> None:
        self._ends = Pair(-1, fd)  # Nothing is written.
        self._lines = Lines(ANSWER_BYTES_MAX)
        self._ended = self._reading = False
        self._answers: dict[str, Decision] = {}
        self._changed = anyio.Condition()

    async def answer(self, ask: Approval) -> Decision:
        """Wait for the answer to one question; the end of the input denies."""
        id = str(ask.body.get("id"))
        async with self._changed:
            while id not in self._answers and not self._ended:
                if self._reading:
                    await self._changed.wait()
                    continue
                self._reading = True
                self._changed.release()
                try:
                    data = await self._ends.more()
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._changed.acquire()
                    self._reading = False
                    self._changed.notify_all()
                self._take(data)
        return self._answers.pop(id, None) or Decision("deny", "the input with answers was closed")

    def _take(self, data: bytes) -> None:
        self._ended = not data
        for line in filter(bytes.strip, self._lines.feed(data) if data else [self._lines.end()]):
            if isinstance(line, Overlong):
                raise wrong(f"an answer line of over {ANSWER_BYTES_MAX} bytes", "answer in fewer words")
            try:
                read = msgspec.convert(strict(line), _AnswerLine)
                self._answers[read.id] = read.to_decision()
            except ValueError as error:
                words = f"a line on stdin is no answer, and is passed over: {streams.one_line(str(error), 200)}"
                streams.error(wrong(words, "backplane schema envelope_answer"))


class _AnswerLine(Decision, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The protocol's `answer`; which run it is for need not be said."""

    id: str
    t: Literal["answer"] = "answer"
    ref_id: str = ""
    reason: str = "a program answered"

    def to_decision(self) -> Decision:
        return Decision(**{name: getattr(self, name) for name in Decision.__struct_fields__})


class _Person:
    def __init__(self, clear: Callable[[], str]) -> None:
        self._clear = clear
        self._turn = anyio.Lock()
        try:
            self._fd = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            if not os.isatty(streams.STDIN):
                raise wrong_words("--on-ask prompt needs a terminal", "--on-ask deny or --on-ask allow") from None
            self._fd = streams.STDIN

    async def answer(self, ask: Approval) -> Decision:
        """Put one question; two at once wait for each other."""
        async with self._turn:
            self._say(self._clear() + question(ask.message, ask.body))
            try:
                return await self._decided(ask)
            except anyio.get_cancelled_exc_class():  # Somebody else has answered, or the run is over.
                self._say("\n")
                raise

    async def _decided(self, ask: Approval) -> Decision:
        if ask.body.get("kind") == "input":
            while (answer := reply(await self._line(), ask.body)) is None:
                self._say(offer(ask.body))
            return answer
        while True:
            self._say(KEYS)
            decision = judge(await self._line())
            if decision is not None:
                return decision
            self._say(HELP)

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
    look = Look.here()
    found = decided(body)
    lines = found[:SHOWN_LINES_MAX]
    left = len(found) - len(lines)
    more = [f"  … {left} more lines, which the page of `backplane web` shows"] if left else []
    # In the colours of a diff where it is one.
    is_diff = any(line.startswith(("--- ", "@@ ")) for line in lines)
    shown = ["  " + (diff_line(line, look) if is_diff else line) for line in lines]
    return "\n".join([f"? {streams.one_line(body.get('question') or message)}", *shown, *more]) + "\n"


def judge(line: str | None) -> Decision | None:
    """What a typed line decides; None for what is none of the keys: a slip of the finger decides nothing."""
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
    return None


def reply(line: str | None, body: Mapping[str, Any]) -> Decision | None:
    """Return the answer that a typed line gives to a question; None for a number that no option has."""
    if line is None:
        return Decision(decision="deny", reason="the terminal was closed")
    words = chosen(line, body.get("options"))
    return None if words is None else Decision(decision="allow", text=words, reason="a person answered")


def offer(body: Mapping[str, Any]) -> str:
    """Return the prompt for a question that is answered in words."""
    return f"type a number from 1 to {len(choices(body.get('options')))}, or an answer in words\n"
