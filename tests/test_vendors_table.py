"""The page about driven agents is what their tests hold."""

from __future__ import annotations

import re

from tests.all.vendors import table
from tests.all.vendors.cases import CASES


def test_the_page_is_that_of_today() -> None:
    hint = "write it anew: .venv/bin/python -m tests.all.vendors.table --write"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), hint


def test_a_label_is_about_a_case_and_says_why() -> None:
    for agent in (*table.agents(), *table.acp_agents()):
        assert set(agent.labels) <= set(CASES)
        assert all(re.match(r"(emulated|refused|cut): .+", label) for label in agent.labels.values())
