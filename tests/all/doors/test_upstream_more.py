"""More of `tests/upstream/test_faults.py`: what takes many processes, or seconds."""

from __future__ import annotations

import pytest

from backplane.testing import Fault, Turn
from tests.upstream.talk import PROTOCOLS, talk
from tests.upstream.test_faults import TEXT


@pytest.mark.parametrize(("protocol", "comment_ms"), [*((one, 20) for one in PROTOCOLS), (PROTOCOLS[0], None)])
def test_a_stream_that_stops_speaking_ends_in_time_with_or_without_comments(
    protocol: str, comment_ms: int | None
) -> None:
    fault = Fault(stall_after_frames=3, stall_comment_ms=comment_ms)
    script = [Turn(text=TEXT, pieces=20, fault=fault)]
    done = talk(protocol, script, timeout_s=0.5, tries_max=1)
    assert done.failed.code == "backend_timeout"
    assert "sent nothing for 0.5 s" in done.failed.message
