"""What the fault suite gets: its ground, and a place for what it measures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.faults import hosts
from tests.all.faults.ground import Ground

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="module", autouse=True)
def subreaper() -> Iterator[None]:
    """Whoever loses its parent becomes our child: then nothing that is left behind can hide.

    For these modules alone: elsewhere an orphan goes to init, as it does for every user.
    """
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, int]:
    """Wall time and size of a good run, the middle of three."""
    ground = Ground(tmp_path_factory.mktemp("base"), (30.0, 1 << 40))
    seen = [ground.run(hosts.GOOD) for _ in range(3)]
    assert [ended.code for ended in seen] == [0, 0, 0], seen[0].stderr
    return sorted(ended.wall_s for ended in seen)[1], sorted(ended.peak_bytes for ended in seen)[1]


@pytest.fixture
def ground(tmp_path: Path, base: tuple[float, int]) -> Ground:
    return Ground(tmp_path, base)
