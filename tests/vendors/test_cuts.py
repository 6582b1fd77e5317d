"""Streams of a model that break: how, when, and how often, with each agent. No broken answer is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import pytest

from backplane.config import Limits
from backplane.contract.events import AssistantMessage
from backplane.testing import Failure, Fault, Turn
from tests.test_deltas import fold
from tests.vendors.found import vendor
from tests.vendors.ground import Agent, Ground
from tests.vendors.test_acp_orders import AGENTS as ACP_AGENTS
from tests.vendors.test_claude import Claude
from tests.vendors.test_codex import Codex
from tests.vendors.test_copilot import Copilot
from tests.vendors.test_gemini import Gemini
from tests.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

AGENTS: Final[dict[str, type[Agent]]] = {
    "claude": Claude, "codex": Codex, "copilot": Copilot, "gemini": Gemini, "kimi": Kimi, **ACP_AGENTS,
}  # fmt: skip
BROKEN: Final = " ".join(f"word-{number}" for number in range(900))
"""Longer than the frames around it, so that half of its bytes is a place within it in each protocol."""
MIDDLE: Final = len(BROKEN) // 2
CUTS: Final = {
    "cut": Fault(cut_after_bytes=MIDDLE, pause_ms=5),
    "reset": Fault(cut_after_bytes=MIDDLE, pause_ms=5, reset=True),
    "error": Fault(failure=Failure(code="overloaded_error", message="too many at once"), pause_ms=5),
    "unended": Fault(drop_terminal=True, drop_done=True, pause_ms=5),
}
"""How: the connection is closed, or reset, an error comes in the stream, or it ends without saying so."""
MOMENTS: Final = ("before the first word", "in the middle", "after a tool turn")
TIMES: Final = {"once": 1, "for ever": None}
RUN_S: Final = 60.0


def turns(agent: Agent, cut: str, moment: str, times: str) -> Iterable[Turn]:
    fault, text = CUTS[cut], BROKEN
    if moment == "before the first word":
        text = ""
        fault = msgspec.structs.replace(fault, cut_after_bytes=fault.cut_after_bytes and 1)
    if moment == "after a tool turn":
        yield agent.runs("echo two >> a.txt")
    yield Turn(text=text, fault=fault, times=TIMES[times])
    yield Turn(text="whole")


@pytest.fixture
def agent(name: str) -> Agent:
    vendor(name)
    return AGENTS[name]()


@pytest.mark.parametrize("key_proxy", [False, True], ids=["plain", "key_proxy"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", AGENTS)
async def test_a_broken_answer_is_never_complete(
    name: str, cut: str, moment: str, times: str, key_proxy: bool, ground: Ground
) -> None:
    script = [*turns(ground.agent, cut, moment, times)]
    seen = await ground.play(script, limits=Limits(run_s=RUN_S), key_proxy=key_proxy)
    ended = seen.receipt.outcome, fold(seen.events)[-1:]
    heard_whole = any(one.text == "whole" for one in seen.of(AssistantMessage))
    if ended == ("complete", ["whole"]):
        assert times == "once"
        return
    assert not heard_whole
    assert ended[0] != "complete"
    assert {*seen.codes, seen.end.get("code")} & {"backend_unavailable", "backend_timeout"}
