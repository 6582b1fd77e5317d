"""The desk of `backplane web`, as a real server process, asked by hand; `tests/all/browsers` has its browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.test_gateway_record import ID, begin, end, write
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
NO_RUN = "0192f0c1-2345-7abc-8def-0123456789ab"


class Page:
    """A running server, and a client with its token."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.runs = folder, list[subprocess.Popen[bytes]]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "backplane", "web", *words], cwd=folder, env=self.environ(), text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.origin, _, self.token = self.address.partition("/#token=")
        self.headers = {"Authorization": f"Bearer {self.token}", "Origin": self.origin}
        self.client = httpx.Client(base_url=self.origin, headers=self.headers, timeout=10, trust_env=False)

    def environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    def close(self) -> int:
        for run in self.runs:
            run.terminate()
            run.wait(10)
        self.client.close()
        self.process.terminate()
        code = self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def listed(self, **asked: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/api/runs", params=asked).json()
        return {**found, "ids": re.findall(r'href="/run/([^"]+)"', found["html"])}

    def begin(self, task: str = f"deploy {HOSTILE}", backend: str = "asks") -> str:
        """Start a run in a terminal of its own; return its id."""
        before = set(self.listed()["ids"])
        command = [sys.executable, "-m", "backplane", "run", "-b", backend, "--root", "work", "--on-ask", "wait", task]
        self.runs.append(
            subprocess.Popen(command, cwd=self.folder, env=self.environ(), stdout=subprocess.DEVNULL, stderr=-3)
        )
        ends = time.monotonic() + 20
        while not (new := [id for id in self.listed()["ids"] if id not in before]):
            assert time.monotonic() < ends
            time.sleep(0.05)
        return str(new[0])

    def done(self, *words: str) -> str:
        """Run a shell command to its end; return the run's id."""
        before = set(self.listed()["ids"])
        command = [sys.executable, "-m", "backplane", "run", "-b", "shell", "--root", "work", *words]
        subprocess.run(command, cwd=self.folder, env=self.environ(), capture_output=True, check=False)
        return str(next(id for id in self.listed()["ids"] if id not in before))

    def lines(self, run_id: str) -> Iterator[dict[str, Any]]:
        with self.client.stream("GET", f"/api/run/{run_id}/rows") as answer:
            yield from map(json.loads, answer.iter_lines())

    def act(self, run_id: str, name: str, **body: object) -> httpx.Response:
        return self.client.post(f"/api/run/{run_id}/{name}", json=body)


@pytest.fixture
def served(tmp_path: Path, backplane_home: Path) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")
    (tmp_path / "agent.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + ASKING)
    (tmp_path / "policy.json").write_text('{"require_approval_for": ["deploy"]}')
    (tmp_path / "backplane.toml").write_text(
        f'policy = "policy.json"\n[backends.asks]\ncommand = ["{sys.executable}", "{tmp_path / "agent.py"}"]\n'
    )

    def serve(*words: str) -> Page:
        pages.append(Page(tmp_path, *words))
        return pages[-1]

    yield serve
    for page in pages:
        page.close()


def test_a_run_is_followed_answered_and_found_again(served: Callable[..., Page]) -> None:
    page = served()
    run_id = page.begin()
    parts: dict[str, Any] = {}
    rows: dict[int, str] = {}
    is_answered = False
    for line in page.lines(run_id):
        parts |= line
        rows |= dict(line.get("rows", []))
        if line.get("asks") and not is_answered:
            ((number, html),) = line["asks"]
            assert "&lt;img" in html
            assert page.listed()["waiting"] == 1
            answer = {"ask": "a1", "number": number, "decision": "allow"}
            assert page.act(run_id, "answer", **{**answer, "number": number - 1}).status_code == 400
            assert page.act(run_id, "answer", **answer).status_code == 200
            assert page.act(run_id, "answer", **answer).status_code == 400
            is_answered = True
        line.pop("title", None)  # Put in as text.
        assert not re.search("<img|<script|\x1b", json.dumps(line, ensure_ascii=False))
    assert (is_answered, parts["over"], sorted(rows)) == (True, True, list(range(len(rows))))
    assert any("answered: allow" in row for row in rows.values())
    assert ("complete" in parts["part head"], "SHA-256" in parts["part receipt"]) == (True, True)
    found = page.listed(text="deploy")
    assert (found["ids"], found["waiting"], found["live"]) == ([run_id], 0, 0)
    assert page.listed(text="nothing-of-this")["ids"] == []
    assert b"What happened" in page.client.get(f"/api/run/{run_id}/report").content


def test_a_waiting_run_is_first_and_the_list_is_filtered(served: Callable[..., Page]) -> None:
    page = served()
    asks = page.begin()
    few, many = page.done("echo 1 > b.txt"), page.done("touch b c d; exit 1")
    assert page.listed()["ids"] == [asks, many, few]
    failed = page.listed(state="failed", text="exit")
    assert (failed["ids"], failed["waiting"], failed["live"]) == ([many], 1, 1)  # The title counts them all.
    assert page.listed(state="live")["ids"] == [asks]
    assert page.act(asks, "cancel").status_code == 200


def test_a_result_is_applied_and_taken_back_like_by_the_commands(served: Callable[..., Page], tmp_path: Path) -> None:
    page, file = served(), tmp_path / "work" / "a.txt"
    run_id = page.done("echo two >> a.txt")
    assert "would change 1 file in " in page.act(run_id, "apply", check="true").text
    assert file.read_text() == "one\n"
    assert page.act(run_id, "apply").status_code == 200
    assert file.read_text() == "one\ntwo\n"
    assert page.act(run_id, "apply").json()["code"] == "execution_workspace_error"
    assert page.act(run_id, "rewind", to="start").status_code == 200
    assert file.read_text() == "one\n"
    file.write_text("zero\none\n")
    refused = page.act(run_id, "apply")
    assert (refused.status_code, "a.txt" in refused.json()["message"], bool(refused.json()["hint"])) == (
        409,
        True,
        True,
    )
    assert page.act(run_id, "rewind", to="nowhere").status_code == 409


def test_a_read_only_desk_changes_nothing(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served("--read-only")
    run_id = page.done("echo two >> a.txt")
    parts = {name: html for line in page.lines(run_id) for name, html in line.items()}
    assert "<form" not in json.dumps(parts)
    for name, body in (
        ("cancel", {}), ("apply", {}), ("rewind", {"to": "start"}),
        ("answer", {"ask": "a", "decision": "allow"}),
    ):  # fmt: skip
        assert page.act(run_id, name, **body).status_code == 403
    assert (tmp_path / "work" / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("host", "evil.example", 421), ("host", "127.0.0.1:1", 421), ("origin", "http://evil.example", 403),
        ("origin", None, 403), ("authorization", None, 401), ("authorization", "Bearer x", 401),
    ],
)  # fmt: skip
def test_a_request_that_is_not_of_the_page_is_refused(
    served: Callable[..., Page], name: str, value: str | None, status: int
) -> None:
    page = served()
    headers = {key: text for key, text in page.headers.items() if key.lower() != name}
    headers |= {name: value} if value is not None else {}
    answer = httpx.post(f"{page.origin}/api/run/{NO_RUN}/cancel", headers=headers, json={}, trust_env=False)
    assert answer.status_code == status


def test_silent_connections_do_not_block_the_desk(served: Callable[..., Page]) -> None:
    page = served()
    port = int(page.origin.rpartition(":")[2])
    with ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert page.listed()["ids"] == []


def test_an_imported_run_shows_its_rows_and_a_pruned_one_says_so(
    served: Callable[..., Page], tmp_path: Path, backplane_home: Path
) -> None:
    page = served()
    run_id = page.done("echo two >> a.txt")
    words = [sys.executable, "-m", "backplane"]
    bundle = tmp_path / "evidence"
    subprocess.run([*words, "receipts", "export", "--to", str(bundle)], env=page.environ(), check=True)
    shutil.rmtree(backplane_home)
    subprocess.run([*words, "receipts", "import", str(bundle)], env=page.environ(), check=True)
    (line,) = page.lines(run_id)
    assert line["over"]
    assert any("echo two" in html for _, html in line["rows"])
    subprocess.run([*words, "prune", "--keep", "0"], env=page.environ(), check=True)
    (line,) = page.lines(run_id)
    assert (line["over"], "receipt_store_failed" in line["part head"]) == (True, True)


def test_the_page_itself_has_no_secret_and_a_strict_policy(served: Callable[..., Page]) -> None:
    page = served()
    for path in ("/", f"/run/{NO_RUN}"):
        front = httpx.get(page.origin + path, trust_env=False)
        assert (front.status_code, page.token in front.text) == (200, False)
        assert "script-src 'sha256-" in front.headers["content-security-policy"]
        assert front.headers["x-content-type-options"] == "nosniff"
        assert {"set-cookie", "server"} & set(front.headers) == set()
    assert page.client.delete("/api/runs").status_code == 405
    for name in ("..%2f..%2fetc", "%00", "x", "last"):
        assert page.client.get(f"/api/run/{name}/rows").status_code in (400, 404)
    assert page.client.get(f"/api/run/{NO_RUN}/rows").status_code == 400
    assert page.close() in (130, 143, -2, -15)


def test_a_taken_port_and_a_wrong_one_are_refused(served: Callable[..., Page]) -> None:
    page = served()
    for port in (page.origin.rpartition(":")[2], "99999"):
        command = [sys.executable, "-m", "backplane", "web", "--port", port]
        assert subprocess.run(command, capture_output=True, cwd=ROOT, timeout=20, check=False).returncode == 2


def test_the_gateways_exchanges_have_a_list_and_a_page_of_their_own(
    served: Callable[..., Page], backplane_home: Path
) -> None:
    failed = end(1, end="failed", error=HOSTILE, losses=1, lost=("/n",))
    journal = write(backplane_home, begin(1, client=HOSTILE), failed, begin(2))
    page = served()
    listed = page.client.get("/api/exchanges").json()
    assert re.findall(r'href="/gateway/([^"]+)"', listed["html"]) == [ID.format(2), ID.format(1)]
    assert listed["live"] == 1
    assert "<script" not in listed["html"]
    only = page.client.get("/api/exchanges", params={"state": "failed"}).json()["html"]
    assert re.findall(r'href="/gateway/([^"]+)"', only) == [ID.format(1)]
    assert page.client.get("/gateway").text == page.client.get(f"/gateway/{ID.format(1)}").text
    one = page.client.get(f"/api/exchange/{ID.format(2)}").json()
    assert (one["over"], "the service has been asked" in one["html"]) == (False, True)
    journal.write(end(2))
    assert page.client.get(f"/api/exchange/{ID.format(2)}").json()["over"] is True
    shown = page.client.get(f"/api/exchange/{ID.format(1)}").json()["html"]
    assert "<code>/n</code>" in shown
    assert "<script" not in shown
    assert page.client.get(f"/api/exchange/{NO_RUN}").status_code == 400
    assert page.client.get("/api/exchange/..").status_code in (400, 404)
    journal.close()
