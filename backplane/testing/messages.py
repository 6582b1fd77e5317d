"""The Messages API as a server speaks it: a turn as one answer, as events, and its errors."""

from __future__ import annotations

import json
from typing import Any, Final

from backplane.testing.frames import Frame, RenderRequest, arguments, arguments_value, cut_text
from backplane.testing.script import Call, Failure, ScriptUsage, Turn

GROUPS: Final = {"END": ("message_delta", "message_stop"), "CLOSING": ("message_stop",)}
STOPS: Final = {"end": "end_turn", "content_filter": "refusal", "pause": "pause_turn"}
"""Every other word is the vendor's own."""
KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def whole(turn: Turn, ask: RenderRequest) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    content = [_full(block) for block in _blocks(turn, ask)]
    return {**_head(ask), "content": content, "stop_reason": _stop(turn), **_usage_of(turn.usage)}


def stream(turn: Turn, ask: RenderRequest) -> list[Frame]:
    """Return the events of the answer."""
    start = {**_head(ask), "content": [], "stop_reason": None, **_usage_of(turn.usage, output=1)}
    frames = [_event("message_start", message=start), _event("ping")]
    for index, (empty, deltas) in enumerate(_blocks(turn, ask)):
        frames.append(_event("content_block_start", index=index, content_block=empty))
        for kind, key, text in deltas:
            # A signature comes in one piece, everything else in several.
            pieces = [text] if kind == "signature_delta" else cut_text(text, turn.pieces)
            frames += [_event("content_block_delta", index=index, delta={"type": kind, key: piece}) for piece in pieces]
        frames.append(_event("content_block_stop", index=index))
    delta = {"stop_reason": _stop(turn), "stop_sequence": None}
    return [*frames, _event("message_delta", delta=delta, **_usage_of(turn.usage)), _event("message_stop")]


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_scripted"}


def failed(failure: Failure, ask: RenderRequest) -> Frame:
    """Return the event of an error half-way."""
    return _event("error", error={"type": failure.code, "message": failure.message})


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the list of models."""
    rows = [{"type": "model", "id": name, "display_name": name, "created_at": "2025-10-09T00:00:00Z"} for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": rows, "has_more": False, **ends}


Block = tuple[dict[str, Any], list[tuple[str, str, str]]]
"""A block as it begins, and its deltas: kind, member, text."""


def _blocks(turn: Turn, ask: RenderRequest) -> list[Block]:
    blocks: list[Block] = []
    if turn.reasoning is not None:
        deltas = [("thinking_delta", "thinking", turn.reasoning), ("signature_delta", "signature", turn.signature)]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
    for text in (turn.text, turn.refusal):
        if text is not None:
            blocks.append(({"type": "text", "text": ""}, [("text_delta", "text", text)]))
    for place, call in enumerate(turn.calls):
        name = call.id or f"toolu_{ask.number}_{place}"
        empty = {"type": "tool_use", "id": name, "name": call.name, "input": {}}
        blocks.append((empty, [("input_json_delta", "partial_json", _arguments(call))]))
    return blocks


def _arguments(call: Call) -> str:
    return json.dumps({"input": call.input}) if call.kind == "custom" else arguments(call)


def _full(block: Block) -> dict[str, Any]:
    empty, deltas = block
    if empty["type"] == "tool_use":
        return {**empty, "input": arguments_value(deltas[0][2])}
    return {**empty, **{key: text for _, key, text in deltas}}


def _head(ask: RenderRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{ask.number}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "stop_sequence": None,
    }


def _event(name: str, **members: Any) -> Frame:
    return Frame(name, {"type": name, **members}, name)


def _stop(turn: Turn) -> str:
    stopped = "refusal" if turn.refusal is not None and turn.stop is None else turn.stopped
    return turn.stop_raw or STOPS.get(stopped, stopped)


def _usage_of(usage: ScriptUsage | None, output: int | None = None) -> dict[str, Any]:
    """Return the member `usage`; this vendor counts what came from or went into its cache apart."""
    if usage is None:
        return {}
    return {
        "usage": {
            "input_tokens": usage.input - usage.cache_read - usage.cache_write,
            "cache_creation_input_tokens": usage.cache_write,
            "cache_read_input_tokens": usage.cache_read,
            "output_tokens": usage.output if output is None else output,
        }
    }
