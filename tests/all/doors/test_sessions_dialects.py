"""A conversation with tools, thinking and a picture, saved after a turn on each dialect, resumed on it and on others.

Nothing is lost unlisted: what was told or said stands in the next request, or a loss names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.config import BackendSettings, Settings
from backplane.contract.conversation import AgentMessage, Image, UserMessage
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.testing import Call, ModelServer, Turn
from backplane.upstream.presets import PRESETS
from tests.api_agent import KEY, LIMITS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PROOF = "cHJvb2Ytb2YtdGhpcy1jYWxs"
DIALECTS = {
    "claude": "anthropic", "codex": "openai", "openai": "openai_chat", "gemini": "gemini", "kimi": "kimi",
    "copilot": "copilot",
}  # fmt: skip
"""Dialect → the preset whose service speaks it; the last two are openai's family."""
WORDS = ("look at none.txt", "I look.", "read_file", "none.txt", "It is not there.", "and now?")


def registry(home: Path, server: ModelServer) -> ProviderRegistry:
    rows = {}
    for name, preset in DIALECTS.items():
        address = server.base_url(PRESETS[preset].protocol)
        options = {"preset": preset, "base_url": address, "key_env": "SCRIPTED_KEY", "model": "m-1"}
        rows[name] = BackendSettings(host="api", options=options)
    environ = {**os.environ, "SCRIPTED_KEY": KEY}
    return ProviderRegistry(Settings(backends=rows, limits=LIMITS, isolation="off"), home, environ)


def asked(server: ModelServer) -> str:
    return msgspec.json.encode(server.requests[-1].body).decode()


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("claude", ("claude", "codex", "kimi")),
        ("codex", ("codex", "openai")),
        ("openai", ("openai", "gemini", "copilot")),
        ("gemini", ("gemini", "claude")),
    ],
)
async def test_a_conversation_goes_on_with_every_dialect(
    source: str, targets: tuple[str, ...], backplane_home: Path, tmp_path: Path
) -> None:
    call = Call(name="read_file", input={"path": "none.txt"}, signature=PROOF)
    first = Turn(reasoning="Where is it?", text="I look.", calls=(call,), signature=PROOF)
    turns = [first, Turn(text="It is not there."), Turn(text="As I said.", times=None)]
    with ModelServer(turns) as server:
        async with registry(backplane_home, server) as providers:
            shown = UserMessage(content="look at none.txt", images=(Image(media_type="image/png", data=PIXEL),))
            config = SessionConfig(root=str(tmp_path))
            async with await providers.get(source).create_session(config) as session:
                (await session.run(shown)).check()
                assert PIXEL in asked(server)
                before, id = session.get_history(), session.id
                assert session.losses == ()
            assert before[0] == shown
            said = [message for message in before if isinstance(message, AgentMessage)]
            thought = [part for message in said for part in message.thinking]
            proofs = [part.signature for part in thought] + [call.signature for one in said for call in one.tool_calls]
            assert source != "gemini" or proofs == [PROOF, PROOF]
            for target in targets:
                async with await providers.get(target).fork_session(id) as session:
                    (await session.run("and now?")).check()
                    assert session.get_history()[: len(before)] == before
                    _check(asked(server), session.losses, thought, proofs, is_home=source == target)


def _check(sent: str, losses: tuple[str, ...], thought: list[Any], proofs: list[Any], *, is_home: bool) -> None:
    assert [word for word in (*WORDS, PIXEL) if word not in sent] == []
    assert [sent.index(word) for word in WORDS if word != "none.txt"] == sorted(
        sent.index(word) for word in WORDS if word != "none.txt"
    )
    if any(part.text for part in thought) and "Where is it?" not in sent:
        assert any("thinking" in loss for loss in losses), losses
    if PROOF in proofs:
        assert (PROOF in sent) == is_home
        assert is_home or any("proofs" in loss or "signatures" in loss for loss in losses), losses
    else:
        assert PROOF not in sent
