"""How the answers of the scripted model server go wrong: status, frames, bytes and connections."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable

import pytest

from backplane.errors import BackplaneError
from backplane.testing import (
    PROTOCOLS,
    Call,
    Failure,
    Fault,
    ModelServer,
    ProtocolName,
    Turn,
)
from tests.scripted import STREAM_PATH, WAIT_S, ask, events, post, question, raw, streamed, text_of

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


# How answers go wrong -------------------------------------------------------------------------------------------------


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
def test_a_status_comes_with_the_vendors_own_error_and_the_scripts_headers(
    protocol: ProtocolName, stream: bool
) -> None:
    fault = Fault(status=429, headers={"retry-after": "3"}, message="slow down")
    with ModelServer(Turn(fault=fault)) as server:
        status, headers, body = post(server, *question(protocol, stream=stream))
    assert (status, headers["retry-after"]) == (429, "3")
    assert json.loads(body)["error"]["message"] == "slow down"


def test_a_body_and_its_type_may_be_anything() -> None:
    page = Fault(status=502, raw=b"<html>no</html>", headers={"content-type": "text/html"})
    bodies = [page, Fault(raw=b'{"a": [1]}'), Fault(raw=b"\xff")]
    with ModelServer([Turn(fault=fault) for fault in bodies]) as server:
        status, headers, body = post(server, *question("anthropic"))
        assert (status, headers["content-type"], body) == (502, "text/html", b"<html>no</html>")
        assert ask(server) == {"a": [1]}
        assert post(server, *question("anthropic", stream=True))[2] == b"\xff"


FRAMES: list[tuple[ProtocolName, Fault, Callable[[list[str]], bool]]] = [
    ("openai_compatible", Fault(drop=("CLOSING",)), lambda rows: "stop" in rows[-1]),
    ("openai_compatible", Fault(drop=("END",)), lambda rows: not any('"stop"' in row for row in rows)),
    ("openai_responses", Fault(drop=("END",)), lambda rows: not any('"response.completed"' in r for r in rows)),
    ("openai_responses", Fault(drop=("*.added", "CLOSING")), lambda rows: len(rows) == 2 + 4 + 1),
    ("anthropic", Fault(drop=("END",)), lambda rows: "content_block_stop" in rows[-1]),
    ("anthropic", Fault(drop=("CLOSING",)), lambda rows: "message_delta" in rows[-1]),
    ("gemini_ai_studio", Fault(drop=("END",)), lambda rows: not any("finishReason" in row for row in rows)),
    ("openai_compatible", Fault(failure=Failure(code="broke")), lambda rows: '"broke"' in rows[-1] and len(rows) == 6),
    ("anthropic", Fault(failure=Failure(code="broke")), lambda rows: '"broke"' in rows[-1]),
    ("openai_responses", Fault(failure=Failure(code="broke")), lambda rows: '"broke"' in rows[-1]),
    ("gemini_ai_studio", Fault(failure=Failure(code="broke")), lambda rows: '"broke"' in rows[-1] and len(rows) == 5),
]


@pytest.mark.parametrize(("protocol", "fault", "holds"), FRAMES)
def test_frames_are_dropped_and_replaced_as_scripted(
    protocol: ProtocolName, fault: Fault, holds: Callable[[list[str]], bool]
) -> None:
    with ModelServer(Turn(text="abcd", fault=fault)) as server:
        rows = events(streamed(server, protocol)[1])
    assert holds(rows), rows


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ['{"a": ', "[1]", "[" * 100_000])
def test_broken_arguments_are_an_answer_in_every_format(protocol: ProtocolName, stream: bool, text: str) -> None:
    turn = Turn(calls=(Call(name="f", input=text),))
    with ModelServer([turn]) as server:
        if stream:
            assert b'"f"' in streamed(server, protocol)[1]
        else:
            assert '"f"' in json.dumps(ask(server, protocol))
        assert [request.status for request in server.requests] == [200]


@each_protocol
def test_split_frames_say_the_same(protocol: ProtocolName) -> None:
    with ModelServer([Turn(text="wörd"), Turn(text="wörd", fault=Fault(split_bytes=1))]) as server:
        plain, odd = streamed(server, protocol)[1], streamed(server, protocol)[1]
    assert [row.replace("2", "1") for row in events(odd)] == [row.replace("2", "1") for row in events(plain)]


def test_a_stream_without_alt_sse_is_one_array() -> None:
    with ModelServer(Turn(text="abcd")) as server:
        body = post(server, STREAM_PATH.partition("?")[0], question("gemini_ai_studio")[1])[2]
    texts = [row["candidates"][0]["content"]["parts"][0]["text"] for row in json.loads(body)]
    assert texts == ["a", "b", "c", "d", ""]


def test_a_body_may_end_with_its_connection() -> None:
    with ModelServer(Turn(text="abcd", fault=Fault(close_delimited=True))) as server:
        head, _, body = raw(server).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"chunked" not in head
    assert b"content-length" not in head
    assert body.endswith(b"data: [DONE]\n\n")


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_cut_where_the_script_says(protocol: ProtocolName, stream: bool) -> None:
    with ModelServer(Turn(text="abcd" * 100, fault=Fault(cut_after_bytes=100))) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            post(server, *question(protocol, stream=stream))
        assert server.wait_end(1) == "cut"
    assert stream or len(caught.value.partial) == 100


def test_a_connection_is_reset_at_once_or_in_the_middle() -> None:
    resets = [Fault(reset=True), Fault(reset=True, cut_after_bytes=50)]
    with ModelServer([Turn(text="abcd", fault=fault) for fault in resets]) as server:
        for _ in resets:
            with pytest.raises(ConnectionResetError):
                raw(server)
        assert [server.wait_end(number) for number in (1, 2)] == ["cut", "cut"]


STALLS = [
    Fault(first_byte_ms=600_000),
    Fault(stall_after_frames=0),
    Fault(stall_after_frames=2),
    Fault(stall_after_frames=2, stall_comment_ms=1),
    Fault(pause_ms=600_000),
]


@pytest.mark.parametrize("fault", STALLS, ids=["hang", "head", "silence", "comments", "slow"])
def test_an_answer_without_end_ends_when_its_client_leaves(fault: Fault) -> None:
    path, body = question("openai_compatible", stream=True)
    with ModelServer([Turn(text="abcd", fault=fault), Turn(text="next")]) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        client.request("POST", path, json.dumps(body))
        server.wait_requests(1)
        if fault.stall_comment_ms:
            answer = client.getresponse()
            while b": keep-alive" not in answer.readline():
                pass
            answer.close()
        client.close()
        assert server.wait_end(1) == "left"
        assert text_of(ask(server)) == "next"


def test_a_server_that_closes_ends_all_that_it_holds_open() -> None:
    with ModelServer(Turn(text="abcd", fault=Fault(stall_after_frames=1))) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        client.request("POST", *question("anthropic", stream=True)[:1], json.dumps(question("anthropic")[1]))
        server.wait_requests(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "model-server"]
    client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def test_waiting_for_what_does_not_come_is_bounded() -> None:
    with ModelServer([]) as server, pytest.raises(BackplaneError, match="no 1 requests within") as caught:
        server.wait_requests(1, within_s=0.01)
    assert caught.value.code == "backend_timeout"
