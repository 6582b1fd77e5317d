"""The table of protocols and faults, one test each: what an agent gets when a model's service misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from backplane import errors
from backplane.testing import Call, Failure, Fault, ScriptUsage, Turn
from tests.scripted import Rework, one_document, reworked, same, twice, with_garbage
from tests.upstream.talk import PROTOCOLS, talk

TEXT = "The answer is forty-two, which is known since long."
CALLS = (Call(name="read", input={"path": "a.txt"}), Call(name="read", input={"path": "b.txt", "n": 2}))
USAGE = ScriptUsage(input=120, output=34, cache_read=100)


Reworked = Callable[[str, Turn], Turn]
"""Makes a turn of a protocol another one."""


def frames(rework: Rework = same, **form: Any) -> Reworked:
    return partial(_reworked, rework, form)


def _reworked(rework: Rework, form: dict[str, Any], protocol: str, turn: Turn) -> Turn:
    return reworked(protocol, turn, rework, **form)


def turn_of(protocol: str, turn: Turn, fault: Fault | Reworked) -> Turn:
    """The turn with its fault."""
    if isinstance(fault, Fault):
        return Turn(text=turn.text, calls=turn.calls, usage=turn.usage, fault=fault)
    return fault(protocol, turn)


@dataclass(frozen=True)
class Row:
    """A fault, and what becomes of the answer in which it is."""

    fault: Fault | Reworked
    text: str = TEXT
    """What is handed on, and in the answer."""
    code: str | None = None
    """How it fails; None: it does not."""
    tries: int = 1
    loss: str | None = None
    """Words of the loss that names what was worked around."""
    has_usage: bool = True
    settings: tuple[tuple[str, Any], ...] = ()


CUT = "ended its answer without saying why"
TWICE = "sent before"
ONCE = (("tries_max", 1),)
QUICK = (("tries_max", 1), ("timeout_s", 0.5))

ROWS = {
    "in good order": Row(Fault()),
    "missing terminal events": Row(Fault(drop=("END",)), code="stream_closed", settings=ONCE),
    "missing closing frames": Row(Fault(drop=("CLOSING",))),
    "missing terminal events and closing frames": Row(
        Fault(drop=("END", "CLOSING")), code="stream_closed", settings=ONCE
    ),
    "frames split at every byte": Row(Fault(split_bytes=1)),
    "frames split at every third byte": Row(Fault(split_bytes=3)),
    "lines that end in CRLF": Row(frames(crlf=True)),
    "lines that end in CRLF, split at every byte": Row(frames(crlf=True, split=1)),
    "comments between all frames": Row(frames(comments=3)),
    "a frame of garbage": Row(frames(with_garbage)),
    "a stream without length or chunks": Row(Fault(close_delimited=True)),
    "JSON to a request for a stream": Row(one_document),
    "a stream with the content type of text": Row(Fault(headers={"content-type": "text/plain"})),
    "a stream with the content type of JSON": Row(Fault(headers={"content-type": "application/json"})),
    "terminal frames that come twice": Row(frames(twice("finish", "usage", "done", "message_delta", "message_stop",
                                                        "response.completed"))),
    "starts that come twice": Row(frames(twice("role", "message_start", "content_block_start", "response.created",
                                               "response.output_item.added", "response.content_part.added"))),
    "ends that come twice": Row(frames(twice("content_block_stop", "*.done"))),
    "a slow body": Row(Fault(pause_ms=20)),
    "a slow first byte": Row(Fault(first_byte_ms=200)),
    "an error in the middle": Row(Fault(failure=Failure(message="it broke")), code="backend_unavailable"),
    "a page of HTML": Row(
        Fault(raw=b"<html><body>Welcome</body></html>", headers={"content-type": "text/html"}), text="",
        code="dialect_mapping_failed",
    ),
    "JSON that is no answer": Row(
        Fault(raw=b'{"detail": "no such thing"}', headers={"content-type": "application/json"}), text="",
        code="dialect_mapping_failed",
    ),
    "an empty body": Row(Fault(raw=b""), text="", code="dialect_mapping_failed"),
    "no byte of an answer": Row(Fault(first_byte_ms=600_000), text="", code="backend_timeout", settings=QUICK),
    "keep-alive comments for ever": Row(
        Fault(stall_after_frames=0, stall_comment_ms=20), text="", code="backend_timeout", settings=QUICK
    ),
}  # fmt: skip

OVER: dict[tuple[str, str], dict[str, Any]] = {
    # Its closing frame shows that nothing is missing but the word.
    ("openai_compatible", "missing terminal events"): {"code": None, "loss": CUT},
}


@pytest.mark.parametrize("fault", ROWS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_fault_makes_of_an_answer(protocol: str, fault: str) -> None:
    row = replace(ROWS[fault], **OVER.get((protocol, fault), {}))
    done = talk(protocol, [turn_of(protocol, Turn(text=TEXT, usage=USAGE), row.fault)], **dict(row.settings))
    assert len(done.requests) == row.tries
    if row.code is not None:
        assert done.failed.code == row.code
        assert done.said == "" or done.said == TEXT
        return
    assert (done.said, done.turn.text, done.turn.stop) == (TEXT, TEXT, "end")
    assert (done.turn.usage is not None) == row.has_usage
    named = [loss.reason for loss in done.turn.losses]
    assert [loss["reason"] for loss in done.carried("loss")] == named
    assert [row.loss in reason for reason in named] == [True] if row.loss else not named


CALL_FAULTS: dict[str, Fault | Reworked] = {
    "in good order": Fault(),
    "missing closing frames": Fault(drop=("CLOSING",)),
    "frames split at every byte": Fault(split_bytes=1),
    "JSON to a request for a stream": one_document,
    "items that nobody added": Fault(drop=("response.output_item.added",)),
    "items that nobody ended": Fault(drop=("response.output_item.done",)),
    "arguments that nobody ended": Fault(drop=("response.function_call_arguments.done",)),
    "all the ends missing": Fault(drop=("*.done",)),
    "pieces that come twice": frames(twice("call", "content_block_delta", "response.*.delta")),
}


@pytest.mark.parametrize("fault", CALL_FAULTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_come_whole_and_once_whatever_the_fault(protocol: str, fault: str) -> None:
    done = talk(protocol, [turn_of(protocol, Turn(calls=CALLS), CALL_FAULTS[fault])])
    wanted = [(call.name, call.input) for call in CALLS]
    assert [(call.name, call.input) for call in done.turn.calls] == wanted
    assert [(call.tool_name, call.input) for call in done.calls] == wanted
    assert [call.tool_use_id for call in done.calls] == [call.id for call in done.turn.calls]
    assert done.turn.stop == "tool_use"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_word_for_the_end_that_hides_a_call_still_ends_as_tool_use(protocol: str) -> None:
    done = talk(protocol, [Turn(text="I read.", calls=CALLS[:1], stop="end")])
    assert done.turn.stop == "tool_use"
    assert done.carried("turn") == [{"stop_reason": "tool_use"}]


@pytest.mark.parametrize("way", ["reset", "cut", "cut without a length"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_cut_before_its_output_is_asked_for_again(protocol: str, way: str) -> None:
    fault = Fault(reset=True) if way == "reset" else Fault(cut_after_bytes=30, close_delimited="without" in way)
    done = talk(protocol, [Turn(text=TEXT, fault=fault), Turn(text="again")])
    assert (done.said, done.turn.text, done.turn.tries) == ("again", "again", 2)
    assert [retry["code"] for retry in done.carried("retry")] == ["stream_closed"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_cut_after_output_was_handed_on_is_not_asked_for_again(protocol: str) -> None:
    whole = {"openai_responses": 2_500, "anthropic": 1_200}.get(protocol, 600)
    done = talk(protocol, [Turn(text=TEXT * 20, pieces=20, fault=Fault(cut_after_bytes=whole)), Turn(text="again")])
    assert done.failed.code == "stream_closed"
    assert len(done.requests) == 1
    assert done.said
    assert (TEXT * 20).startswith(done.said)
    assert done.failed.turn.text == done.said
    assert not done.carried("retry")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_that_is_cut_anywhere_is_not_called_whole(protocol: str) -> None:
    """Closed cleanly, as a gateway does whose own upstream broke: between documents and inside of them."""
    whole = 0
    for size in range(20, 4_000, 89):
        fault = Fault(cut_after_bytes=size, close_delimited=True)
        done = talk(protocol, [Turn(text=TEXT, pieces=4, usage=USAGE, fault=fault)], tries_max=1)
        if done.error is None:
            assert done.turn.text == done.said == TEXT
            whole += 1
        else:
            assert done.failed.code in ("stream_closed", "dialect_mapping_failed")
            assert TEXT.startswith(done.said)
    assert whole


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_is_cut_is_not_run(protocol: str) -> None:
    calls = (Call(name="read", input={"path": "a" * 4000}),)
    done = talk(protocol, [Turn(calls=calls, pieces=8, fault=Fault(cut_after_bytes=2_000, close_delimited=True))],
                tries_max=1)  # fmt: skip
    assert done.failed.code == "stream_closed"
    assert not done.calls


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_to_a_request_for_one_document_is_read(protocol: str) -> None:
    given = reworked(protocol, Turn(text=TEXT, calls=CALLS[:1], usage=USAGE), same)
    done = talk(protocol, [given], stream=False)
    assert (done.said, done.turn.stop, [call.input for call in done.turn.calls]) == (
        TEXT, "tool_use", [CALLS[0].input]
    )  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_in_one_document_says_the_same_as_a_stream(protocol: str) -> None:
    script = Turn(text=TEXT, reasoning="I think.", calls=CALLS, usage=USAGE)
    streamed, whole = talk(protocol, [script]), talk(protocol, [script], stream=False)
    assert [request.stream for request in (*streamed.requests, *whole.requests)] == [True, False]
    assert streamed.said == whole.said == TEXT
    assert streamed.turn.usage is not None
    assert whole.turn.usage is not None
    for name in ("input", "output", "cache_read"):
        assert getattr(streamed.turn.usage, name) == getattr(whole.turn.usage, name)
    assert [call.input for call in streamed.turn.calls] == [call.input for call in whole.turn.calls]


STATUSES = {
    400: ("mapping_unsupported_capability", "invalid_request", False),
    401: ("backend_auth_failed", "authentication_failed", False),
    402: ("backend_auth_failed", "authentication_failed", False),
    403: ("backend_auth_failed", "authentication_failed", False),
    404: ("backend_model_not_found", "model_unavailable", False),
    405: ("backend_model_not_found", "model_unavailable", False),
    408: ("backend_timeout", "network_error", True),
    413: ("backend_context_length", "context_length_exceeded", False),
    422: ("mapping_unsupported_capability", "invalid_request", False),
    429: ("backend_rate_limited", "rate_limited", True),
    500: ("backend_unavailable", "network_error", True),
    503: ("backend_unavailable", "network_error", True),
    529: ("backend_unavailable", "network_error", True),
}
"""Status → code, provider code, and whether the same is sent again."""


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_status_is_a_typed_error_and_is_repeated_only_where_it_may_pass(protocol: str, status: int) -> None:
    code, provider_code, may_pass = STATUSES[status]
    fault = Fault(status=status, message="it will not")
    done = talk(protocol, [Turn(fault=fault, times=None)], tries_max=2)
    assert (done.failed.code, done.failed.failure.status) == (code, status)
    assert errors.provider_code(done.failed.code) == provider_code
    repeats = [retry for retry in done.carried("retry") if retry["step"] is None]
    assert len(repeats) == (1 if may_pass else 0)
    assert "it will not" in done.failed.message
    assert not done.said


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_may_pass_is_tried_again_after_the_time_that_was_asked_for(protocol: str, status: int) -> None:
    fault = Fault(status=status, headers={"retry-after": "0.01"})
    done = talk(protocol, [Turn(fault=fault), Turn(text=TEXT)], backoff_ms=3_600_000)
    assert (done.turn.text, done.turn.tries) == (TEXT, 2)
    assert [retry["wait_ms"] for retry in done.carried("retry")] == [10]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_waits_longer_than_half_a_minute(protocol: str) -> None:
    done = talk(protocol, [Turn(fault=Fault(status=429, headers={"retry-after": "3600"}))])
    assert (done.failed.code, done.failed.failure.retry_after_s, len(done.requests)) == (
        "backend_rate_limited",
        3600.0,
        1,
    )
