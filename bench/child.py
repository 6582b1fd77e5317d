"""The far end of every measurement: a small program that says, in four dialects, the same 200 bytes.

`bench/child.py DIALECT MODE COUNT`: it answers what its peer needs to hear before it may speak, then
writes COUNT lines (`stream` as fast as they are taken, `paced` one every 2 ms with the time of its
writing in it), then its end. `ask` and `idle` wait for the peer; `echo` copies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

LINE_BYTES = 200
"""The newline included."""
BLOCK_LINES = 1000
"""Lines made before the first is written; a stream repeats them. Each has a time of its own."""
PACE_S = 0.002
"""Far longer than anybody needs for one event, so that every event finds its reader waiting."""
READ_BYTES = 65536
PASSAGE = (
    "The last page is missing because page_count rounds down; a short one is needed for what is left over, so I look "
    "at how it divides, change it in src/pager.py and run the tests of the whole project once more. Two of them fail "
    "as before, and both are about the same thing: a list that does not fill its last page, and a list of nothing at "
    "all. I will read the caller next, since it asks for one page more than there are when total is zero. The loop in "
    "main.py:48 goes from 1 to pages + 1, which is right; what is wrong is the number it is given. With -(-total // "
    "size) the short page counts, and nothing still needs none. This is the smallest implementation that passes, and "
    "it keeps integers where the other way (math.ceil) would go through a float and be off for very large lists. Now "
    "all four tests pass. Commit 5f0c1b7e9ad34c6688c2f0de4b7a91c3d2e6f850 had the same fault in an older place; it is "
    "gone there too, and I have written down in the changelog what a user will see: one page more, never an empty one. "
)
"""What an agent would say, with the names and digits that come with it: a look for secrets must not find it easy."""
EXTENSIONS = {"ask": ["ask/1"]}

Json = dict[str, Any]


def say(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def message(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def heard() -> Iterator[Json]:
    """Messages from stdin until it ends."""
    rest = b""
    while data := os.read(0, READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def padded(line_of: Callable[[str], bytes], text: str) -> bytes:
    """A line with the text in it, cut or filled up to the length that all lines have."""
    room = LINE_BYTES - len(line_of(""))
    return line_of(text[:room].ljust(room))


def words_from(number: int) -> str:
    """A different piece of the passage for every line."""
    words = PASSAGE.split()
    start = number * 7 % len(words)
    return " ".join(words[start:] + words[:start])


def speak(mode: str, count: int, line_of: Callable[[int, str], bytes]) -> None:
    """Write the lines of a stream; `line_of` takes a number for the line's time, and its text."""
    if mode == "paced":
        for number in range(count):
            time.sleep(PACE_S)
            stamp = f"{time.monotonic_ns()} "
            say(padded(lambda text, number=number: line_of(number, text), stamp))  # type: ignore[misc]
        return
    block = [padded(lambda text, n=n: line_of(n, text), words_from(n)) for n in range(BLOCK_LINES)]  # type: ignore[misc]
    whole = b"".join(block)
    for _ in range(count // BLOCK_LINES):
        say(whole)
    say(b"".join(block[: count % BLOCK_LINES]))


# Dialects -------------------------------------------------------------------------------------------------------------


def stamp_of(number: int) -> str:
    milliseconds = number % 999 + 1
    return f"2026-01-01T00:00:{number // 999 % 60:02d}.{milliseconds:03d}Z"


def abp_receipt(run: Json, usage_raw: Json) -> Json:
    now = "2026-01-01T00:00:00Z"
    return {
        "meta": {
            "run_id": run["id"],
            "work_order_id": run["work_order"]["id"],
            "contract_version": "abp/v0.1",
            "started_at": now,
            "finished_at": now,
            "duration_ms": 0,
        },
        "backend": {"id": "bench", "backend_version": None, "adapter_version": None},
        "capabilities": {},
        "mode": "mapped",
        "usage_raw": usage_raw,
        "usage": {},
        "trace": [],
        "artifacts": [],
        "verification": {"git_diff": None, "git_status": None, "harness_ok": True},
        "outcome": "complete",
        "receipt_sha256": None,
    }


def abp(mode: str, count: int) -> None:
    hello = {"t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "bench"}, "capabilities": {}}
    say(message({**hello, "mode": "mapped", "extensions": EXTENSIONS.get(mode, [])}))
    messages = heard()
    run = next(messages)
    head = '{"t":"event","ref_id":' + json.dumps(run["id"]) + ',"event":{"type":"'

    def line_of(number: int, text: str) -> bytes:
        if mode == "mixed" and number % 10 == 0:
            body = f'tool_call","ts":"{stamp_of(number)}","tool_name":"read","input":{{"path":"{text}"}}'
        else:
            body = f'assistant_delta","ts":"{stamp_of(number)}","text":"{text}"'
        return f"{head}{body}}}}}\n".encode()

    usage_raw: Json = {}
    if mode in ("stream", "paced", "mixed"):
        speak(mode, count, line_of)
    else:
        usage_raw = {"ask_ns": [ask(run["id"], str(number), messages) for number in range(count)]}
    say(message({"t": "final", "ref_id": run["id"], "receipt": abp_receipt(run, usage_raw)}))


def ask(ref_id: str, name: str, messages: Iterator[Json]) -> int:
    began = time.monotonic_ns()
    say(message({"t": "ask", "ref_id": ref_id, "id": name, "kind": "tool", "name": "read", "input": {}}))
    next(messages)
    return time.monotonic_ns() - began


MCP_HEAD = '{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"'
ACP_HEAD = (
    '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":'
    '{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"'
)
CLAUDE_HEAD = '{"type":"assistant","message":{"model":"m","content":[{"type":"text","text":"'


def around(head: str, tail: str) -> Callable[[int, str], bytes]:
    return lambda _, text: f"{head}{text}{tail}\n".encode()


def rpc(request: Json, result: Json) -> bytes:
    return message({"jsonrpc": "2.0", "id": request["id"], "result": result})


def mcp(mode: str, count: int) -> None:
    for request in heard():
        if request["method"] == "initialize":
            version = request["params"]["protocolVersion"]
            server = {"name": "bench", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"logging": {}, "tools": {}}, "serverInfo": server}
            say(rpc(request, result))
        elif request["method"] == "notifications/initialized" and mode != "idle":
            speak(mode, count, around(MCP_HEAD, '"}}'))


def acp(mode: str, count: int) -> None:
    for request in heard():
        if request["method"] == "initialize":
            say(rpc(request, {"protocolVersion": 1, "agentCapabilities": {}, "authMethods": []}))
        elif request["method"] == "session/new":
            say(rpc(request, {"sessionId": "s"}))
        elif request["method"] == "session/prompt":
            speak(mode, count, around(ACP_HEAD, '"}}}}'))
            say(rpc(request, {"stopReason": "end_turn"}))


def claude(mode: str, count: int) -> None:
    for request in heard():
        if request["type"] == "control_request":
            inner = {
                "subtype": "success",
                "request_id": request["request_id"],
                "response": {"hook_on_failure_supported": True},
            }
            say(message({"type": "control_response", "response": inner}))
        elif request["type"] == "user":
            speak(mode, count, around(CLAUDE_HEAD, '"}]},"parent_tool_use_id":null,"session_id":"s"}'))
            end = {"type": "result", "subtype": "success", "duration_ms": 1, "duration_api_ms": 1, "is_error": False}
            say(message({**end, "num_turns": 1, "session_id": "s", "total_cost_usd": 0.0}))


def echo(mode: str, count: int) -> None:
    while data := os.read(0, READ_BYTES):
        os.write(1, data)


DIALECTS = {"abp": abp, "mcp": mcp, "acp": acp, "claude": claude, "echo": echo}


if __name__ == "__main__":
    try:
        DIALECTS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    except BrokenPipeError:
        os._exit(0)
