"""More of `tests/test_report.py`: what takes many processes, or seconds."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from tests.test_report import cli, runs  # noqa: F401


def test_two_runs_stand_side_by_side_and_other_forms_take_many(runs: Path) -> None:
    both = cli("report", "last", "last~1").stdout
    assert both.count("<article") == 2
    assert cli("report", "last", "last~1", "last").returncode == 2
    summary = cli("report", "last", "last~1", "last", "--summary").stdout
    assert summary.count("### ") == 3
    assert "| failed | shell |" in summary
    suite = ET.fromstring(cli("report", "last", "last~1", "--junit").stdout)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "receipts show" in cli("show", "last").stdout
