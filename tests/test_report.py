"""The page of a run: whole in one file, harmless whatever is in it, its receipt the one that was sealed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.events import (
    Approval,
    AssistantDelta,
    AssistantMessage,
    Failed,
    FileChanged,
    RunStarted,
    ToolCall,
    ToolResult,
)
from backplane.view import report
from backplane.view.html import text
from backplane.view.picture import Ended, Picture
from backplane.view.report_files import CSS, JS
from backplane.view.story import Story, cut
from backplane.view.why import Diagnosis, Evidence
from tests.hostile import HOSTILE
from tests.in_process import in_process
from tests.receipt_writer import TS, open_journal

TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body div input span main article p h1 h2 dl dt dd section b ul li table caption "
        "thead tbody tr th td code pre details summary svg text rect button script i",
    )
)


class Seen(HTMLParser):
    """The elements and attributes of a page, and its scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)


def seen(page: str) -> Seen:
    parser = Seen()
    parser.feed(page)
    return parser


def shown(word: str, omit: frozenset[str] = frozenset()) -> report.Shown:
    """A run that has a word wherever a foreign one can stand."""
    events: list[Any] = [
        RunStarted(ts=TS, message=word),
        AssistantDelta(ts=TS, text=word),
        AssistantMessage(ts=TS, text=word),
        ToolCall(ts=TS, tool_name=word, tool_use_id="c", input={word: word}),
        ToolResult(ts=TS, tool_name=word, tool_use_id="c", output=word, is_error=True),
        FileChanged(ts=TS, path=word, summary=word),
        Failed(ts=TS, message=word, error_code=word),
    ]
    picture, story = (
        Picture(run_id=word, task=word, root=word, model=word, backend=word),
        Story(omit=omit),
    )
    for event in events:
        picture.take(event)
        story.take(event)
    picture.ended = Ended(
        outcome=word, reason=word, code=word, exit_code=1, signal=None, message=word, hint=word, evidence=word,
        duration_ms=1, finished_at=TS, sha256=word, harness_ok=True, added={}, diff=None,
    )  # fmt: skip
    story.decisions.append((word, word, word, word, word))
    found = Diagnosis(
        run_id=word, kind="crashed", sure=True, verdict=word, since_ms=None, evidence=(Evidence(word),), next=(word,)
    )
    patch = f"diff --git a/{word} b/{word}\n--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+{word}\n"
    return report.Shown(picture=picture, state="ended", diagnosis=found, story=story, patch=patch)


@pytest.mark.parametrize("word", HOSTILE)
def test_no_foreign_text_becomes_an_element_an_attribute_or_a_script(word: str) -> None:
    plain, page = seen("".join(report.page([shown("word")]))), "".join(report.page([shown(word), shown(word)]))
    found = seen(page)
    assert found.tags <= TAGS
    assert found.attributes == plain.attributes
    assert found.scripts == [JS]
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u200b\ud800-\udfff]", page)
    assert "\u0301" * 9 not in page
    for other in (report.markdown([shown(word)]), report.junit([shown(word)])):
        told = "".join(other)
        assert "<script" not in told
        assert "<img" not in told
    ET.fromstring("".join(report.junit([shown(word)])))


@pytest.mark.parametrize(
    "word",
    [
        "/home/ann/secret-client/calc.py", "edit /home/ann/secret-client/calc.py", "~/work/secret-client/x",
        "PATH=/usr/bin:/srv/secret-client/bin", "file:///home/ann/secret-client/x.html", "'/home/ann/secret-client/'",
    ],
)  # fmt: skip
def test_a_page_without_paths_has_none_in_any_part(word: str) -> None:
    run = shown(word, omit=frozenset({"paths"}))
    run.story.take(Approval(ts=TS, message=word, ext={"ask": {"id": "1", "kind": "tool", "input": {"path": word}}}))
    run.story.take(ToolCall(ts=TS, tool_name=word, tool_use_id="d", input={"command": word}))
    page = "".join(report.page([run] * 2)).replace(JS, "").replace(CSS, "")
    folders = [where for where in re.findall(r".{40}secret-client.{5}", page, re.S) if "/secret-client" in where]
    assert folders == [] or word.endswith("/'")
    assert "ann/" not in page
    assert "<svg" in page
    assert seen(page).tags <= TAGS


def test_the_pages_policy_lets_run_what_stands_in_it_and_nothing_else() -> None:
    page = "".join(report.page([shown("word")]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    words = policy[1].replace("&#x27;", "'")
    for whole in (CSS, JS):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode()}'" in words
        assert whole in page
    assert "default-src 'none'" in words
    assert "unsafe" not in words
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page


def test_text_of_any_length_is_cut_with_its_length_said() -> None:
    whole = "x" * 50_000_000
    assert len(cut(whole)) < 20_000
    assert "characters are left out" in cut(whole)
    assert text("<&\"'>") == "&lt;&amp;&quot;&#x27;&gt;"


def cli(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=cwd or Path.cwd())


@pytest.fixture
def runs(tmp_path: Path, backplane_home: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    assert cli("run", "-b", "shell", "echo two >> a.txt", cwd=work).returncode == 0
    assert cli("run", "-b", "shell", "exit 3", cwd=work).returncode == 1
    return work


def test_the_page_of_a_stored_run_has_its_diff_and_its_hash(runs: Path) -> None:
    done = cli("report", "last~1")
    assert done.returncode == 0, done.stderr
    sealed = json.loads(cli("receipts", "show", "last~1", "--json").stdout)["receipt_sha256"]
    for part in (f"<code>{sealed}</code>", '<span class="added">+two</span>', ">complete</span>"):
        assert part in done.stdout


def test_a_page_without_prompts_says_where_events_repeat_the_task(runs: Path) -> None:
    done = cli("report", "last~1", "--omit", "prompts")
    assert "echo two &gt;&gt; a.txt" in done.stdout
    assert "its events repeat the task" in done.stderr
    assert cli("run", "-b", "mock", "tell a tale", cwd=runs).returncode == 0
    told = cli("report", "last", "--omit", "prompts")
    assert ("tell a tale" in told.stdout, told.stderr) == (False, "")


def test_a_page_without_outputs_has_none(runs: Path) -> None:
    assert cli("run", "-b", "shell", "printf 'se%sput' cret-out", cwd=runs).returncode == 0
    assert "secret-output" in cli("report", "last", "--full").stdout
    assert "secret-output" not in cli("report", "last", "--omit", "outputs").stdout


@pytest.mark.parametrize("mark", ["\uffff", "\ufffe", "\x00", "\x1b", "\u2028"])
def test_junit_of_any_text_is_xml(mark: str) -> None:
    whole = "".join(report.junit([shown(f"a{mark}b")]))
    ET.fromstring(whole.encode("utf-8"))


def test_a_live_run_is_told_as_running_and_fails_no_check(backplane_home: Path) -> None:
    cut_off = open_journal(backplane_home)
    cut_off.close()
    live = open_journal(backplane_home)
    try:
        names = (live.run_id, cut_off.run_id)
        page = cli("report", *names).stdout
        chips = re.findall('<span class="chip ([a-z]+)">([^<]*)<', page)
        assert chips == [("dim", "running"), ("bad", "cut off")]
        summary = cli("report", *names, "--summary").stdout
        assert re.findall("### (.*?) ", summary) == ["⏳", "❌"]
        assert re.findall(r"\n\| (running|cut off) \|", summary) == ["running", "cut off"]
        suite = ET.fromstring(cli("report", *names, "--junit").stdout)
        assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["2", "1", "1"]
        skipped = suite.findall("testcase")[0].find("skipped")
        assert skipped is not None
        assert skipped.get("message") == "running: it has not ended yet"
        for run_id in names:
            assert "receipts show" not in cli("runs", "show", run_id).stdout
    finally:
        live.close()
