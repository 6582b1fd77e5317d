"""The command line: exit codes, streams, signals and text; signals and streams with the real program as a child."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli import COMMANDS, main, streams
from backplane.contract.receipt import verify_bytes
from backplane.errors import CODES, OWN_CODES, STEPS
from backplane.policy.rules import PROFILES
from backplane.receipts.pieces import seal
from backplane.receipts.store import Store
from backplane.schemas import build
from tests.in_process import in_process
from tests.receipt_writer import delta, receipt_of
from tests.terminal import Window

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-m", "backplane"]
WAIT_S = 30
"""Bound of one call: a run takes under one second, a busy machine some."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, with one file."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    return folder


Cli = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def cli(work: Path) -> Cli:
    """Do one command in the folder `work`; in a process of its own where `real`."""

    def call(
        *words: str, stdin: bytes = b"", env: dict[str, str] | None = None, real: bool = False, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        environ = {**os.environ, **(env or {})}
        if not real and not more:
            done = in_process(*words, cwd=work, stdin=stdin, env=environ)
            return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())
        command = [*PROGRAM, *words]
        return subprocess.run(
            command, input=stdin, cwd=work, env=environ, capture_output=True, timeout=WAIT_S, check=False, **more
        )

    return call


def lines(data: bytes) -> list[str]:
    return data.decode().splitlines()


def fault(done: subprocess.CompletedProcess[bytes]) -> str:
    """The code on stderr, and what belongs to it below: evidence, the next step; no traceback of ours."""
    words = lines(done.stderr)
    assert all(line.startswith("  ") for line in words[1:]), done.stderr
    assert b"Traceback" not in done.stderr
    code, _, _ = words[0].partition(": ")
    assert code in CODES | OWN_CODES
    return code


# Text -----------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_printable_text_has_nothing_that_a_terminal_acts_on(text: str) -> None:
    shown = streams.printable(text)
    assert all(char.isprintable() or char in "\n\t" or ord(char) >= 0xA0 for char in shown)
    assert not set(shown) & set("\x1b\x07\x08\r\x7f\x9b\u202e\u2066\ufeff")
    shown.encode()


def test_a_line_stays_one_line_and_is_cut() -> None:
    assert streams.one_line("a\nb\x1b[2J\r\udc80") == "a\\nb\\x1b[2J\\r\\udc80"
    assert streams.one_line("x" * 500, 10) == "x" * 10 + "…"
    assert streams.one_line("abcdef", 3, keep="end") == "…def"


# Help and version -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["version"]])
def test_help_and_version_load_nothing(words: list[str]) -> None:
    program = (
        f"import sys; from backplane.cli import main; code = main({words!r}); sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=WAIT_S, check=True)
    loaded = set(done.stderr.decode().split())
    assert not loaded & {"msgspec", "anyio", "asyncio", "jsonschema", "subprocess", "sqlite3", "tomllib"}
    assert done.stdout


@pytest.mark.parametrize(
    "words",
    [name.split() for name in COMMANDS],
)
def test_every_commands_help_shows_an_example(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    about, _, example = capfd.readouterr().out.partition("example:\n")
    assert example.startswith(f"  backplane {' '.join(words)}")
    assert all(len(line) <= 100 for line in about.splitlines())


# Usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["--config"],
        ["run"],
        ["run", ""],
        ["run", "fix", "the", "test"],
        ["run", "task", "--order", "x.json"],
        ["run", "task", "--backend", "nobody"],
        ["run", "task", "--backend", "mock", "--sidecar", "x"],
        ["run", "task", "--backend", "mock", "--timeout", "0"],
        ["run", "task", "--backend", "mock", "--param", "a=1", "--param", "a.b=1"],
        ["run", "task", "--backend", "mock", "--env", "SURELY_NOT_SET"],
        ["run", "task", "--backend", "mock", "--max-turns", "-1"],
        ["run", "task", "--backend", "mock", "--context", "missing"],
        ["run", "task", "--backend", "mock", "--receipt", "missing/receipt.json"],
        ["run", "task", "--backend", "mock", "--on-ask", "prompt"],
        ["run", "--order", "-"],
        ["backends", "--config", "missing.toml"],
        ["runs", "--since", "tomorrow"],
        ["runs", "--limit", "-1"],
        ["sessions", "lst"],
        ["receipts", "show", "abc"],
        ["receipts", "verify", "--save-checkpoint", "chain.json"],
        ["apply", "abcdef"],
        ["conform"],
        ["run", "task\udcff", "--backend", "mock"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_why(cli: Cli, words: list[str], backplane_home: Path) -> None:
    done = cli(*words)
    assert fault(done) in ("usage_invalid", "config_invalid", "backend_not_found")
    assert done.returncode == 2
    assert done.stdout == b""
    assert not (backplane_home / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["schema", "nope"],
        ["compare", "x", "-b", "shell"],
        ["run", "x", "--param", "nope"],
        ["policy", "test", "ci"],
    ],
)
def test_a_wrong_word_is_a_fault_of_usage(cli: Cli, words: list[str]) -> None:
    done = cli(*words)
    assert (fault(done), done.returncode) == ("usage_invalid", 2), done


def test_a_dry_run_refuses_a_folder_as_the_run_does(cli: Cli, work: Path) -> None:
    (work / "file").write_text("")
    for root in ("nowhere", "file"):
        words = ("run", "true", "--backend", "shell", "--root", root)
        done, real = cli(*words, "--dry-run"), cli(*words)
        assert (done.returncode, done.stdout) == (real.returncode, b"")
        assert fault(done) == fault(real) == "workspace_init_failed"


MEMORY_BYTES = 220 << 20
"""Address space of a command: a third of it is Python and what it loads."""


def test_what_is_translated_on_a_terminal_is_escaped_and_says_the_same(work: Path) -> None:
    text = "hi \x9b31m \u202e \U000e0001 \x7f ä"
    document = {"model": "m", "messages": [{"role": "user", "content": text}]}
    (work / "request.json").write_text(json.dumps(document))
    master, slave = os.openpty()
    command = [*PROGRAM, "translate", "--from", "openai", "--to", "openai", "request.json"]
    done = subprocess.run(command, cwd=work, stdout=slave, stderr=subprocess.PIPE, timeout=WAIT_S, check=False)
    os.close(slave)
    said = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert not set("\x9b\u202e\U000e0001\x7f") & set(said)
    assert json.loads(said)["messages"][0]["content"] == text
    piped = subprocess.run(command, cwd=work, capture_output=True, timeout=WAIT_S, check=True).stdout
    assert text.encode() in piped


@pytest.mark.parametrize("words", [["validate"], ["receipts", "verify"]])
def test_a_file_without_an_end_is_refused_in_little_memory(work: Path, words: list[str]) -> None:
    (work / "hole.json").touch()
    os.truncate(work / "hole.json", 20 << 30)
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}));"
    program = (
        f"{limited} from backplane.__main__ import main; sys.argv[1:] = {[*words, 'hole.json']!r}; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert b"is over" in done.stderr


@pytest.mark.usefixtures("no_agents")
def test_without_a_backend_the_router_is_asked_and_says_why_it_finds_none(cli: Cli) -> None:
    done = cli("run", "task")
    assert done.returncode == 4
    assert fault(done) == "capability_unsupported"
    assert b"mock: named_only" in done.stderr


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(code: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["explain", code]) == 0
    assert CODES[code].meaning.encode() in capfdbinary.readouterr().out


def test_a_fault_of_our_own_is_told_without_a_traceback(cli: Cli, backplane_home: Path) -> None:
    program = (
        "import sys; from backplane.cli import command, main; "
        "command._ROOMS['version'] = 'no.version'; sys.exit(main())"
    )
    words = [sys.executable, "-c", program, "version"]
    done = subprocess.run(words, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert fault(done) == "internal"


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "closed"), [("nonsense", "2>&-"), ("run hello --backend mock", "<&- >&- 2>&-")])
def test_closed_standard_streams_harm_nothing(work: Path, words: str, closed: str, backplane_home: Path) -> None:
    command = f"exec {shlex.join(PROGRAM)} {words} {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == (2 if words == "nonsense" else 0)
    assert b"Traceback" not in done.stderr
    assert sorted(path.name for path in work.iterdir()) == ["a.txt"]
    if words.startswith("run"):
        with Store.open(backplane_home, readonly=True) as store:
            assert [row.outcome for row in store.rows()] == ["complete"]
            assert not store.verify_all().findings


def test_a_reader_that_leaves_ends_the_command_without_a_word() -> None:
    command = f"{shlex.join([*PROGRAM, 'explain'])}; echo code $? >&2"
    ours, theirs = os.pipe()
    with subprocess.Popen(["sh", "-c", command], stdout=theirs, stderr=subprocess.PIPE) as shell:
        os.close(theirs)
        os.close(ours)
        assert shell.communicate(timeout=WAIT_S)[1] == b"code 141\n"


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, "explain"], stdout=full, stderr=subprocess.PIPE, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"stream_closed: cannot write to stdout: ENOSPC")


def test_a_nonblocking_stdout_gets_every_byte() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with subprocess.Popen([*PROGRAM, "schema", "receipt"], stdout=theirs) as child:
        os.close(theirs)
        with open(ours, "rb") as pipe:
            assert pipe.read() == build.render("receipt")
        assert child.wait(WAIT_S) == 0


# Checks ---------------------------------------------------------------------------------------------------------------


def test_a_schema_is_printed_byte_for_byte(cli: Cli) -> None:
    assert cli("schema", "work_order").stdout == (ROOT / "schemas" / "work_order.json").read_bytes()
    assert "work_order" in lines(cli("schema").stdout)


def test_validate_names_every_fault_and_recognises_by_content(cli: Cli, work: Path) -> None:
    (work / "good.json").write_text('{"task": "x"}')
    (work / "bad.json").write_text('{"task": 3, "lane": "fast"}')
    (work / "odd.toml").write_text("x = 3")
    done = cli("validate", "good.json")
    assert (done.returncode, done.stdout) == (0, b"good.json: work_order, valid\n")
    done = cli("validate", "good.json", "bad.json", "odd.toml", "-", stdin=b'{"task": "y"}')
    assert done.returncode == 1
    text = done.stdout.decode()
    assert "bad.json: work_order: /task: " in text
    assert "bad.json: work_order: /lane: " in text
    assert "odd.toml: configuration: " in text
    assert "stdin: work_order, valid" in text


def test_conform_says_a_line_a_check_and_the_level(cli: Cli) -> None:
    done = cli("conform", "--", "false")
    *checks, level = lines(done.stdout)
    assert (done.returncode, level.startswith("level: none")) == (1, True)
    skips = [line for line in checks if line.startswith("skip")]
    assert len(skips) == len({line.partition("): ")[2] for line in skips}), "one line a reason"


def test_backends_are_listed_with_what_keeps_them_from_being_ready(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text("[backends.mine]\ncommand = ['surely-not-there']\n")
    found = {entry["id"]: entry for entry in map(json.loads, lines(cli("backends", "--json").stdout))}
    assert found["mock"]["ready"]
    assert not found["mine"]["ready"]
    assert "surely-not-there" in found["mine"]["why"]


def test_backends_are_listed_with_what_they_said_of_themselves_last(cli: Cli) -> None:
    assert json.loads(cli("backends", "--json", "mock").stdout)["manifest"] is None
    assert cli("run", "task", "--backend", "mock").returncode == 0
    assert json.loads(cli("backends", "--json", "mock").stdout)["manifest"]["tool_edit"] == "emulated"


# Receipts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(backplane_home: Path) -> list[str]:
    """Run ids of three stored receipts."""
    with Store.open(backplane_home) as store:
        return [
            store.adopt(seal(receipt_of([delta(f"text {number}"), delta("\x1b[2J")]))).run_id for number in range(3)
        ]


def test_receipts_are_listed_newest_first(cli: Cli, stored: list[str]) -> None:
    done = cli("runs")
    assert [line.split()[0] for line in lines(done.stdout)] == [run_id[:8] for run_id in stored[::-1]]
    done = cli("runs", "--limit", "2", "--json")
    assert [json.loads(line)["run_id"] for line in lines(done.stdout)] == stored[:0:-1]


def test_an_empty_store_is_an_empty_list_and_is_not_made(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "new"
    done = cli("runs", env={"BACKPLANE_HOME": str(home)})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"no runs\n")
    assert not home.exists()


def test_show_prints_the_canonical_receipt_or_text_without_escapes(cli: Cli, stored: list[str]) -> None:
    whole = cli("receipts", "show", stored[0][:13], "--json").stdout
    assert verify_bytes(whole) is None
    text = cli("receipts", "show", stored[0]).stdout
    assert b"text 0" in text
    assert b"\x1b" not in text
    assert b"complete" in text


def test_verify_finds_what_was_changed(cli: Cli, stored: list[str], backplane_home: Path, work: Path) -> None:
    assert cli("receipts", "verify").returncode == 0
    whole = cli("receipts", "show", stored[0], "--json").stdout
    (work / "good.json").write_bytes(whole)
    (work / "bad.json").write_bytes(whole.replace(b"text 0", b"text 9"))
    (work / "bare.json").write_bytes(re.sub(rb'"receipt_sha256":"[0-9a-f]*"', b'"receipt_sha256":null', whole))
    done = cli("receipts", "verify", "good.json", stored[1])
    assert (done.returncode, lines(done.stdout)) == (0, ["good.json: intact", f"{stored[1]}: intact"])
    done = cli("receipts", "verify", "good.json", "bad.json", "bare.json")
    assert done.returncode == 1
    assert [line.split(": ")[1] for line in lines(done.stdout)] == ["intact", *["receipt_hash_mismatch"] * 2]
    (line,) = lines(cli("receipts", "verify", "./bad.json").stdout)  # A fault belongs to the name as it was given.
    assert line.startswith("./bad.json: receipt_hash_mismatch")
    trace = backplane_home / "runs" / stored[2] / "trace.jsonl"
    trace.write_bytes(trace.read_bytes().replace(b"text 2", b"text 3"))
    assert cli("receipts", "verify", stored[2]).returncode == 1
    done = cli("receipts", "verify")
    assert done.returncode == 1
    assert stored[2] in done.stdout.decode()


def test_an_exported_receipt_can_be_imported_elsewhere(cli: Cli, stored: list[str], work: Path, tmp_path: Path) -> None:
    assert lines(cli("receipts", "export", stored[0][:13], "--to", "out").stdout) == ["out"]
    assert verify_bytes((work / "out" / "receipt.json").read_bytes()) is None
    other = {"BACKPLANE_HOME": str(tmp_path / "other")}
    assert lines(cli("receipts", "import", "out", env=other).stdout) == [stored[0]]
    assert cli("receipts", "verify", env=other).returncode == 0
    assert cli("receipts", "import", "out", env=other).returncode == 1


# Runs -----------------------------------------------------------------------------------------------------------------


def mock(*steps: Any) -> list[str]:
    """Options for a run of the scripted host."""
    return ["--backend", "mock", "--param", f"mock.scenario={json.dumps(steps)}"]


def rows(home: Path) -> list[Any]:
    with Store.open(home, readonly=True) as store:
        assert not store.verify_all().findings
        return store.rows()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (mock({"say": "hello"}), 0, "complete"),
        (mock({"say": "x"}, {"outcome": "failed"}), 1, "failed"),
        (mock({"say": "x"}, {"outcome": "partial"}), 3, "partial"),
        (mock({"say": "x"}, {"exit": 7}), 1, "host_exit"),
        (mock({"raw": '{"t":\n'}), 1, "protocol"),
        ([*mock({"sleep_s": 60}), "--timeout", "4"], 3, "deadline"),
        (["--backend", "mock", "--require", "vision"], 4, "refused"),
        (["--sidecar", "/surely/not/there"], 1, "failed"),
        (["--backend", "mock", "--root", "/surely/not/there"], 1, None),
    ],
)
def test_the_exit_code_says_how_the_run_ended(
    cli: Cli, words: list[str], code: int, reason: str | None, backplane_home: Path
) -> None:
    done = cli("run", "task", *words)
    assert done.returncode == code, done
    if done.stderr:
        fault(done)
    (row,) = rows(backplane_home)
    assert reason is None or row.reason == reason


def test_json_lines_are_the_protocols_own_messages(cli: Cli, work: Path) -> None:
    done = cli("run", "task", *mock({"delta": "a"}, {"write": {"path": "b.txt", "content": "é\n"}}), "--json",
               "--receipt", "r.json", "--patch", "p.diff")  # fmt: skip
    assert done.returncode == 0
    assert not done.stderr
    *events, last = done.stdout.splitlines()
    messages = [json.loads(line) for line in events]
    assert {message["t"] for message in messages} == {"event"}
    assert {message["event"]["type"] for message in messages} >= {"assistant_delta", "tool_call", "file_changed"}
    final = json.loads(last)
    assert list(final) == ["t", "ref_id", "receipt"]
    assert final["t"] == "final"
    assert {message["ref_id"] for message in messages} == {final["ref_id"]} == {final["receipt"]["meta"]["run_id"]}
    whole = last[last.index(b'"receipt":') + len(b'"receipt":') : -1]
    assert verify_bytes(whole) is None
    assert (work / "r.json").read_bytes() == whole
    assert [message["event"] for message in messages] == final["receipt"]["trace"]
    patch = (work / "p.diff").read_text()
    assert "+++ b/b.txt" in patch
    assert not (work / "b.txt").exists()


def test_a_receipt_over_the_line_limit_goes_without_its_trace(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text("[limits]\nline_bytes_max = 9000\n")
    done = cli("run", "task", *mock({"repeat": {"times": 60, "steps": [{"say": "number {n} " + "x" * 100}]}}), "--json")
    assert done.returncode == 0
    *events, last = done.stdout.splitlines()
    assert last.startswith(b'{"t":"final","ref_id":"')
    final = json.loads(last)
    assert list(final) == ["t", "ref_id", "trace", "receipt"]
    assert final["trace"] == "as_streamed"
    kept = b",".join(line[line.index(b'"event":{') + len(b'"event":') : -1] for line in events)
    whole = last[last.index(b'"receipt":{') + len(b'"receipt":') : -1].replace(
        b'"trace":[]', b'"trace":[' + kept + b"]", 1
    )
    assert verify_bytes(whole) is None


def test_a_fatal_carries_its_code_and_the_receipt(cli: Cli) -> None:
    done = cli("run", "task", *mock({"say": "x"}, {"exit": 7}), "--json")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    fatal = json.loads(last)
    assert list(fatal) == ["t", "ref_id", "error", "error_code", "receipt"]
    assert (fatal["t"], fatal["error_code"]) == ("fatal", "backend_crashed")
    assert verify_bytes(last[last.index(b'"receipt":') + len(b'"receipt":') : -1]) is None
    assert fault(done) == "backend_crashed"
    assert b"exit code 7" in done.stderr


def test_what_a_child_says_is_shown_escaped(cli: Cli) -> None:
    evil = "\x1b]0;gotcha\x07\x1b[2J\r"
    done = cli(
        "run", "task",
        *mock({"delta": evil}, {"say": evil}, {"tool": {"name": evil, "input": {"command": evil}, "output": evil}},
              {"error": {"message": evil}}, {"stderr": evil}, {"exit": 3}),
    )  # fmt: skip
    assert done.returncode == 1
    assert not set(b"\x1b\x07\r") & set(done.stdout + done.stderr)
    assert b"gotcha" in done.stdout


def test_every_error_code_has_a_next_step() -> None:
    assert set(STEPS) == set(CODES | OWN_CODES)
    named = {word for step in STEPS.values() for word in re.findall(r"backplane ([a-z]+)", step)}
    assert named <= {name.partition(" ")[0] for name in COMMANDS} | {"help"}


@pytest.mark.parametrize(
    ("code", "quiet", "way"),
    [
        ("config_invalid", True, "fatal"),
        ("policy_denied", False, "final"),
        ("backend_auth_failed", True, "final"),
    ],
)
def test_a_failed_run_says_its_error_on_stderr_and_ends_with_its_exit_code(
    cli: Cli, code: str, quiet: bool, way: str
) -> None:
    error = {"message": "not so", "code": code}
    steps = [{"fail": error}] if way == "fatal" else [{"error": error}, {"outcome": "failed"}]
    words = ("--backend", "mock", "--param", f"mock.scenario={json.dumps(steps)}")
    done = cli("run", "task", *words, *(["-q"] if quiet else []))
    assert (fault(done), done.returncode) == (code, CODES[code].exit_code), done
    assert b"not so" in done.stderr
    assert not quiet or done.stdout == b""


def test_a_secret_that_goes_through_the_end_of_a_preview_is_told_nowhere(cli: Cli, backplane_home: Path) -> None:
    secret = "hunter2-and-quite-some-more"
    task = """printf '%8172s%s%9000s' x "$A_KEY" y"""
    done = cli("run", task, "--backend", "shell", "--json", "--env", f"A_KEY={secret}")
    assert done.returncode == 0
    files = [path.read_bytes() for path in backplane_home.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [data for data in (done.stdout, done.stderr, *files) if secret[:8].encode() in data]


def test_an_order_comes_from_stdin_and_options_go_over_it(cli: Cli, backplane_home: Path) -> None:
    order = {
        "task": "do it",
        "lane": "workspace_first",
        "config": {"model": "m", "vendor": {"abp": {"x": 1}}, "env": {"A": "1"}},
    }
    done = cli(
        "run", "--order", "-", "--backend", "mock", "--model", "n", "--isolation", "off",
        "--param", "abp.y=two", "--env", "B=geheim-9", "--exclude", "*.log", "--deny-tool", "bash", "--max-turns", "3",
        stdin=json.dumps(order).encode(),
    )  # fmt: skip
    assert done.returncode == 0, done
    assert b"I was asked: do it" in done.stdout
    (row,) = rows(backplane_home)
    head = (backplane_home / "runs" / row.run_id / "head.jsonl").read_bytes()
    kept = json.loads(head.splitlines()[0])["order"]
    assert kept["lane"] == "workspace_first"
    assert kept["config"]["model"] == "n"
    assert kept["config"]["vendor"]["abp"] == {"x": 1, "y": "two", "isolation": "off"}
    assert kept["config"]["env"] == ["A", "B"]
    assert kept["config"]["max_turns"] == 3
    assert kept["workspace"]["exclude"] == ["*.log"]
    assert kept["policy"]["disallowed_tools"] == ["bash"]
    assert kept["policy"]["deny_write"] == list(PROFILES["default"].deny_write), "a rule is added to the default ones"
    assert b"geheim-9" not in head


def test_context_travels_by_path_inside_the_workspace_and_by_content_from_outside(
    cli: Cli, work: Path, tmp_path: Path, backplane_home: Path
) -> None:
    (tmp_path / "notes.md").write_text("remember")
    cli("run", "task", "--backend", "mock", "--context", "a.txt", "--context", "../notes.md")
    (row,) = rows(backplane_home)
    kept = json.loads((backplane_home / "runs" / row.run_id / "head.jsonl").read_bytes().splitlines()[0])["order"]
    assert kept["context"] == {"files": ["a.txt"], "snippets": [{"name": "../notes.md", "content": "remember"}]}


def test_the_configured_backend_and_policy_are_taken_when_nothing_is_said(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text("default_backend = 'mock'\npolicy = 'policy.json'\n")
    (work / "policy.json").write_text('{"disallowed_tools": ["bash"]}')
    scenario = json.dumps([{"tool": {"name": "bash", "input": {"command": "ls"}}}])
    done = cli("run", "task", "--param", f"mock.scenario={scenario}")
    assert done.returncode == 0, done
    assert b"policy_denied" in done.stdout


def test_a_run_of_one_line_leaves_a_patch_that_apply_puts_in(cli: Cli, work: Path) -> None:
    done = cli("run", "echo two >> a.txt", "--backend", "shell")
    run = re.search(r"^run (\S+)", done.stdout.decode(), re.MULTILINE)
    assert run is not None
    assert (work / "a.txt").read_text() == "one\n"
    assert cli("apply", run[1][:8], "--check").returncode == 0
    assert (work / "a.txt").read_text() == "one\n"
    assert cli("apply", run[1]).returncode == 0
    assert (work / "a.txt").read_text() == "one\ntwo\n"
    again = cli("apply", run[1])
    assert again.returncode == 1
    assert fault(again) == "execution_workspace_error"


def test_a_patch_that_a_rule_forbids_makes_the_run_partial_and_is_applied_only_when_that_is_accepted(
    cli: Cli, work: Path
) -> None:
    (work / "policy.json").write_text('{"deny_write": ["made"]}')
    done = cli("run", "echo x > made", "--backend", "shell", "--policy", "policy.json")
    assert done.returncode == 3
    assert b"\npolicy_denied: " in b"\n" + done.stderr
    run = re.search(r"^run (\S+)", done.stdout.decode(), re.MULTILINE)
    assert run is not None
    for words in ([], ["--check"], ["--merge"]):
        refused = cli("apply", run[1], *words)
        assert (refused.returncode, fault(refused)) == (4, "policy_denied")
        assert not (work / "made").exists()
    assert cli("apply", run[1], "--accept-violations").returncode == 0
    assert (work / "made").read_text() == "x\n"


def test_a_receipt_that_cannot_be_stored_is_printed(cli: Cli, backplane_home: Path) -> None:
    (backplane_home / "receipts.sqlite").mkdir()
    done = cli("run", "task", *mock({"say": "hello"}))
    assert done.returncode == 1
    assert fault(done) == "receipt_store_failed"
    assert verify_bytes(done.stdout.splitlines()[-1]) is None


# Signals and readers --------------------------------------------------------------------------------------------------


Running = Callable[..., "subprocess.Popen[bytes]"]


def until(child: subprocess.Popen[bytes], text: bytes) -> None:
    """Read what a run writes until this has come."""
    assert child.stdout is not None
    seen, deadline = b"", time.monotonic() + WAIT_S
    while text not in seen:
        assert select.select([child.stdout], [], [], max(deadline - time.monotonic(), 0))[0], seen
        more = os.read(child.stdout.fileno(), 65536)
        assert more, seen
        seen += more


@pytest.fixture
def running(work: Path) -> Iterator[Running]:
    """Start a run in the folder `work`; it is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, before: str = "") -> subprocess.Popen[bytes]:
        command = f"{before} exec {shlex.join([*PROGRAM, 'run', 'task', *words])}"
        started.append(
            subprocess.Popen(
                ["sh", "-c", command], cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=WAIT_S)


WAITING: Sequence[Any] = ({"say": "ready"}, {"sleep_s": 60})


@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False), (signal.SIGHUP, 129, True)],
)
def test_a_signal_ends_the_run_in_order(
    running: Running, number: int, code: int, to_group: bool, backplane_home: Path
) -> None:
    run = running(*mock(*WAITING))
    until(run, b"ready")
    (os.killpg if to_group else os.kill)(run.pid, number)
    _, stderr = run.communicate(timeout=WAIT_S)
    assert run.returncode == code
    assert b"Traceback" not in stderr
    (row,) = rows(backplane_home)
    assert (row.outcome, row.reason) == ("partial", "cancelled")


def test_a_signal_before_the_hello_leaves_nothing_behind(work: Path) -> None:
    os.mkfifo(work / "up")
    ours = os.open(work / "up", os.O_RDONLY | os.O_NONBLOCK)
    words = [
        *PROGRAM,
        "run",
        "task",
        "--sidecar",
        f"sh -c 'echo up > {work}/up; exec sleep 600'",
        "--in-place",
    ]
    with subprocess.Popen(words, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert select.select([ours], [], [], WAIT_S)[0]
        os.close(ours)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=WAIT_S)[1] == b""
    assert child.returncode == 130


def test_a_run_that_was_started_to_outlive_its_terminal_does(running: Running) -> None:
    run = running(*mock({"say": "ready"}, {"sleep_s": 0.5}, {"say": "done"}), before="trap '' HUP INT;")
    until(run, b"ready")
    os.killpg(run.pid, signal.SIGHUP)
    os.kill(run.pid, signal.SIGINT)
    until(run, b"done")
    run.communicate(timeout=WAIT_S)
    assert run.returncode == 0


@pytest.mark.parametrize(("json_lines", "busy"), [(False, False), (True, True)])
def test_when_the_reader_leaves_the_run_is_stopped_and_stored(
    running: Running, json_lines: bool, busy: bool, backplane_home: Path
) -> None:
    steps = [{"repeat": {"times": 100000, "steps": [{"say": "ready " * 20}]}}] if busy else list(WAITING)
    run = running(*mock(*steps), *(["--json"] if json_lines else []))
    until(run, b"ready")
    assert run.stdout is not None
    run.stdout.close()
    run.stdout = None
    _, stderr = run.communicate(timeout=WAIT_S)
    assert (run.returncode, stderr) == (141, b"")
    (row,) = rows(backplane_home)
    assert (row.outcome, row.reason) == ("partial", "cancelled")


# On a terminal --------------------------------------------------------------------------------------------------------


def on_terminal(words: Sequence[str], cwd: Path, answers: dict[bytes, bytes], **environ: str) -> tuple[int, bytes]:
    """Run the program on a terminal of its own, typing an answer when its prompt has been seen."""
    window = Window(words, cwd=cwd, env=environ)
    for prompt, answer in answers.items():
        window.until(partial(window.shows, prompt.decode()))
        window.type(answer.decode())
    return window.ends(), window.text.encode()


def test_a_terminal_gets_colour_and_the_diff_at_the_end(work: Path) -> None:
    code, seen = on_terminal(["run", "echo two >> a.txt", "--backend", "shell"], work, {})
    assert code == 0
    assert b"\x1b[32m+two\x1b[0m" in seen
    assert b"\x1b[32mcomplete\x1b[0m" in seen
    code, seen = on_terminal(["run", "true", "--backend", "shell"], work, {}, NO_COLOR="1")
    assert code == 0
    assert b"m" not in re.findall(rb"\x1b\[[0-9;]*([a-zA-Z])", seen)


@pytest.mark.parametrize(("typed", "said"), [(b"yes\n", b"answer: allow"), (b"blue\n", b"answer: allow blue")])
def test_a_person_is_asked_on_the_terminal(work: Path, typed: bytes, said: bytes) -> None:
    ask = {"question": "which colour?", "options": ["red", "blue"]}
    code, seen = on_terminal(["run", "task", *mock({"ask": ask})], work, {b"which colour?": typed})
    assert code == 0
    assert b"2. blue" in seen
    assert said in seen


@pytest.mark.parametrize(("typed", "denied"), [(b"y\n", False), (b"n too risky\n", True)])
def test_a_tool_that_needs_approval_waits_for_the_persons_word(work: Path, typed: bytes, denied: bool) -> None:
    (work / "policy.json").write_text('{"require_approval_for": ["bash"]}')
    tool = {"tool": {"name": "bash", "input": {"command": "ls"}, "output": "listed"}}
    words = ["run", "task", *mock(tool), "--policy", "policy.json"]
    _, seen = on_terminal(words, work, {b"[y]es": typed})
    assert (b"policy_denied: too risky" in seen) is denied
    assert (b"listed" in seen) is not denied


@pytest.mark.parametrize("place", ["a file", "below a file", "a loop", "nowhere"])
def test_a_state_folder_that_cannot_be_made_is_an_error_with_its_code(place: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    home = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "x",
        "a loop": tmp_path / "loop" / "x",
        "nowhere": "/proc/nowhere/x",
    }[place]
    done = cli("run", "--backend", "shell", "true", env={"BACKPLANE_HOME": str(home)})
    assert fault(done) in ("receipt_store_failed", "config_invalid")


# A first configuration ------------------------------------------------------------------------------------------------


def test_init_writes_a_configuration_that_works_and_overwrites_none(cli: Cli, work: Path) -> None:
    made = cli("init", "--backend", "shell", "--policy", "default")
    assert made.returncode == 0, made.stderr
    assert (work / "backplane.toml").read_bytes() in made.stdout
    assert cli("run", "echo hello").returncode == 0
    assert cli("validate", "backplane.toml").returncode == 0
    again = cli("init")
    assert (again.returncode, b"already exists" in again.stderr) == (2, True)
