"""An agent over a model's API as a host: our own loop, see `backplane.agents.loop`.

What an order says beside the contract's own fields stands under `config.vendor.api`.
"""

from __future__ import annotations

from backplane.contract.light import OPTIONAL_OF_HTTPX  # isort: skip
from typing import Final

from backplane.contract.capability import EMULATED, NATIVE
from backplane.host import Deferred, Host, main

HOST: Final = Host(
    id="api",
    capabilities={
        **dict.fromkeys(("streaming", "tool_use", "function_calling", "system_message", "max_tokens"), NATIVE),
        **dict.fromkeys(
            ("tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob", "tool_grep", "tool_web_fetch"), EMULATED
        ),
        **dict.fromkeys(("tool_ask_user", "structured_output_json_schema", "mcp_client"), EMULATED),
    },
    heeds=(
        *("model", "max_turns", "max_budget_usd", "context", "history", "system", "sampling", "images"),
        *("mcp_servers", "output_schema", "project_instructions", "wait_for_limit_s"),
    ),
)


if __name__ == "__main__":
    main(HOST, Deferred("backplane.agents.loop:drive", without=OPTIONAL_OF_HTTPX))
