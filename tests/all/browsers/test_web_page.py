"""The desk of `backplane web` in a real browser: clicks, keys, codes, hostile texts, other pages, accessibility."""

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

from tests.all.doors.test_web import Page, served
from tests.gateway.test_gateway_record import begin, end, first, write
from tests.hostile import HOSTILE as HOSTILE_TEXTS
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE

__all__ = ["served"]

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
ASK = ".ask [data-key=a]"


def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


def opened(browser: Any, page: Page, path: str = "/") -> Any:
    tab = browser.new_page(viewport=WIDE)
    tab.goto(f"{page.origin}{path}#token={page.token}")
    tab.locator("#list > li").first.wait_for()
    return tab


def test_keys_find_a_run_and_answer_and_a_terminal_beside_it_sees_that(
    served: Callable[..., Page], browser: Any
) -> None:
    page = served()
    run_id = page.begin()
    page.done("true")
    tab = opened(browser, page)
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    assert tab.title() == "(1) backplane"
    assert page.token not in tab.url
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    tab.keyboard.press("k")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(ASK)
    assert tab.url == f"{page.origin}/run/{run_id}"
    watch = subprocess.Popen(
        [sys.executable, "-m", "backplane", "watch", run_id], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    tab.fill(".ask [name=words]", "ad")  # Letters in a field are no keys.
    tab.keyboard.press("Escape")
    tab.wait_for_timeout(600)
    tab.keyboard.press("a")
    tab.wait_for_selector(".rows :text('answered: allow')")
    tab.wait_for_selector(".chip:text('complete')")
    assert "answered: allow" in watch.communicate(timeout=20)[0]
    tab.wait_for_selector("#counts:empty", state="attached")
    assert (tab.locator(".ask").count(), tab.title().startswith("(")) == (0, False)
    # Hostile words ran nothing, fetched nothing and are there to be read.
    assert tab.evaluate("window.owned") is None
    assert "<img src=x" in tab.inner_text("article")
    assert {re.match(r"[a-z]+://[^/]+|data:", url)[0] for url in asked} <= {page.origin, "data:"}  # type: ignore[index]
    assert not any(page.token in url for url in asked)
    tab.reload()
    tab.wait_for_selector(".rows :text('answered: allow')")
    tab.keyboard.press("/")
    tab.keyboard.type("onerror")
    tab.locator("#list a >> nth=1").wait_for(state="detached")
    assert tab.locator("#list a").count() == 1
    tab.close()


def test_a_deep_link_in_another_tab_gets_the_token_and_a_conflict_has_a_next_step(
    served: Callable[..., Page], browser: Any, tmp_path: Path
) -> None:
    page = served()
    run_id = page.done("echo two >> a.txt")
    context = browser.new_context()
    context.new_page().goto(page.address)
    tab = context.new_page()
    tab.goto(f"{page.origin}/run/{run_id}")
    tab.wait_for_selector(".file :text('+two')")
    (tmp_path / "work" / "a.txt").write_text("zero\none\n")
    apply = tab.locator("[data-act=apply]")
    apply.get_by_role("button", name="Apply").click()
    apply.locator("output.bad:has-text('a.txt')").wait_for()
    assert "next:" in apply.locator("output").inner_text()
    apply.get_by_role("checkbox").check()
    apply.get_by_role("button", name="Apply").click()
    apply.locator("output:has-text(', some by a merge: a.txt')").wait_for()
    assert (tmp_path / "work" / "a.txt").read_text() == "zero\none\ntwo\n"
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("[data-copy]")
    tab.wait_for_selector("[data-copy]:text('Copied')")
    assert tab.evaluate("navigator.clipboard.readText()").startswith("backplane run -b shell --root ")
    context.close()


def test_letters_typed_while_an_answer_is_under_way_add_no_loop_and_old_answers_are_dropped(
    served: Callable[..., Page], browser: Any
) -> None:
    page = served()
    page.done("true")
    tab = opened(browser, page)
    asked: list[str] = []

    def late(route: Any) -> None:
        asked.append(route.request.url)
        words = re.search("text=([a-z]*)", route.request.url)[1]  # type: ignore[index]
        tab.wait_for_timeout(400)
        html = f'<li><a href="/run/{words}">{words or "none"}</a></li>'
        route.fulfill(json={"html": html, "waiting": 0, "live": 0})

    tab.route("**/api/runs?*", late)
    tab.locator("#words").press_sequentially("letters", delay=250)
    tab.locator("#list a:text-is('letters')").wait_for()
    seen = [tab.locator("#list").inner_text() for _ in range(10) if not tab.wait_for_timeout(100)]
    assert set(seen) == {"letters"}
    asked.clear()
    tab.wait_for_timeout(6000)
    assert len(asked) <= 4
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
    tab.wait_for_selector("text=No runs yet")
    assert tab.url == f"{page.origin}/"
    tab.reload()
    tab.wait_for_selector("text=No runs yet")
    tab.close()
    code = {"Authorization": f"Code {address.partition('=')[2]}"}
    assert page.client.post("/api/token", json={}, headers=code).status_code == 401
    assert page.client.get("/api/token", headers=code).status_code == 401


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_checker_of_accessibility_finds_nothing_and_nothing_is_too_wide(
    served: Callable[..., Page], tmp_path: Path, browser: Any, npm_programs: Callable[..., Path], size: dict[str, int]
) -> None:
    checker = (npm_programs("axe-core@4.14.1").parent / "axe-core" / "axe.min.js").read_text()
    page = served()
    ended = page.done(
        "for n in $(seq 400); do echo a_word_without_a_break_in_it_$n_$n_$n_$n_$n_$n >> a.txt; done; cat a.txt"
    )
    asks = page.begin()
    (tmp_path / "report.html").write_bytes(page.client.get(f"/api/run/{ended}/report").content)
    found = []

    def look(tab: Any, name: str) -> None:
        if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append(f"{name}: wider than the window")
        tab.evaluate(checker)
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            seen = tab.evaluate("axe.run()")["violations"]
            found.extend(f"{name}, {scheme}, {one['id']}: {one['nodes'][0]['html'][:100]}" for one in seen)

    tab = browser.new_page(viewport=size)
    tab.goto(page.address)
    tab.wait_for_selector("#list a")
    look(tab, "list")
    tab.keyboard.press("?")
    look(tab, "help")
    tab.keyboard.press("Escape")
    tab.goto(f"{page.origin}/run/{asks}")
    tab.wait_for_selector(ASK)
    look(tab, "asks")
    tab.goto(f"{page.origin}/run/{ended}")
    for path in ("[data-act=apply]", "body"):
        tab.wait_for_selector(path)
        tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        look(tab, "ended")
        tab.goto((tmp_path / "report.html").as_uri())
    assert found == []
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
    run_id = page.begin("\n".join(hostile).replace("\0", "0"))
    asked: list[str] = []
    tab = browser.new_page()
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("dialog", lambda dialog: asked.append("dialog"))
    tab.goto(f"{page.origin}/run/{run_id}#token={page.token}")
    tab.locator(".ask").nth(30).wait_for()  # The policy denies some by itself: they name no file.
    tab.locator(".row").nth(100).wait_for(state="attached")
    for box in tab.locator("summary").all()[:5]:
        box.focus()
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.owned") is None
    assert tab.url == f"{page.origin}/run/{run_id}"
    assert {re.match(r"[a-z]+://[^/]+|data:", url)[0] for url in asked} <= {page.origin, "data:"}  # type: ignore[index]
    assert tab.locator("img, iframe, object, embed, video, form[action], base, style").count() == 1  # Its own style.
    page.act(run_id, "cancel")
    tab.close()


def test_another_page_can_neither_frame_nor_read_it(served: Callable[..., Page], browser: Any) -> None:
    page, other = served(), served()
    script = """async ([origin, token]) => {
      const tries = [fetch(origin + '/api/runs'), fetch(origin + '/api/runs', {mode: 'no-cors'}),
        fetch(origin + '/api/runs', {headers: {Authorization: 'Bearer ' + token}})];
      return Promise.all(tries.map((one) => one.then((answer) => answer.type + answer.status, (error) => 'refused')));
    }"""
    context = browser.new_context(bypass_csp=True)  # As a hostile page would be: without our policy.
    foreign = context.new_page()
    foreign.goto(other.origin)  # Another port of this machine: "same site", and another origin.
    assert set(foreign.evaluate(script, [page.origin, page.token])) <= {"refused", "opaque0"}
    foreign.evaluate("(url) => { const f = document.createElement('iframe'); f.src = url; document.body.append(f); }",
                     page.origin)  # fmt: skip
    foreign.wait_for_timeout(500)
    assert not any("backplane" in frame.content() for frame in foreign.frames[1:])
    context.close()


def test_an_exchange_of_the_gateway_is_found_in_its_tab_and_ends_live(
    served: Callable[..., Page], browser: Any, backplane_home: Path
) -> None:
    journal = write(backplane_home, begin(1), first(1))
    page = served()
    page.done("true")
    tab = opened(browser, page)
    tab.click("#tabs a:text('Gateway')")
    tab.wait_for_selector("#counts:text('1 open')")
    tab.click("#list a")
    tab.wait_for_selector("article b:text('answering')")
    journal.write(end(1, backend="a", model="big", tokens={"input": 5, "output": 7}))
    journal.close()
    tab.wait_for_selector("article b:text('complete')")
    tab.wait_for_selector("#list b:text('complete')")
    assert "5 in, 7 out" in tab.inner_text("article")
    tab.reload()
    tab.wait_for_selector("article b:text('complete')")
    tab.click("#tabs a:text('Runs')")
    tab.wait_for_selector("#list a[href^='/run/']")
    tab.close()
