"""More of `tests/test_redact.py`: what takes many processes, or seconds."""

from __future__ import annotations

import time

from backplane.redact.secrets import Redactor
from tests.test_redact import SECRET


def test_a_long_text_of_almost_keys_is_looked_through_in_time() -> None:
    redactor = Redactor([SECRET, "a" * 40])
    for hostile in ("-----BEGIN PRIVATE KEY-----", "sk-", "sk-a", "ghp_", "xoxb-", "AIza", "a" * 39 + "-", "\\u00"):
        began = time.process_time()
        text = hostile * ((1 << 18) // len(hostile))
        redactor.found(text.encode())
        redactor.text(text)
        # Some 0.03 s where it was written; what is looked for is a cost that grows with the square.
        assert time.process_time() - began < 5, hostile
