"""An agent over a model's API as a host: our own loop, see `backplane.agents.loop`.

Which service it is stands in the variable `OPTIONS`, see `backplane.upstream.presets`; what an order says beside the
contract's own fields, under `config.vendor.api`.
"""

from __future__ import annotations

import functools
import os
from typing import Final

import msgspec

from backplane.contract.capability import EMULATED, NATIVE
from backplane.host import Done, Host, HostRun, main
from backplane.upstream.presets import OPTIONS, Service, read_options

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
        *("mcp_servers", "output_schema"),
    ),
)


@functools.cache
def read_own() -> tuple[Service, dict[str, str]]:
    """The service that this process was started for, and its keys, which then stand nowhere else."""
    from backplane.tools.keys import take

    service = read_options(msgspec.json.decode(os.environ.get(OPTIONS, "{}")), "the options")
    return service, take(service.variables)


async def work(run: HostRun) -> Done:
    # Loaded now and not at the start: the hello need not wait for it.
    from backplane.agents.loop import drive

    return await drive(run, *read_own())


if __name__ == "__main__":
    main(HOST, work)
