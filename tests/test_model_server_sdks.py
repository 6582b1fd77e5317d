"""The scripted model server judged by the vendors' own clients: they hear what the script says.

The readers of `tests/sdks.py` turn an SDK's answer into the script's own words; the cases are data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing

import pytest

from backplane.testing import PROTOCOLS, Failure, Fault, ModelServer, ProtocolName, Turn
from backplane.testing.frames import RenderRequest
from backplane.testing.plan import VENDORS
from tests.dialects import referees
from tests.scripted import READ, TURNS, expected, reworked, same
from tests.sdks import COMMENTS, DIALECTS, KEY, hear, openai_client


@pytest.fixture(autouse=True)
def quiet_sdks() -> Iterator[None]:
    """What the SDKs warn of among themselves is no concern of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# The cases ------------------------------------------------------------------------------------------------------------


@each_protocol
@each_way
@pytest.mark.parametrize("case", TURNS)
def test_a_vendors_client_hears_what_the_script_says(protocol: ProtocolName, stream: bool, case: str) -> None:
    referees.need(DIALECTS[protocol])
    turn = TURNS[case]
    with ModelServer(turn) as server:
        assert hear(protocol, server, stream) == expected(turn, protocol)
        (request,) = server.requests
    assert (request.protocol, request.stream, request.turn, request.status) == (protocol, stream, 0, 200)


def test_a_vendors_client_says_that_a_streamed_answer_was_cut_short() -> None:
    referees.need("openai")
    turn = TURNS["an answer cut short"]
    question = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    with (
        ModelServer(turn) as server,
        closing(openai_client(server)) as client,
        client.chat.completions.stream(**question) as events,
        pytest.raises(referees.sdk("openai").LengthFinishReasonError) as caught,
    ):
        events.get_final_completion()
    assert caught.value.completion.choices[0].message.content == turn.text
    assert caught.value.completion.choices[0].finish_reason == "length"


@each_protocol
def test_a_vendors_client_hears_the_same_through_a_rough_line(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    turn = Turn(reasoning="hm", text="Hello, wörld.", calls=(READ,))
    rough = reworked(protocol, turn, same, crlf=True, comments=COMMENTS[protocol], split=1)
    with ModelServer(rough) as server:
        assert hear(protocol, server, True) == expected(turn, protocol)


@each_protocol
@each_way
def test_a_vendors_client_tries_again_after_a_scripted_429(protocol: ProtocolName, stream: bool) -> None:
    referees.need(DIALECTS[protocol])
    answer = Turn(text="now")
    limited = Turn(fault=Fault(status=429, headers={"retry-after-ms": "1", "retry-after": "0"}))
    with ModelServer([limited, answer]) as server:
        assert hear(protocol, server, stream, retries=1) == expected(answer, protocol)
        assert [request.status for request in server.requests] == [429, 200]


ERRORS: dict[tuple[ProtocolName, int], str] = {
    ("openai_compatible", 401): "AuthenticationError",
    ("openai_compatible", 404): "NotFoundError",
    ("openai_compatible", 429): "RateLimitError",
    ("openai_compatible", 500): "InternalServerError",
    ("openai_responses", 422): "UnprocessableEntityError",
    ("openai_responses", 403): "PermissionDeniedError",
    ("anthropic", 401): "AuthenticationError",
    ("anthropic", 413): "ContentTooLargeError",
    ("anthropic", 529): "OverloadedError",
    ("gemini_ai_studio", 400): "ClientError",
    ("gemini_ai_studio", 503): "ServerError",
}


@pytest.mark.parametrize(("protocol", "status"), ERRORS)
@each_way
def test_a_vendors_client_raises_its_own_error_with_the_scripts_words(
    protocol: ProtocolName, status: int, stream: bool
) -> None:
    referees.need(DIALECTS[protocol])
    with (
        ModelServer(Turn(fault=Fault(status=status, message="as scripted"))) as server,
        pytest.raises(Exception, match="as scripted") as caught,
    ):
        hear(protocol, server, stream)
    assert caught.type.__name__ == ERRORS[protocol, status]


@pytest.mark.parametrize("protocol", ["openai_compatible", "anthropic", "gemini_ai_studio"])
def test_a_vendors_client_notices_an_error_half_way(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    turn = Turn(text="so far", fault=Fault(failure=Failure(code="overloaded_error", message="as scripted")))
    with ModelServer(turn) as server, pytest.raises(Exception, match="as scripted"):
        hear(protocol, server, True)


def test_a_failed_response_ends_with_the_scripts_code() -> None:
    referees.need("codex")
    failure = Failure(code="server_is_overloaded", message="as scripted")
    turn = Turn(text="so far", fault=Fault(failure=failure))
    with ModelServer(turn) as server, closing(openai_client(server)) as client:
        *_, last = client.responses.create(model="m", input="go", stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "server_is_overloaded")


@each_protocol
@pytest.mark.parametrize("case", TURNS)
def test_every_answer_and_chunk_is_valid_by_the_vendors_types(protocol: ProtocolName, case: str) -> None:
    dialect = DIALECTS[protocol]
    referees.need(dialect)
    ask, vendor = RenderRequest("m", 1), VENDORS[protocol]
    assert referees.invalid(dialect, "response", vendor.whole(TURNS[case], ask)) is None
    frames = vendor.stream(TURNS[case], ask)
    chunks = [frame.data for frame in frames if isinstance(frame.data, dict) and frame.label != "ping"]
    assert [why for chunk in chunks[:20] + chunks[-20:] if (why := referees.invalid_chunk(dialect, chunk))] == []


def test_lists_of_models_and_counts_are_read_by_the_vendors_clients() -> None:
    referees.need("openai", "claude", "gemini")
    anthropic, genai = referees.sdk("anthropic"), referees.sdk("google.genai")
    with ModelServer({"models": ["one", "two"]}) as server:
        with closing(openai_client(server)) as client:
            assert [model.id for model in client.models.list()] == ["one", "two"]
            assert client.models.retrieve("two").id == "two"
        with closing(anthropic.Anthropic(base_url=server.url, api_key=KEY)) as client:
            assert [model.id for model in client.models.list()] == ["one", "two"]
            question = [{"role": "user", "content": "how many?"}]
            assert client.messages.count_tokens(model="one", messages=question).input_tokens > 0
        with closing(genai.Client(api_key=KEY, http_options={"base_url": server.url})) as client:
            assert [model.name for model in client.models.list()] == ["models/one", "models/two"]
            assert client.models.count_tokens(model="one", contents="how many?").total_tokens > 0
