"""A session over an agent, handed to a model's API and back."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backplane.config import BackendSettings, Settings
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.testing import SIDE_TURNS, ModelServer, Turn
from tests.all.vendors.ground import Agent, Ground, installed
from tests.all.vendors.test_codex import Codex

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

AGENTS: dict[str, Callable[[], Agent]] = {"codex": Codex}


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


@contextlib.asynccontextmanager
async def registry(
    ground: Ground, home: Path, turns: Sequence[Turn]
) -> AsyncIterator[tuple[ProviderRegistry, ModelServer]]:
    agent = ground.agent
    with ModelServer([*SIDE_TURNS, *turns]) as server:
        own = BackendSettings(
            host=agent.host,
            options=agent.options(server.url),
            env={**agent.variables(), **agent.env},
            writable=agent.writable,
        )
        options = {"protocol": "anthropic", "base_url": server.base_url("anthropic"), "model": "m", "key_env": "A_KEY"}
        rows = {"agent": own, "model": BackendSettings(host="api", options=options)}
        environ = {**os.environ, "A_KEY": "scripted-key-1"}
        async with ProviderRegistry(Settings(backends=rows, isolation="off"), home, environ) as made:
            yield made, server


def config(ground: Ground) -> SessionConfig:
    mode: Any = ground.agent.conversations_in
    return SessionConfig(root=str(ground.root), mode=mode)


async def test_a_session_remembers_and_its_work_is_in_the_folder(ground: Ground, backplane_home: Path) -> None:
    turns = [ground.agent.writes("new.txt", "made\n"), Turn(text="noted"), Turn(text="zebra", times=None)]
    async with registry(ground, backplane_home, turns) as (providers, server):
        async with await providers.get("agent").create_session(config(ground)) as session:
            assert (await session.run("the word is zebra; write new.txt")).check().text == "noted"
            assert (ground.root / "new.txt").read_text() == "made\n"
            assert (await session.run("which word?")).check().text == "zebra"
            assert session.keeps_conversations
            assert session.losses == ()
        assert "the word is zebra" in json.dumps(server.requests[-1].body)
    assert [type(message).__name__ for message in session.get_history()] == [
        "UserMessage", "AgentMessage", "ToolResultMessage", "AgentMessage", "UserMessage", "AgentMessage"
    ]  # fmt: skip


async def test_a_session_is_handed_to_a_model_and_back(ground: Ground, backplane_home: Path) -> None:
    turns = [Turn(text="noted"), Turn(text="gnu"), Turn(text="both", times=None)]
    async with registry(ground, backplane_home, turns) as (providers, server):
        agent, model = providers.get("agent"), providers.get("model")
        async with await agent.create_session(config(ground)) as session:
            await session.run("the word is zebra")
            assert "dropped: the provider's own state of the conversation" in await session.handover(model)
            assert (await session.run("and gnu")).check().text == "gnu"
            sent = server.requests[-1].body
            assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
            assert "zebra" in json.dumps(sent)
            assert "emulated: history, it is said in the user's words" in await session.handover(agent)
            assert (await session.run("which words?")).check().text == "both"
        asked = json.dumps(server.requests[-1].body)
    assert all(words in asked for words in ("the word is zebra", "and gnu", "which words?"))
