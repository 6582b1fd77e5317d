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
    AssistantDelta,
    AssistantMessage,
    Failed,
    FileChanged,
    RunStarted,
    ToolCall,
    ToolResult,
)
from backplane.view import page, summary
from backplane.view.html import text
from backplane.view.omit import Omission
from backplane.view.page import CSS, JS, Shown
from backplane.view.picture import Ended, Evidence, Picture
from backplane.view.rows import Story, cut
from backplane.view.why import Diagnosis
from tests.hostile import HOSTILE
from tests.in_process import in_process
from tests.receipt_writer import TS, open_journal

TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta link title style body div input span main article p h1 h2 dl dt dd section b ul li table "
        "caption thead tbody tr th td code pre details summary svg text rect button script i",
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


def page_of(*runs: Shown) -> str:
    return "".join(page.page(runs))


def shown(word: str) -> Shown:
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
    picture, rows = Picture(run_id=word, task=word, root=word, model=word, backend=word), Story()
    for event in events:
        picture.take(event)
        rows.take(event)
    picture.ended = Ended(
        outcome=word, reason=word, code=word, exit_code=1, signal=None, message=word, hint=word, evidence=word,
        duration_ms=1, sha256=word, added={},
    )  # fmt: skip
    found = Diagnosis(
        run_id=word, kind="crashed", sure=True, verdict=word, since_ms=None, evidence=(Evidence(word),), next=(word,)
    )
    patch = f"diff --git a/{word} b/{word}\n--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+{word}\n"
    return Shown(picture=picture, state="ended", diagnosis=found, rows=rows, patch=patch)


@pytest.mark.parametrize("word", HOSTILE)
def test_no_foreign_text_becomes_an_element_an_attribute_or_a_script(word: str) -> None:
    plain, drawn = seen(page_of(shown("word"))), page_of(shown(word), shown(word))
    found = seen(drawn)
    assert found.tags <= TAGS
    assert found.attributes == plain.attributes
    assert found.scripts == [JS]
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u200b\ud800-\udfff]", drawn)
    assert "\u0301" * 9 not in drawn
    for other in (summary.markdown([shown(word)]), summary.junit([shown(word)])):
        whole = "".join(other)
        assert "<script" not in whole
        assert "<img" not in whole
    ET.fromstring("".join(summary.junit([shown(word)])))


ROOT = "/srv/über kunden"
PATHS = {
    "/home/ann/secret-client/calc.py": "…",
    "edit /home/ann/secret-client/calc.py": "edit …",
    "cannot read /home/ann/secret client/a b/calc.py: gone": "cannot read …: gone",
    "~/work/secret-client/x": "…",
    "PATH=/usr/bin:/srv/secret-client/bin": "PATH=…:…",
    "file:///home/ann/secret-client/x.html": "file://…",
    "cc -I/home/ann/secret-client/include <'/srv/secret-client/a b'": "cc -I… <'…'",
    r'{"text": "a\n/home/ann/secret-client/b"}': r'{"text": "a\n…"}',
    f"the folder {ROOT}": "the folder …",
    f"edit {ROOT}/src/a.py": "edit src/a.py",
    f"edit {ROOT}-old/a.py": "edit …",
    "src/a/b.py ./c/d ../e/f": "src/a/b.py ./c/d ../e/f",
    "https://example.com/a/b": "https://example.com/a/b",
}


@pytest.mark.parametrize("words", PATHS)
def test_absolute_paths_are_left_out(words: str) -> None:
    omission = Omission(["paths"])
    omission.fact({"fact": "order", "order": {"workspace": {"root": ROOT}}})
    assert omission.of(words) == PATHS[words]
    assert omission.of(PATHS[words]) == PATHS[words]  # Once more changes nothing.
    assert Omission().of(words) == words


PROMPT = 'Mend "calc" for Ann\'s bank\n- and tell nobody of it, not even in a commit or a comment\nok'


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (PROMPT, "(left out)\n- (left out)\nok"),
        (json.dumps({"a": PROMPT.splitlines()[0]}), '{"a": "(left out)"}'),
        ("'Mend \"calc\" for Ann'\\''s bank'", "'(left out)'"),
        ("and tell  nobody of it, not even in the log", "(left out)"),
        ("Mend calc for Ann's banking", "Mend calc for Ann's banking"),
    ],
)
def test_lines_of_a_prompt_are_left_out_however_they_are_quoted(words: str, left: str) -> None:
    omission = Omission(["prompts"])
    omission.fact({"fact": "order", "order": {"task": PROMPT}})
    assert omission.of(words) == left


def test_the_pages_policy_lets_run_what_stands_in_it_and_nothing_else() -> None:
    whole_page = page_of(shown("word"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', whole_page)
    assert policy is not None
    words = policy[1].replace("&#x27;", "'")
    for whole in (CSS, JS):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode()}'" in words
        assert whole in whole_page
    assert "default-src 'none'" in words
    assert "unsafe" not in words
    assert "http:" not in whole_page.replace("http-equiv", "")
    assert "https:" not in whole_page


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


def test_a_page_without_paths_and_prompts_has_none_of_them(runs: Path, tmp_path: Path) -> None:
    task = f"cat '{tmp_path}/secret client/none' /etc/hostname > x; echo $(pwd)\nexit 3"
    assert cli("run", "-b", "shell", task, cwd=runs).returncode == 1
    whole, less = cli("report", "last").stdout, cli("report", "last", "--omit", "paths,prompts").stdout
    words = re.sub(r"<style>.*?</style>|<script>.*?</script>|</?[a-z][^>]*>", " ", less, flags=re.S)
    assert re.findall(r"(?<![\w.…])/[\w.-]+/[\w.-]+", words) == []
    for word in ("secret client", "echo", "/etc/hostname", str(tmp_path)):
        assert (word in whole, word in words) == (True, False), word


def test_a_page_without_outputs_has_none(runs: Path) -> None:
    assert cli("run", "-b", "shell", "printf 'se%sput' cret-out", cwd=runs).returncode == 0
    assert "secret-output" in cli("report", "last").stdout
    assert "secret-output" not in cli("report", "last", "--omit", "outputs").stdout


def test_a_name_beyond_ascii_is_shown_as_it_is(runs: Path) -> None:
    assert cli("run", "-b", "shell", "echo a > café.txt && mv a.txt 'é \"b.txt'", cwd=runs).returncode == 0
    for words in ([], ["--summary"]):
        done = cli("report", "last", *words).stdout
        assert "café.txt" in done, words
        assert "\\303" not in done, words


def test_rows_beyond_the_most_are_counted() -> None:
    rows = Story(rows_max=2)
    for number in range(4):
        rows.take(ToolCall(ts=TS, tool_name="bash", tool_use_id=str(number), input={"command": "ls"}))
    for number in range(4):
        rows.take(ToolResult(ts=TS, tool_name="bash", tool_use_id=str(number), output="out", is_error=False))
    assert ([row.mark for row in rows.rows], rows.beyond) == (["done", "done"], 2)
    assert [len(row.body) for row in rows.rows] == [2, 2]


@pytest.mark.parametrize("mark", ["\uffff", "\ufffe", "\x00", "\x1b", "\u2028"])
def test_junit_of_any_text_is_xml(mark: str) -> None:
    whole = "".join(summary.junit([shown(f"a{mark}b")]))
    ET.fromstring(whole.encode("utf-8"))


def test_a_live_run_is_told_as_running_and_fails_no_check(backplane_home: Path) -> None:
    cut_off = open_journal(backplane_home)
    cut_off.close()
    live = open_journal(backplane_home)
    try:
        names = (live.run_id, cut_off.run_id)
        chips = re.findall('<span class="chip ([a-z]+)">([^<]*)<', cli("report", *names).stdout)
        assert chips == [("dim", "running"), ("bad", "cut off")]
        marks = cli("report", *names, "--summary").stdout
        assert re.findall("### (.*?) ", marks) == ["⏳", "❌"]
        assert re.findall(r"\n\| (running|cut off) \|", marks) == ["running", "cut off"]
        suite = ET.fromstring(cli("report", *names, "--junit").stdout)
        assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["2", "1", "1"]
        skipped = suite.findall("testcase")[0].find("skipped")
        assert skipped is not None
        assert skipped.get("message") == "running: it has not ended yet"
        for run_id in names:
            assert "receipts show" not in cli("show", run_id).stdout
    finally:
        live.close()


def test_a_long_call_says_how_long_it_took() -> None:
    rows = Story()
    rows.take(ToolCall(ts="2026-01-15T12:00:00Z", tool_name="bash", tool_use_id="1", input={"command": "make"}))
    rows.take(ToolResult(ts="2026-01-15T12:01:05Z", tool_name="bash", tool_use_id="1", output="", is_error=True))
    assert [row.mark for row in rows.rows] == ["failed after 1 min 5 s"]
