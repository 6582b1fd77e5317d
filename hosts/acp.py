"""Any agent that speaks the Agent Client Protocol, by a profile: one process and one session a run.

The argument names a row of `acp.toml`; a backend's options lie over it, and describe an agent that has no row. Every
tool that the agent asks about is put to the control plane. Nothing of the agent is left.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
import sys

from backplane.agents.options import OPTIONS, Profile, read_options
from backplane.contract.capability import EMULATED, Level
from backplane.contract.work import OF_AGENT
from backplane.host import EXTENSIONS, Deferred, Host, main

EMULATED_FOR_ALL = ("checkpointing", "structured_output_json_schema")
"""What the host does in place of any such agent."""
HEEDS = OF_AGENT
"""All of them: what an agent cannot is refused by its profile, with the reason."""


def level(text: str) -> Level:
    """A level as a profile writes it: a word of the contract, or the reason why it is restricted."""
    return Level(text) if text in ("native", "emulated", "unsupported") else Level("restricted", text)  # type: ignore[arg-type]


if __name__ == "__main__":
    PROFILE = read_options(__file__, "".join(sys.argv[1:2]), os.environ.pop(OPTIONS, "{}"), Profile)
    STEERED = ("input/1", "interrupt/1", *(("session/1",) if PROFILE.sessions else ()))
    HOST = Host(
        id="".join(sys.argv[1:2]) or os.path.basename(PROFILE.program),
        capabilities={
            **dict.fromkeys(EMULATED_FOR_ALL, EMULATED),
            **{name: level(text) for name, text in PROFILE.capabilities.items()},
        },
        extensions=(*EXTENSIONS, *STEERED),
        heeds=HEEDS,
    )
    early = ("backplane.agents.acp.start", "backplane.agents.acp.agent")
    main(HOST, Deferred("backplane.agents.program:drive", "backplane.agents.acp", PROFILE, early=early))
