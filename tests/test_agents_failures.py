"""Which code a failure of a vendor's agent has: by its label, by a status in a member, by words, never by a number."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.errors import DENIAL
from backplane.upstream.failure import STATUSES, code_of

COUNTED = (
    "the build log has {n} lines and the process died", "crashed at row {n}", "segfault after {n} files",
    "read {n} files, then the socket closed", "{n}", "HTTP {n}", "error {n}: it is over", "status={n}", "({n})",
    "took {n} s", "exit of pid {n}", "API Error: {n}",
)  # fmt: skip


@pytest.mark.parametrize("words", COUNTED)
@given(number=st.integers(min_value=0, max_value=999))
def test_a_number_among_words_is_no_status(words: str, number: int) -> None:
    assert code_of(words.format(n=number)) == "backend_unavailable"


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_in_a_member_has_its_code(status: int) -> None:
    assert code_of("it failed", status=status) == STATUSES[status]
    for said in (
        f'API Error: {{"type": "error", "error": {{"code": {status}}}}}', f'no: {{"statusCode": {status}}} again',
        f'{{"error": {{"status": {status}, "message": "after 413 files"}}}}',
    ):  # fmt: skip
        assert code_of(said) == STATUSES[status]


@pytest.mark.parametrize(
    "said", ['{"lines": 429}', '{"code": "429"}', "{429}", '{"error": {"count": 429}}', '{"code": 429', "{" * 9_000]
)
def test_other_members_and_broken_json_say_no_status(said: str) -> None:
    assert code_of(said) == "backend_unavailable"


def test_words_and_labels_still_count() -> None:
    assert code_of("429 Too Many Requests") == "backend_rate_limited"
    assert code_of("401 Unauthorized") == "backend_auth_failed"
    labels = {"context_limit": "backend_context_length"}
    assert code_of("it failed after 429 lines", "context_limit", own=labels) == "backend_context_length"


SAID = f"{DENIAL}: connecting to 'model.example:443' is forbidden by '*'"


@pytest.mark.parametrize(
    ("words", "labels", "status"),
    [
        (f"403 {SAID}", (), None),
        (f"unexpected status 403 Forbidden: {SAID}, url: http://model.example/v1/responses", ({"x": 1},), 403),
        (f'API Error: 403 {{"error": {{"type": "key_proxy", "message": "{SAID}"}}}}', ("authentication_failed",), 403),
        (f"[provider.auth_error] {SAID}", ("provider.auth_error",), 401),
    ],
)
def test_an_agents_words_of_a_denial_count_before_labels_and_status(
    words: str, labels: tuple[Any, ...], status: int | None
) -> None:
    assert code_of(words, *labels, status=status) == "policy_denied"


def test_words_of_another_refusal_are_no_denial() -> None:
    assert code_of("403 Forbidden: your key may not use this") == "backend_auth_failed"
    assert code_of("refused by the gateway", status=403) == "backend_auth_failed"
