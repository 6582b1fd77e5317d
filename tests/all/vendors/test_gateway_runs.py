"""Runs of real agents whose model requests another service answers, in another protocol."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import backplane
from backplane.config import BackendSettings, Settings
from backplane.testing import PROTOCOLS, SIDE_TURNS, Call, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.all.vendors import found
from tests.all.vendors.test_gateway_agents import CALLS

pytestmark = pytest.mark.anyio

KEY = "sk-mine-the-key-of-another-service"
AGENTS = ("claude", "codex", "gemini")
PRICES = {"input": 1, "output": 2}
MODELS = {"codex": "m"}
"""Agent → its own name of the model; Codex gives other tools to models that it does not know."""
USAGE = ScriptUsage(input=1000, output=500)  # 2,000 millionths of a dollar by these prices.
CLAUDE = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def settings_for(agent: str, server: ModelServer, protocol: ProtocolName, **changes: Any) -> Settings:
    options = {"protocol": protocol, "base_url": server.base_url(protocol), "key_env": "MINE_KEY", "prices": PRICES}
    program = found.vendor(agent)
    env = {"PATH": f"{Path(program).parent}:{os.environ['PATH']}", **(CLAUDE if agent == "claude" else {})}
    own = BackendSettings(host=agent, options={"program": program}, model_backend="mine/m", env=env, **changes)
    return Settings(backends={"mine": BackendSettings(host="api", options=options), "agent": own})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_KEY", KEY)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("agent", AGENTS)
async def test_another_service_answers_an_agents_model(agent: str, protocol: ProtocolName, tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    script = [*SIDE_TURNS, Turn(reasoning="hm", calls=(CALLS[agent],), usage=USAGE), Turn(text="all done", usage=USAGE)]
    with ModelServer(script) as server:
        settings = settings_for(agent, server, protocol)
        given: dict[str, Any] = {"settings": settings, "home": tmp_path / "home"}
        async with backplane.start("make it", backend="agent", model=MODELS.get(agent), root=root, **given) as run:
            await run.wait()
        assert not server.unscripted
        keys = {request.headers.get(name, "").removeprefix("Bearer ") for request in server.requests
                for name in ("authorization", "x-api-key", "x-goog-api-key") if name in request.headers}  # fmt: skip
        models = {request.body.get("model", "m") for request in server.requests}
    receipt = run.receipt
    assert receipt is not None
    assert (receipt.outcome, run.error) == ("complete", None)
    assert run.patch is not None
    assert "marmot" in run.patch.read_text()
    assert (keys, models) == ({KEY}, {"m"})
    seen = receipt.backplane.get("key_proxy", {})
    assert (seen["answers"]["models"], seen["without_key"], seen["answers"]["uncounted"]) == ({"m": 2}, 0, 0)
    assert (receipt.usage.input_tokens, receipt.usage.output_tokens) == (2000, 1000)
    assert KEY not in json.dumps(receipt.backplane)
    losses = seen.get("losses", {})
    same = {"claude": "anthropic", "codex": "openai_responses", "gemini": "gemini_ai_studio"}
    assert bool(losses) == (same[agent] != protocol)


async def test_a_budget_holds_by_the_count_of_the_other_service(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    script = [*SIDE_TURNS, Turn(calls=(CALLS["claude"],), usage=USAGE, times=None)]
    with ModelServer(script) as server:
        given: dict[str, Any] = {
            "settings": settings_for("claude", server, "openai_compatible"),
            "home": tmp_path / "home",
        }
        async with backplane.start("go", backend="agent", root=root, max_budget_usd=0.005, **given) as run:
            await run.wait()
        asked = len([request for request in server.requests if request.turn == 2])
    assert run.receipt is not None
    assert run.receipt.outcome != "complete"
    assert asked <= 4  # 0.002 dollars each: the third passes the budget, and one more may be under way.


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_codex_keeps_its_newest_tools_on_any_service(protocol: ProtocolName, tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    script = "const done = await tools.exec_command({cmd: 'echo marmot > made.txt'}); text(done.output);"
    custom = protocol == "openai_responses"
    call = Call(name="exec", input=script if custom else {"input": script}, kind="custom" if custom else "function")
    with ModelServer([Turn(calls=(call,)), Turn(text="all done")]) as server:
        given: dict[str, Any] = {"settings": settings_for("codex", server, protocol), "home": tmp_path / "home"}
        async with backplane.start("make it", backend="agent", root=root, **given) as run:
            await run.wait()
    assert run.error is None
    assert run.patch is not None
    assert "marmot" in run.patch.read_text()
