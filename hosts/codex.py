"""Codex as a host: its app-server, one process and one thread a run, over JSON-RPC lines.

Every command and every patch is put to the control plane before it runs, whatever the agent's own settings say; the
order's policy is compiled into those settings as well. What the agent says of its own success is not believed.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import Final

from backplane.agents.options import OPTIONS, Codex, read_options
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_write", "tool_edit", "tool_bash", "tool_web_search",
    "tool_ask_user", "session_resume", "session_fork", "mcp_client",
)  # fmt: skip
BY_SHELL: Final = restricted("by commands of its shell; it has no tool of its own for it")
BY_US: Final = ("hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing", "structured_output_json_schema")
HOST: Final = Host(
    id="codex",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        **dict.fromkeys(("tool_read", "tool_glob", "tool_grep"), BY_SHELL),
        **dict.fromkeys(BY_US, EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)

if __name__ == "__main__":
    given = read_options(__file__, "codex", os.environ.pop(OPTIONS, "{}"), Codex)
    early = ("backplane.agents.codex.start", "backplane.agents.codex.agent")
    main(HOST, Deferred("backplane.agents.program:drive", "backplane.agents.codex", given, early=early))
