"""The page of `backplane web` in a real browser: clicks, codes, hostile texts, other pages, accessibility."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.all.doors.test_web import HOSTILE, Page, begun, served
from tests.hostile import HOSTILE as HOSTILE_TEXTS
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE

__all__ = ["served"]


def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


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


def test_a_checker_of_accessibility_finds_nothing(
    served: Callable[..., Page], tmp_path: Path, browser: Any, npm_programs: Callable[..., Path]
) -> None:
    checker = (npm_programs("axe-core@4.14.1").parent / "axe-core" / "axe.min.js").read_text()
    page = served()
    run_id = begun(page, tmp_path / "work")
    tab = browser.new_page()
    tab.goto(page.address)
    tab.wait_for_selector("tbody tr")

    def findings() -> list[str]:
        tab.evaluate(checker)
        found = []
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            seen = tab.evaluate("axe.run()")["violations"]
            found += [f"{scheme}, {one['id']}: {one['nodes'][0]['html'][:100]}" for one in seen]
        return found

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


@pytest.mark.parametrize("half", range(2))  # A run has 64 open questions at most.
def test_hostile_texts_in_every_place_of_the_page_run_nothing(
    served: Callable[..., Page], tmp_path: Path, browser: Any, half: int
) -> None:
    hostile = HOSTILE_TEXTS[half::2]
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
