"""The gateway judged by the vendors' own clients: each hears the script through each protocol of a service.

`tests/all/clients/test_sdks_of_node.py` does the same with the SDKs for JavaScript.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from backplane.testing import PROTOCOLS, ModelServer, ProtocolName, Turn
from tests.dialects import referees
from tests.gateway.ground import Gate, all_of, gateway
from tests.scripted import EVERY, EXCHANGES_MIN, TOOLS, WAYS, Heard, expected, reworked, same
from tests.sdks import COMMENTS, DIALECTS, listening
from tests.test_model_server_sdks import quiet_sdks

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


def through(turn: Turn, front: ProtocolName, protocol: ProtocolName) -> Heard:
    """What a client of one interface should hear from a service of a protocol."""
    right = expected(turn, front)
    crosses = (front in OPENAI) != (protocol in OPENAI)
    return right._replace(stop=REFUSED[front]) if turn.refusal and crosses else right


def cut_anew(protocol: ProtocolName, turn: Turn, chance: random.Random) -> Turn:
    """The same stream of a service in writes that end anywhere, often in the middle of a character."""
    crlf, split = chance.random() < 0.5, chance.choice([31, 211, 999])
    return reworked(protocol, turn, same, crlf=crlf, comments=COMMENTS[protocol], split=split)


@pytest.mark.parametrize("front", PROTOCOLS)
def test_a_vendors_client_hears_the_script_through_any_service(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName
) -> None:
    referees.need(DIALECTS[front])
    protocol, gate = behind
    chance = random.Random(f"{front} on {protocol}")
    wrong: list[str] = []
    count = 0
    with listening(front, gate) as hear:
        for case, turn in EVERY.items():
            right = through(turn, front, protocol)
            for way in WAYS:
                is_cut = way != "whole" and turn.pieces < 100 and chance.random() < 0.25
                server.play(cut_anew(protocol, turn, chance) if is_cut else turn)
                try:
                    heard = hear(way, TOOLS if turn.calls else None, turn.reasoning is not None)
                except Exception as error:
                    wrong.append(f"{case}, {way}, {is_cut=}: {error!r}"[:400])
                    continue
                count += 1
                if heard != right:
                    members = zip(Heard._fields, heard, right, strict=True)
                    differs = {name: (had, want) for name, had, want in members if had != want}
                    wrong.append(f"{case}, {way}, {is_cut=}: {differs}"[:400])
    assert wrong == []
    assert count >= EXCHANGES_MIN
