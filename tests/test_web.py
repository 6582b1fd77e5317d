"""The page of `backplane web`, as a real server process: its doors by hand, its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from backplane.receipts.pieces import seal
from backplane.receipts.store import Store
from backplane.web.guard import STREAMS_MAX
from tests.hostile import HOSTILE as HOSTILE_TEXTS
from tests.peers import ROOT
from tests.receipt_writer import delta, receipt_of
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
    assert page.process.stdout is not None
    assert page.process.stdout.readline() == "whoever has this address can read runs here; Ctrl-C ends it\n"
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


def test_a_taken_port_and_a_wrong_one_are_said(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    for port, words in ((page.origin.rpartition(":")[2], "cannot be had"), ("99999", "is no port")):
        command = [sys.executable, "-m", "backplane", "web", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20, check=False)
        assert done.returncode == 2
        assert words in done.stderr


# Slow, many, huge -----------------------------------------------------------------------------------------------------


def raw(page: Page, data: bytes) -> socket.socket:
    port = int(page.origin.rpartition(":")[2])
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(data)
    return made


def head(page: Page, path: str, *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {page.origin.partition('//')[2]}", f"Authorization: Bearer {page.token}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def test_a_head_or_body_that_does_not_come_and_one_without_end_are_given_up(served: Callable[..., Page]) -> None:
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
    assert time.monotonic() - began < 20
    for made in (slow, waits, huge, endless):
        made.close()


@pytest.mark.parametrize("said", [b"", b"G", b"GET / HTTP/1.1\r\nHost"])
def test_silent_connections_leave_room_for_the_page(served: Callable[..., Page], said: bytes) -> None:
    page = served()
    silent = [raw(page, said) for _ in range(250)]
    for _ in range(3):
        assert page.client.get("/api/runs").status_code == 200
    for made in silent:
        made.close()


def test_a_thousand_streams_are_bounded_and_leave_the_page_at_work(served: Callable[..., Page], tmp_path: Path) -> None:
    page = served()
    run_id = begun(page, tmp_path / "work")
    stream = head(page, f"/api/runs/{run_id}/stream")
    with ExitStack() as opened:
        # One after another, exactly so many are followed; the rest of the thousand comes at once.
        followed = [opened.enter_context(raw(page, stream)).recv(12) for _ in range(STREAMS_MAX + 8)]
        assert followed == [b"HTTP/1.1 200"] * STREAMS_MAX + [b"HTTP/1.1 429"] * 8
        flood = [opened.enter_context(raw(page, stream)) for _ in range(1000 - len(followed))]
        # In a flood a connection whose request was not read yet is closed for a newer one.
        assert {answered(made) for made in flood} <= {b"HTTP/1.1 429", b"HTTP/1.1 503", b""}
    until(lambda: page.client.get("/api/runs").status_code == 200)
    until(lambda: next(page.states(run_id))["asks"] != [])


def answered(made: socket.socket) -> bytes:
    try:
        return made.recv(12)
    except ConnectionResetError:
        return b""


def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_link_among_the_runs_is_not_followed(
    served: Callable[..., Page], tmp_path: Path, backplane_home: Path
) -> None:
    page = served()
    run_id = begun(page, tmp_path / "work")
    fake = "0192f0c1-2345-7abc-8def-0123456789ab"
    (backplane_home / "runs" / fake).symlink_to(backplane_home / "runs" / run_id)
    assert fake not in page.client.get("/api/runs").text
    assert page.client.get(f"/api/runs/{fake}/stream").status_code in (400, 404)


def test_five_thousand_runs_are_listed_at_once(served: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # 5,000 commits wait for no disk there.
    with tempfile.TemporaryDirectory(dir=memory) as home:
        monkeypatch.setenv("BACKPLANE_HOME", home)
        with Store.open(Path(home)) as store:
            for _ in range(5_000):
                store.append(seal(receipt_of([delta("x")])))
        page = served()
        took = []
        for _ in range(7):
            began = time.monotonic()
            rows = page.client.get("/api/runs").json()
            took.append(time.monotonic() - began)
        print("listed_s", min(took))
        assert len(rows) == 200
        assert min(took) < 0.3 * SLOW
        # Words that none of them has are looked for in all of them.
        assert page.client.get("/api/runs", params={"text": "nowhere"}, timeout=60).json() == []


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


def test_a_browser_is_opened_with_a_code_that_serves_once(
    served: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Any
) -> None:
    asked = tmp_path / "asked"
    opener = tmp_path / "opener"
    opener.write_text(f'#!/bin/sh\necho "$1" > {asked}.new\nmv {asked}.new {asked}\n')
    opener.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(opener))
    page = served("--open")
    until(asked.exists)
    address = asked.read_text().strip()
    assert re.fullmatch(re.escape(page.origin) + r"/#code=[\w-]{20,}", address)
    assert page.token not in address
    for wrong in ("Code x", "", f"Bearer {page.token}", "Code"):
        assert page.client.post("/api/token", json={}, headers={"Authorization": wrong}).status_code == 401
    tab = browser.new_page()
    tab.goto(address)
    tab.wait_for_selector("text=0 runs")
    assert tab.url == f"{page.origin}/#/"
    tab.reload()
    tab.wait_for_selector("text=0 runs")
    tab.close()
    code = {"Authorization": f"Code {address.partition('=')[2]}"}
    again = page.client.post("/api/token", json={}, headers=code)
    assert (again.status_code, "code was used" in again.text) == (401, True)
    assert page.client.post("/api/token", json={}, headers={"Authorization": "Code x"}).status_code == 401
    assert page.client.get("/api/token", headers=code).status_code == 405


def test_without_the_token_the_page_says_what_to_do(served: Callable[..., Page], browser: Any) -> None:
    page = served()
    tab = browser.new_page()
    tab.goto(page.origin)
    tab.wait_for_selector("text=open the address with its token")
    tab.close()


def test_a_run_opened_in_a_tab_of_its_own_has_the_token(
    served: Callable[..., Page], tmp_path: Path, browser: Any
) -> None:
    page = served()
    run_id = begun(page, tmp_path / "work")
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(page.address)
    tab.wait_for_selector("tbody a")
    with context.expect_page() as opened:
        tab.click("tbody a", modifiers=["Control"])
    opened.value.wait_for_selector("section.ask")
    assert run_id in opened.value.url
    stranger = browser.new_context().new_page()
    stranger.goto(f"{page.origin}/#/run/{run_id}")
    stranger.wait_for_selector("text=open the address with its token")
    stranger.wait_for_timeout(300)
    assert stranger.locator("section.ask").count() == 0
    stranger.context.close()
    context.close()


SLOW_ANSWERS = """() => {
  const fetched = window.fetch;
  window.looks = 0;
  window.fetch = (path, how) => {
    window.looks += 1;
    return new Promise((done) => setTimeout(done, 400)).then(() => fetched(path, how));
  };
}"""


def test_typing_begins_no_further_looks_at_the_list(served: Callable[..., Page], browser: Any) -> None:
    page = served()
    tab = browser.new_page()
    tab.goto(page.address)
    tab.wait_for_selector("text=0 runs")
    tab.evaluate(SLOW_ANSWERS)
    for letter in "deploying":
        tab.type("#words", letter)
        tab.wait_for_timeout(200)
    tab.wait_for_timeout(1000)
    tab.evaluate("window.looks = 0")
    tab.wait_for_timeout(5000)
    assert 1 <= tab.evaluate("window.looks") <= 3
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


TICKS = """
hello(extensions=["ask/1", "cancel/1"])
run = take()
def now(): return str(round(time.time() * 1000))
for number in range(60):
    put(event(run, type="assistant_message", text="tick " + now()))
    time.sleep(0.05)
for number in range(5):
    ask = {"t": "ask", "ref_id": run["id"], "id": "a%d" % number, "kind": "tool", "name": "deploy", "input": {"n": 1}}
    put(ask)
    take()
    put(event(run, type="assistant_message", text="answered " + now()))
put(final(run))
end()
"""
WATCHER = """(name) => {
  window[name] = []; window.clicked = [];
  document.addEventListener('click', () => window.clicked.push(Date.now()), true);
  new MutationObserver(() => document.querySelectorAll('.row .message').forEach((row) => {
    if (row.dataset.seen) return;
    row.dataset.seen = 1;
    window[name].push([row.textContent, Date.now()]);
  })).observe(document.body, { subtree: true, childList: true });
}"""


def test_events_and_answers_are_there_at_once_and_once(
    served: Callable[..., Page], tmp_path: Path, browser: Any
) -> None:
    (tmp_path / "agent.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + TICKS)
    page = served()
    tab = browser.new_page()
    tab.goto(page.address)
    tab.wait_for_selector("text=0 runs")
    tab.evaluate(WATCHER, "seen")
    run_id = begun(page, tmp_path / "work")
    tab.evaluate(f"location.hash = '#/run/{run_id}'")
    for number in range(5):
        tab.wait_for_selector("section.ask")
        if number == 2:  # The tab goes to the background and comes back: its stream is closed, and begun anew.
            for hidden in ("true", "false"):
                tab.evaluate(f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}})")
                tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            tab.wait_for_timeout(500)
        tab.evaluate("window.clicked.length = 0")
        tab.get_by_role("button", name="allow").click()
        clicked = tab.evaluate("window.clicked[0]")
        tab.locator(f".message:has-text('answered') >> nth={number}").wait_for()
        answered = int(tab.locator(".message:has-text('answered')").nth(number).text_content().split()[1])
        print("answered after ms", answered - clicked)
        assert answered - clicked < 100 * SLOW
    tab.wait_for_selector(".chip:text('complete')")
    seen = tab.evaluate("window.seen")
    late = sorted(at - int(words.split()[1]) for words, at in seen[:60] if words.startswith("tick"))
    assert len(late) > 50
    print("event to page, ms: half, last", late[len(late) // 2], late[-1])
    assert late[-1] < 250 * SLOW
    shown = tab.locator(".message").all_text_contents()
    assert len([words for words in shown if words.startswith("tick")]) == 60
    assert len(set(shown)) == len(shown) == 65
    tab.close()


SLOW = 4
"""What a loaded machine may take of the goals, which are those of a quiet one."""

EVERYWHERE = """
texts = json.load(open(TEXTS))
hello(extensions=["ask/1", "cancel/1"])
run = take()
steps = [{"step": text, "status": "pending"} for text in texts]
put(event(run, type="warning", message="plan", ext={"task": {"plan": steps}}))
for number, text in enumerate(texts):
    put(
        event(run, type="assistant_message", text=text),
        event(run, type="tool_call", tool_name=text, tool_use_id=str(number), input={text: text, "command": text}),
        event(run, type="tool_result", tool_name=text, tool_use_id=str(number), output=text, is_error=True),
        event(run, type="command_executed", command=text, exit_code=1, output_preview=text),
        event(run, type="file_changed", path=text, summary=text),
        event(run, type="error", message=text, error_code=text),
        event(run, type="run_completed", message=text),
    )
    put({"t": "ask", "ref_id": run["id"], "id": "a%d" % number, "kind": "tool", "name": text, "input": {"to": text}})
while take()["t"] != "cancel": pass
put(final(run))
end()
"""


@pytest.mark.parametrize("third", range(3))  # A run has 64 open questions at most.
def test_hostile_texts_in_every_place_of_the_page_run_nothing(
    served: Callable[..., Page], tmp_path: Path, browser: Any, third: int
) -> None:
    hostile = HOSTILE_TEXTS[third::3]
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(hostile))
    agent = PRELUDE.format(hello=json.dumps(HELLO)) + EVERYWHERE.replace("TEXTS", repr(str(texts)))
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "policy.json").write_text('{"require_approval_for": ["*"]}')
    page = served()
    run_id = begun(page, tmp_path / "work", "\n".join(hostile).replace("\0", "0"))
    tab = browser.new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("dialog", lambda dialog: asked.append("dialog"))
    tab.goto(page.address)
    tab.wait_for_selector("tbody tr")
    tab.evaluate(f"location.hash = '#/run/{run_id}'")
    tab.locator("section.ask").nth(30).wait_for()  # The policy denies some by itself: they name no file.
    for box in tab.locator("summary").all()[:5]:
        box.click()
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.owned") is None
    assert tab.url == f"{page.origin}/#/run/{run_id}"
    assert {re.match(r"[a-z]+://[^/]+|data:", url)[0] for url in asked} <= {page.origin, "data:"}  # type: ignore[index]
    assert tab.locator("img, iframe, object, embed, video, form[action], base, style").count() == 1  # Its own style.
    page.client.post(f"/api/runs/{run_id}/cancel", json={})
    tab.close()


def test_another_page_can_neither_frame_nor_read_it(served: Callable[..., Page], browser: Any) -> None:
    page, other = served(), served()
    tab = browser.new_page()
    tab.goto(other.origin)  # Another port of this machine: "same site", and another origin.
    seen: list[str] = []
    tab.on("requestfailed", lambda request: seen.append(request.url))
    script = """async ([origin, token]) => {
      const tries = [fetch(origin + '/api/runs'), fetch(origin + '/api/runs', {mode: 'no-cors'}),
        fetch(origin + '/api/runs', {headers: {Authorization: 'Bearer ' + token}})];
      return Promise.all(tries.map((one) => one.then((answer) => answer.type + answer.status, (error) => 'refused')));
    }"""
    context = browser.new_context(bypass_csp=True)  # As a hostile page would be: without our policy.
    foreign = context.new_page()
    foreign.goto(other.origin)
    assert set(foreign.evaluate(script, [page.origin, page.token])) <= {"refused", "opaque0"}
    foreign.evaluate("(url) => { const f = document.createElement('iframe'); f.src = url; document.body.append(f); }",
                     page.origin)  # fmt: skip
    foreign.wait_for_timeout(500)
    assert not any("backplane" in frame.content() for frame in foreign.frames[1:])
    context.close()
    tab.close()
