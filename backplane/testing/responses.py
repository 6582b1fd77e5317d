"""The Responses API as a server speaks it: a turn as one answer, as events, and its errors."""

from __future__ import annotations

from typing import Any, Final

from backplane.testing.chat import CREATED_S, error, models
from backplane.testing.frames import Frame, RenderRequest, arguments, cut_text
from backplane.testing.script import Failure, ScriptUsage, Turn

__all__ = ["GROUPS", "error", "failed", "models", "stream", "whole"]

GROUPS: Final = {
    "END": ("response.completed", "response.incomplete", "response.failed", "response.cancelled"),
    "CLOSING": ("*.done",),
}
REASONS: Final = {"max_tokens": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete; with any other stop it is completed."""
STATES: Final = ("completed", "incomplete", "failed", "cancelled", "in_progress", "queued")


def whole(turn: Turn, ask: RenderRequest) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    state, reason = _state(turn)
    return _response(ask, state, _items(turn, ask), _usage(turn.usage), reason)


def stream(turn: Turn, ask: RenderRequest) -> list[Frame]:
    """Return the events of the answer."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(ask, "in_progress", [], None)},
        {"type": "response.in_progress", "response": _response(ask, "in_progress", [], None)},
    ]
    for index, item in enumerate(_items(turn, ask)):
        place = {"item_id": item["id"], "output_index": index}
        events.append({"type": "response.output_item.added", "output_index": index, "item": _empty(item)})
        write = _write_call if item["type"].endswith("_call") else _write_parts
        events += write(item, place, turn.pieces)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    last = whole(turn, ask)
    events.append({"type": f"response.{last['status']}", "response": last})
    return [_event(event, number) for number, event in enumerate(events)]


def failed(failure: Failure, ask: RenderRequest) -> Frame:
    """Return the event of an error half-way."""
    response = {**_response(ask, "failed", [], None), "error": {"code": failure.code, "message": failure.message}}
    # Its number is known only to the stream that it interrupts, and no client reads it.
    return _event({"type": "response.failed", "response": response}, 0)


def _items(turn: Turn, ask: RenderRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        summary = [{"type": "summary_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{ask.number}", "summary": summary})
    content: list[dict[str, Any]] = []
    if turn.text is not None:
        content.append({"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []})
    if turn.refusal is not None:
        content.append({"type": "refusal", "refusal": turn.refusal})
    if content:
        base = {"type": "message", "id": f"msg_{ask.number}", "role": "assistant", "status": "completed"}
        items.append({**base, "content": content})
    for place, call in enumerate(turn.calls):
        kind, key = ("custom_tool_call", "input") if call.kind == "custom" else ("function_call", "arguments")
        head = {"type": kind, "id": f"fc_{ask.number}_{place}", "call_id": call.id or f"call_{ask.number}_{place}"}
        space = {} if call.namespace is None else {"namespace": call.namespace}
        items.append({**head, **space, "name": call.name, key: arguments(call), "status": "completed"})
    return items


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is when it begins."""
    blank = {"content": [], "summary": [], "arguments": "", "input": "", "status": "in_progress"}
    return {key: blank.get(key, value) for key, value in item.items()}


def _write_parts(item: dict[str, Any], place: dict[str, Any], pieces: int) -> list[dict[str, Any]]:
    is_summary = item["type"] == "reasoning"
    events: list[dict[str, Any]] = []
    for index, part in enumerate(item["summary" if is_summary else "content"]):
        key = "refusal" if part["type"] == "refusal" else "text"
        around, inner = "response.content_part", f"response.{part['type']}"
        if is_summary:
            around, inner = "response.reasoning_summary_part", "response.reasoning_summary_text"
        here = {**place, "summary_index" if is_summary else "content_index": index}
        extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        events.append({"type": f"{around}.added", **here, "part": {**part, key: ""}})
        events += [{"type": f"{inner}.delta", **here, "delta": piece, **extra} for piece in cut_text(part[key], pieces)]
        events.append({"type": f"{inner}.done", **here, key: part[key], **extra})
        events.append({"type": f"{around}.done", **here, "part": part})
    return events


def _write_call(item: dict[str, Any], place: dict[str, Any], pieces: int) -> list[dict[str, Any]]:
    custom = item["type"] == "custom_tool_call"
    key, name = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
    named = {} if custom else {"name": item["name"]}
    deltas = [{"type": f"response.{name}.delta", **place, "delta": piece} for piece in cut_text(item[key], pieces)]
    return [*deltas, {"type": f"response.{name}.done", **place, key: item[key], **named}]


def _event(event: dict[str, Any], number: int) -> Frame:
    return Frame(event["type"], {**event, "sequence_number": number}, event["type"])


def _state(turn: Turn) -> tuple[str, str | None]:
    if turn.stop_raw in STATES:
        return turn.stop_raw, None
    reason = turn.stop_raw or REASONS.get(turn.stopped)
    return ("incomplete", reason) if reason else ("completed", None)


def _response(
    ask: RenderRequest, state: str, items: list[dict[str, Any]], usage: dict[str, Any] | None, reason: str | None = None
) -> dict[str, Any]:
    return {
        "id": f"resp_{ask.number}",
        "object": "response",
        "created_at": CREATED_S,
        "status": state,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": ask.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage,
    }


def _usage(usage: ScriptUsage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
