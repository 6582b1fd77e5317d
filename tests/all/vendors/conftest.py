"""What the tests of every driven agent start from; which agent it is says each file by its fixture `agent`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.all.vendors.ground import Agent, Ground


@pytest.fixture(autouse=True)
def home_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's login shell reads what lies there, and a version manager of ours can make it wait for a minute."""
    home = tmp_path / "home-of-nobody"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture(scope="session")
def kept() -> dict[tuple[str, str], Any]:
    """Runs that several tests of a worker look at."""
    return {}


@pytest.fixture
def ground(agent: Agent, tmp_path: Path, kept: dict[tuple[str, str], Any]) -> Ground:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return Ground(agent, root, kept)
