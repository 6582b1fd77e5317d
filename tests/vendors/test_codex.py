"""Codex for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backplane.testing import Call, Turn
from tests.vendors.cases import CASES, Ground
from tests.vendors.found import vendor

pytestmark = pytest.mark.anyio


class Codex:
    """How its model calls tools, and how its retries are capped."""

    name = "codex"
    write_tool = "write_file"

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient = {"options": {"retries": 10}}
        self.labels: dict[str, str] = {}

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("codex"), "base_url": f"{url}/v1", "retries": 1, "model": "gpt-5.5"}

    def variables(self) -> dict[str, str]:
        return {"OPENAI_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        lines = "".join(f"+{line}\n" for line in content.splitlines())
        patch = f"*** Begin Patch\n*** Add File: {path}\n{lines}*** End Patch\n"
        return Turn(calls=(Call(name="apply_patch", input=patch, kind="custom"),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="exec_command", input={"cmd": command}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


@pytest.fixture
def anyio_backend() -> str:
    """Each case starts a program of 150 MB: once is enough, the host's own side is tested on both loops."""
    return "asyncio"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    vendor("codex")
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return Ground(Codex(), root)


@pytest.mark.parametrize("name", CASES)
async def test_codex_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)
