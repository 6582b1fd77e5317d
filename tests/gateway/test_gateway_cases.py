"""What users of other gateways reported, a test for each: tools, streams, thinking, images, usage, errors.

`through` sends one request by an interface to a service of another protocol, and returns what the service was asked
and what the client got.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from backplane.gateway.proofs import Proofs
from backplane.testing import PROTOCOLS, Call, Failure, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.gateway.ground import KEY, Gate, all_of, backend, gateway
from tests.gateway.test_gateway import BEARER, CHAT, GEMINI, MESSAGES, RESPONSES, ask, client, said
from tests.scripted import events, question

TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Passed(NamedTuple):
    """One exchange: what the service was asked, and what the client got."""

    asked: Any
    status: int
    answer: Any
    lost: tuple[str, ...]


def through(
    front: ProtocolName, service: ProtocolName, body: dict[str, Any] | None = None, turn: Turn | None = None, *,
    stream: bool = False,
) -> Passed:  # fmt: skip
    """Send a request with further members; of a stream the answer is the list of its events."""
    path, whole = question(front, stream=stream, **(body or {}))
    with ModelServer(turn or Turn(text="ok")) as server, gateway(all_of(server), {"m": service}) as gate:
        status, _, data = ask(gate, path, whole)
        (end,) = gate.ends
        asked = server.requests[0].body if server.requests else None
    if stream and status == 200:
        found = [json.loads(row) if row.startswith("{") else row for row in events(data)]
        return Passed(asked, status, found, end.lost)
    return Passed(asked, status, json.loads(data), end.lost)


def chat_calls(*ids: str) -> list[dict[str, Any]]:
    """A chat history with calls of these ids and their results."""
    calls = [{"id": one, "type": "function", "function": {"name": "read", "arguments": "{}"}} for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": f"result {one}"} for one in ids]
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def blocks(body: Any, kind: str) -> list[dict[str, Any]]:
    """The blocks of a kind in an Anthropic request."""
    return [
        one for message in body["messages"] if isinstance(message["content"], list)
        for one in message["content"] if one["type"] == kind
    ]  # fmt: skip


def raw(*chunks: Any, done: bool = True, kind: str = "text/event-stream") -> Turn:
    """A turn that streams these chunks of the Chat format as they stand."""
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    return Turn(fault=Fault(raw=body + (b"data: [DONE]\n\n" if done else b""), headers={"content-type": kind}))


def delta(finish: str | None = None, usage: Any = None, **members: Any) -> dict[str, Any]:
    """One chunk of a Chat stream."""
    found = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**found, "choices": [{"index": 0, "delta": members, "finish_reason": finish}], "usage": usage}


def call_piece(index: int, arguments: str = "", id: str | None = None, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function, **({"id": id, "type": "function"} if id else {})}


def streamed_calls(found: list[Any]) -> dict[str, Any]:
    """The calls of a Messages stream: name → arguments; each block begins before its pieces."""
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]], texts[event["index"]] = event["content_block"]["name"], ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"]] += event["delta"]["partial_json"]
    return {names[index]: json.loads(text or "{}") for index, text in texts.items()}


# Tools ----------------------------------------------------------------------------------------------------------------


def test_ids_that_a_service_refuses_are_made_valid_with_their_results() -> None:
    asked = through(CHAT, MESSAGES, {"messages": chat_calls("Bash:0")}).asked
    (call,), (result,) = blocks(asked, "tool_use"), blocks(asked, "tool_result")
    assert call["id"] == result["tool_use_id"]
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", call["id"])


def test_two_ids_that_look_alike_stay_apart() -> None:
    asked = through(CHAT, MESSAGES, {"messages": chat_calls("a:b", "a.b", "a_b")}).asked
    ids = [block["id"] for block in blocks(asked, "tool_use")]
    assert len(set(ids)) == 3
    assert [block["tool_use_id"] for block in blocks(asked, "tool_result")] == ids


def test_a_long_id_is_shortened_the_same_way_each_time() -> None:
    content = [{"type": "tool_use", "id": "x" * 90, "name": "read", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "x" * 90, "content": "r"}]
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": result},
    ]
    ids = set()
    for _ in range(2):
        items = through(MESSAGES, RESPONSES, {"messages": history}).asked["input"]
        ids |= {item["call_id"] for item in items if "call_id" in item}
    (one,) = ids
    assert len(one) <= 64


def test_interleaved_calls_keep_their_arguments() -> None:
    turn = raw(
        delta(role="assistant", tool_calls=[call_piece(0, "", "c0", "one")]),
        delta(tool_calls=[call_piece(1, "", "c1", "two")]),
        delta(tool_calls=[call_piece(0, '{"a"')]), delta(tool_calls=[call_piece(1, '{"b"')]),
        delta(tool_calls=[call_piece(0, ":1}")]), delta(tool_calls=[call_piece(1, ":2}")]), delta("tool_calls"),
    )  # fmt: skip
    found = through(MESSAGES, CHAT, turn=turn, stream=True).answer
    assert streamed_calls(found) == {"one": {"a": 1}, "two": {"b": 2}}


def test_calls_that_all_open_before_one_ends_are_all_there() -> None:
    opened = [delta(tool_calls=[call_piece(place, "", f"c{place}", f"t{place}")]) for place in range(4)]
    filled = [delta(tool_calls=[call_piece(place, json.dumps({"n": place}))]) for place in range(4)]
    found = through(MESSAGES, CHAT, turn=raw(*opened, *filled, delta("tool_calls")), stream=True).answer
    assert streamed_calls(found) == {f"t{place}": {"n": place} for place in range(4)}


def test_a_whole_call_of_gemini_is_streamed_as_pieces() -> None:
    turn = Turn(calls=(Call(name="read", input={"path": "a"}),))
    assert streamed_calls(through(MESSAGES, GEMINI, turn=turn, stream=True).answer) == {"read": {"path": "a"}}


def test_two_chunks_that_finish_give_one_call() -> None:
    turn = raw(
        delta(tool_calls=[call_piece(0, "{}", "c0", "one")]), delta("tool_calls"), delta("tool_calls"), delta("stop")
    )
    found = through(MESSAGES, CHAT, turn=turn, stream=True).answer
    assert streamed_calls(found) == {"one": {}}
    assert [event["type"] for event in found].count("message_stop") == 1


def test_a_tool_loads_late_only_where_the_service_knows_that() -> None:
    tools = [{"name": "read", "input_schema": TOOL, "defer_loading": True}]
    asked = through(MESSAGES, GEMINI, {"tools": tools}).asked
    assert "defer" not in json.dumps(asked)
    assert asked["tools"][0]["functionDeclarations"][0]["name"] == "read"


def test_schemas_are_made_fit_for_the_service() -> None:
    schema = {
        **TOOL, "$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False, "$comment": "x",
        "properties": {"path": {"type": "string", "enum": [1, 2]}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
    (declared,) = through(CHAT, GEMINI, {"tools": tools}).asked["tools"][0]["functionDeclarations"]
    # The older member `parameters` takes a subset that has none of these.
    assert "parameters" not in declared
    assert declared["parametersJsonSchema"]["required"] == ["path"]


@pytest.mark.parametrize(
    "tool",
    [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read", "parameters": TOOL}]},
    ],
)
def test_tools_of_codex_pass_to_a_service_that_knows_them(tool: dict[str, Any]) -> None:
    assert through(RESPONSES, RESPONSES, {"tools": [tool]}).asked["tools"] == [tool]


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}
GROUP = {
    "type": "namespace",
    "name": "functions",
    "description": "",
    "tools": [PATCH, {"type": "function", "name": "read", "parameters": TOOL}],
}
MORE = {"type": "additional_tools", "role": "developer", "tools": [GROUP]}


@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI])
@pytest.mark.parametrize(
    "given", [{"tools": [PATCH]}, {"tools": [GROUP]}, {"input": [MORE, {"role": "user", "content": "go"}]}]
)
def test_a_tool_that_takes_a_text_is_offered_and_called_as_such(service: ProtocolName, given: dict[str, Any]) -> None:
    turn = Turn(text="I edit", calls=(Call(name="patch", input={"input": "*** Begin\n+a"}),))
    for stream in (True, False):
        found = through(RESPONSES, service, given, turn, stream=stream)
        asked = json.dumps(found.asked["tools"])
        assert all(word in asked for word in ("patch", "edits", "start: /a/"))
        answer = found.answer[-1]["response"] if stream else found.answer
        call = answer["output"][-1]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "*** Begin\n+a")
        history = [
            {"role": "user", "content": "go"}, {name: call[name] for name in ("type", "name", "input", "call_id")},
            {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done it"},
        ]  # fmt: skip
        items = [MORE, *history] if "input" in given else history
        again = json.dumps(through(RESPONSES, service, {**given, "input": items}).asked)
        assert "done it" in again
        assert "*** Begin" in again


def test_a_result_in_a_model_turn_is_a_result() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "read", "args": {}}}]},
        {"role": "model", "parts": [{"functionResponse": {"name": "read", "response": {"output": "found"}}}]},
    ]
    asked = through(GEMINI, MESSAGES, {"contents": contents}).asked
    (call,), (result,) = blocks(asked, "tool_use"), blocks(asked, "tool_result")
    assert call["id"] == result["tool_use_id"]
    assert "found" in json.dumps(result)


@pytest.mark.parametrize("content", [None, "text", [{"type": "text", "text": "text"}], []])
def test_a_result_may_be_a_text_a_list_or_nothing(content: Any) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1"} | ({} if content is None else {"content": content})
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    for service in (CHAT, RESPONSES, GEMINI):
        found = through(MESSAGES, service, {"messages": history})
        assert found.status == 200
        assert ("text" in json.dumps(found.asked)) or not content


@pytest.mark.parametrize("service", [RESPONSES, MESSAGES, GEMINI])
def test_the_choice_of_a_tool_is_carried(service: ProtocolName) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in ("read", "write")]
    choice = {"type": "function", "function": {"name": "read"}}
    asked = through(CHAT, service, {"tools": tools, "tool_choice": choice}).asked
    chosen = asked.get("tool_choice") or asked["toolConfig"]
    assert "read" in json.dumps(chosen)


@pytest.mark.parametrize("service", PROTOCOLS)
def test_the_schema_of_a_tool_survives(service: ProtocolName) -> None:
    tools = [{"name": "read", "description": "reads", "input_schema": TOOL}]
    asked = json.dumps(through(MESSAGES, service, {"tools": tools}).asked["tools"])
    assert all(word in asked for word in ("read", "reads", "path", "required", "string"))


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [CHAT, RESPONSES, GEMINI])
def test_messages_streams_have_the_order_that_clients_need(service: ProtocolName) -> None:
    turn = Turn(reasoning="I think", text="I say", calls=(Call(name="read", input={"path": "a"}),))
    found = through(MESSAGES, service, turn=turn, stream=True).answer
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds.count("message_start"), kinds[-1]) == ("message_start", 1, "message_stop")
    opened: dict[int, str] = {}
    texts = {"text": "", "thinking": ""}
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(opened)
            opened[event["index"]] = event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert event["index"] in opened
            for name in texts:
                texts[name] += event["delta"].get(name, "")
    assert texts == {"text": "I say", "thinking": "I think"}


@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI])
@pytest.mark.parametrize("size", [None, 300, 900])
def test_responses_streams_end_completed_or_failed(service: ProtocolName, size: int | None) -> None:
    turn = Turn(text="word " * 300, pieces=50, fault=Fault(cut_after_bytes=size))
    found = through(RESPONSES, service, turn=turn, stream=True)
    if found.status != 200:
        assert size is not None
        return
    last = found.answer[-1]["type"]
    assert last == "response.completed" if size is None else last in ("response.failed", "response.incomplete")
    numbers = [event["sequence_number"] for event in found.answer]
    assert numbers == sorted(set(numbers))


def test_comments_and_a_wrong_content_type_do_no_harm() -> None:
    body = b": hello\n\ndata: " + json.dumps(delta("stop", content="hi")).encode() + b"\n\n: bye\n\ndata: [DONE]\n\n"
    for kind in ("text/event-stream", "application/json", "text/plain"):
        turn = Turn(fault=Fault(raw=body, headers={"content-type": kind}))
        for stream in (True, False):
            found = through(MESSAGES, CHAT, turn=turn, stream=stream)
            assert found.status == 200
            assert "hi" in json.dumps(found.answer)
            assert "hello" not in json.dumps(found.answer)


@pytest.mark.parametrize("service", PROTOCOLS)
def test_the_first_piece_comes_before_the_last_is_written(service: ProtocolName) -> None:
    turn = Turn(text="one two three", pieces=3, fault=Fault(stall_after_frames=6))
    path, body = question(CHAT, stream=True)
    with ModelServer(turn) as server, gateway(all_of(server), {"m": service}) as gate, posted(gate, path, body) as end:
        got = b""
        while b"content" not in got.partition(b"\r\n\r\n")[2]:
            got += end.recv(65_536)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("front", [CHAT, RESPONSES, MESSAGES, GEMINI])
def test_an_answer_whose_service_gives_no_id_has_one_of_its_own(front: ProtocolName, stream: bool) -> None:
    if front == GEMINI:
        service, body = CHAT, {**delta("stop", content="hi"), "id": "", "object": "chat.completion.chunk"}
        whole = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    else:
        service = GEMINI
        body = whole = {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}]}
    data = b"data: " + json.dumps(body).encode() + b"\n\n" if stream else json.dumps(whole).encode()
    turn = Turn(fault=Fault(raw=data, headers={"content-type": "text/event-stream" if stream else "application/json"}))
    beginning, ids = {CHAT: "chatcmpl-", RESPONSES: "resp_", MESSAGES: "msg_", GEMINI: ""}[front], set()
    for _ in range(2):
        text = json.dumps(through(front, service, turn=turn, stream=stream).answer)
        assert "translated" not in text
        ids.add(re.findall(rf'"(?:id|responseId)": "({beginning}[0-9a-f]{{32}})"', text)[0])
    assert len(ids) == 2


def test_counters_that_come_after_the_finish_are_kept() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    turn = raw(delta("stop", content="hi"), {**delta(usage=usage), "choices": []})
    found = through(MESSAGES, CHAT, turn=turn, stream=True).answer
    (last,) = [event for event in found if event["type"] == "message_delta"]
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (7, 3)


# Thinking -------------------------------------------------------------------------------------------------------------


def two_turns(front: ProtocolName, service: ProtocolName, answer: Any) -> list[Any]:
    """Ask twice through a service that answers with `answer` first; return its two requests.

    The second request has the history as a client of the interface keeps it.
    """
    first = Turn(fault=Fault(raw=json.dumps(answer).encode(), headers={"content-type": "application/json"}))
    with ModelServer([first, Turn(text="done")]) as server, gateway(all_of(server), {"m": service}) as gate:
        given = said(gate, front)[1]
        if front == CHAT:
            message = given["choices"][0]["message"]
            kept = {name: message[name] for name in ("role", "content", "tool_calls")}
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in kept["tool_calls"]]
            said(gate, front, messages=[{"role": "user", "content": "go"}, kept, *results])
        else:
            calls = [block for block in given["content"] if block["type"] != "thinking"]
            results = [
                {"type": "tool_result", "tool_use_id": one["id"], "content": "r"} for one in calls if "id" in one
            ]
            history = [{"role": "user", "content": "go"}, {"role": "assistant", "content": calls}]
            said(gate, front, messages=[*history, {"role": "user", "content": results}])
        return [request.body for request in server.requests]


CLAUDE_ANSWER: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
    "stop_sequence": None, "content": [
        {"type": "thinking", "thinking": "So “this”.", "signature": "c2ln=="},
        {"type": "redacted_thinking", "data": "cmVk"},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip


def test_signed_thinking_goes_back_unchanged_through_a_client_that_cannot_carry_it() -> None:
    _, second = two_turns(CHAT, MESSAGES, CLAUDE_ANSWER)
    assistant = next(message for message in second["messages"] if message["role"] == "assistant")
    assert assistant["content"][:2] == CLAUDE_ANSWER["content"][:2]
    assert assistant["content"][2]["id"] == "toolu_1"


@pytest.mark.parametrize("front", [CHAT, MESSAGES])
def test_a_signature_of_gemini_goes_back_with_its_call(front: ProtocolName) -> None:
    call = {"functionCall": {"id": "g1", "name": "read", "args": {}}, "thoughtSignature": "c2lnbmVk"}
    answer = {"candidates": [{"content": {"role": "model", "parts": [call]}, "finishReason": "STOP", "index": 0}]}
    _, second = two_turns(front, GEMINI, answer)
    parts = [part for content in second["contents"] for part in content["parts"] if "functionCall" in part]
    assert [part["thoughtSignature"] for part in parts] == ["c2lnbmVk"]


@pytest.mark.parametrize("front", [CHAT, MESSAGES])
def test_encrypted_reasoning_goes_back_before_its_call(front: ProtocolName) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "ZW5j"}
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "read",
        "arguments": "{}",
        "status": "completed",
    }
    answer = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [reasoning, call]}
    _, second = two_turns(front, RESPONSES, answer)
    kinds = [item.get("type") for item in second["input"]]
    assert second["input"][kinds.index("function_call") - 1] == reasoning


def test_proofs_stay_with_the_account_that_made_them_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = Proofs()
    proofs.keep("one", "claude", CLAUDE_ANSWER)
    request = {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1"}]}]}
    assert proofs.restore("other", "claude", request) == request
    assert proofs.restore("one", "claude", request) != request
    monkeypatch.setattr("backplane.gateway.kept.BYTES_MAX", 1000)
    for place in range(100):
        block = {**CLAUDE_ANSWER["content"][2], "id": f"t{place}"}
        proofs.keep("one", "claude", {**CLAUDE_ANSWER, "content": [*CLAUDE_ANSWER["content"][:2], block]})
    assert len(proofs.rows) < 20
    assert proofs.rows.size <= 1000


def test_thinking_without_a_signature_is_not_sent_to_a_service_that_wants_one() -> None:
    messages = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "user", "content": "on"},
    ]  # fmt: skip
    asked = through(CHAT, MESSAGES, {"messages": messages}).asked
    assert not blocks(asked, "thinking")


@pytest.mark.parametrize("service", [CHAT, RESPONSES, GEMINI])
def test_signatures_of_another_vendor_are_not_sent(service: ProtocolName) -> None:
    content = [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, {"type": "text", "text": "a"}]
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "on"},
    ]
    assert "c2ln" not in json.dumps(through(MESSAGES, service, {"messages": history}).asked)


@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI])
def test_reasoning_items_without_content_and_ids_are_taken(service: ProtocolName) -> None:
    items = [
        {"role": "user", "content": "go"}, {"type": "reasoning", "summary": [], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"role": "user", "content": "on"},
    ]  # fmt: skip
    found = through(RESPONSES, service, {"input": items, "store": False, "include": ["reasoning.encrypted_content"]})
    assert found.status == 200


def test_effort_reaches_the_thinking_of_another_vendor() -> None:
    asked = through(RESPONSES, MESSAGES, {"reasoning": {"effort": "high"}}).asked
    assert "thinking" in asked or "output_config" in asked


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [CHAT, GEMINI])
def test_an_image_in_a_result_reaches_the_model(service: ProtocolName) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [image]}
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert PNG in json.dumps(through(MESSAGES, service, {"messages": history}).asked)


@pytest.mark.parametrize("service", [MESSAGES, RESPONSES, GEMINI])
def test_an_image_without_detail_is_taken(service: ProtocolName) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    found = through(CHAT, service, {"messages": [{"role": "user", "content": [part]}]})
    assert found.status == 200
    assert PNG in json.dumps(found.asked)


@pytest.mark.parametrize("service", PROTOCOLS)
def test_addresses_in_contents_are_never_fetched(service: ProtocolName) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.3)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/a.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": f"see {url} and file:///etc/hostname"}
        found = through(CHAT, service, {"messages": [{"role": "user", "content": [text, part]}]})
        with pytest.raises(TimeoutError):
            bait.accept()
    assert found.status == 200 or found.asked is None


# Usage and caches -----------------------------------------------------------------------------------------------------


def test_cache_writes_are_charged_once() -> None:
    usage = ScriptUsage(input=1000, output=0, cache_read=200, cache_write=300)
    prices = {"input": 10, "output": 10, "cache_read": 1, "cache_write": 20}
    with ModelServer(Turn(text="ok", usage=usage)) as server:
        services = {"a": backend(server, MESSAGES, prices=prices)}
        with gateway(services, {"m": "a"}) as gate:
            said(gate, MESSAGES, stream=True)
            (end,) = gate.ends
    assert end.cost == 500 * 10 + 200 * 1 + 300 * 20


def test_what_a_service_cannot_cache_is_named() -> None:
    text = {"type": "text", "text": "long", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    found = through(MESSAGES, CHAT, {"messages": [{"role": "user", "content": [text]}]})
    assert "ttl" not in json.dumps(found.asked)
    assert any("cache" in row for row in found.lost)


def test_a_line_that_changes_each_time_does_not_break_another_vendors_cache() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
        {"type": "text", "text": "You help."},
    ]
    found = through(MESSAGES, CHAT, {"system": system})
    assert "billing" not in json.dumps(found.asked)
    assert "You help." in json.dumps(found.asked)
    assert through(MESSAGES, MESSAGES, {"system": system}).asked["system"] == system


# Errors ---------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_stream_is_an_event_of_the_clients_dialect() -> None:
    turn = Turn(text="so far", fault=Fault(failure=Failure(code="server_error", message="as scripted")))
    found = through(MESSAGES, CHAT, turn=turn, stream=True).answer
    assert found[-1]["type"] == "error"
    assert "as scripted" in found[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("front", "service", "member"),
    [
        (MESSAGES, CHAT, {"thread": {"type": "continue", "previous_message_id": "msg_1"}}),
        (MESSAGES, GEMINI, {"thread": {"type": "create"}}),
        (RESPONSES, MESSAGES, {"conversation": "conv_1"}),
        (GEMINI, CHAT, {"cachedContent": "cachedContents/1"}),
    ],
)
def test_a_conversation_that_only_its_vendor_keeps_is_refused(
    front: ProtocolName, service: ProtocolName, member: dict[str, Any]
) -> None:
    found = through(front, service, member)
    assert (found.status, found.asked) == (400, None)
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert found.answer["error"].get("details") == (details if "thread" in member else None)


def test_a_quota_that_is_used_up_is_no_pause() -> None:
    quota = {
        "error": {
            "message": "You exceeded your current quota",
            "type": "insufficient_quota",
            "code": "insufficient_quota",
        }
    }
    body = Fault(status=429, raw=json.dumps(quota).encode(), headers={"content-type": "application/json"})
    found = through(MESSAGES, CHAT, turn=Turn(fault=body))
    assert found.status == 429
    assert "quota" in found.answer["error"]["message"]


@contextmanager
def posted(gate: Gate, path: str, body: Any) -> Iterator[socket.socket]:
    """Send a request; its answer comes from the socket."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{gate.port}\r\nauthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", gate.port), timeout=5) as end:
        end.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        yield end


# At once --------------------------------------------------------------------------------------------------------------


def test_a_place_is_free_again_after_its_client_has_gone() -> None:
    with (
        ModelServer([Turn(text="slow", fault=Fault(first_byte_ms=3000)), Turn(text="ok")]) as server,
        gateway(all_of(server), {"m": CHAT}, key=None, clients=client(exchanges_max=1)) as gate,
    ):
        path, body = question(CHAT)
        with posted(gate, path, body):
            server.wait_requests(1)
            assert ask(gate, path, body)[0] == 429
        assert gate.ends
        assert ask(gate, path, body)[0] == 200


def test_many_exchanges_at_once_do_not_mix() -> None:
    turns = [Turn(text=f"answer {place}", pieces=5) for place in range(40)]
    found: list[str] = []
    with ModelServer(turns) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        path, body = question(CHAT, stream=True)

        def work() -> None:
            data = ask(gate, path, body, BEARER)[2]
            rows = [json.loads(row) for row in events(data) if row.startswith("{")]
            found.append("".join(row["choices"][0]["delta"].get("content") or "" for row in rows if row["choices"]))

        threads = [threading.Thread(target=work) for _ in turns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(gate.ends) == len(turns)
    assert sorted(found) == sorted(turn.text or "" for turn in turns)
