"""A run's events as the rows of a page, in their order: what was streamed is merged, a result stands with its call.

The first rows are drawn; those beyond are counted, and stand in the receipt. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carried
from backplane.view.figures import lasting, milliseconds
from backplane.view.html import Html, join, said, tag, text
from backplane.view.text import in_workspace
from backplane.view.values import about, words_of

ROWS_MAX: Final = 10_000
"""Rows that are drawn; a browser lays out those alone that are in sight."""

OUTPUT_CHARS_MAX: Final = 16 * 1024
"""Of a text: half from its beginning, half from its end."""
BODIES_CHARS_MAX: Final = 4 * 1024 * 1024
"""Most characters of inputs and outputs in one page; a text beyond that is named by its length."""

DECISIONS_MAX: Final = 500
SPANS_MAX: Final = 400
"""Bars of the timeline; more are narrower than a pixel."""

NOTHING: Final = Html("")
_PATH: Final = re.compile(r"(?<![\w.<~-])~?/(?:[\w.@+~-]+/)+(?=[\w.])")


class StoryRow(msgspec.Struct):
    """One row of a story."""

    kind: str
    """bad, warn or nothing."""
    head: Html
    body: Html = NOTHING
    is_open: bool = False

    def drawn(self) -> Html:
        """What stands in the row."""
        if not self.body:
            return self.head
        return tag("details", tag("summary", self.head), self.body, open="" if self.is_open else None)


class Bar(msgspec.Struct):
    """A stretch of time that something took: a call, or the wait for an answer."""

    start_ms: int
    label: str
    end_ms: int | None = None
    kind: str = ""


class Story(msgspec.Struct, kw_only=True):
    """The rows of one run; filled by `take`."""

    rows_max: int | None = ROWS_MAX
    """Rows that are drawn; those beyond are counted. None draws all."""
    omit: frozenset[str] = frozenset()
    """What is not to be told: `outputs`, `prompts`, `paths`."""
    rows: list[StoryRow] = []
    decisions: list[tuple[str, str, str, str, str]] = []
    """Tool, about, decision, by, reason."""
    bars: list[Bar] = []
    touched: set[int] = set()
    """Rows that are new or have changed; whoever draws them takes them out."""
    beyond: int = 0
    """Rows that are not drawn."""
    is_full: bool = False
    """No more rows are drawn."""
    _calls: dict[str, tuple[int, StoryRow, Bar | None]] = {}
    _asked: dict[str, tuple[str, str, Bar | None]] = {}
    _number: int = 0
    _bodies_chars: int = 0
    _began_ms: int | None = None
    _ts: str = ""
    _now_ms: int | None = None
    _after: str = ""

    def take(self, event: AgentEvent) -> None:
        """Add the next event."""
        if event.ext is not None:
            event = carried(event)
        self._number += 1
        if event.ts != self._ts:
            self._ts, self._now_ms = event.ts, milliseconds(event.ts)
            if self._began_ms is None:
                self._began_ms = self._now_ms
            if self._now_ms is not None and self._began_ms is not None:
                self._after = f" +{lasting(max(self._now_ms - self._began_ms, 0))}"
        kind = type(event)
        if self.is_full and kind not in _LATE:
            self.beyond += kind in _TOLD
        elif kind in _TOLD:
            _TOLD[kind](self, event)

    @property
    def began_ms(self) -> int | None:
        """When its first event was."""
        return self._began_ms

    @property
    def last_ms(self) -> int | None:
        """When its last event was."""
        return self._now_ms

    def shown(self, words: str) -> Html:
        """A text, escaped, without what is not to be told."""
        return self.hidden(text(in_workspace(words)))

    def hidden(self, drawn: Html) -> Html:
        """What was drawn, without the folders of paths where they are not to be told."""
        return Html(_PATH.sub("…/", drawn)) if "paths" in self.omit else drawn

    def _put(self, head: Html, body: Html = NOTHING, kind: str = "", *, is_open: bool = False) -> tuple[int, StoryRow]:
        number = Html(f'<span class="no mono">{self._number}{self._after}</span>')
        row = StoryRow(kind, Html(number + head), body, is_open)
        if self.is_full or self.rows_max == 0:
            self.is_full = True
            self.beyond += 1
            return -1, row
        self.rows.append(row)
        self.is_full = len(self.rows) == self.rows_max
        self.touched.add(len(self.rows) - 1)
        return len(self.rows) - 1, row

    def _text(self, words: str) -> Html:
        if not words.strip():
            return NOTHING
        shown = cut(words)
        self._bodies_chars += len(shown)
        if self.rows_max is not None and self._bodies_chars > BODIES_CHARS_MAX:
            return tag("p", text(f"{len(words)} characters are in the receipt"), class_="dim")
        return tag("pre", self.shown(shown))

    def _output(self, words: str) -> Html:
        if "outputs" in self.omit and words.strip():
            return tag("p", text(f"{len(words)} characters of output are left out"), class_="dim")
        return self._text(words)

    def _bar(self, label: str, kind: str = "") -> Bar | None:
        if self._now_ms is None or len(self.bars) >= SPANS_MAX:
            return None
        self.bars.append(Bar(self._now_ms, label, kind=kind))
        return self.bars[-1]

    def _ended(self, bar: Bar | None, kind: str) -> None:
        if bar is not None:
            bar.end_ms, bar.kind = self._now_ms, kind

    # What each kind of event is.

    def _message(self, event: kinds.AssistantMessage) -> None:
        words = cut(event.text)
        drawn = text("its words are left out") if "prompts" in self.omit else self.hidden(said(in_workspace(words)))
        self._put(tag("div", drawn, class_="message"))

    def _called(self, event: kinds.ToolCall) -> None:
        what = about(event.input)[:200]
        head = join((tag("b", text(event.tool_name)), tag("code", self.shown(what))), " ")
        body = self._text(_json(event.input)) if event.input not in ({}, None) else NOTHING
        place, row = self._put(head, body)
        bar = self._bar(f"{event.tool_name} {in_workspace(what)}")
        self._calls[event.tool_use_id or event.tool_name] = place, row, bar

    def _resulted(self, event: kinds.ToolResult) -> None:
        place, row, bar = self._calls.pop(event.tool_use_id or event.tool_name, (-1, None, None))
        if row is None and self.is_full:
            return  # It goes with its call, which is not drawn.
        kind = "bad" if event.is_error else "good"
        mark = tag("span", text("failed" if event.is_error else "done"), class_=kind)
        if row is None:
            place, row = self._put(join((tag("b", text(event.tool_name)), mark), " "))
        else:
            row.head = join((row.head, mark), " ")
        row.body = join((row.body, self._output(words_of(event.output))))
        if event.is_error:
            row.kind, row.is_open = "bad", True
        self._ended(bar, kind)
        if place >= 0:
            self.touched.add(place)

    def _ran(self, event: kinds.CommandExecuted) -> None:
        good = event.exit_code == 0
        code = "ended by a signal" if event.exit_code is None else f"exit {event.exit_code}"
        head = join((tag("code", self.shown(event.command[:400])), tag("span", text(code), class_=tone(good))), " ")
        shown = self._output(event.output_preview) if event.output_preview else NOTHING
        self._put(head, shown, "" if good else "bad", is_open=not good)

    def _changed(self, event: kinds.FileChanged) -> None:
        self._put(join((text("file"), tag("code", self.shown(event.path)), text(event.summary)), " "))

    def _asks(self, event: kinds.Approval) -> None:
        what = in_workspace(about(event.body.get("input")) or str(event.body.get("question") or event.message))[:400]
        name = str(event.body.get("name") or event.body.get("kind") or "")
        self._asked[str(event.body.get("id"))] = name, what, self._bar(f"waits: {event.message}", "warn")
        self._put(self.shown(f"{event.message}: {what}"[:400]), kind="warn")

    def _answered(self, event: kinds.ApprovalAnswered) -> None:
        name, what, bar = self._asked.pop(str(event.body.get("id")), ("", "", None))
        decision, by = str(event.body.get("decision")), str(event.body.get("by"))
        self._ended(bar, "warn")
        if len(self.decisions) < DECISIONS_MAX:
            self.decisions.append((name, what, decision, by, str(event.body.get("reason") or "")))
        self._put(text(event.message), kind="warn" if decision == "deny" else "")

    def _failed(self, event: kinds.Failed) -> None:
        self._put(tag("span", self.shown(event.message), class_="bad"), kind="bad")

    def _noted(self, event: Any) -> None:
        self._put(tag("span", self.shown(event.message), class_="dim"))


_TOLD: Final[dict[type[Any], Any]] = {
    kinds.AssistantMessage: Story._message,
    kinds.ToolCall: Story._called,
    kinds.ToolResult: Story._resulted,
    kinds.CommandExecuted: Story._ran,
    kinds.FileChanged: Story._changed,
    kinds.Approval: Story._asks,
    kinds.ApprovalAnswered: Story._answered,
    kinds.Failed: Story._failed,
    kinds.RunStarted: Story._noted,
    kinds.RunCompleted: Story._noted,
    kinds.RetryReported: Story._noted,
    kinds.CheckpointReported: Story._noted,
    kinds.LossReported: Story._noted,
    kinds.Warned: Story._noted,
}
_LATE: Final = frozenset({kinds.ToolResult, kinds.Approval, kinds.ApprovalAnswered})
"""Kinds that say more than their row: a drawn call's result, and the table of decisions."""


def cut(whole: str, chars_max: int = OUTPUT_CHARS_MAX) -> str:
    """A long text's beginning and end, with what is left out between them counted."""
    half = chars_max // 2
    if len(whole) <= chars_max:
        return whole
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters are left out …\n{whole[-half:]}"


def tone(good: bool) -> str:
    """The class of what went well, or did not."""
    return "good" if good else "bad"


def _json(value: Json) -> str:
    return cut(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
