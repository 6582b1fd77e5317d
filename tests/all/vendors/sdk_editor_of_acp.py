"""An editor made with the public Python SDK of the Agent Client Protocol; run by the referees' Python.

Every message of the agent is read by the SDK's own models. Arguments: a folder, then the agent's command. It permits
the first call, rejects the second and leaves the third open while it cancels, cancels a prompt, lists and loads the
session, and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import acp
from acp.schema import (
    AllowedOutcome,
    ClientCapabilities,
    DeniedOutcome,
    RequestPermissionResponse,
    TextContentBlock,
)

FOLDER, *COMMAND = sys.argv[1:]
SEEN: dict[str, Any] = {"updates": [], "stops": [], "asked": []}


class Editor:
    """Answers permissions, and keeps what is shown."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()

    def on_connect(self, conn: Any) -> None:
        self.agent = conn

    async def session_update(self, session_id: str, update: Any, **members: Any) -> None:
        SEEN["updates"].append(type(update).__name__)

    async def request_permission(self, options: Any, session_id: str, tool_call: Any, **members: Any) -> Any:
        SEEN["asked"].append(tool_call.title)
        if len(SEEN["asked"]) == 3:
            self.was_asked.set()
            await asyncio.sleep(1)
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        chosen = options[0] if len(SEEN["asked"]) == 1 else options[-1]
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))


def words(text: str) -> list[TextContentBlock]:
    return [TextContentBlock(type="text", text=text)]


async def main() -> None:
    editor = Editor()
    async with acp.spawn_agent_process(editor, *COMMAND, env=dict(os.environ)) as (agent, program):
        await agent.initialize(protocol_version=1, client_capabilities=ClientCapabilities())
        session = await agent.new_session(cwd=FOLDER, mcp_servers=[])
        SEEN["mode"] = session.modes.current_mode_id
        for text in ("first", "second"):
            answer = await agent.prompt(session_id=session.session_id, prompt=words(text))
            SEEN["stops"].append(answer.stop_reason)
        waiting = asyncio.create_task(agent.prompt(session_id=session.session_id, prompt=words("third")))
        await asyncio.sleep(1.5)
        await agent.cancel(session_id=session.session_id)
        SEEN["stops"].append((await waiting).stop_reason)
        waiting = asyncio.create_task(agent.prompt(session_id=session.session_id, prompt=words("fourth")))
        await editor.was_asked.wait()
        await agent.cancel(session_id=session.session_id)
        SEEN["stops"].append((await waiting).stop_reason)
        await agent.set_session_mode(session_id=session.session_id, mode_id="two")
        await agent.close_session(session_id=session.session_id)
        SEEN["listed"] = [one.session_id for one in (await agent.list_sessions(cwd=FOLDER)).sessions] == [
            session.session_id
        ]
        SEEN["updates"].append("load")
        loaded = await agent.load_session(cwd=FOLDER, session_id=session.session_id, mcp_servers=[])
        SEEN["mode_after"] = loaded.modes.current_mode_id
        program.stdin.close()
        SEEN["code"] = await asyncio.wait_for(program.wait(), 20)
    print(json.dumps(SEEN))


asyncio.run(main())
