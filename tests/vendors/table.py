"""The page that says of every driven agent which shared case passes, is emulated, or is refused and why.

`python3 xtask.py vendors --table` prints it; `python -m tests.vendors.table --write` writes it anew. What it says is
what the agents' own tests hold: a case with a label is tested, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.vendors import found
from tests.vendors.cases import table
from tests.vendors.ground import Agent
from tests.vendors.test_claude import Claude
from tests.vendors.test_codex import Codex

PAGE = Path(__file__).resolve().parents[2] / "contracts" / "agents.md"
HEAD = """# Driven agents, case by case

Each agent is run for real against a scripted model (`tests/vendors/`). `pass`: it does so by itself or by its host.
`emulated`: the host or the control plane does what the agent cannot. `refused`: an order that asks for it is refused.

"""


def agents() -> Sequence[Agent]:
    return (Claude(), Codex())


def page() -> str:
    """The whole page, with the versions it was found out with."""
    pins = found.pins()
    versions = ", ".join(f"{agent.name} {found.version(pins[agent.name])}" for agent in agents())
    return f"{HEAD}Versions: {versions}.\n\n{table(agents())}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
