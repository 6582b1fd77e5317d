"""Draws docs/pictures/ anew: the live view, `why`, a report and the page, each of a real run, by a real browser.

Run by `xtask.py pictures`; needs Debian's `chromium`. A terminal's picture is what a plain terminal shows of the bytes
that the command wrote, its colours included.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.runs import HELLO, PRELUDE  # noqa: E402
from tests.terminal import Window, typed  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
ROWS = 24
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}

AGENT = """
from datetime import datetime, timezone
def say(type, **body):
    put(event(run, type=type, ts=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), **body))
def plan(*states):
    steps = ["Read the failing test", "Find where the timeout is lost", "Mend it", "Run the tests"]
    rows = [{"step": step, "status": state} for step, state in zip(steps, states)]
    say("warning", message="plan", ext={"task": {"plan": rows}})
hello(extensions=["ask/1", "cancel/1"])
run = take()
plan("in_progress", "pending", "pending", "pending")
say("assistant_message", text="## The fault\\n\\n**test_deadline** fails, as `connect()` drops its timeout.")
say("tool_call", tool_name="read_file", tool_use_id="1", input={"path": "client.py"})
say("tool_result", tool_name="read_file", tool_use_id="1", output="def connect(host, timeout): ...", is_error=False)
say("warning", message="u", ext={"usage": {"input_tokens": 15320, "output_tokens": 812, "estimated_cost_usd": 0.0312}})
plan("completed", "completed", "in_progress", "pending")
open(run["work_order"]["workspace"]["root"] + "/client.py", "a").write("    return open_socket(host, timeout)\\n")
say("file_changed", path="client.py", summary="modified")
say("tool_call", tool_name="bash", tool_use_id="2", input={"command": "pytest -q tests/test_client.py"})
for number in range(7):
    say("warning", message="o", ext={"output": {"text": "tests/test_client.py::test_%d ok\\n" % number}})
    time.sleep(0.4)
    spent = {"input_tokens": 15320 + 4000 * number, "output_tokens": 812 + 300 * number}
    say("warning", message="u", ext={"usage": {**spent, "estimated_cost_usd": 0.0312 + 0.011 * number}})
say("tool_result", tool_name="bash", tool_use_id="2", output="7 passed", is_error=False)
put({"t": "ask", "ref_id": run["id"], "id": "a1", "kind": "tool", "name": "deploy", "input": {"to": "staging"}})
answer = take()
say("warning", message="u", ext={"usage": {"input_tokens": 46110, "output_tokens": 2950, "estimated_cost_usd": 0.1127}})
say("assistant_message", text="The timeout is kept now; all **7** tests pass.")
put(final(run))
end()
"""

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])", re.S)
_COLOURS = {"2": "#8b949e", "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "36": "#56d4dd"}


def drawn(text: str, columns: int) -> str:
    """The last rows of a terminal as HTML, long lines broken as there."""
    lines: list[list[str]] = [[]]
    row = column = 0
    style = ""
    for token in _TOKEN.finditer(text):
        number, letter, end, word = token.groups()
        if word is not None:
            if column == columns:
                row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            shown = html.escape(word)
            lines[row][column] = f'<span style="{style}">{shown}</span>' if style else shown
            column += 1
        elif end == "\r":
            column = 0
        elif end == "\n":
            row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
        elif letter == "m":
            colour = _COLOURS.get(number or "")
            style = f"color:{colour}" if colour else "font-weight:bold" if number == "1" else ""
        elif letter == "K":
            del lines[row][column:]
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "J":
            del lines[row][column:], lines[row + 1 :]
    return "\n".join("".join(line) for line in lines[-ROWS:])


def terminal(tab: Page, name: str, text: str, columns: int) -> None:
    """Write the picture of a terminal."""
    style = "margin:0;padding:14px;background:#0d1117;color:#e6edf3;font:14px/1.4 monospace;display:inline-block"
    tab.set_content(f'<body style="margin:0"><pre style="{style};min-width:{columns}ch">{drawn(text, columns)}</pre>')
    tab.locator("pre").screenshot(path=str(FOLDER / f"{name}.png"))


def live(tab: Page, work: Path) -> None:
    """The live view while a command runs, on two widths, and what `why` says afterwards."""
    words = ["run", "Mend the lost timeout", "--backend", "agent", "--on-ask", "deny"]
    for columns in (80, 160, 40):
        _, text = typed(words, columns=columns, rows=ROWS, cwd=work)
        frames = [found.end() for found in re.finditer(r"\x1b\[\?2026l", text)]
        at = next(end for end in reversed(frames) if "working" in text[:end].rpartition("\x1b[?2026h")[2])
        terminal(tab, f"live-{columns}", text[:at], columns)
    asks = ["run", "Mend the lost timeout", "--backend", "agent", "--config", "backplane.toml", "--root", "."]
    window = Window(asks, columns=80, cwd=work)
    window.until(lambda: window.shows("[?]: "))
    terminal(tab, "live-asks", window.text, 80)
    window.type("y\n")
    window.ends()
    typed(["run", "pytest -q tests/test_client.py", "--backend", "shell"], cwd=work)
    _, text = typed(["why", "last"], columns=80, rows=ROWS, cwd=work)
    terminal(tab, "why", text, 80)


def pages(browser: Browser, work: Path) -> None:
    """A report, and the desk: its list, a run that asks, and one that has ended."""
    command = [sys.executable, "-m", "backplane"]
    report = work / "report.html"
    with report.open("wb") as file:
        subprocess.run([*command, "report", "last~1"], stdout=file, cwd=work, check=True)
    server = subprocess.Popen([*command, "web"], cwd=work, stdout=subprocess.PIPE, text=True)
    asks = [*command, "run", "Mend the lost timeout", "-b", "agent", "--root", ".", "--on-ask", "wait"]
    waiting = subprocess.Popen([*asks, "--config", "backplane.toml"], cwd=work, stdout=subprocess.DEVNULL, stderr=-3)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        for look in ("light", "dark", "phone"):
            options: Any = {"viewport": PHONE if look == "phone" else WIDE}
            context = browser.new_context(**options, color_scheme="dark" if look == "dark" else "light")
            tab = context.new_page()
            tab.goto(report.as_uri())
            tab.screenshot(path=str(FOLDER / f"report-{look}.png"), full_page=look == "light")
            tab.goto(address)
            tab.wait_for_selector("#list b:text('waiting')", timeout=60_000)
            tab.screenshot(path=str(FOLDER / f"web-list-{look}.png"))
            tab.click("#list a >> nth=0")
            tab.wait_for_selector(".ask button")
            tab.screenshot(path=str(FOLDER / f"web-run-{look}.png"))
            tab.go_back()
            tab.click("#list a >> nth=2")
            tab.wait_for_selector("[data-act=apply]")
            tab.screenshot(path=str(FOLDER / f"web-ended-{look}.png"))
            context.close()
    finally:
        for process in (waiting, server):
            process.terminate()
            process.wait(10)


def main() -> int:
    """Draw all of them; say where they are."""
    program = shutil.which("chromium")
    if program is None:
        sys.stderr.write("pictures: chromium is not installed (apt-get install chromium)\n")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        work = Path(made, "timeouts")
        work.mkdir()
        (work / "client.py").write_text("def connect(host, timeout):\n")
        agent = Path(made, "agent.py")
        agent.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + AGENT)
        (work / "policy.json").write_text('{"require_approval_for": ["deploy"]}')
        (work / "backplane.toml").write_text(
            f'policy = "policy.json"\n[backends.agent]\ncommand = ["{sys.executable}", "{agent}"]\n'
        )
        os.environ |= {"BACKPLANE_HOME": str(Path(made, "home")), "PYTHONPATH": str(ROOT)}
        browser = playwright.chromium.launch(executable_path=program, args=["--disable-dev-shm-usage"])
        live(browser.new_page(viewport={"width": 1500, "height": 800}), work)
        pages(browser, work)
        browser.close()
    sys.stdout.write(f"{len(list(FOLDER.glob('*.png')))} pictures in {FOLDER.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
