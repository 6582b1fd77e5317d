"""An agent's program as a host: one process and one conversation a run.

The argument names a row of `agents.toml`; a backend's options lie over it, and describe an agent that has no row. Every
tool call that the agent asks about is put to the control plane before it runs, whatever the agent's own settings say.
What the agent reports of its own success is not believed, and nothing of the agent is left.
"""

from __future__ import annotations

from backplane.contract.light import OPTIONAL_OF_HTTPX  # isort: skip
import os
import sys
from typing import Final

from msgspec import UNSET

from backplane.agents.rows import OPTIONS, AgentRow, read_options
from backplane.contract.capability import EMULATED, Level
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

EMULATED_FOR_ALL: Final = dict.fromkeys(("checkpointing", "structured_output_json_schema"), EMULATED)
"""Abilities that backplane supplies for an agent without them; a row may declare one as `native`."""


def level(text: str) -> Level:
    """Return the level of a capability; text that is no word of the contract is the reason why it is restricted."""
    return Level(text) if text in ("native", "emulated", "unsupported") else Level("restricted", text)  # type: ignore[arg-type]


def host_of(name: str, row: AgentRow) -> Host:
    """Return the host of an agent: its hello says what the row says."""
    also = {"session/1": row.sessions, "subagent/1": row.subagent_ends}
    return Host(
        id=name or os.path.basename(row.program),
        capabilities={**EMULATED_FOR_ALL, **{ability: level(text) for ability, text in row.capabilities.items()}},
        extensions=(*EXTENSIONS, *(name for name, is_there in also.items() if is_there), "input/1", "interrupt/1"),
        heeds=(*OF_AGENT, *row.heeds),
        instruction_files=row.instruction_files or UNSET,
    )


if __name__ == "__main__":
    row_name = "".join(sys.argv[1:2])
    row = read_options(os.path.dirname(__file__), row_name, os.environ.pop(OPTIONS, "{}"))
    package = f"backplane.agents.{row.drive}"
    early, without = (f"{package}.start", f"{package}.agent"), OPTIONAL_OF_HTTPX if row.drive == "kimi" else ()
    main(host_of(row_name, row), Deferred("backplane.agents.program:drive", package, row, early=early, without=without))
