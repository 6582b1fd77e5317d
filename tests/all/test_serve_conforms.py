"""`backplane serve` under the rules of a host of the highest level."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from backplane.conform.rules import rules
from backplane.conform.runner import conform
from tests.served import SERVE


def test_serve_conforms_at_the_highest_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A host is given no variable of ours, so its state folder lies in this home.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BACKPLANE_ISOLATION", "off")
    # The rules of one run at a time are those of the kit, which its own hosts are held against.
    only = [rule.name for rule in rules() if rule.level == "complete"]
    report = anyio.run(partial(conform, SERVE, only=only))
    wrong = [(result.rule, result.name, result.seen) for result in report.results if result.verdict == "fail"]
    assert wrong == []
    assert (report.level, report.count("skip")) == ("complete", 0)
