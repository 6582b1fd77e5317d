"""Copilot CLI as a host: its headless server, one process and one session a run, over framed JSON-RPC.

Every tool call is put to the control plane before it runs, whatever the agent's own settings say. What the agent says
of its own success is not believed: a turn has failed where the session told an error.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import Final

from backplane.agents.options import OPTIONS, Copilot, read_options
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob",
    "tool_grep", "tool_ask_user", "hooks_pre_tool_use", "hooks_post_tool_use", "session_resume", "session_fork",
    "mcp_client",
)  # fmt: skip
HOST: Final = Host(
    id="copilot",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        "tool_web_fetch": restricted("at the agent's own service alone; COPILOT_OFFLINE=false has it elsewhere, too"),
        **dict.fromkeys(("checkpointing", "structured_output_json_schema"), EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=(*OF_AGENT, "system"),
)

if __name__ == "__main__":
    given = read_options(__file__, "copilot", os.environ.pop(OPTIONS, "{}"), Copilot)
    early = ("backplane.agents.copilot.start", "backplane.agents.copilot.agent")
    main(HOST, Deferred("backplane.agents.program:drive", "backplane.agents.copilot", given, early=early))
