"""The tools of a model that brings none: what they do, and that nothing leads out of the workspace."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.agents.structured import AnswerSchema
from backplane.errors import ConfigError
from backplane.tools import SPECS, fault_in
from backplane.tools.keys import without
from tests.toolbox import box, run

pytestmark = pytest.mark.anyio


# Files ----------------------------------------------------------------------------------------------------------------


async def test_a_file_is_read_whole_or_by_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    assert (await run(tmp_path, "read_file", path="a.txt")).text == "one\ntwo\nthree\n"
    part = await run(tmp_path, "read_file", path="a.txt", offset=2, limit=1)
    assert part.text == "two\n[lines 2 to 2 of 4; read on with offset 3]"
    beyond = await run(tmp_path, "read_file", path="a.txt", offset=9)
    assert (beyond.is_error, beyond.text) == (True, "a.txt has 4 lines")


@pytest.mark.parametrize(
    "text",
    [
        "x" * 200_000,
        "a\n" + "é" * 150_000 + "\nend\n",
        "".join(f"{n:x}" for n in range(60_000)),
        "a" * 65_535 + "\nb\n",
    ],
)
async def test_a_long_file_is_read_in_parts_that_say_how_to_read_on(text: str, tmp_path: Path) -> None:
    (tmp_path / "long").write_text(text)
    asked: dict[str, int] = {"offset": 1}
    parts = []
    while True:
        read = await run(tmp_path, "read_file", path="long", **asked)
        assert not read.is_error
        assert len(read.text) < 70_000
        part, _, note = read.text.rpartition("\n[")
        found = re.search(r"read on with offset (\d+)(?: and column (\d+))?\]$", note)
        if found is None:
            break
        parts.append(part if found[2] else part + "\n")
        asked = {"offset": int(found[1]), **({"column": int(found[2])} if found[2] else {})}
    assert len(parts) > 0
    assert "".join([*parts, read.text]) == text


async def test_a_column_beyond_its_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nthree")
    assert (await run(tmp_path, "read_file", path="a.txt", column=3)).text == "e\n\nthree"
    assert (await run(tmp_path, "read_file", path="a.txt", offset=2, column=1)).text == "\nthree"
    beyond = await run(tmp_path, "read_file", path="a.txt", column=4)
    assert (beyond.is_error, beyond.text) == (True, "line 1 of a.txt has 3 characters")


async def test_a_written_file_has_its_folders_and_is_told(tmp_path: Path) -> None:
    made = await run(tmp_path, "write_file", path="src/new/a.py", content="x = 1\n")
    assert (tmp_path / "src/new/a.py").read_text() == "x = 1\n"
    assert [(change.path, change.summary) for change in made.changes] == [("src/new/a.py", "made")]
    again = await run(tmp_path, "write_file", path="./src/new/../new/a.py", content="")
    assert [(change.path, change.summary) for change in again.changes] == [("src/new/a.py", "replaced")]
    assert sorted(os.listdir(tmp_path / "src/new")) == ["a.py"]


async def test_an_executable_stays_one_when_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    await run(tmp_path, "edit_file", path="run.sh", old="/bin/sh", new="/bin/bash")
    assert stat.S_IMODE((tmp_path / "run.sh").stat().st_mode) == 0o755


async def test_an_edit_needs_its_text_exactly_once_unless_all_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x x y")
    twice = await run(tmp_path, "edit_file", path="a", old="x", new="z")
    assert twice.is_error
    assert "stands 2 times" in twice.text
    absent = await run(tmp_path, "edit_file", path="a", old="q", new="z")
    assert absent.is_error
    assert (tmp_path / "a").read_text() == "x x y"
    done = await run(tmp_path, "edit_file", path="a", old="x", new="z", all=True)
    assert (done.text, (tmp_path / "a").read_text()) == ("changed 2 places in a", "z z y")


async def test_an_edit_keeps_the_line_ends_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    await run(tmp_path, "edit_file", path="a", old="one\ntwo\n", new="1\n2\n")
    assert (tmp_path / "a").read_bytes() == b"1\r\n2\r\nthree\r\n"


async def test_what_is_no_text_is_neither_shown_nor_edited(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    os.mkfifo(tmp_path / "pipe")
    assert "is no text" in (await run(tmp_path, "read_file", path="image")).text
    assert "no UTF-8" in (await run(tmp_path, "edit_file", path="latin", old="caf", new="x")).text
    assert (tmp_path / "latin").read_bytes() == b"caf\xe9"
    with anyio.fail_after(5):
        assert "no regular file" in (await run(tmp_path, "read_file", path="pipe")).text
        assert "no regular file" in (await run(tmp_path, "write_file", path="pipe", content="x")).text
    assert "folder" in (await run(tmp_path, "read_file", path=".")).text


# The edge of the workspace --------------------------------------------------------------------------------------------


OUTSIDE = ["../secret", "/etc/passwd", "link", "folder/secret", "a/../../secret", "chain/secret", "absolute"]


def with_links(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to("../secret")
    (root / "folder").symlink_to("..")
    (root / "chain").symlink_to("folder")
    (root / "absolute").symlink_to(tmp_path / "secret")
    return root


@pytest.mark.parametrize("path", OUTSIDE)
async def test_no_path_and_no_link_leads_out_of_the_workspace(path: str, tmp_path: Path) -> None:
    root = with_links(tmp_path)
    for name, more in (
        ("read_file", {}),
        ("write_file", {"content": "x"}),
        ("edit_file", {"old": "secret", "new": "x"}),
        ("grep", {"pattern": "s"}),
        ("glob", {"pattern": "*"}),
    ):
        result = await run(root, name, path=path, **more)
        assert result.is_error, (name, result.text)
        assert "outside the workspace" in result.text
    assert (tmp_path / "secret").read_text() == "secret"


async def test_a_link_inside_is_followed_and_judged_by_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("KEY=1")
    (tmp_path / "plain").symlink_to(".env")
    assert (await run(tmp_path, "read_file", path="plain")).text == "KEY=1"
    denied = await run(tmp_path, "read_file", path="plain", policy={"deny_read": (".env*",)})
    assert denied.is_error
    assert denied.text.startswith("policy_denied")
    written = await run(tmp_path, "write_file", path="plain", content="x", policy={"deny_write": (".env",)})
    assert written.text.startswith("policy_denied")
    await run(tmp_path, "write_file", path="plain", content="KEY=2")
    assert (tmp_path / ".env").read_text() == "KEY=2"
    assert (tmp_path / "plain").is_symlink()


async def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outer").write_text("kept")
    os.link(tmp_path / "outer", root / "inner")
    await run(root, "write_file", path="inner", content="new")
    assert ((tmp_path / "outer").read_text(), (root / "inner").read_text()) == ("kept", "new")


# Search ---------------------------------------------------------------------------------------------------------------


def searched(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "src/a.py").write_text("import os\nprint('Ä')\n")
    (tmp_path / "b.py").write_text("IMPORT sys\n")
    (tmp_path / ".env").write_text("import secret\n")
    (tmp_path / ".git/c.py").write_text("import git\n")
    (tmp_path / "binary.py").write_bytes(b"import\0")
    (tmp_path / "gone.py").symlink_to("/nowhere")
    return tmp_path


async def test_files_are_found_by_pattern_in_order(tmp_path: Path) -> None:
    root = searched(tmp_path)
    assert (await run(root, "glob", pattern="*.py")).text == "b.py\nbinary.py\nsrc/a.py"
    assert (await run(root, "glob", pattern="*.py", path="src")).text == "src/a.py"
    assert (await run(root, "glob", pattern="*.rs")).text == "no files found"
    hidden = await run(root, "glob", pattern="*", policy={"deny_read": (".env",)})
    assert ".env" not in hidden.text


async def test_lines_are_found_and_files_that_may_not_be_read_are_not_looked_at(tmp_path: Path) -> None:
    root = searched(tmp_path)
    assert (await run(root, "grep", pattern="^import")).text == ".env:1:import secret\nsrc/a.py:1:import os"
    found = await run(root, "grep", pattern="import", ignore_case=True, glob="*.py", policy={"deny_read": (".env",)})
    assert found.text == "b.py:1:IMPORT sys\nsrc/a.py:1:import os"
    assert (await run(root, "grep", pattern="Ä", path="src/a.py")).text == "src/a.py:2:print('Ä')"
    assert (await run(root, "grep", pattern="nothing")).text == "no matches"
    alone = await run(root, "grep", pattern="import", path=".env", policy={"deny_read": (".env",)})
    assert alone.text.startswith("policy_denied")


async def test_a_pattern_that_is_none_or_takes_for_ever_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a" * 60 + "b\n")
    assert "cannot be read" in (await run(tmp_path, "grep", pattern="(")).text
    monkeypatch.setattr("backplane.tools.search.GREP_S_MAX", 0.5)
    with anyio.fail_after(20):
        slow = await run(tmp_path, "grep", pattern="(a+)+$")
    assert slow.is_error
    assert "took over 0.5 s" in slow.text


async def test_many_matches_are_cut_and_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 300)
    found = await run(tmp_path, "grep", pattern="x")
    assert found.text.count("a:") == 200
    assert found.text.endswith("narrow the pattern]")


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input", "words"),
    [
        ("no_such_tool", {}, "there is no tool"),
        ("read_file", "{half", "not one JSON object"),
        ("read_file", {}, "'path' is a required property"),
        ("read_file", {"path": 3}, "read_file.path"),
        ("read_file", {"path": "a", "offset": 0}, "read_file.offset"),
        ("bash", {"command": "x", "timeout_s": 601}, "bash.timeout_s"),
        ("edit_file", {"path": "a", "old": "", "new": "x"}, "edit_file.old"),
        ("glob", {"pattern": "*", "also": 1}, "also"),
    ],
)
def test_a_wrong_input_is_named_for_the_model(name: str, input: Any, words: str) -> None:
    assert words in str(fault_in(name, input))


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
async def test_no_input_of_any_kind_raises(name: str, tmp_path: Path) -> None:
    toolbox = box(tmp_path)
    inputs: Any = (
        None,
        [],
        "x",
        {},
        {"path": "\0"},
        {"path": "a" * 5000, "content": ""},
        {"pattern": "[" * 5000},
    )
    for input in inputs:
        assert (await toolbox.run(name, input)).is_error


def test_commands_get_no_key_under_any_name() -> None:
    keys = {"MY_KEY": "sk-123456"}
    env = {"PATH": "/bin", "MY_KEY": "sk-123456", "COPY": "sk-123456", "URL": "https://x/?k=sk-123456", "OK": "sk"}
    assert without(env, keys) == {"PATH": "/bin", "OK": "sk"}


# Answers of a given shape ---------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("text", ['{"n": 1}', ' \n{"n": 1}\n', 'Here:\n```json\n{"n": 1}\n```\nDone.'])
def test_an_answer_of_the_shape_is_read(text: str) -> None:
    assert AnswerSchema(SCHEMA).read(text) == ({"n": 1}, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "not one JSON value"),
        ('{"n": "1"}', "/n: "),
        ("{}", "'n' is a required"),
        ('{"n": 1} {"n": 2}', "not one"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(text: str, words: str) -> None:
    _, fault = AnswerSchema(SCHEMA).read(text)
    assert words in str(fault)


@pytest.mark.parametrize("schema", [3, "x", {"type": "nothing"}, {"$ref": "https://example.com/s.json"}])
def test_a_schema_that_is_none_or_leads_elsewhere_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError) as error:
        AnswerSchema(schema)
    assert error.value.code == "config_invalid"


# What a hostile model asks for ----------------------------------------------------------------------------------------


async def test_an_edit_whose_places_overlap_is_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("aaa")
    assert "stands 2 times" in (await run(tmp_path, "edit_file", path="a", old="aa", new="b")).text
    assert (tmp_path / "a").read_text() == "aaa"


async def test_an_edit_that_would_make_a_huge_file_is_refused_before_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a" * 4_000_000)
    huge = await run(tmp_path, "edit_file", path="a", old="a", new="b" * 4_000_000, all=True)
    assert "would be over" in huge.text


async def test_a_name_that_is_no_utf_8_is_shown_by_its_bytes_and_its_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_text("hello\n")
    assert (await run(tmp_path, "glob", pattern="*")).text == "b\\udcff.txt"
    assert (await run(tmp_path, "grep", pattern="hello")).text == "b\\udcff.txt:1:hello"


async def test_whole_numbers_written_as_fractions_are_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n3\n")
    assert (await run(tmp_path, "read_file", path="a", offset=2.0, limit=1.0)).text.startswith("2\n[lines 2 to 2")


async def test_half_a_letter_in_a_path_is_an_answer(tmp_path: Path) -> None:
    assert "surrogate" in (await run(tmp_path, "read_file", path="\ud800")).text


def test_a_schema_that_leads_in_a_circle_or_nowhere_is_an_answer_or_named() -> None:
    assert "deeper than can be checked" in (AnswerSchema({"$ref": "#"}).read("1")[1] or "")
    with pytest.raises(ConfigError, match="names nothing"):
        AnswerSchema({"$ref": "#/nope"}).read("1")
    assert "\n" in (
        AnswerSchema({"type": "array", "items": {"type": "string"}}).read("[" + "1," * 100_000 + "1]")[1] or ""
    )
