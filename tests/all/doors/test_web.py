"""The page of `backplane web`, as a real server process, asked by hand; `tests/all/browsers` has its browser."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE

pytest.importorskip("starlette", reason="needs starlette: not installed")
pytest.importorskip("uvicorn", reason="needs uvicorn: not installed")

HOSTILE = '<img src=x onerror="window.owned=1"><script>window.owned=2</script>\x1b]0;x\x07'
ASKING = f"""
HOSTILE = {HOSTILE!r}
hello(extensions=["ask/1", "cancel/1"])
run = take()
put(event(run, type="assistant_message", text=HOSTILE))
put(event(run, type="tool_call", tool_name=HOSTILE, tool_use_id="1", input={{"command": HOSTILE}}))
put({{"t": "ask", "ref_id": run["id"], "id": "a1", "kind": "tool", "name": "deploy", "input": {{"to": HOSTILE}}}})
answer = take()
put(event(run, type="assistant_message", text="answered: " + str(answer.get("decision"))))
put(final(run))
end()
"""


class Page:
    """A running server, and a client with its token."""

    program = ("-m", "backplane")

    def __init__(self, folder: Path, *words: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *self.program, "web", *words]
        self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.origin, _, self.token = self.address.partition("/#token=")
        self.headers = {"Authorization": f"Bearer {self.token}", "Origin": self.origin}
        self.client = httpx.Client(base_url=self.origin, headers=self.headers, timeout=10, trust_env=False)

    def close(self) -> int:
        self.client.close()
        self.process.terminate()
        code = self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def states(self, run_id: str) -> Iterator[dict[str, Any]]:
        with self.client.stream("GET", f"/api/runs/{run_id}/stream") as answer:
            for line in answer.iter_lines():
                told = json.loads(line)
                yield {**told.get("state", {}), "over": told.get("over", False), "rows": told.get("rows", [])}


@pytest.fixture
def served(tmp_path: Path, backplane_home: Path) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []
    (tmp_path / "work").mkdir()
    (tmp_path / "agent.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + ASKING)
    (tmp_path / "policy.json").write_text('{"require_approval_for": ["deploy"]}')
    (tmp_path / "backplane.toml").write_text(
        f'policy = "policy.json"\n[backends.asks]\ncommand = ["{sys.executable}", "{tmp_path / "agent.py"}"]\n'
        '[web]\nroots = ["work"]\n'
    )

    def serve(*words: str) -> Page:
        pages.append(Page(tmp_path, *words))
        return pages[-1]

    yield serve
    for page in pages:
        page.close()


def begun(page: Page, root: Path, task: str = f"deploy {HOSTILE}") -> str:
    order = {"task": task, "backend": "asks", "root": str(root)}
    answer = page.client.post("/api/orders", json=order)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["run_id"])


def test_a_run_is_started_followed_answered_and_found_again(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    run_id = begun(page, tmp_path / "work")
    asked: dict[str, Any] | None = None
    for state in page.states(run_id):
        if state.get("asks") and asked is None:
            asked = state["asks"][0]
            assert "<img" in asked["body"]  # Drawn as text.
            assert [row["standing"] for row in page.client.get("/api/runs").json()] == ["waiting"]
            answer = {"ask": asked["id"], "shown": asked["shown"], "decision": "allow"}
            late = {**answer, "shown": "0" * 64}
            assert page.client.post(f"/api/runs/{run_id}/answer", json=late).status_code == 409
            assert page.client.post(f"/api/runs/{run_id}/answer", json=answer).status_code == 200
            assert page.client.post(f"/api/runs/{run_id}/answer", json=answer).status_code == 409
        for _, _, html in state["rows"]:
            assert "<img" not in html
            assert "\x1b" not in html
    assert asked is not None
    assert state["over"]
    (row,) = page.client.get("/api/runs", params={"text": "deploy"}).json()
    assert (row["run_id"], row["standing"]) == (run_id, "complete")
    assert page.client.get("/api/runs", params={"text": "nothing-of-this"}).json() == []
    report = page.client.get("/api/report", params={"runs": run_id})
    assert b"What happened" in report.content


def test_a_run_is_cancelled_and_those_of_the_page_end_with_it(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    first, second = begun(page, tmp_path / "work"), begun(page, tmp_path / "work")
    assert page.client.post(f"/api/runs/{first}/cancel", json={}).status_code == 200
    assert page.close() in (130, 143)
    listed = subprocess.run(
        [sys.executable, "-m", "backplane", "runs", "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    rows = {row["run_id"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert {rows[first]["state"], rows[second]["state"]} == {"ended"}


def test_a_read_only_page_changes_nothing(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served("--read-only")
    assert page.client.get("/api/form").json()["roots"] == []
    for path, body in (
        ("/api/orders", {"task": "x", "backend": "asks", "root": str(tmp_path / "work")}),
        ("/api/runs/0192f0c1-2345-7abc-8def-0123456789ab/cancel", {}),
        ("/api/runs/0192f0c1-2345-7abc-8def-0123456789ab/answer", {"ask": "a", "shown": "", "decision": "allow"}),
    ):
        assert page.client.post(path, json=body).status_code == 403


def test_what_an_order_of_the_page_may_not_say(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    good = {"task": "x", "backend": "asks", "root": str(tmp_path / "work")}
    changes: list[dict[str, Any]] = [
        {"root": str(tmp_path)},
        {"backend": "sh -c id"},
        {"task": " "},
        {"sidecar": "id"},
    ]
    for change in changes:
        answer = page.client.post("/api/orders", json={**good, **change})
        assert answer.status_code == 400, change
        assert answer.json()["code"] in ("config_invalid", "backend_not_found")
    assert page.client.get("/api/runs").json() == []


DOORS: list[tuple[str, str | None, int]] = [
    ("host", "evil.example", 421),
    ("host", "127.0.0.1:1", 421),
    ("origin", "http://evil.example", 403),
    ("origin", None, 403),
    ("sec-fetch-site", "same-site", 403),
    ("authorization", None, 401),
    ("authorization", "Bearer x", 401),
    ("content-type", "text/plain", 415),
]


def test_the_doors(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    order = {"task": "x", "backend": "asks", "root": str(tmp_path / "work")}
    with httpx.Client(trust_env=False) as client:
        for name, value, status in DOORS:
            headers = {**page.headers, "Content-Type": "application/json"}
            headers = {key: text for key, text in headers.items() if key.lower() != name}
            headers |= {name: value} if value is not None else {}
            answer = client.post(f"{page.origin}/api/orders", headers=headers, content=json.dumps(order))
            assert answer.status_code == status, (name, value)
    assert page.client.get("/api/runs").json() == []


def test_more_doors(served: Callable[..., Page]) -> None:
    page = served()
    get = page.client.get
    assert get("/api/runs", params={"token": page.token}).status_code == 400
    assert page.client.delete("/api/runs").status_code == 405
    # Its head alone: who sends all of it may hear of a reset before the answer.
    post = head(
        page, "/api/orders", f"Origin: {page.origin}", "Content-Type: application/json", "Content-Length: 1100000"
    )
    long = raw(page, post.replace(b"GET", b"POST"))
    assert long.recv(12) == b"HTTP/1.1 413"
    long.close()
    for name in ("..%2f..%2fetc", "%00", "x", "last"):
        assert get(f"/api/runs/{name}/stream").status_code in (400, 404)
        assert get("/api/report", params={"runs": name}).status_code == 400
    front = httpx.get(page.origin, trust_env=False)
    assert front.status_code == 200
    assert "script-src 'sha256-" in front.headers["content-security-policy"]
    assert page.token not in front.text
    assert front.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in front.headers
    assert "server" not in front.headers


def test_a_taken_port_and_a_wrong_one_are_refused(served: Callable[..., Page]) -> None:
    page = served()
    for port in (page.origin.rpartition(":")[2], "99999"):
        command = [sys.executable, "-m", "backplane", "web", "--port", port]
        assert subprocess.run(command, capture_output=True, cwd=ROOT, timeout=20, check=False).returncode == 2


def raw(page: Page, data: bytes) -> socket.socket:
    port = int(page.origin.rpartition(":")[2])
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(data)
    return made


def head(page: Page, path: str, *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {page.origin.partition('//')[2]}", f"Authorization: Bearer {page.token}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def test_a_stream_that_breaks_comes_again_whole(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    run_id = begun(page, tmp_path / "work")
    whole: list[dict[int, str]] = []
    for _ in range(2):
        rows: dict[int, str] = {}
        for state in page.states(run_id):
            for number, _kind, html in state["rows"]:
                assert number not in rows or rows[number] != html
                rows[number] = html
            if state.get("asks"):
                break  # The connection goes with the generator.
        whole.append(rows)
    assert whole[0] == whole[1]
    assert sorted(whole[0]) == list(range(len(whole[0])))
