"""Small requests to a scripted model server, and what comes back, without any client library."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, cast

from backplane.testing import Call, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from backplane.testing.frames import Frame, RenderRequest, as_events, json_text
from backplane.testing.plan import VENDORS

WAIT_S = 10.0
PATHS: dict[ProtocolName, str] = {
    "openai_compatible": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini_ai_studio": "/v1beta/models/m:generateContent",
}
STREAM_PATH = "/v1beta/models/m:streamGenerateContent?alt=sse"


def question(
    protocol: ProtocolName, says: str = "go", stream: bool = False, **members: Any
) -> tuple[str, dict[str, Any]]:
    """Path and body of a small request."""
    path = STREAM_PATH if stream and protocol == "gemini_ai_studio" else PATHS[protocol]
    every: dict[ProtocolName, dict[str, Any]] = {
        "openai_compatible": {"model": "m", "messages": [{"role": "user", "content": says}]},
        "openai_responses": {"model": "m", "input": says},
        "anthropic": {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": says}]},
        "gemini_ai_studio": {"contents": [{"role": "user", "parts": [{"text": says}]}]},
    }
    streams = {"stream": True} if stream and protocol != "gemini_ai_studio" else {}
    return path, {**every[protocol], **streams, **members}


def post(
    server: ModelServer, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and whole body of an answer, on a connection of its own."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    try:
        client.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        answer = client.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        client.close()


def ask(server: ModelServer, protocol: ProtocolName = "openai_compatible", says: str = "go", **members: Any) -> Any:
    """The JSON of an answer."""
    return json.loads(post(server, *question(protocol, says, **members))[2])


def text_of(answer: Any) -> str:
    return cast("str", answer["choices"][0]["message"]["content"])


def events(body: bytes) -> list[Any]:
    """The data of each event of a stream."""
    blocks = [block for block in body.decode().replace("\r\n", "\n").split("\n\n") if "data: " in block]
    return [block.partition("data: ")[2] for block in blocks]


def streamed(
    server: ModelServer, protocol: ProtocolName = "openai_compatible", **members: Any
) -> tuple[dict[str, str], bytes]:
    _, headers, body = post(server, *question(protocol, stream=True, **members))
    return headers, body


def raw(server: ModelServer, protocol: ProtocolName = "openai_compatible", stream: bool = True) -> bytes:
    """Every byte of an answer, read until the server closes the connection."""
    path, body = question(protocol, stream=stream)
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
        return b"".join(iter(lambda: sock.recv(65536), b""))


# Answers as raw bodies ------------------------------------------------------------------------------------------------

ASK: Final = RenderRequest("scripted-model", 1)
Rework = Callable[[list[Frame]], list[Frame]]


def reworked(
    protocol: str, turn: Turn, rework: Rework, *, crlf: bool = False, comments: int = 0, split: int = 0
) -> Turn:
    """A turn whose stream has other frames, line ends, or comments between its frames."""
    events = as_events(rework(VENDORS[cast("ProtocolName", protocol)].stream(turn, ASK)))
    body = b"".join(b": keep-alive\n\n" * comments + event for event in events)
    body = body.replace(b"\n", b"\r\n") if crlf else body
    return Turn(fault=Fault(raw=body, headers={"content-type": "text/event-stream"}, split_bytes=split))


def one_document(protocol: str, turn: Turn) -> Turn:
    """A turn whose answer to a request for a stream is one document."""
    body = json_text(VENDORS[cast("ProtocolName", protocol)].whole(turn, ASK)).encode()
    return Turn(fault=Fault(raw=body, headers={"content-type": "application/json"}))


def same(frames: list[Frame]) -> list[Frame]:
    return frames


def twice(*labels: str) -> Rework:
    def rework(frames: list[Frame]) -> list[Frame]:
        return [one for one in frames for _ in range(2 if any(fnmatchcase(one.label, name) for name in labels) else 1)]

    return rework


def with_garbage(frames: list[Frame]) -> list[Frame]:
    return [*frames[:-2], Frame("garbage", "{oops"), *frames[-2:]]


# What is said, and what should be heard -------------------------------------------------------------------------------

MEGABYTE = 1_000_000
LONG = "".join(f"{row:09d}\n" for row in range(MEGABYTE // 10))

READ = Call(name="read", input={"path": "a b.txt", "lines": [1, 2], "deep": {"ü": None}})
TURNS = {
    "a text": Turn(text="Hello, wörld.\nSecond line."),
    "reasoning, text and two calls": Turn(
        reasoning="First this,\nthen that.",
        text="I look.",
        calls=(READ, Call(name="bash", input={"command": "ls -la"}, id="call_given")),
        usage=ScriptUsage(input=1000, output=321, cache_read=600, cache_write=50, reasoning=200),
    ),
    "a call without arguments": Turn(calls=(Call(name="now"),)),
    "an answer cut short": Turn(text="Once upon a", stop="max_tokens", usage=ScriptUsage(input=7, output=3)),
    "a refusal": Turn(refusal="I will not.", stop="refusal"),
    "a megabyte": Turn(
        text="".join(f"{row:09d}\n" for row in range(MEGABYTE // 10)),
        pieces=1000,
        usage=ScriptUsage(input=9, output=250_000),
    ),
    "a megabyte of arguments": Turn(calls=(Call(name="write", input={"text": "x" * MEGABYTE}),), pieces=100),
}


class Heard(NamedTuple):
    """What a client heard, in the script's words."""

    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    input: int
    output: int
    cache_read: int
    stop: str


def expected(turn: Turn, protocol: ProtocolName) -> Heard:
    usage = turn.usage or ScriptUsage()
    stops = {
        "openai_compatible": {"tool_use": "tool_calls", "max_tokens": "length", "end": "stop", "refusal": "stop"},
        "openai_responses": {"max_tokens": "max_output_tokens"},
        "anthropic": {"end": "end_turn"},
        "gemini_ai_studio": {"max_tokens": "MAX_TOKENS", "refusal": "SAFETY", "end": "STOP", "tool_use": "STOP"},
    }
    fallback = "completed" if protocol == "openai_responses" else turn.stopped
    return Heard(
        text=(turn.text or "") + (turn.refusal or ""), reasoning=turn.reasoning or "",
        calls=[(call.name, call.input) for call in turn.calls], input=usage.input, output=usage.output,
        cache_read=usage.cache_read, stop=stops[protocol].get(turn.stopped, fallback),
    )  # fmt: skip


# Hundreds of exchanges, alike for every SDK --------------------------------------------------------------------------

WAYS = ("whole", "stream", "helper")
"""How an SDK reads an answer: at once, by its iterator, by its accumulator."""
MADE = 60
"""Turns made by chance beside the named ones; with three ways to read, 201 exchanges a pair."""
EXCHANGES_MIN = 200
TOOLS = [
    {"name": name, "description": f"It does {name}.", "parameters": {"type": "object", "properties": {}}}
    for name in ("read", "bash", "now", "write")
]
WORDS = (
    "plain",
    "wörd",
    "日本",
    "🙂",
    '"quoted"',
    "back\\slash",
    "<b>",
    "line\nend",
    "\ttab",
    "data: x",
    "[DONE]",
    "é",
)


def made(seed: int) -> Turn:
    """Return a turn by chance, with anything that an answer may have."""
    chance = random.Random(seed)

    def words() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 30)))

    def value(depth: int = 0) -> Any:
        leaves = [words(), chance.randint(-9, 2**40), 0.5, True, None, ""]
        if depth == 2:
            return chance.choice(leaves)
        inner = [value(depth + 1) for _ in range(chance.randint(0, 3))]
        return chance.choice([*leaves, inner, {f"k {place}": one for place, one in enumerate(inner)}])

    names = chance.choices(["read", "bash", "now", "write"], k=chance.choice([0, 0, 1, 2, 4]))
    calls = tuple(Call(name=name, input={"a": value(), "ü": value()}) for name in names)
    text = words() if not calls or chance.random() < 0.5 else None
    sent, cached, written = (chance.randint(0, 50_000) for _ in range(3))
    thought = chance.randint(0, 900)
    usage = ScriptUsage(
        input=sent + cached + written, output=thought + chance.randint(1, 5000), cache_read=cached,
        cache_write=written, reasoning=thought,
    )  # fmt: skip
    return Turn(
        reasoning=words() if chance.random() < 0.4 else None, text=text, calls=calls, pieces=chance.choice([1, 3, 40]),
        usage=usage, stop=None if calls or chance.random() < 0.8 else "max_tokens",
    )  # fmt: skip


EVERY = {**TURNS, **{f"made by chance {seed}": made(seed) for seed in range(MADE)}}
