"""Kimi as a host: its local server on loopback, one process and one session a run, by REST and a WebSocket.

Every tool call is put to the control plane before it runs, by a hook of ours in the agent's settings. What the agent
says of its own success is not believed: a turn has failed where it told an error, or its model's stream just ended.
"""

from __future__ import annotations

from backplane.contract.light import OPTIONAL_OF_HTTPX  # isort: skip
import os
from typing import Final

from backplane.agents.options import OPTIONS, Kimi, read_options
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_ask_user",
    "mcp_client",
)  # fmt: skip
IN_PLACE: Final = restricted("in the folder where the conversation began")
HOST: Final = Host(
    id="kimi",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        **dict.fromkeys(("tool_glob", "tool_grep"), restricted("needs ripgrep on PATH")),
        **dict.fromkeys(("session_resume", "session_fork"), IN_PLACE),
        **dict.fromkeys(("checkpointing", "structured_output_json_schema", "hooks_pre_tool_use"), EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)


if __name__ == "__main__":
    given = read_options(__file__, "kimi", os.environ.pop(OPTIONS, "{}"), Kimi)
    early = ("backplane.agents.kimi.start", "backplane.agents.kimi.agent")
    package, without = "backplane.agents.kimi", OPTIONAL_OF_HTTPX
    main(HOST, Deferred("backplane.agents.program:drive", package, given, early=early, without=without))
