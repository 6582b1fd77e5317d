"""The browser that the tests of pages drive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, driven by playwright; skips where one of them is not there."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium: not found")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: not installed")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--disable-dev-shm-usage"])
        yield made
        made.close()
