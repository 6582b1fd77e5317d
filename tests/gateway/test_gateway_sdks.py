"""The gateway judged by the vendors' own clients: each hears the script through each protocol of a service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backplane.testing import PROTOCOLS, ModelServer, ProtocolName
from tests.dialects import referees
from tests.gateway.ground import Gate, all_of, gateway
from tests.scripted import TURNS, expected
from tests.test_model_server_sdks import CUT_CHAT, DIALECTS, HEAR, each_way, quiet_sdks

__all__ = ["quiet_sdks"]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer([]) as server:
        yield server


@pytest.fixture(scope="module", params=PROTOCOLS)
def behind(request: pytest.FixtureRequest, server: ModelServer) -> Iterator[tuple[ProtocolName, Gate]]:
    with gateway(all_of(server), {"m": request.param}) as gate:
        yield request.param, gate


REFUSED: dict[ProtocolName, str] = {
    "openai_compatible": "content_filter",
    "openai_responses": "content_filter",
    "anthropic": "refusal",
    "gemini_ai_studio": "STOP",
}
"""How a refusal ends for a client of this interface, from a service of the other family.

OpenAI's services refuse in an answer that ends as usual, the others by the reason of the end; Anthropic's clients are
told that reason also for OpenAI's form."""
OPENAI = ("openai_compatible", "openai_responses")


@each_way
@pytest.mark.parametrize("front", PROTOCOLS)
@pytest.mark.parametrize("case", TURNS)
def test_a_vendors_client_hears_the_script_through_any_service(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, stream: bool, case: str
) -> None:
    referees.need(DIALECTS[front])
    if (front, stream, case) == CUT_CHAT:
        pytest.skip("the vendor's stream reader makes an exception of this stop")
    protocol, gate = behind
    server.play(TURNS[case])
    right = expected(TURNS[case], front)
    if case == "a refusal" and (front in OPENAI) != (protocol in OPENAI):
        right = right._replace(stop=REFUSED[front])
        if front == "openai_compatible" and stream:
            with pytest.raises(referees.sdk("openai").ContentFilterFinishReasonError):
                HEAR[front](gate, stream)
            return
    assert HEAR[front](gate, stream) == right
