"""More of `tests/upstream/test_client.py`: what takes many processes, or seconds."""

from __future__ import annotations

import pytest

from backplane.testing import Fault, Turn
from backplane.upstream import client
from tests.upstream.talk import talk


def test_an_answer_that_is_over_does_not_wait_for_a_connection_that_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason to stop came; neither `[DONE]` nor an end of the body does."""
    monkeypatch.setattr(client, "TAIL_S", 0.5)
    fault = Fault(drop=("CLOSING",), stall_after_frames=4)
    done = talk("openai_compatible", [Turn(text="ok", pieces=1, usage=None, fault=fault)], timeout_s=300)
    assert (done.turn.text, done.turn.stop) == ("ok", "end")
