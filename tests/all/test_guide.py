"""Every command of the guide's pages, run as a reader would; what needs no minute is in `tests/test_readme.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import GUIDE, PAGES, all_blocks, blocks, compare, env, sample  # noqa: F401


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [path.name for path in GUIDE if blocks("console", path.name)])
def test_every_command_of_the_guide_prints_what_it_says(page: str, sample: Path, env: dict[str, str]) -> None:
    for language, block in all_blocks(PAGES[page]):
        if "main(Host(" in block:
            (sample / "hello.py").write_text(block)
        if language == "console":
            assert compare(block, sample, env)
