"""The host `acp` with an agent that is made with the protocol's public SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane import api
from backplane.config import BackendSettings, Settings
from backplane.contract.events import AssistantMessage
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile, WorkOrder, WorkspaceSpec
from tests.all.vendors.found import referee


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("allowed", [True, False])
def test_an_agent_made_with_the_public_sdk_reads_all_that_the_client_says(workspace: Path, allowed: bool) -> None:
    receipt, events = on_the_sdk(workspace, PolicyProfile(disallowed_tools=() if allowed else ("write",)))
    assert receipt.outcome == "complete"
    words = "was completed" if allowed else "was failed"
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == [words]
    assert bool(receipt.verification.git_diff) == allowed


def test_an_agent_made_with_the_public_sdk_is_cancelled(workspace: Path) -> None:
    receipt, _ = on_the_sdk(workspace, PolicyProfile(), task="wait for me", cancel_at="waiting")
    assert receipt.usage_raw["stopReason"] == "cancelled"


def on_the_sdk(
    workspace: Path, policy: PolicyProfile, *, task: str = "do it", cancel_at: str = ""
) -> tuple[Receipt, list[Any]]:
    script = Path(__file__).with_name("sdk_agent_of_acp.py")
    options = {"program": referee("acp"), "arguments": [str(script)]}
    settings = Settings(backends={"sdk": BackendSettings(host="acp", options=options)}, isolation="off")
    work = WorkOrder(task, workspace=WorkspaceSpec(root=str(workspace)), policy=policy)

    async def run() -> tuple[Receipt, list[Any]]:
        events: list[Any] = []
        async with api.start(work, backend="sdk", settings=settings) as running:
            async for event in running:
                events.append(event)
                if cancel_at and cancel_at in getattr(event, "text", ""):
                    await running.cancel()
        return running.receipt, events

    return anyio.run(run)
