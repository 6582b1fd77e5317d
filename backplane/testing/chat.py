"""Chat Completions as a server speaks it: a turn as one answer, as chunks, and its errors.

Siblings (`responses`, `messages`, `gemini`) have the same functions in the same order.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.testing.frames import Frame, RenderRequest, arguments, cut_text
from backplane.testing.script import Call, Failure, ScriptUsage, Turn

GROUPS: Final = {"END": ("finish",), "CLOSING": ("done",)}
STOPS: Final = {"tool_use": "tool_calls", "max_tokens": "length", "content_filter": "content_filter"}
"""Everything else is `stop`."""
CREATED_S: Final = 1_760_000_000
"""The time in every answer: equal scripts make equal bytes."""
KINDS: Final = {403: "permission_error", 429: "rate_limit_error"}
"""Everything else is `server_error` from 500 on, and below `invalid_request_error`."""
CODES: Final = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def whole(turn: Turn, ask: RenderRequest) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": turn.refusal}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call(call, place, ask) for place, call in enumerate(turn.calls)]
    choice = {"index": 0, "message": message, "finish_reason": _stop(turn), "logprobs": None}
    answer = {**_head(ask, "chat.completion"), "choices": [choice]}
    return answer if turn.usage is None else {**answer, "usage": _usage(turn.usage)}


def stream(turn: Turn, ask: RenderRequest) -> list[Frame]:
    """Return the chunks of the answer."""
    frames = [_chunk(ask, "role", {"role": "assistant", "content": ""})]
    for label, key, text in (
        ("reasoning", "reasoning_content", turn.reasoning),
        ("text", "content", turn.text),
        ("refusal", "refusal", turn.refusal),
    ):
        frames += [_chunk(ask, label, {key: piece}) for piece in cut_text(text or "", turn.pieces)]
    for place, call in enumerate(turn.calls):
        frames += _call_chunks(turn, ask, place, call)
    frames.append(_chunk(ask, "finish", {}, _stop(turn)))
    if ask.wants_usage and turn.usage is not None:
        data = {**_head(ask, "chat.completion.chunk"), "choices": [], "usage": _usage(turn.usage)}
        frames.append(Frame("usage", data))
    return [*frames, Frame("done", "[DONE]")]


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": CODES.get(status)}}


def failed(failure: Failure, ask: RenderRequest) -> Frame:
    """Return the frame of an error half-way."""
    return Frame("error", {"error": {"message": failure.message, "type": failure.code, "code": failure.code}})


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the list of models."""
    rows = [{"id": name, "object": "model", "created": CREATED_S, "owned_by": "scripted"} for name in names]
    return {"object": "list", "data": rows}


def _call_chunks(turn: Turn, ask: RenderRequest, place: int, call: Call) -> list[Frame]:
    begun = _call(call, place, ask)
    key = "input" if call.kind == "custom" else "arguments"
    text = begun[call.kind].pop(key)
    parts = [{**begun, call.kind: {**begun[call.kind], key: ""}}]
    parts += [{call.kind: {key: piece}} for piece in cut_text(text, turn.pieces)]
    return [_chunk(ask, "call", {"tool_calls": [{"index": place, **part}]}) for part in parts]


def _call(call: Call, place: int, ask: RenderRequest) -> dict[str, Any]:
    inner = {"name": call.name, "input" if call.kind == "custom" else "arguments": arguments(call)}
    return {"id": call.id or f"call_{ask.number}_{place}", "type": call.kind, call.kind: inner}


def _head(ask: RenderRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ask.number}", "object": kind, "created": CREATED_S, "model": ask.model}


def _chunk(ask: RenderRequest, label: str, delta: dict[str, Any], stop: str | None = None) -> Frame:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": stop}
    return Frame(label, {**_head(ask, "chat.completion.chunk"), "choices": [choice]})


def _stop(turn: Turn) -> str:
    return turn.stop_raw or STOPS.get(turn.stopped, "stop")


def _usage(usage: ScriptUsage) -> dict[str, Any]:
    details = {"cached_tokens": usage.cache_read}
    if usage.cache_write:
        details["cache_write_tokens"] = usage.cache_write
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
