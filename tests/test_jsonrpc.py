"""JSON-RPC lines: what is a message, what is none, and a conversation over two pipes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.agents.claude.peer import ControlPeer
from backplane.errors import BackendError
from backplane.process import jsonrpc as pipe_module
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    FramedPeer,
    Malformed,
    Notification,
    Peer,
    Request,
    Response,
    RpcError,
)

WAIT_S = 5.0


BODIES = st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=30), max_size=3), max_size=5)


@given(bodies=BODIES, cuts=st.lists(st.integers(0, 400), max_size=8), noise=st.booleans())
def test_framed_messages_are_whole_whatever_the_pieces(
    bodies: list[dict[str, str]], cuts: list[int], noise: bool
) -> None:
    peer = FramedPeer()
    wire = (b"no header\r\n\r\n" if noise else b"") + b"".join(peer.notify("m", body) for body in bodies)
    places = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    found = [one for a, b in itertools.pairwise(places) for one in peer.receive(wire[a:b])]
    if noise:
        assert isinstance(found.pop(0), Malformed)
    assert found == [Notification("m", body) for body in bodies]


def test_a_framed_message_over_the_limit_is_read_past() -> None:
    for size in (2000, 4000, 100_000):
        peer = FramedPeer(1000)
        wire = peer.notify("m", {"a": "x" * size}) + peer.notify("m", {})
        found = [one for place in range(0, len(wire), 700) for one in peer.receive(wire[place : place + 700])]
        assert [type(one) for one in found] == [Malformed, Notification]
    assert type(FramedPeer().receive(b"x" * 5000)[0]) is Malformed


def received(text: str) -> Any:
    (only,) = Peer().receive(text.encode() + b"\n")
    return only


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"jsonrpc":"2.0","id":0,"method":"m","params":{"a":1}}', Request(0, "m", {"a": 1})),
        ('{"id":"x","method":"m"}', Request("x", "m", {})),
        ('{"method":"m","params":{}}', Notification("m", {})),
        ('{"id":7,"result":null}', Response(7, None)),
        ('{"id":7,"error":{"code":5,"message":"no"}}', Response(7, None, RpcError(5, "no"))),
        ('{"id":7,"error":{"code":"x"}}', Response(7, None, RpcError(-32603, "no reason was given"))),
    ],
)
def test_a_line_is_a_question_a_notification_or_an_answer(line: str, expected: Any) -> None:
    assert received(line) == expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("hello", PARSE_ERROR),
        ("{", PARSE_ERROR),
        ('{"id":NaN}', PARSE_ERROR),
        ("[" * 500 + "]" * 500, PARSE_ERROR),
        ("[]", INVALID_REQUEST),
        ("{}", INVALID_REQUEST),
        ('{"id":true,"method":"m"}', INVALID_REQUEST),
        ('{"id":1.5,"result":1}', INVALID_REQUEST),
        ('{"id":1,"method":"m","params":[1]}', INVALID_PARAMS),
    ],
)
def test_what_is_no_message_is_said_with_its_code(line: str, code: int) -> None:
    unread = received(line)
    assert isinstance(unread, Malformed)
    assert unread.code == code


@pytest.mark.parametrize("peer", [Peer, ControlPeer, FramedPeer])
@pytest.mark.parametrize("before", [b"\x07", b"\x1b[2K\r", b"\xef\xbb\xbf", b"\x1b]0;title\x07\x1b[?25l"])
def test_a_message_behind_control_characters_is_read_and_counted(peer: Callable[[], Peer], before: bytes) -> None:
    end = peer()
    body = before + b'{"type":"note","jsonrpc":"2.0","method":"note","params":{"a":"\\u001b"}}'
    framed = isinstance(end, FramedPeer)
    data = b"Content-Length: %d\r\n\r\n%b" % (len(body), body) if framed else body + b"\n"
    for _ in range(3):
        (note,) = end.receive(data)
        assert isinstance(note, Notification), note
        assert note.method == "note"
    assert end.prefixed == 3


def test_a_line_over_the_limit_is_skipped_and_the_next_is_read() -> None:
    found = Peer(line_bytes_max=64).receive(b'{"a":"' + b"x" * 100 + b'"}\n{"method":"m"}\n')
    assert isinstance(found[0], Malformed)
    assert found[1] == Notification("m", {})


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=3), max_size=5), st.integers(1, 50))
def test_messages_come_out_as_they_went_in_however_they_are_cut(bodies: list[dict[str, str]], size: int) -> None:
    ours, theirs = Peer(), Peer()
    data = b"".join(ours.call("m", body)[1] + ours.notify("n", body) for body in bodies)
    cut = [data[at : at + size] for at in range(0, len(data), size)]
    found = [message for piece in cut for message in theirs.receive(piece)]
    assert [(type(one), getattr(one, "params", None)) for one in found] == [
        (kind, body) for body in bodies for kind in (Request, Notification)
    ]


class Other:
    """The far end of a pipe, by hand."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write, self.seen = read, write, b""

    def say(self, message: Any) -> None:
        os.write(self.write, (message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")

    async def next(self) -> Any:
        with anyio.fail_after(WAIT_S):
            while b"\n" not in self.seen:
                await anyio.wait_readable(self.read)
                self.seen += os.read(self.read, 65536)
        line, _, self.seen = self.seen.partition(b"\n")
        return json.loads(line)


@asynccontextmanager
async def joined(**options: Any) -> AsyncIterator[tuple[Pipe, Other]]:
    """A pipe that is running, and its far end."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    for fd in (theirs_in, ours_out, ours_in, theirs_out):
        os.set_blocking(fd, False)

    async def answer(asked: Request) -> Any:
        return asked.params if asked.method == "echo" else RpcError(METHOD_NOT_FOUND, "no such method")

    async def hear(told: Notification) -> None:
        return None

    pipe = Pipe(ours_out, ours_in, **{"answer": answer, "hear": hear, **options})
    other = Other(theirs_in, theirs_out)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipe.run)
            yield pipe, other
            tasks.cancel_scope.cancel()
    finally:
        for fd in (theirs_in, ours_out, ours_in):
            os.close(fd)
        if other.write >= 0:
            os.close(other.write)


pytestmark = pytest.mark.anyio


async def test_each_answer_reaches_its_own_question() -> None:
    async with joined() as (pipe, other):
        found: dict[str, Response] = {}

        async def ask(name: str) -> None:
            found[name] = await pipe.call(name, {}, timeout_s=WAIT_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "one")
            tasks.start_soon(ask, "two")
            asked = [await other.next(), await other.next()]
            for question in reversed(asked):
                other.say({"id": question["id"], "result": question["method"]})
        assert {name: reply.result for name, reply in found.items()} == {"one": "one", "two": "two"}


async def test_a_question_without_an_answer_ends_in_time() -> None:
    async with joined() as (pipe, _):
        with pytest.raises(BackendError) as caught:
            await pipe.call("slow", {}, timeout_s=0.05)
        assert caught.value.code == "backend_timeout"


async def test_the_line_after_one_that_was_given_up_halfway_is_a_line_of_its_own() -> None:
    async with joined() as (pipe, other):
        with pytest.raises(BackendError):
            await pipe.call("prompt", {"text": "x" * 200_000}, timeout_s=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipe.notify, "session/cancel", {"id": 1})
            assert len((await other.next())["params"]["text"]) == 200_000
            assert (await other.next())["method"] == "session/cancel"


async def test_a_line_that_was_given_up_before_its_first_byte_is_not_sent() -> None:
    async with joined() as (pipe, other):
        for text in ("x" * 200_000, "y"):
            with pytest.raises(BackendError):
                await pipe.call("prompt", {"text": text}, timeout_s=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipe.notify, "session/cancel", {"id": 1})
            assert (await other.next())["params"]["text"].startswith("x")
            assert (await other.next())["method"] == "session/cancel"


async def test_an_end_that_goes_away_fails_every_open_question() -> None:
    async with joined() as (pipe, other):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                reply = await pipe.call("m", {}, timeout_s=WAIT_S)
                assert reply.fault is not None
                assert reply.fault.gone

            tasks.start_soon(ask)
            await other.next()
            os.close(other.write)
            other.write = -1
        assert (await pipe.call("late", {}, timeout_s=WAIT_S)).fault is not None


async def test_questions_of_the_other_end_are_answered_or_refused() -> None:
    async with joined() as (_, other):
        other.say({"id": "a", "method": "echo", "params": {"x": 1}})
        assert (await other.next())["result"] == {"x": 1}
        other.say({"id": 0, "method": "unknown"})
        assert (await other.next())["error"]["code"] == METHOD_NOT_FOUND


async def test_questions_that_are_open_are_bounded_by_their_bytes_and_one_may_be_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipe_module, "ASKED_BYTES_MAX", 2000)
    free = anyio.Event()

    async def answer(asked: Request) -> Any:
        await free.wait()
        return "done"

    async with joined(answer=answer) as (_, other):
        other.say({"id": 1, "method": "m", "params": {"x": "y" * 3000}})
        other.say({"id": 2, "method": "m"})
        refused = await other.next()
        assert refused["id"] == 2
        assert "questions of 2000 bytes are open" in refused["error"]["message"]
        free.set()
        assert (await other.next())["id"] == 1
        other.say({"id": 3, "method": "m"})
        assert (await other.next()) == {"jsonrpc": "2.0", "id": 3, "result": "done"}


async def test_a_dropped_question_gets_no_answer_and_its_id_is_free_again() -> None:
    begun = anyio.Event()

    async def answer(asked: Request) -> Any:
        if asked.method == "hang":
            begun.set()
            await anyio.sleep_forever()
        return "done"

    async with joined(answer=answer) as (pipe, other):
        other.say({"id": 1, "method": "hang"})
        with anyio.fail_after(WAIT_S):
            await begun.wait()
        other.say({"id": 1, "method": "quick"})
        assert (await other.next())["error"]["code"] == INVALID_REQUEST
        pipe.drop(1)
        pipe.drop("never")
        other.say({"id": 2, "method": "quick"})
        assert (await other.next()) == {"jsonrpc": "2.0", "id": 2, "result": "done"}


async def test_a_strict_end_answers_what_it_cannot_read() -> None:
    async with joined(strict=True) as (_, other):
        other.say(b"nonsense")
        assert (await other.next())["error"]["code"] == PARSE_ERROR
        other.say({"id": 3, "method": "echo", "params": []})
        refused = await other.next()
        assert (refused["id"], refused["error"]["code"]) == (3, INVALID_PARAMS)


@pytest.mark.parametrize("left", [b"", b'{"id":1,"method":"echo"}\n' * 2000], ids=["nothing unread", "much unread"])
async def test_an_end_that_has_said_all_and_takes_no_answer_is_not_waited_for(left: bytes) -> None:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    for fd in (ours_out, ours_in, theirs_out):
        os.set_blocking(fd, False)

    async def answer(asked: Request) -> Any:
        return {"x": "y" * 4096}

    async def hear(told: Notification) -> None:
        return None

    pipe = Pipe(ours_out, ours_in, answer=answer, hear=hear, strict=True, rest_s=0.2)
    os.write(theirs_out, b'{"id":1,"method":"echo"}\n' * 500 + left)
    os.close(theirs_out)
    try:
        with anyio.fail_after(WAIT_S):
            await pipe.run()
    finally:
        for fd in (theirs_in, ours_out, ours_in):
            os.close(fd)
