"""The page about the pairs says what the pairs do."""

from __future__ import annotations

from pathlib import Path

from tests.dialects import pairs_page
from tests.dialects.dialect_corpus import NAMES

PAGE = Path(__file__).resolve().parents[2] / "contracts" / "dialects" / "README.md"


def test_the_page_of_the_36_pairs_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == pairs_page.page(), (
        "run `python -m tests.dialects.pairs_page > contracts/dialects/README.md`"
    )


def test_every_pair_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for source in NAMES:
        others = " | ".join(name for name in NAMES if name != source)
        assert f"| request from {source} | {others} |" in text
        assert f"| response from {source} | {others} |" in text
