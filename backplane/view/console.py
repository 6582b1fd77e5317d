"""Draws events for a terminal and for pipes: the one renderer of run, watch, chat, demo and `receipts show`. Pure.

A terminal gets marks, colours and prose wrapped at words; anything else gets words. Foreign text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.contract import events as kinds
from backplane.contract.deltas import taken_back
from backplane.contract.events import AgentEvent
from backplane.view.columns import Line, Span, wrapped
from backplane.view.markdown import Markdown
from backplane.view.text import in_workspace, one_line, printable
from backplane.view.values import TEXT_CHARS_MAX, about, words_of

PREVIEW_LINES_MAX: Final = 10
"""Most lines of a command's output that are shown: enough for the error at its end."""

UNWORDED: Final = "a message of the kind "
"""The beginning of a warning about a message of a driven agent that is stored and means nothing to people."""

CALLS_MAX: Final = 100
"""Most open calls whose command is not repeated at their end; agents have a handful at a time."""

_CHARS_MAX: Final = 160

_COLOURS: Final = {
    "dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36",
    "bad": "31", "good": "32", "warn": "33", "live": "36",
}  # fmt: skip
"""Colour, or tone of a run's state (`figures.standing`) → its code."""


class _ShownCall(msgspec.Struct, eq=False):
    """A call whose command was shown; a command and a result end it, in either order."""

    tool: str
    id: str | None
    command: str
    ended_by: type[AgentEvent] | None = None
    """The type of the one of both that came first."""


class Look:
    """Draws events one after the other; it knows the streamed line that has no end yet.

    Args:
        terminal: draw marks and wrap prose; a line without end waits in `written`, to be painted apart.
        colours: use colours (default: on a terminal).
        sessions: show the id of a conversation.
        columns: gives the width at which prose is wrapped; 0 for no wrapping.
    """

    def __init__(
        self,
        terminal: bool,
        *,
        colours: bool | None = None,
        sessions: bool = False,
        columns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.terminal = terminal
        self.colours = terminal if colours is None else colours
        self.written = ""
        """The line that the agent has begun and not ended."""
        self.sessions, self._columns = sessions, columns
        self._dressed: Callable[[str], str] = printable
        """Draws `written`: as words of the agent, or as output of a command."""
        self._markdown = Markdown()
        self._streamed = ""
        self._has_output = False
        self._calls: list[_ShownCall] = []
        self._is_open = False
        """True if the last text did not end its line."""

    def dress(self, colour: str, text: str) -> str:
        """Return printable text in a colour, or as it is without colours."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colours else text

    def dress_line(self, line: Line) -> str:
        """Return a line with the colours of its parts."""
        return "".join(self.dress(span.colour, span.text) if span.colour else span.text for span in line)

    def event(self, event: AgentEvent) -> str:
        """Return the text to write for an event; empty if it is for programs only."""
        if type(event) is kinds.AssistantDelta:
            self._streamed = (self._streamed + event.text)[-TEXT_CHARS_MAX:]
            return self._stream(event.text, self._words)
        if isinstance(event, kinds.AssistantMessage):
            return self._message(event.text)
        if isinstance(event, kinds.OutputReported):
            self._has_output = True
            return self._stream(str(event.body.get("text", "")), self._output)
        if isinstance(event, kinds.RetryReported) and taken_back(event):
            self._streamed = ""  # No message repeats these words.
        said, draw = _SAID.get(type(event)), _DRAWN.get(type(event))
        if said is not None:
            text = "" if self._is_silent(event) else self.line(*said, one_line(event.message))  # type: ignore[union-attr]
        else:
            text = draw(self, event) if draw is not None else ""
        return f"{self.end_line()}{text}\n" if text else ""

    def _is_silent(self, event: AgentEvent) -> bool:
        """Return True if the message of an event means nothing to people, or stands elsewhere."""
        match event:
            case kinds.Warned(message=message, ext=dict() as ext) if message.startswith(UNWORDED):
                return "raw_message" in ext
            case kinds.ApprovalAnswered(body=body):  # A call that no rule forbids is allowed without a question.
                return body.get("by") == "policy" and body.get("decision") == "allow"
            case kinds.TaskReported(body=body):  # On a terminal the foot shows the plan.
                return self.terminal and isinstance(body.get("plan"), list)
        return False

    def end_line(self) -> str:
        """Return what ends the line that streamed text has left open."""
        rest, self.written = self.written, ""
        ended, self._is_open = ("\n" if self._is_open else ""), False
        return (self._dressed(rest) if rest else "") + ended

    def _stream(self, text: str, dressed: Callable[[str], str]) -> str:
        """Return text at once, or on a terminal line by line."""
        if not text:
            return ""
        self._is_open = not text.endswith("\n")
        if not self.terminal:
            return dressed(text)
        *whole, self.written = (self.written + text).split("\n")
        self._dressed = dressed
        return "".join([f"{dressed(line)}\n" for line in whole])

    def _output(self, text: str) -> str:
        return self.dress("dim", printable(text)) if text else ""

    def _words(self, text: str) -> str:
        """Draw words of the agent: on a terminal one line of them as Markdown, whose marks stay without colours."""
        text = printable(text)
        if not self.terminal:
            return text
        line = self._markdown.line(text)
        line, indent = line if self.colours else (Span(text),), self._markdown.indent
        columns = self._columns() if indent is not None else 0
        parts = wrapped(line, columns, indent or 0) if columns > 0 else (line,)
        return "\n".join(map(self.dress_line, parts))

    def _message(self, text: str) -> str:
        """Draw a whole message, unless it was streamed before."""
        streamed, self._streamed = self._streamed.strip(), ""
        ended, self._markdown = self.end_line(), Markdown()
        if streamed and text.strip()[-TEXT_CHARS_MAX:].endswith(streamed):
            return ended
        whole = "".join([f"{self._words(line)}\n" for line in text.rstrip().split("\n")])
        self._markdown = Markdown()
        return ended + whole

    def called(self, event: kinds.ToolCall) -> None:
        """Note the command of a call that is shown, so that its end does not repeat it."""
        command = event.input.get("command", event.input.get("cmd")) if isinstance(event.input, dict) else None
        if isinstance(command, str):
            self._calls = [*self._calls[1 - CALLS_MAX :], _ShownCall(event.tool_name, event.tool_use_id, command)]

    def ending(self, event: kinds.CommandExecuted | kinds.ToolResult) -> tuple[_ShownCall | None, bool]:
        """Return the shown call that an event ends, and whether an earlier event has shown its end."""
        for call in self._calls:
            is_ours = (
                call.command == event.command
                if isinstance(event, kinds.CommandExecuted)
                else call.id == event.tool_use_id
            )
            if is_ours and call.ended_by is not type(event):
                is_shown, call.ended_by = call.ended_by is not None, type(event)
                if is_shown:
                    self._calls.remove(call)
                return call, is_shown
        return None, False

    def preview(self, text: str) -> list[str]:
        """Return the end of a command's output, unless it was shown as it came."""
        shown, self._has_output = self._has_output, False
        lines = [] if shown else text.rstrip().splitlines()
        more = [f"  … {len(lines) - PREVIEW_LINES_MAX} lines before"] if len(lines) > PREVIEW_LINES_MAX else []
        return [self.dress("dim", line) for line in more + [f"  {printable(it)}" for it in lines[-PREVIEW_LINES_MAX:]]]

    def line(self, mark: str, word: str, colour: str, text: str) -> str:
        """Return a line that begins with a mark on a terminal, and with a word elsewhere."""
        return f"{self.dress(colour, mark if self.terminal else f'{word}:')} {text}"


def _reasoning(look: Look, event: kinds.Reasoning) -> str:
    return look.dress("dim", printable(event.reasoning)) if look.terminal and event.reasoning else ""


def _tool_call(look: Look, event: kinds.ToolCall) -> str:
    look.called(event)
    input = one_line(in_workspace(about(event.input)), _CHARS_MAX)
    return look.line("→", "tool", "cyan", f"{one_line(event.tool_name)} {input}".rstrip())


def _end_of_call(look: Look, good: bool, text: str) -> str:
    return look.line(*(("✓", "tool done", "green") if good else ("✗", "tool failed", "red")), text.rstrip())


def _tool_result(look: Look, event: kinds.ToolResult) -> str:
    if look.ending(event)[1]:
        return ""
    first = words_of(event.output).strip().split("\n", 1)[0]
    name, text = one_line(event.tool_name), one_line(in_workspace(first), _CHARS_MAX)
    return _end_of_call(
        look, not event.is_error, f"{name}: {text}" if event.is_error else f"{name} {look.dress('dim', text)}"
    )


def _command(look: Look, event: kinds.CommandExecuted) -> str:
    code = "ended by a signal" if event.exit_code is None else f"exit {event.exit_code}"
    good, (call, is_shown) = event.exit_code == 0, look.ending(event)
    if is_shown:
        return ""
    if call is not None:
        text = _end_of_call(look, good, f"{one_line(call.tool)}  ({code})")
    else:
        command = f"{one_line(in_workspace(event.command))}  ({code})"
        text = look.line("$", "command", "green" if good else "red", command)
    return "\n".join([text, *look.preview(event.output_preview or "")])


def _file(look: Look, event: kinds.FileChanged) -> str:
    text = f"{one_line(in_workspace(event.path))}  {one_line(event.summary, _CHARS_MAX)}"
    return look.line("✎", "file", "yellow", text.rstrip())


def _failed(look: Look, event: kinds.Failed) -> str:
    code = f" ({one_line(event.error_code)})" if isinstance(event.error_code, str) else ""
    return look.line("✗", "error", "red", one_line(event.message) + code)


def _session(look: Look, event: kinds.SessionNamed) -> str:
    """Draw the id of a conversation alone: the message may be any text, and the id is typed into an order."""
    word = "conversation " if look.terminal else ""
    return look.line("·", "conversation", "dim", word + one_line(event.body.get("id"))) if look.sessions else ""


_NOTE: Final = ("·", "note", "dim")
_SAID: Final[dict[type[Any], tuple[str, str, str]]] = {
    kinds.RunStarted: ("▶", "started", "bold"),
    kinds.RunCompleted: ("■", "ended", "bold"),
    kinds.Warned: ("!", "warning", "yellow"),
    kinds.Unread: ("!", "warning", "yellow"),
    kinds.ApprovalAnswered: ("=", "answered", "blue"),
    kinds.TaskReported: _NOTE,
    kinds.RetryReported: _NOTE,
    kinds.LossReported: _NOTE,
}
"""Mark, word and colour of each type of event that is drawn by its message."""
_DRAWN: Final[dict[type[Any], Callable[[Look, Any], str]]] = {
    kinds.Reasoning: _reasoning,
    kinds.ToolCall: _tool_call,
    kinds.ToolResult: _tool_result,
    kinds.FileChanged: _file,
    kinds.CommandExecuted: _command,
    kinds.Failed: _failed,
    kinds.SessionNamed: _session,
}
"""Draws each other type of event that people see; a type that is missing is for programs."""
