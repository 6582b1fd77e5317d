"""What reading and translating a stream costs, a chunk, against the vendor's own SDK; row 12 of the goals.

A program, not a test: `PYTHONPATH=. python bench/streams.py`, with the SDKs installed for the ratios.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from backplane.dialects import StreamTranslation, dialect, framing
from tests.dialects import referees

CHUNKS = 2000
ROUNDS = 5
PIECE_BYTES = 64 * 1024
WORD = "some words of an answer, "


def chat() -> list[Any]:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o", "system_fingerprint": "fp"}
    one = {**head, "choices": [{"index": 0, "delta": {"content": WORD}, "logprobs": None, "finish_reason": None}]}
    end = {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    return [one] * CHUNKS + [end]


def responses() -> list[Any]:
    response = {
        "id": "r", "object": "response", "created_at": 1, "model": "gpt-5", "status": "in_progress", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    item = {"id": "m", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    where = {"item_id": "m", "output_index": 0, "content_index": 0, "sequence_number": 3}
    done = {**item, "status": "completed", "content": [{**part, "text": WORD * CHUNKS}]}
    return [
        {"type": "response.created", "response": response, "sequence_number": 0},
        {"type": "response.output_item.added", "output_index": 0, "item": item, "sequence_number": 1},
        {"type": "response.content_part.added", **where, "part": part},
        *[{"type": "response.output_text.delta", **where, "delta": WORD, "logprobs": []}] * CHUNKS,
        {"type": "response.output_item.done", "output_index": 0, "item": done, "sequence_number": 4},
        {
            "type": "response.completed",
            "response": {**response, "status": "completed", "output": [done]},
            "sequence_number": 5,
        },
    ]


def messages() -> list[Any]:
    head: dict[str, Any] = {
        "id": "m", "type": "message", "role": "assistant", "model": "claude", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    return [
        {"type": "message_start", "message": head},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *[{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": WORD}}] * CHUNKS,
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    ]


def gemini() -> list[Any]:
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 7, "totalTokenCount": 12}
    candidate = {"content": {"role": "model", "parts": [{"text": WORD}]}, "index": 0}
    one = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "g", "responseId": "r"}
    return [one] * CHUNKS


STREAMS: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "chat": ("openai", chat),
    "responses": ("codex", responses),
    "messages": ("claude", messages),
    "gemini": ("gemini", gemini),
}


def as_bytes(name: str, chunks: list[Any]) -> bytes:
    module = dialect(name)
    data = b"".join(framing.sse_bytes(chunk, module.event_name(chunk)) for chunk in chunks)
    return data + (framing.done_bytes() if module.DONE else b"")


def ours(name: str, data: bytes) -> None:
    """Bytes to agent events: what a host does."""
    module = dialect(name)
    reader, state = framing.Sse(), module.StreamState()
    for place in range(0, len(data), PIECE_BYTES):
        for chunk in reader.feed(data[place : place + PIECE_BYTES]):
            module.map_stream_event(chunk, state)


def rendered(name: str, data: bytes) -> None:
    """Bytes to another vendor's chunks."""
    reader, done = framing.Sse(), StreamTranslation(name, "claude" if name != "claude" else "openai")
    for place in range(0, len(data), PIECE_BYTES):
        for chunk in reader.feed(data[place : place + PIECE_BYTES]):
            done.feed(chunk)


def theirs(kind: str, data: bytes) -> list[Any]:
    """The same bytes through the vendor's SDK, from an HTTP answer that is there already."""
    httpx = importlib.import_module("httpx2" if referees.have("httpx2") else "httpx")
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    client = httpx.Client(transport=httpx.MockTransport(lambda request: answer))
    if kind in ("chat", "responses"):
        sdk = importlib.import_module("openai").OpenAI(api_key="x", http_client=client, base_url="http://t")
        if kind == "chat":
            stream = sdk.chat.completions.create(model="m", messages=[], stream=True)
        else:
            stream = sdk.responses.create(model="m", input="x", stream=True)
    elif kind == "messages":
        sdk = importlib.import_module("anthropic").Anthropic(api_key="x", http_client=client, base_url="http://t")
        stream = sdk.messages.create(model="m", max_tokens=1, messages=[], stream=True)
    else:
        genai, types = importlib.import_module("google.genai"), importlib.import_module("google.genai.types")
        options = types.HttpOptions(httpx_client=client, base_url="http://t")
        stream = genai.Client(api_key="x", http_options=options).models.generate_content_stream(model="m", contents="x")
    return list(stream)


def cost_us(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return (time.process_time() - began) / CHUNKS * 1e6


def main() -> int:
    """Print µs of CPU a chunk: ours, rendered for another vendor, the SDK's, and the ratio."""
    for kind, (name, make) in STREAMS.items():
        data = as_bytes(name, make())
        rows: list[tuple[float, float, float]] = []
        can = referees.have(referees.SDK_OF[referees.FAMILY[name]])
        for _ in range(ROUNDS):
            mine = cost_us(lambda: ours(name, data))  # noqa: B023
            other = cost_us(lambda: rendered(name, data))  # noqa: B023
            sdk = cost_us(lambda: theirs(kind, data)) if can else 0.0  # noqa: B023
            rows.append((mine, other, sdk))
        mine, other, sdk = (median(row[place] for row in rows) for place in range(3))
        print(f"{kind:<10} ours {mine:6.2f}  rendered {other:6.2f}  sdk {sdk:7.2f}  ratio {sdk / mine:5.1f}")
    print(json.dumps({"chunks": CHUNKS, "rounds": ROUNDS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
