"""Reports in a real browser: how fast they open, what hostile texts do there, what is left without a script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import HOSTILE
from tests.runs import HELLO, PRELUDE
from tests.test_report import page_of, shown

LONG = """
hello()
run = take()
for n in range(COUNT // 5):
    number = str(n)
    command = "sed -n 1,200p src/file_%d.py" % n
    put(
        event(run, type="assistant_delta", text="word %d of what it says, and some more" % n),
        event(run, type="assistant_message", text="step **%d**: I look at `file_%d.py`" % (n, n)),
        event(run, type="tool_call", tool_name="bash", tool_use_id=number, input={"command": command}),
        event(run, type="command_executed", command=command, exit_code=0, output_preview="line %d\\n" % n * 10),
        event(run, type="tool_result", tool_name="bash", tool_use_id=number, output=OUTPUT(n), is_error=False),
    )
put(final(run))
end()
"""
SHORT, HUGE = '"def f_%d(): return 1\\n" % n * 12', '"x" * (1 << 20)'


def cli(*words: str, cwd: Path) -> bytes:
    command = [sys.executable, "-m", "backplane", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, check=True, timeout=100).stdout


def long_report(folder: Path, count: int, output: str = SHORT, *words: str) -> Path:
    host = folder / "long.py"
    body = LONG.replace("COUNT", str(count)).replace("OUTPUT(n)", output)
    host.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + body)
    work = folder / "work"
    work.mkdir()
    cli("run", "a long task", "--root", "work", "--json", "--sidecar", f"{sys.executable} {host}", cwd=folder)
    page = folder / "report.html"
    page.write_bytes(cli("report", "last", *words, cwd=folder))
    return page


@pytest.mark.parametrize(("count", "output"), [(5_000, SHORT), (40, HUGE)], ids=["5,000 events", "8 MB of output"])
def test_all_of_a_long_run_is_found(
    tmp_path: Path, backplane_home: Path, browser: Any, count: int, output: str
) -> None:
    page = long_report(tmp_path, count, output)
    assert page.stat().st_size <= 10e6
    tab = browser.new_page()
    tab.goto(page.as_uri())
    last, rows = count // 5 - 1, count // 5 * 3
    tab.fill("#search", f"file_{last}.py")
    tab.locator(f"#count:text('3 of {rows} rows')").wait_for()
    assert tab.locator(f"summary:visible:has-text('file_{last}.py')").count() == 2
    tab.fill("#search", "")
    tab.locator("#count:text('rows')").wait_for(state="hidden")
    assert tab.locator(".row").count() == rows
    tab.close()


def test_without_a_script_and_on_paper_the_report_is_read(tmp_path: Path, backplane_home: Path, browser: Any) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    cli("run", "-b", "shell", "echo two >> a.txt && echo said", cwd=work)
    page = tmp_path / "report.html"
    page.write_bytes(cli("report", "last", cwd=work))
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    words = ("complete", "echo two >> a.txt", "+two", "What happened", "What enforced the policy", "SHA-256")
    text = tab.inner_text("body")
    assert not [word for word in words if word not in text]
    tab.click(".row summary")
    assert "said" in tab.inner_text(".row details[open]")
    # On paper: no search, no buttons, the same words.
    tab.emulate_media(media="print")
    paper = tab.inner_text("body")
    assert not [word for word in words if word not in paper]
    assert not tab.locator("input, button").filter(visible=True).count()
    (tmp_path / "report.pdf").write_bytes(tab.pdf())
    assert (tmp_path / "report.pdf").stat().st_size > 5_000
    context.close()


def test_hostile_texts_in_every_place_run_nothing_and_fetch_nothing(tmp_path: Path, browser: Any) -> None:
    assert len(HOSTILE) >= 100
    page = tmp_path / "report.html"
    tab = browser.new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("dialog", lambda dialog: asked.append("dialog"))
    for at in range(0, len(HOSTILE), 40):
        words = HOSTILE[at : at + 40]
        for policed in (True, False):  # Escaping alone has to hold: the policy is the net below it.
            pages = page_of(*map(shown, words))
            if not policed:
                pages = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", pages)
            page.write_text(pages, errors="replace")
            asked.clear()
            tab.goto(page.as_uri())
            tab.locator(".row").nth(len(words) * 5 - 1).wait_for(state="attached")
            tab.locator("summary").first.focus()
            tab.wait_for_timeout(100)
            assert asked == [page.as_uri()]
            assert tab.evaluate("window.owned") is None
            assert tab.url == page.as_uri()
    tab.close()
