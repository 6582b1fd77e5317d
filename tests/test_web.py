"""The page of `backplane web`, as a real server process: its doors by hand, its page in a real browser."""

from __future__ import annotations

import json
import os
import re
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

    def __init__(self, folder: Path, *words: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "backplane", "web", *words]
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


def begun(page: Page, root: Path) -> str:
    order = {"task": f"deploy {HOSTILE}", "backend": "asks", "root": str(root)}
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
        {"root": str(tmp_path)}, {"root": "/"}, {"backend": "sh -c id"}, {"task": " "}, {"sidecar": "id"},
        {"isolation": "off"}, {"policy": {}}, {"task": 1},
    ]  # fmt: skip
    for change in changes:
        answer = page.client.post("/api/orders", json={**good, **change})
        assert answer.status_code == 400, change
        assert answer.json()["code"] in ("config_invalid", "backend_not_found")
    assert page.client.get("/api/runs").json() == []


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "127.0.0.1:1"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": None}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"authorization": None}, 401),
        ({"authorization": "Bearer x"}, 401),
        ({"content-type": "text/plain"}, 415),
    ],
)
def test_the_doors(served: Callable[..., Page], tmp_path: Path, change: dict[str, str | None], status: int) -> None:
    page = served()
    ((name, value),) = change.items()
    headers = {**page.headers, "Content-Type": "application/json"}
    headers = {key: text for key, text in headers.items() if key.lower() != name}
    headers |= {name: value} if value is not None else {}
    order = {"task": "x", "backend": "asks", "root": str(tmp_path / "work")}
    with httpx.Client(trust_env=False) as client:
        answer = client.post(f"{page.origin}/api/orders", headers=headers, content=json.dumps(order))
    assert answer.status_code == status
    assert page.client.get("/api/runs").json() == []


def test_more_doors(served: Callable[..., Page]) -> None:
    page = served()
    get = page.client.get
    assert get("/api/runs", params={"token": page.token}).status_code == 400
    assert page.client.delete("/api/runs").status_code == 405
    assert page.client.post("/api/orders", json={"task": "x" * 1_100_000}).status_code == 413
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


def test_a_taken_port_and_a_wrong_one_are_said(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    for port, words in ((page.origin.rpartition(":")[2], "cannot be had"), ("99999", "is no port")):
        command = [sys.executable, "-m", "backplane", "web", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20, check=False)
        assert done.returncode == 2
        assert words in done.stderr


# In a browser ---------------------------------------------------------------------------------------------------------


def test_a_click_answers_and_a_terminal_beside_it_sees_it(
    served: Callable[..., Page], tmp_path: Path, browser: Any
) -> None:
    page = served()
    tab = browser.new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.address)
    tab.wait_for_selector("text=0 runs")
    assert page.token not in tab.url
    tab.click("#to-new")
    tab.fill("#task", f"deploy {HOSTILE}")
    tab.select_option("#backend", "asks")
    tab.click("#start")
    tab.wait_for_selector("section.ask")
    run_id = tab.url.rpartition("/")[2]
    watch = subprocess.Popen(
        [sys.executable, "-m", "backplane", "watch", run_id], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    tab.get_by_role("button", name="allow").click()
    tab.wait_for_selector("text=answered: allow")
    tab.wait_for_selector(".chip:text('complete')")
    seen = watch.communicate(timeout=20)[0]
    assert "answered: allow" in seen
    assert tab.locator("section.ask").count() == 0
    # Hostile words ran nothing, fetched nothing and are there to be read.
    assert tab.evaluate("window.owned") is None
    assert "<img src=x" in tab.inner_text("body")
    assert {re.match(r"[a-z]+://[^/]+|data:", url)[0] for url in asked} <= {page.origin, "data:"}  # type: ignore[index]
    assert not any(page.token in url.partition("#")[0] for url in asked)
    tab.reload()
    tab.wait_for_selector("text=answered: allow")
    tab.click("nav a")
    tab.fill("#words", "deploy")
    tab.wait_for_selector("td span:text('complete')")
    tab.close()


def test_without_the_token_the_page_says_what_to_do(served: Callable[..., Page], browser: Any) -> None:
    page = served()
    tab = browser.new_page()
    tab.goto(page.origin)
    tab.wait_for_selector("text=open the address with its token")
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_checker_of_accessibility_finds_nothing(
    served: Callable[..., Page], tmp_path: Path, browser: Any, npm_programs: Callable[..., Path], scheme: str
) -> None:
    checker = (npm_programs("axe-core@4.14.1").parent / "axe-core" / "axe.min.js").read_text()
    page = served()
    run_id = begun(page, tmp_path / "work")
    tab = browser.new_page(color_scheme=scheme)
    tab.goto(page.address)
    tab.wait_for_selector("tbody tr")

    def findings() -> list[str]:
        tab.evaluate(checker)
        return [f"{one['id']}: {one['nodes'][0]['html'][:100]}" for one in tab.evaluate("axe.run()")["violations"]]

    assert findings() == []
    tab.click("tbody a")
    tab.wait_for_selector("section.ask")
    assert findings() == []
    tab.get_by_role("button", name="deny").click()
    tab.wait_for_selector(".chip:text('complete')")
    (tmp_path / "report.html").write_bytes(page.client.get("/api/report", params={"runs": run_id}).content)
    tab.goto((tmp_path / "report.html").as_uri())
    assert findings() == []
    tab.close()
