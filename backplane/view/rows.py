"""Turns a run's events into the rows of a page, in their order; how a row looks is for `page` to say. Pure.

A result joins the row of its call. Streamed pieces have no row: the whole message repeats them.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carried
from backplane.view.figures import lasting, milliseconds
from backplane.view.text import in_workspace
from backplane.view.values import TEXT_CHARS_MAX, about, words_of

ROWS_MAX: Final = 10_000
"""Rows of one page; a browser lays out only those in sight. Further rows are counted."""
BODIES_CHARS_MAX: Final = 4 * 1024 * 1024
"""Characters of all inputs and outputs of one page; of a further text only the length is shown."""
HEAD_CHARS_MAX: Final = 400

Kind = Literal["said", "call", "command", "file", "question", "answer", "fault", "note"]
Tone = Literal["", "good", "warn", "bad"]


class StoryRow(msgspec.Struct, kw_only=True):
    """One row of a page, in plain text."""

    kind: Kind
    number: int
    """Number of its event, counted from 1."""
    after_ms: int | None
    """Time since the run's first event; None if one of the two has no readable time."""
    head: str
    tool: str = ""
    body: list[str] = []
    mark: str = ""
    """Its result in a few words, as `done after 3.1 s` or `exit 1`."""
    tone: Tone = ""


class Story(msgspec.Struct, kw_only=True):
    """The rows of one run; filled by `take`."""

    rows_max: int = ROWS_MAX
    """Further rows are only counted."""
    rows: list[StoryRow] = []
    touched: set[int] = set()
    """Rows that are new or changed; a reader that draws them empties the set."""
    beyond: int = 0
    """Rows that were only counted."""
    _open: dict[str, int | None] = {}
    """Open calls by id: the row; None if it was only counted."""
    _number: int = 0
    _chars: int = 0
    _began_ms: int | None = None
    _after_ms: int | None = None

    def take(self, event: AgentEvent) -> None:
        """Add the next event."""
        self._number += 1
        now_ms = milliseconds(event.ts)
        self._began_ms = now_ms if self._began_ms is None else self._began_ms
        self._after_ms = max(now_ms - self._began_ms, 0) if now_ms is not None and self._began_ms is not None else None
        match carried(event) if event.ext is not None else event:
            case kinds.AssistantDelta():
                pass
            case kinds.AssistantMessage() as said:
                self._put("said", cut(in_workspace(said.text)))
            case kinds.ToolCall() as call:
                self._called(call)
            case kinds.ToolResult() as result:
                self._resulted(result)
            case kinds.CommandExecuted(exit_code=code) as ran:
                mark = "ended by a signal" if code is None else f"exit {code}"
                body = self._body(ran.output_preview or "")
                self._put("command", ran.command, body=body, mark=mark, tone="good" if code == 0 else "bad")
            case kinds.FileChanged() as file:
                self._put("file", file.path, tool="file", mark=file.summary)
            case kinds.Approval(body=body) as ask:
                what = about(body.get("input")) or str(body.get("question") or "")
                self._put("question", f"{ask.message}: {what}" if what else ask.message, tone="warn")
            case kinds.ApprovalAnswered() as answer:
                self._put("answer", answer.message, tone="warn" if answer.body.get("decision") == "deny" else "")
            case kinds.Failed() as failed:
                self._put("fault", failed.message, tone="bad")
            case note if type(note) in _NOTES:
                self._put("note", note.message)

    def _put(
        self, kind: Kind, head: str, *, tool: str = "", body: list[str] | None = None, mark: str = "", tone: Tone = ""
    ) -> int | None:
        if len(self.rows) >= self.rows_max:
            self.beyond += 1
            return None
        shown = head if kind == "said" else in_workspace(head)[:HEAD_CHARS_MAX]
        self.rows.append(
            StoryRow(kind=kind, number=self._number, after_ms=self._after_ms, head=shown, tool=tool, body=body or [],
                mark=mark, tone=tone)
        )  # fmt: skip
        self.touched.add(len(self.rows) - 1)
        return len(self.rows) - 1

    def _body(self, words: str) -> list[str]:
        if not words.strip():
            return []
        shown = cut(in_workspace(words))
        self._chars += len(shown)
        return [f"{len(words)} characters are in the receipt" if self._chars > BODIES_CHARS_MAX else shown]

    def _called(self, event: kinds.ToolCall) -> None:
        body = self._body(_json(event.input)) if event.input not in ({}, None) else []
        key = event.tool_use_id or event.tool_name
        self._open[key] = self._put("call", about(event.input), tool=event.tool_name, body=body)

    def _resulted(self, event: kinds.ToolResult) -> None:
        key = event.tool_use_id or event.tool_name
        place = self._open.pop(key) if key in self._open else self._put("call", "", tool=event.tool_name)
        if place is None:
            return
        row = self.rows[place]
        row.body += self._body(words_of(event.output))
        row.mark, row.tone = ("failed", "bad") if event.is_error else ("done", "good")
        lasted_ms = 0 if self._after_ms is None or row.after_ms is None else self._after_ms - row.after_ms
        row.mark += f" after {lasting(lasted_ms)}" if lasted_ms >= 1000 else ""
        self.touched.add(place)


_NOTES: Final[frozenset[type[Any]]] = frozenset(
    {kinds.RunStarted, kinds.RunCompleted, kinds.RetryReported, kinds.CheckpointReported, kinds.LossReported}
    | {kinds.Warned}
)
"""Events whose message is all that is shown of them."""


def cut(whole: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return the beginning and the end of a long text, with the number of characters left out between them."""
    half = chars_max // 2
    if len(whole) <= chars_max:
        return whole
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters are left out …\n{whole[-half:]}"


def _json(value: Json) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
