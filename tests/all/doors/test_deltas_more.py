"""More of `tests/test_deltas.py`: what takes many processes, or seconds."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.testing import PROTOCOLS, Call, Fault, ProtocolName, Turn
from tests.api_agent import job, solve
from tests.test_deltas import fold


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("cut", "protocol"),
    [*((400, protocol) for protocol in PROTOCOLS), (0, "openai_compatible"), (1600, "openai_responses")],
)
async def test_an_answer_of_a_service_that_breaks_off_is_not_told_twice(
    tmp_path: Any, backplane_home: Any, protocol: ProtocolName, cut: int
) -> None:
    look = Turn(text="a look first", calls=(Call(name="bash", input={"command": "true"}),), pieces=4)
    turns = [
        look,
        Turn(text="one two three four", pieces=6, fault=Fault(cut_after_bytes=cut)),
        Turn(text="one two three four", pieces=6, times=None),
    ]
    _, events, _ = await solve(backplane_home, turns, job(tmp_path), protocol)
    assert fold(events)[:1] == ["a look first"]
