"""The same order through `api` over each protocol is the story that every driven agent tells, and failures alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backplane.testing import PROTOCOLS, Call, Fault, Turn
from tests.all.vendors.cases import check_story, story
from tests.all.vendors.ground import Agent, Ground, installed
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

TOO_LONG = "backend_context_length"
FAULTS = {
    "backend_auth_failed": Fault(status=401, message="no such key"),
    "backend_rate_limited": Fault(status=429, message="slow down", headers={"retry-after": "0"}),
    TOO_LONG: Fault(status=400, message="this model's maximum context length is 4 tokens"),
}
"""The contract's code → what the model's service said."""


class Api(Agent):
    """The host `api`, as a driven agent is played."""

    host = "api"
    conversations_in = "staged"
    write_tool = "write_file"

    def __init__(self, protocol: str) -> None:
        self.name = self.protocol = protocol
        self.env: dict[str, str] = {}
        self.patient: dict[str, Any] = {}
        self.labels: dict[str, str] = {}

    def options(self, url: str) -> dict[str, Any]:
        path = "/v1beta" if self.protocol.startswith("gemini") else "/v1"
        named = {"model": "scripted-model", "key_env": "SCRIPTED_KEY"}
        return {"protocol": self.protocol, "base_url": url + path, **named}

    def variables(self) -> dict[str, str]:
        return {"SCRIPTED_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="write_file", input={"path": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="bash", input={"command": command}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


def of_protocol(protocol: str) -> Callable[[], Agent]:
    return lambda: Api(protocol)


AGENTS: dict[str, Callable[[], Agent]] = {
    **{f"api-{protocol}": of_protocol(protocol) for protocol in PROTOCOLS},
    "claude": Claude, "codex": Codex, "copilot": Copilot, "gemini": Gemini, "kimi": Kimi,
}  # fmt: skip


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


OF_API = tuple(name for name in AGENTS if name.startswith("api-"))


@pytest.mark.parametrize("agent", OF_API, indirect=True)
async def test_the_same_order_is_the_same_story(ground: Ground) -> None:
    """Each driven agent shows that as a case of `cases.py`."""
    check_story(await ground.play(story(ground.agent)))


@pytest.mark.parametrize(
    ("agent", "code"),
    [*((name, TOO_LONG) for name in AGENTS), *((name, code) for name in OF_API for code in FAULTS if code != TOO_LONG)],
    indirect=["agent"],
)
async def test_the_same_failure_has_the_same_code(code: str, ground: Ground) -> None:
    """Codes of other failures of driven agents: `cases.py`."""
    seen = await ground.play([Turn(fault=FAULTS[code], times=None)])
    assert seen.receipt.outcome == "failed"
    assert [*seen.codes, seen.end.get("code")][-2:].count(code) >= 1


BROKEN = {
    "500": Fault(status=500, message="it broke"),
    "503": Fault(status=503, message="too much to do", headers={"retry-after": "0"}),
}
"""Failures that an agent answers by asking again."""


@pytest.mark.parametrize(
    ("agent", "broken", "retries"),
    [("codex", "503", 0), ("codex", "500", 2)],
    indirect=["agent"],
)
async def test_retries_are_the_requests_after_the_first(broken: str, retries: int, ground: Ground) -> None:
    options = ground.agent.options
    ground.agent.options = lambda url: {**options(url), "retries": retries}  # type: ignore[method-assign]
    seen = await ground.play([Turn(fault=BROKEN[broken], times=None)])
    assert seen.receipt.outcome == "failed"
    assert len(seen.server.requests) <= retries + 1
