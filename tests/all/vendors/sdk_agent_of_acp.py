"""An agent made with the public Python SDK of the Agent Client Protocol; run by the referees' Python.

Every message of the client is read by the SDK's own models, so a wrong one is refused. It answers, asks for a tool,
tells what it was told, and ends its turn.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any
from uuid import uuid4

import acp
from acp import helpers
from acp.schema import AgentCapabilities, PermissionOption, ToolCallUpdate


class Agent:
    """One turn: a tool that is asked about, then words."""

    def on_connect(self, conn: Any) -> None:
        self.client = conn
        self.cancelled = asyncio.Event()

    async def initialize(self, protocol_version: int, **members: Any) -> acp.InitializeResponse:
        return acp.InitializeResponse(protocol_version=protocol_version, agent_capabilities=AgentCapabilities())

    async def new_session(self, cwd: str, **members: Any) -> acp.NewSessionResponse:
        self.cwd = cwd
        return acp.NewSessionResponse(session_id=uuid4().hex)

    async def cancel(self, session_id: str, **members: Any) -> None:
        self.cancelled.set()

    async def prompt(self, prompt: list[Any], session_id: str, **members: Any) -> acp.PromptResponse:
        words = " ".join(getattr(block, "text", "") for block in prompt)
        if "wait" in words:
            await self.client.session_update(session_id, helpers.update_agent_message_text("waiting"))
            await self.cancelled.wait()
            return acp.PromptResponse(stop_reason="cancelled")
        path = f"{self.cwd}/b.txt"
        update = helpers.start_tool_call("c1", "write", kind="edit", status="pending", raw_input={"path": path})
        await self.client.session_update(session_id, update)
        options = [
            PermissionOption(option_id="y", name="Yes", kind="allow_once"),
            PermissionOption(option_id="n", name="No", kind="reject_once"),
        ]
        asked = ToolCallUpdate(tool_call_id="c1", title="write", kind="edit", raw_input={"path": path})
        answer = await self.client.request_permission(session_id=session_id, tool_call=asked, options=options)
        allowed = answer.outcome.outcome == "selected" and answer.outcome.option_id == "y"
        if allowed:
            os.close(os.open(path, os.O_CREAT, 0o644))
        status = "completed" if allowed else "failed"
        await self.client.session_update(session_id, helpers.update_tool_call("c1", status=status))
        await self.client.session_update(session_id, helpers.update_agent_message_text(f"was {status}"))
        return acp.PromptResponse(stop_reason="end_turn")


asyncio.run(acp.run_agent(Agent()))
