"""Five hundred honest runs raise no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_claims import honest_runs


@pytest.mark.anyio
@pytest.mark.timeout(360)
async def test_500_honest_runs_raise_no_alarm(tmp_path: Path) -> None:
    counts = await honest_runs(tmp_path, 500)
    assert min(counts["file_changed true"], counts["file_content true"]) > 100
