"""Claude Code as a host: one process and one conversation a run, over its JSON lines and control requests.

Every tool call is put to the control plane before it runs, whatever the agent's own settings say; the order's policy
is compiled into those settings as well. What the agent says of its own success is not believed.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import Final

from backplane.agents.options import OPTIONS, Claude, read_options
from backplane.contract.capability import EMULATED, NATIVE
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob",
    "tool_grep", "tool_web_search", "tool_web_fetch", "tool_ask_user", "hooks_pre_tool_use", "hooks_post_tool_use",
    "session_resume", "session_fork", "structured_output_json_schema", "mcp_client",
)  # fmt: skip
HOST: Final = Host(
    id="claude",
    capabilities={**dict.fromkeys(NATIVELY, NATIVE), "checkpointing": EMULATED},
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=(*OF_AGENT, "system"),
)

if __name__ == "__main__":
    given = read_options(__file__, "claude", os.environ.pop(OPTIONS, "{}"), Claude)
    early = ("backplane.agents.claude.start", "backplane.agents.claude.agent")
    main(HOST, Deferred("backplane.agents.program:drive", "backplane.agents.claude", given, early=early))
