"""Streams of a model that break: how, when, and how often, with each agent. No broken answer is complete.

The suite plays 6 of the 384 cells, one of each host; what else it holds of an answer that breaks are cases of
`cases.py`. All of them:
`BACKPLANE_ALL_CUTS=1 python -m pytest tests/all/vendors/test_cuts.py`, about an hour on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Final

import msgspec
import pytest

from backplane.config import Limits
from backplane.contract.events import AssistantMessage
from backplane.testing import Failure, Fault, Turn
from tests.all.vendors.cases import BROKEN
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.test_acp_orders import AGENTS as ACP_AGENTS
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi
from tests.test_deltas import fold

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

AGENTS: Final[dict[str, type[Agent]]] = {
    "claude": Claude, "codex": Codex, "copilot": Copilot, "gemini": Gemini, "kimi": Kimi, **ACP_AGENTS,
}  # fmt: skip
MIDDLE: Final = len(BROKEN) // 2
CUTS: Final = {
    "cut": Fault(cut_after_bytes=MIDDLE, pause_ms=5),
    "reset": Fault(cut_after_bytes=MIDDLE, pause_ms=5, reset=True),
    "error": Fault(failure=Failure(code="overloaded_error", message="too many at once"), pause_ms=5),
    "unended": Fault(drop=("END", "CLOSING"), pause_ms=5),
}
"""How: the connection is closed, or reset, an error comes in the stream, or it ends without saying so."""
MOMENTS: Final = ("before the first word", "in the middle", "after a tool turn")
TIMES: Final = {"once": 1, "for ever": None}
KEYS: Final = {"plain": False, "key_proxy": True}
RUN_S: Final = 60.0
KEEPS_WORDS: Final = {("opencode", "error"), ("opencode", "unended"), ("qwen", "error"), ("qwen", "unended")}
"""Where the words of an answer that broke stand before the whole one: opencode goes on from words without an end; else
the agent asks for the whole answer again, and the protocol does not show that."""

Cell = tuple[str, str, str, str, str]
"""Name of the agent, how, when, how often, and how its key is given."""


CHOSEN: Final[list[Cell]] = [
    ("claude", "reset", "after a tool turn", "for ever", "key_proxy"),
    ("codex", "unended", "in the middle", "for ever", "plain"),
    ("copilot", "reset", "after a tool turn", "once", "plain"),
    ("gemini", "unended", "before the first word", "once", "plain"),
    ("kimi", "error", "in the middle", "for ever", "key_proxy"),
    ("codex-acp", "cut", "before the first word", "once", "key_proxy"),
]
ALL: Final[list[Cell]] = [*product(AGENTS, CUTS, MOMENTS, TIMES, KEYS)]
CELLS: Final = ALL if os.environ.get("BACKPLANE_ALL_CUTS") else CHOSEN


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


def test_the_chosen_cells_have_every_host_and_every_other_value() -> None:
    assert set(CHOSEN) <= set(ALL)
    assert {AGENTS[cell[0]].host for cell in CHOSEN} == {agent.host for agent in AGENTS.values()}
    for values, chosen in [*zip(zip(*ALL, strict=True), zip(*CHOSEN, strict=True), strict=True)][1:]:
        assert set(values) == set(chosen)


@pytest.mark.parametrize(
    ("name", "cut", "moment", "times", "key"), [pytest.param(*cell, id="-".join(cell)) for cell in CELLS]
)
async def test_a_broken_answer_is_never_complete(
    name: str, cut: str, moment: str, times: str, key: str, ground: Ground
) -> None:
    script = [*turns(ground.agent, cut, moment, times)]
    seen = await ground.play(script, limits=Limits(run_s=RUN_S), key_proxy=KEYS[key])
    ended = seen.receipt.outcome, fold(seen.events)[-1:]
    if ended[0] == "complete":
        assert times == "once"
        whole = ended[1][0]
        if moment != MOMENTS[0] and (name, cut) in KEEPS_WORDS:
            whole = whole.removeprefix(BROKEN[: whole.rfind("whole")])
        assert whole == "whole"
        return
    assert not any(one.text == "whole" for one in seen.of(AssistantMessage))
    assert {*seen.codes, seen.end.get("code")} & {"backend_unavailable", "backend_timeout"}
