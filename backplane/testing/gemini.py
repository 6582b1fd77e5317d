"""The Gemini API as a server speaks it: a turn as one answer, as chunks, and its errors."""

from __future__ import annotations

from typing import Any, Final

from backplane.testing.frames import Frame, RenderRequest, arguments, arguments_value, cut_text
from backplane.testing.script import Call, Failure, ScriptUsage, Turn

GROUPS: Final = {"END": ("finish",), "CLOSING": ()}
STOPS: Final = {"max_tokens": "MAX_TOKENS", "refusal": "SAFETY", "content_filter": "SAFETY"}
"""Everything else is `STOP`, calls included."""
KINDS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def whole(turn: Turn, ask: RenderRequest) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    parts = [*_thoughts(turn, 1), *_texts(turn, 1), *map(_call, turn.calls)]
    return _answer(ask, parts, _usage(turn.usage), _stop(turn))


def stream(turn: Turn, ask: RenderRequest) -> list[Frame]:
    """Return the chunks of the answer; all but the last count only what was sent."""
    sent = turn.usage.input if turn.usage else 0
    counted = {"promptTokenCount": sent, "totalTokenCount": sent} if turn.usage else None
    rows = [("reasoning", part) for part in _thoughts(turn, turn.pieces)]
    rows += [("text", part) for part in _texts(turn, turn.pieces)]
    rows += [("call", _call(call)) for call in turn.calls]
    frames = [Frame(label, _answer(ask, [part], counted)) for label, part in rows]
    return [*frames, Frame("finish", _answer(ask, [{"text": ""}], _usage(turn.usage), _stop(turn)))]


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = KINDS.get(status, "INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
    return {"error": {"code": status, "message": message, "status": kind}}


def failed(failure: Failure, ask: RenderRequest) -> Frame:
    """Return the chunk of an error half-way."""
    return Frame("error", {"error": {"code": failure.status, "message": failure.message, "status": failure.code}})


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the list of models."""
    ways = ["generateContent", "streamGenerateContent", "countTokens"]
    rows = [
        {"name": f"models/{name}", "version": "1", "displayName": name, "supportedGenerationMethods": ways}
        for name in names
    ]
    return {"models": rows}


def _thoughts(turn: Turn, pieces: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"text": piece, "thought": True} for piece in cut_text(turn.reasoning or "", pieces)]
    if parts:
        parts[-1]["thoughtSignature"] = turn.signature
    return parts


def _texts(turn: Turn, pieces: int) -> list[dict[str, Any]]:
    return [{"text": piece} for text in (turn.text, turn.refusal) for piece in cut_text(text or "", pieces)]


def _call(call: Call) -> dict[str, Any]:
    text = arguments(call)
    args = {"input": text} if call.kind == "custom" else arguments_value(text)
    # This vendor gives ids now and then; only a scripted one is sent.
    part = {"functionCall": {**({"id": call.id} if call.id else {}), "name": call.name, "args": args}}
    return {**part, "thoughtSignature": call.signature} if call.signature else part


def _answer(
    ask: RenderRequest, parts: list[dict[str, Any]], usage: dict[str, Any] | None, stop: str | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if stop is not None:
        candidate["finishReason"] = stop
    answer: dict[str, Any] = {"candidates": [candidate]}
    if usage is not None:
        answer["usageMetadata"] = usage
    return {**answer, "modelVersion": ask.model, "responseId": f"resp-{ask.number}"}


def _stop(turn: Turn) -> str:
    return turn.stop_raw or STOPS.get(turn.stopped, "STOP")


def _usage(usage: ScriptUsage | None) -> dict[str, Any] | None:
    """Return the counters; thoughts are counted beside the candidates, not among them."""
    if usage is None:
        return None
    counters = {
        "promptTokenCount": usage.input,
        "candidatesTokenCount": usage.output - usage.reasoning,
        "totalTokenCount": usage.input + usage.output,
    }
    if usage.cache_read:
        counters["cachedContentTokenCount"] = usage.cache_read
    if usage.reasoning:
        counters["thoughtsTokenCount"] = usage.reasoning
    return counters
