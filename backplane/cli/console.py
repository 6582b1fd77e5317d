"""Events and results as text for people; whatever a child said is escaped.

Two looks: marks and colours on a terminal, words on anything else. Nothing is written here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.cli.streams import STDOUT, is_coloured, is_painted, one_line, printable
from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.deltas import taken_back
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Receipt
from backplane.view.findings import outcome_words, remarks
from backplane.view.text import in_workspace
from backplane.view.values import about, as_list, as_object, words_of

if TYPE_CHECKING:
    from backplane.view.columns import Line
    from backplane.view.markdown import Markdown

PREVIEW_LINES_MAX: Final = 10
"""Lines of a command's output shown: enough for the error at its end."""

DIFF_LINES_MAX: Final = 300
"""Lines of the diff shown at the end of a run; the whole is in the patch file."""

TEXT_CHARS_MAX: Final = 16 * 1024
"""Remembered of a streamed answer, to know it again when the whole message follows."""

VALUE_CHARS_MAX: Final = 4000
"""Of an answer of the shape that an order asked for: it is what the run was for, and the receipt has all of it."""

UNWORDED: Final = "a message of the kind "
"""How hosts of driven agents name a message that they only keep."""

VIOLATIONS_MAX: Final = 5
"""Lines about what a rule forbids and was done: the first say what has to be looked at."""

CALLS_MAX: Final = 100
"""Open calls whose commands are known again; agents have a handful at a time."""

_CHARS_MAX: Final = 160

_COLOURS: Final = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


def decided(receipt: Receipt) -> Iterator[str]:
    """What the control plane decided about an ended run: how it ended, what held it, what was kept."""
    added = receipt.backplane
    yield f"end {msgspec.json.encode(added.get('end')).decode()}"
    held = as_object(added.get("enforcement"))
    for name, row in as_object(held.get("kinds")).items():
        by = ", ".join(map(str, as_object(row).get("by", ())))
        yield f"{name}: {as_object(row).get('state')}{f' by {by}' if by else ''}"
    if proxy := as_object(added.get("key_proxy")):
        yield f"model's key: {proxy.get('state')} by key proxy (requests: {proxy.get('with_key')})"
    yield f"approvals: {held.get('approvals', 'unknown')}"
    yield f"receipt {receipt.receipt_sha256}"


class _ShownCommand(msgspec.Struct, eq=False):
    """A tool's call that has shown a command."""

    tool: str
    id: str | None
    command: str
    has_run: bool = False
    has_result: bool = False


class Look:
    """How text is dressed: on a terminal with marks and colours, elsewhere in words."""

    def __init__(self, terminal: bool, *, colours: bool | None = None, sessions: bool = False) -> None:
        self.terminal = terminal
        self.colours = terminal if colours is None else colours
        self.sessions = sessions
        """Whether a conversation's id is of use after the run."""
        self.written = ""
        """The line that the agent has begun and not ended; on a terminal it goes out when it is whole."""
        self._written_as: Callable[[str], str] = printable
        self._markdown: Markdown | None = None
        self._streamed = ""
        self._live_output = False
        self._calls: list[_ShownCommand] = []
        """Calls whose command was shown and that are not over, oldest first."""
        self.open_line = False

    @classmethod
    def here(cls, *, plain: bool = False, sessions: bool = False) -> Look:
        """As the terminal on stdout and the environment want it."""
        terminal = not plain and is_painted(STDOUT)
        return cls(terminal, colours=is_coloured(STDOUT), sessions=sessions)

    def dress(self, colour: str, text: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colours else text

    def dress_line(self, line: Line) -> str:
        """A line with the colours of its parts."""
        return "".join(self.dress(span.colour, span.text) if span.colour else span.text for span in line)

    def event(self, event: AgentEvent) -> str:
        """The event as text to write; empty when there is nothing to see."""
        if type(event) is kinds.AssistantDelta:
            return self._delta(event.text)
        if isinstance(event, kinds.AssistantMessage):
            return self._message(event.text)
        if isinstance(event, kinds.OutputReported):
            return self._output(str(event.body.get("text", "")))
        make = _SHOWN.get(type(event))
        text = make(self, event) if make is not None else ""
        return f"{self.end_line()}{text}\n" if text else ""

    def end_line(self) -> str:
        """What ends the line that streamed text has left open."""
        rest, self.written = self.written, ""
        ended, self.open_line = ("\n" if self.open_line else ""), False
        return (self._written_as(rest) if rest else "") + ended

    def _stream(self, text: str, dressed: Callable[[str], str]) -> str:
        """Text as it comes: at once, or line by line where the line that has no end yet is painted apart."""
        if not text:
            return ""
        self.open_line = not text.endswith("\n")
        if not self.terminal:
            return dressed(text)
        *whole, rest = text.split("\n")
        if whole:
            whole[0] = self.written + whole[0]
            self.written = ""
        self.written += rest
        self._written_as = dressed
        return "".join([f"{dressed(line)}\n" for line in whole])

    def _delta(self, text: str) -> str:
        self._streamed = (self._streamed + text)[-TEXT_CHARS_MAX:]
        return self._stream(text, self._words if self.terminal and self.colours else printable)

    def _words(self, line: str) -> str:
        """A line of the agent's words; without colours its marks stay."""
        if self._markdown is None:
            from backplane.view.markdown import Markdown

            self._markdown = Markdown()
        return self.dress_line(self._markdown.line(printable(line)))

    def forget(self) -> None:
        """Expect the words that were streamed in no message any more."""
        self._streamed = ""

    def _message(self, text: str) -> str:
        """The whole message; only what of it was not streamed before."""
        streamed, self._streamed = self._streamed, ""
        ended, self._markdown = self.end_line(), None
        if streamed and text.strip()[-TEXT_CHARS_MAX:].endswith(streamed.strip()):
            return ended
        if not (self.terminal and self.colours):
            return f"{ended}{printable(text.rstrip())}\n"
        whole = "".join([f"{self._words(line)}\n" for line in text.rstrip().split("\n")])
        self._markdown = None
        return ended + whole

    def _output(self, text: str) -> str:
        self._live_output = True
        return self._stream(text, lambda line: self.dress("dim", printable(line)) if line else "")

    def preview(self, text: str) -> list[str]:
        """The end of a command's output, unless it was shown while it came."""
        shown, self._live_output = self._live_output, False
        lines = [] if shown else text.rstrip().splitlines()
        more = [f"  … {len(lines) - PREVIEW_LINES_MAX} lines before"] if len(lines) > PREVIEW_LINES_MAX else []
        return [
            self.dress("dim", line) for line in more + [f"  {printable(line)}" for line in lines[-PREVIEW_LINES_MAX:]]
        ]

    def called(self, event: kinds.ToolCall) -> None:
        """Remember the command of a call that is shown, so that it is shown once."""
        command = event.input.get("command", event.input.get("cmd")) if isinstance(event.input, dict) else None
        if isinstance(command, str):
            self._calls = [*self._calls[1 - CALLS_MAX :], _ShownCommand(event.tool_name, event.tool_use_id, command)]

    def ran(self, event: kinds.CommandExecuted) -> _ShownCommand | None:
        """The call that has shown this command; None where none has."""
        call = next((call for call in self._calls if call.command == event.command and not call.has_run), None)
        if call is not None:
            call.has_run = True
            self._forget(call)
        return call

    def ended(self, event: kinds.ToolResult) -> _ShownCommand | None:
        """The call that has shown the command with this result; None where none has."""
        call = next((call for call in self._calls if call.id == event.tool_use_id and not call.has_result), None)
        if call is not None:
            call.has_result = True
            self._forget(call)
        return call

    def _forget(self, call: _ShownCommand) -> None:
        if call.has_run and call.has_result:
            self._calls.remove(call)

    def _line(self, mark: str, word: str, colour: str, text: str) -> str:
        head = mark if self.terminal else f"{word}:"
        return f"{self.dress(colour, head)} {text}"


def _reasoning(look: Look, event: Any) -> str:
    return look.dress("dim", printable(event.reasoning)) if look.terminal and event.reasoning else ""


def _tool_call(look: Look, event: Any) -> str:
    look.called(event)
    return look._line("→", "tool", "cyan", f"{one_line(event.tool_name)} {_input(event.input)}".rstrip())


def _tool_result(look: Look, event: Any) -> str:
    call = look.ended(event)
    if call is not None and call.has_run:  # Told with the command's exit code.
        return ""
    text = one_line(in_workspace(_first_line(event.output)), _CHARS_MAX)
    if event.is_error:
        return look._line("✗", "tool failed", "red", f"{one_line(event.tool_name)}: {text}")
    return look._line("✓", "tool done", "green", f"{one_line(event.tool_name)} {look.dress('dim', text)}".rstrip())


def _file(look: Look, event: Any) -> str:
    return look._line(
        "✎", "file", "yellow", f"{one_line(in_workspace(event.path))}  {one_line(event.summary, _CHARS_MAX)}".rstrip()
    )


def _command(look: Look, event: Any) -> str:
    code = "ended by a signal" if event.exit_code is None else f"exit {event.exit_code}"
    good, call = event.exit_code == 0, look.ran(event)
    if call is not None and call.has_result:
        return ""
    if call is not None:
        mark, word, colour = ("✓", "tool done", "green") if good else ("✗", "tool failed", "red")
        text = look._line(mark, word, colour, f"{one_line(call.tool)}  ({code})")
    else:
        text = look._line(
            "$", "command", "green" if good else "red", f"{one_line(in_workspace(event.command))}  ({code})"
        )
    return "\n".join([text, *look.preview(event.output_preview or "")])


def _started(look: Look, event: Any) -> str:
    return look._line("▶", "started", "bold", one_line(event.message))


def _completed(look: Look, event: Any) -> str:
    return look._line("■", "ended", "bold", one_line(event.message))


def _warning(look: Look, event: Any) -> str:
    # What a driven agent said and the contract has no word for is kept for programs, and warns of nothing.
    if event.message.startswith(UNWORDED) and isinstance(event.ext, dict) and "raw_message" in event.ext:
        return ""
    return look._line("!", "warning", "yellow", one_line(event.message))


def _failed(look: Look, event: Any) -> str:
    code = f" ({one_line(event.error_code)})" if isinstance(event.error_code, str) else ""
    return look._line("✗", "error", "red", one_line(event.message) + code)


def _answer(look: Look, event: Any) -> str:
    # What no rule forbids is allowed without anybody being asked: that is not worth a line.
    if event.body.get("by") == "policy" and event.body.get("decision") == "allow":
        return ""
    return look._line("=", "answered", "blue", one_line(event.message))


def _note(look: Look, event: Any) -> str:
    return look._line("·", "note", "dim", one_line(event.message))


def _task(look: Look, event: Any) -> str:
    # A plan stands at the foot of a terminal as it is now.
    return "" if look.terminal and isinstance(event.body.get("plan"), list) else _note(look, event)


def _retry(look: Look, event: Any) -> str:
    if taken_back(event):
        look.forget()
    return _note(look, event)


def _session(look: Look, event: Any) -> str:
    # The id alone is what is typed into the next order; the message may be anything.
    word = "conversation " if look.terminal else ""
    return look._line("·", "conversation", "dim", word + one_line(event.body.get("id"))) if look.sessions else ""


_SHOWN: Final[dict[type[Any], Callable[[Look, Any], str]]] = {
    kinds.Reasoning: _reasoning,
    kinds.ToolCall: _tool_call,
    kinds.ToolResult: _tool_result,
    kinds.FileChanged: _file,
    kinds.CommandExecuted: _command,
    kinds.RunStarted: _started,
    kinds.RunCompleted: _completed,
    kinds.Warned: _warning,
    kinds.Failed: _failed,
    kinds.ApprovalAnswered: _answer,
    kinds.TaskReported: _task,
    kinds.RetryReported: _retry,
    kinds.LossReported: _note,
    kinds.SessionNamed: _session,
    kinds.Unread: _warning,
}
"""What is shown of an event and how; a type that is not here is for programs."""


def _input(value: Json) -> str:
    return one_line(in_workspace(about(value)), _CHARS_MAX)


def _first_line(value: Json) -> str:
    return words_of(value).strip().split("\n", 1)[0]


# The end of a run -----------------------------------------------------------------------------------------------------


def summary(receipt: Receipt, look: Look, patch: Path | None) -> str:
    """What came of the run, in a few lines."""
    words = outcome_words(receipt.outcome, receipt.findings)
    is_clean = words == receipt.outcome
    colour = {"complete": "green" if is_clean else "yellow", "partial": "yellow"}.get(receipt.outcome, "red")
    added = receipt.backplane
    reason = as_object(added.get("end")).get("reason")
    why = f" ({one_line(reason)})" if reason and reason != receipt.outcome else ""
    unknown = added.get("duration") == "unknown"
    lasted = "an unknown time" if unknown else f"{receipt.meta.duration_ms / 1000:.1f} s"
    lines = [
        f"{look.dress(colour, words)}{why}{'' if is_clean else ','} after {lasted}{_usage(receipt)}",
        f"run {receipt.meta.run_id}  receipt {one_line((receipt.receipt_sha256 or '')[:16])}",
    ]
    if original := as_object(added.get("replay")):
        served = as_object(added.get("cache")).get("hit") is True
        lines.append(f"{'served from the store: the answer of' if served else 'replay of'} run {original.get('run')}")
    if receipt.outcome != "complete":
        lines.append(f"why backplane why {receipt.meta.run_id[:8]}")
    if (output := as_object(receipt.usage_raw).get("structured_output")) is not None:
        value = msgspec.json.encode(output).decode()
        lines.append(f"value {one_line(value, VALUE_CHARS_MAX)}")
    held = as_object(added.get("enforcement"))
    lines += [f"{look.dress('red', 'policy not kept:')} {one_line(row)}" for row in _reasons(held.get("violations"))]
    attempts = _reasons(held.get("attempts"))
    lines += [f"{look.dress('yellow', 'forbidden, and failed:')} {one_line(row)}" for row in attempts]
    if unnamed := as_list(as_object(added.get("claimed")).get("unexplained")):
        lines.append(f"{look.dress('yellow', 'changed, and named by no event:')} {names(list(map(str, unnamed)))}")
    if unheard := as_list(added.get("unheard")):
        lines.append(f"without effect in the order: {one_line(', '.join(map(str, unheard)))}")
    return "\n".join([*lines, *patch_lines(receipt, patch)]) + "\n"


def remarks_on(receipt: Receipt) -> list[str]:
    """Return the lines about an ended run that go to stderr, beside its outcome."""
    return remarks(receipt.meta.run_id, receipt.outcome, receipt.backplane)


def names(paths: Sequence[str]) -> str:
    """Return one line with the first files of a list, and how many more there are."""
    more = f" and {len(paths) - NAMES_SHOWN} more" if len(paths) > NAMES_SHOWN else ""
    return one_line(", ".join(paths[:NAMES_SHOWN]), VALUE_CHARS_MAX) + more


NAMES_SHOWN: Final = 5
"""Most files named on one line of a summary."""


def is_bare(patch: Path) -> bool:
    """Whether a patch came from another machine: the folder that it was made of is not known here."""
    from backplane.workspace.patch import RECORD_NAME

    return not os.path.lexists(patch.with_name(RECORD_NAME))


def patch_lines(receipt: Receipt, patch: Path | None, root: str = "DIR") -> list[str]:
    """Return where a run's patch is, and how to apply it, or that it is applied; nothing for a run without one.

    Args:
        root: the folder it is for, where the run was made elsewhere.
    """
    if patch is None or not patch.is_file() or not patch.stat().st_size:
        return []
    return [f"patch {one_line(patch)}  ({_place(receipt, patch) or _apply_step(receipt, patch, root)})"]


def _place(receipt: Receipt, patch: Path) -> str:
    """Say that a patch is in its folder already; an empty text where it is not."""
    from backplane.workspace.patch import mode_of

    if as_object(receipt.backplane.get("lane")).get("applied"):
        return "applied"
    return "made in place" if mode_of(patch.parent) == "pass_through" else ""


def _apply_step(receipt: Receipt, patch: Path, root: str) -> str:
    into = f" --root {shlex.quote(root)}" if is_bare(patch) else ""
    accepted = " --accept-violations" if violations(receipt) else ""
    return f"backplane apply {receipt.meta.run_id[:8]}{one_line(into)}{accepted}"


def violations(receipt: Receipt) -> list[str]:
    """Return why each thing that was done is forbidden, each reason once."""
    return _reasons(as_object(receipt.backplane.get("enforcement")).get("violations"))


def _reasons(rows: Json) -> list[str]:
    told = (
        [row.get("reason") or row.get("rule") for row in rows if isinstance(row, dict)]
        if isinstance(rows, list)
        else []
    )
    once = list(dict.fromkeys(map(str, told)))
    more = [f"and {len(once) - VIOLATIONS_MAX} more, see the receipt"] if len(once) > VIOLATIONS_MAX else []
    return once[:VIOLATIONS_MAX] + more


def _usage(receipt: Receipt) -> str:
    usage = receipt.usage
    parts = [
        f"{count:,} tokens {way}"
        for count, way in ((usage.input_tokens, "in"), (usage.output_tokens, "out"))
        if count is not None
    ]
    if usage.estimated_cost_usd is not None:
        parts.append(f"${usage.estimated_cost_usd:.4f}")
    return ", " + ", ".join(parts) if parts else ""


_DIFF_COLOURS: Final = (
    ("+++", "bold"),
    ("---", "bold"),
    ("diff ", "bold"),
    ("@@", "cyan"),
    ("+", "green"),
    ("-", "red"),
)


def diff_line(text: str, look: Look) -> str:
    """A line of a patch, coloured by what it begins with."""
    line = printable(text)
    colour = next((colour for start, colour in _DIFF_COLOURS if line.startswith(start)), None)
    return look.dress(colour, line) if colour else line


def diff(path: Path, look: Look, lines_max: int = DIFF_LINES_MAX) -> Iterator[str]:
    """A patch file as coloured lines, cut to `lines_max`."""
    with path.open("rb") as file:
        lines = _readable(raw[:4096].decode("utf-8", "replace").rstrip("\n") for raw in file)
        for line in islice(lines, lines_max):
            yield diff_line(line, look) + "\n"
        if next(lines, None) is not None:
            yield look.dress("dim", f"… cut after {lines_max} lines; the whole is in {one_line(path)}") + "\n"


def _readable(patch: Iterable[str]) -> Iterator[str]:
    """Return the lines of a patch, with one line for each binary file."""
    head: list[str] = []
    """Lines of a file's header, until its first hunk says that it is text."""
    binary = False
    for line in patch:
        if line.startswith("diff --git "):
            yield from head
            head, binary = [line], False
        elif binary:
            continue
        elif head and line.startswith(("literal ", "delta ")):
            kind, _, size = line.partition(" ")
            yield f"{head[0]} (binary{f', {int(size):,} bytes' if kind == 'literal' and size.isdecimal() else ''})"
            head, binary = [], True
        elif head and not line.startswith("@@ "):
            head.append(line)
        else:
            yield from (*head, line)
            head = []
    yield from head
