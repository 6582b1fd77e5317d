"""Clients of the page that are slow, silent, endless or too many: the page stays at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.all.doors.test_web import Page, head, raw, served

__all__ = ["served"]


WAITS_S = 2.0
IMPATIENT = f"""
import sys
from backplane.__main__ import main
from backplane.web import app, server
app.BODY_S = server.HEAD_S = {WAITS_S}
sys.exit(main())
"""
"""The program that gives up sooner."""


def test_a_head_or_body_that_does_not_come_and_one_without_end_are_given_up(
    served: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    from backplane.web import app, server  # A Python without the extra reads this file, too.

    assert min(app.BODY_S, server.HEAD_S) > WAITS_S
    monkeypatch.setattr(Page, "program", ("-c", IMPATIENT))
    page = served()
    slow = raw(page, head(page, "/api/runs")[:-4])
    post = head(page, "/api/orders", f"Origin: {page.origin}", "Content-Type: application/json", "Content-Length: 9")
    waits = raw(page, post.replace(b"GET", b"POST") + b"{")
    huge = raw(page, head(page, "/api/runs", "X: " + "x" * 100_000))
    assert huge.recv(12) == b"HTTP/1.1 431"
    endless = raw(page, head(page, "/api/runs", "X: x")[:-4])
    with suppress(ConnectionError):
        for _ in range(64):
            endless.sendall(b"x" * 65536)
    with suppress(ConnectionError):
        assert endless.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 431")
    assert page.client.get("/api/runs").status_code == 200
    began = time.monotonic()
    assert slow.recv(1) == b""
    answer = waits.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400")
    assert time.monotonic() - began < WAITS_S + 10
    for made in (slow, waits, huge, endless):
        made.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost"])
def test_silent_connections_leave_room_for_the_page(served: Callable[..., Page], said: bytes) -> None:
    page = served()
    silent = [raw(page, said) for _ in range(250)]
    for _ in range(3):
        assert page.client.get("/api/runs").status_code == 200
    for made in silent:
        made.close()
