"""Claude Code for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backplane.testing import Call, Turn
from tests.vendors.cases import CASES, Ground
from tests.vendors.found import vendor

pytestmark = pytest.mark.anyio


class Claude:
    """How its model calls tools, and how its retries are capped."""

    name = "claude"
    write_tool = "write_file"

    def __init__(self) -> None:
        self.env = {"CLAUDE_CODE_MAX_RETRIES": "1"}
        self.labels: dict[str, str] = {}

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("claude"), "base_url": url}

    def variables(self) -> dict[str, str]:
        return {"ANTHROPIC_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="Write", input={"file_path": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="Bash", input={"command": command, "description": "a step"}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(calls=(Call(name="StructuredOutput", input=value),)), Turn(text="done"))


@pytest.fixture
def anyio_backend() -> str:
    """Each case starts a program of 200 MB: once is enough, the host's own side is tested on both loops."""
    return "asyncio"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    vendor("claude")
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return Ground(Claude(), root)


@pytest.mark.parametrize("name", CASES)
async def test_claude_code_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)
