"""The command line: exit codes, streams, signals and text, with the real program as a child."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli import COMMANDS, EXITS, help_text, streams
from backplane.cli.remedies import REMEDIES
from backplane.contract.receipt import verify_bytes
from backplane.errors import CODES, OWN_CODES, CapabilityError
from backplane.policy.rules import PROFILES
from backplane.receipts.pieces import seal
from backplane.receipts.store import Store
from backplane.schemas import build
from backplane.upstream.presets import PROTOCOLS
from tests.receipt_writer import delta, receipt_of
from tests.terminal import screen

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-m", "backplane"]
WAIT_S = 30
"""Bound of one call: a run takes under one second, a busy machine some."""
PARTS = ("list", "show", "verify", "diff", "export", "import", "checkpoint", "prune")


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("user")))


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
    """Run the real program to its end, in the folder `work`."""

    def call(*words: str, stdin: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
        environ = {**os.environ, **more.pop("env", {})}
        return subprocess.run(
            [*PROGRAM, *words],
            input=stdin,
            cwd=work,
            env=environ,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
            **more,
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
    [[name] for name in COMMANDS]
    + [["receipts", part] for part in PARTS]
    + [["runs", part] for part in ("list", "show")],
)
def test_every_commands_help_shows_an_example(cli: Cli, words: list[str]) -> None:
    done = cli(*words, "--help")
    assert done.returncode == 0
    assert not done.stderr
    about, mark, example = done.stdout.decode().partition("example:\n")
    assert mark
    assert example.startswith(f"  backplane {' '.join(words)}")
    assert all(len(line) <= 100 for line in about.splitlines())


def test_the_help_names_every_command_and_exit_code() -> None:
    text = help_text()
    assert all(f"  {name} " in text for name in COMMANDS)
    assert all(f"  {code} " in text for code in EXITS)


def test_the_installed_script_is_the_same_program(cli: Cli) -> None:
    script = Path(sys.executable).with_name("backplane")
    done = subprocess.run([script, "version"], capture_output=True, timeout=WAIT_S, check=True)
    assert done.stdout == cli("--version").stdout


def test_the_help_of_doctor_names_the_protocols_it_can_try(cli: Cli) -> None:
    text = " ".join(cli("doctor", "--help").stdout.decode().split())
    assert all(name in text for name in PROTOCOLS)


# Usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["--nonsense"],
        ["--config"],
        ["run"],
        ["run", "--nonsense"],
        ["run", ""],
        ["run", "task", "--order", "x.json"],
        ["run", "task", "--backend", "mock", "--sidecar", "x"],
        ["run", "task", "--backend", "nobody"],
        ["run", "task", "--backend", "mock", "--timeout", "0"],
        ["run", "task", "--backend", "mock", "--timeout", "soon"],
        ["run", "task", "--backend", "mock", "--idle-timeout", "nan"],
        ["run", "task", "--backend", "mock", "--param", "x"],
        ["run", "task", "--backend", "mock", "--param", "a..b=1"],
        ["run", "task", "--backend", "mock", "--param", "a=1", "--param", "a.b=1"],
        ["run", "task", "--backend", "mock", "--env", "SURELY_NOT_SET"],
        ["run", "task", "--backend", "mock", "--env", "=x"],
        ["run", "task", "--backend", "mock", "--env-file", "missing"],
        ["run", "task", "--backend", "mock", "--require", "streaming=best"],
        ["run", "task", "--backend", "mock", "--max-turns", "-1"],
        ["run", "task", "--backend", "mock", "--model", ""],
        ["run", "task", "--backend", "mock", "--max-budget-usd", "nan"],
        ["run", "task", "--backend", "mock", "--context", "missing"],
        ["run", "task", "--backend", "mock", "--receipt", "missing/receipt.json"],
        ["run", "task", "--backend", "mock", "--patch", "."],
        ["run", "task", "--backend", "mock", "--on-ask", "prompt"],
        ["run", "task", "--backend", "mock", "--isolation", "maybe"],
        ["run", "task", "--backend", "mock", "--config", "missing.toml"],
        ["run", "--order", "missing.json"],
        ["run", "--order", "-"],
        ["run", "task", "--sidecar", ""],
        ["run", "task", "--sidecar", "'"],
        ["--config", "missing.toml", "backends"],
        ["errors", "nonsense"],
        ["schema", "nonsense"],
        ["validate", "missing"],
        ["receipts", "nonsense"],
        ["runs", "show", "abc"],
        ["runs", "--since", "tomorrow"],
        ["runs", "--limit", "-1"],
        ["why", "abcdef"],
        ["receipts", "show", "abc"],
        ["receipts", "show", "abcdef"],
        ["receipts", "verify", "abcdef"],
        ["receipts", "import", "missing"],
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
    ("words", "said"),
    [
        (["run", "task", "--backend", "mock", "--timeout", "-1"], "--timeout is wrong"),
        (["run", "task", "--backend", "mock", "--hello-timeout", "nan"], "--hello-timeout is wrong"),
        (["run", "--order", "-"], "stdin is not strict JSON"),
        (["translate", "--from", "openai", "--to", "claude", "-"], "stdin is no JSON"),
        (["receipts", "show", "ab"], "backplane receipts list"),
        (["receipts", "prune", "--keep", "-1"], "--keep -1 is no number of receipts"),
        (["receipts", "list", "--limit", "-1"], "--limit -1 is no number of receipts"),
        (["receipts", "list", "--limit", str(1 << 63)], "is no number of receipts"),
        (["validate", ""], "'' cannot be read"),
        (["run", "fix", "the", "test"], "arguments: the test; a TASK of several words stands in quotes"),
        (["receipts", "list", "more"], "backplane receipts list --help"),
        (["receipts", "checkpoint"], "run an order first"),
        (["why", "last", "extra"], "unrecognized arguments: extra"),
        (["runs", "show", "last", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_a_wrong_word_is_called_what_it_is_called_where_it_is_typed(cli: Cli, words: list[str], said: str) -> None:
    done = cli(*words)
    assert done.returncode == 2
    assert said in done.stderr.decode()


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
def test_a_dry_run_refuses_a_folder_as_the_run_does(cli: Cli, work: Path, mode: str) -> None:
    (work / "file").write_text("")
    for root in ("nowhere", "file"):
        words = ("run", "true", "--backend", "shell", "--root", root, "--mode", mode)
        done, real = cli(*words, "--dry-run"), cli(*words)
        assert (done.returncode, done.stdout) == (real.returncode, b"")
        assert fault(done) == fault(real) == "workspace_init_failed"


MEMORY_BYTES = 220 << 20
"""Address space of a command: a third of it is Python and what it loads."""

SECRET = "hunter2secret-value+99=="


@pytest.mark.parametrize(
    "words",
    [
        ["--include", "[" + SECRET],
        ["--root", "nowhere-" + SECRET],
        ["--require", f"cap={SECRET}"],
        ["--context", "c-" + SECRET],
        ["--policy", "nowhere/" + SECRET],
        ["--deny-tool", "x" + SECRET],
        ["--policy", "policy.json"],
    ],
    ids=lambda words: " ".join(words).replace(SECRET, ""),
)
def test_a_variable_of_the_order_stands_in_no_rule_and_no_error(
    cli: Cli, work: Path, backplane_home: Path, words: list[str]
) -> None:
    lists = ("deny_read", "deny_write", "disallowed_tools", "require_approval_for")
    (work / "policy.json").write_text(json.dumps({name: ["q" + SECRET] for name in lists}))
    done = cli("run", "true", "--backend", "shell", "--json", "--env", f"MYKEY={SECRET}", *words)
    assert b"[redacted" in done.stdout + done.stderr
    assert SECRET.encode() not in done.stdout + done.stderr
    kept = [path for path in backplane_home.rglob("*") if path.is_file()]
    assert [path.name for path in kept if SECRET.encode() in path.read_bytes()] == []


def test_a_state_directory_that_is_a_file_is_said_to_be_none(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    for words in (["receipts", "list"], ["run", "true", "--backend", "shell"], ["apply", "abcdef"]):
        done = cli(*words, env={"BACKPLANE_HOME": str(tmp_path / "state")})
        assert fault(done) == "receipt_store_failed"
        assert b"BACKPLANE_HOME" in done.stderr


def test_a_state_directory_whose_runs_are_a_file_is_told_so(cli: Cli, backplane_home: Path) -> None:
    backplane_home.mkdir(exist_ok=True)
    (backplane_home / "runs").touch()
    done = cli("run", "true", "--backend", "shell")
    assert done.returncode == 1
    assert b"is no folder" in done.stderr
    assert b"move away what lies there" in done.stderr
    assert b"used before" not in done.stderr


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


@pytest.mark.parametrize(
    ("words", "kind"), [(["validate"], "hole"), (["validate"], "device"), (["receipts", "verify"], "hole")]
)
def test_a_file_without_an_end_is_refused_in_little_memory(work: Path, words: list[str], kind: str) -> None:
    name = "/dev/zero"
    if kind == "hole":
        name = "hole.json"
        (work / name).touch()
        os.truncate(work / name, 20 << 30)
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}));"
    program = f"{limited} from backplane.__main__ import main; sys.argv[1:] = {[*words, name]!r}; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert b"is over" in done.stderr


def test_a_protocol_that_is_none_is_answered_with_those_there_are(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text(
        '[backends.mine]\nhost = "api"\noptions = { protocol = "openai", base_url = "http://127.0.0.1:1/v1" }\n'
    )
    done = cli("run", "task", "--backend", "mine", "--model", "m")
    assert done.returncode == 2
    assert "one of: " + ", ".join(PROTOCOLS) in done.stderr.decode()


@pytest.mark.parametrize("host", ["claude", "codex", "opencode"])
def test_an_agent_that_is_not_installed_starts_nothing_and_says_how(cli: Cli, work: Path, host: str) -> None:
    (work / "backplane.toml").write_text(
        f'[backends.mine]\nhost = "{host}"\noptions = {{ program = "no-such-agent" }}\n'
    )
    done = cli("run", "task", "--backend", "mine")
    assert fault(done) == "backend_unavailable"
    fact, fix = done.stderr.decode().splitlines()
    assert fact.endswith("no-such-agent is not found or not executable")
    assert "npm install -g" in fix
    assert done.stdout == b""


@pytest.mark.usefixtures("no_agents")
def test_without_a_backend_the_router_is_asked_and_says_why_it_finds_none(cli: Cli) -> None:
    done = cli("run", "task")
    assert done.returncode == 4
    assert "no backend can take this order" in done.stderr.decode()
    assert "mock: named_only" in done.stderr.decode()


def test_a_broken_configuration_names_its_line(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text("default_backend = 'mock'\nspeed = 3\n")
    done = cli("run", "task")
    assert done.returncode == 2
    assert "backplane.toml, line 2: `speed`" in done.stderr.decode()


def test_an_order_with_a_key_twice_is_refused(cli: Cli) -> None:
    done = cli("run", "--order", "-", "--backend", "mock", stdin=b'{"task":"a","task":"b"}')
    assert done.returncode == 2
    assert "'task' stands twice" in done.stderr.decode()


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(code: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from backplane.cli import main

    assert main(["errors", code]) == 0
    assert CODES[code].meaning.encode() in capfdbinary.readouterr().out


def test_a_fault_of_our_own_is_told_without_a_traceback(cli: Cli, backplane_home: Path) -> None:
    program = "import sys; from backplane import cli; cli.COMMANDS['version'].call = 'no:version'; sys.exit(cli.main())"
    words = [sys.executable, "-c", program, "version"]
    done = subprocess.run(words, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert fault(done) == "internal"
    shown = subprocess.run(
        words, capture_output=True, timeout=WAIT_S, check=False, env={**os.environ, "BACKPLANE_DEBUG": "1"}
    )
    assert b"Traceback" in shown.stderr


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["errors", "nonsense", "backends", "--help", "run hello --backend mock"])
def test_closed_standard_streams_harm_nothing(work: Path, words: str, closed: str, backplane_home: Path) -> None:
    command = f"exec {shlex.join(PROGRAM)} {words} {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == (2 if words == "nonsense" else 0)
    assert b"Traceback" not in done.stderr
    assert sorted(path.name for path in work.iterdir()) == ["a.txt"]
    if words.startswith("run"):
        with Store.open(backplane_home, readonly=True) as store:
            assert [row.outcome for row in store.list()] == ["complete"]
            assert not store.verify_all().findings


def test_a_reader_that_leaves_ends_the_command_without_a_word() -> None:
    command = f"{shlex.join([*PROGRAM, 'errors'])}; echo code $? >&2"
    ours, theirs = os.pipe()
    with subprocess.Popen(["sh", "-c", command], stdout=theirs, stderr=subprocess.PIPE) as shell:
        os.close(theirs)
        os.close(ours)
        assert shell.communicate(timeout=WAIT_S)[1] == b"code 141\n"


@pytest.mark.parametrize("between", ["; ", "\n"])
def test_long_evidence_is_cut_at_a_whole_entry(capfd: pytest.CaptureFixture[str], between: str) -> None:
    entries = [f"backend-{number}: not_ready, manifest_unknown" for number in range(20)]
    streams.error(CapabilityError("capability_unsupported", "none", evidence=between.join(entries)))
    shown = "\n".join(line.removeprefix("  ") for line in capfd.readouterr().err.splitlines()[1:])
    assert shown.startswith("… backend-")
    kept = shown.removeprefix("… ").split(between)
    assert kept == entries[-len(kept) :]
    assert len(kept) > 5


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, "errors"], stdout=full, stderr=subprocess.PIPE, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"stream_closed: stdout cannot be written: ENOSPC")


def test_a_nonblocking_stdout_gets_every_byte() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with subprocess.Popen([*PROGRAM, "schema", "receipt_written"], stdout=theirs) as child:
        os.close(theirs)
        with open(ours, "rb") as pipe:
            assert pipe.read() == build.render("receipt_written")
        assert child.wait(WAIT_S) == 0


# Checks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["work_order", "configuration", "envelope_final"])
def test_a_schema_is_printed_byte_for_byte(cli: Cli, name: str) -> None:
    assert cli("schema", name).stdout == (ROOT / "schemas" / f"{name}.json").read_bytes()
    assert name in lines(cli("schema").stdout)


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


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ('host = "api"\noptions = { preset = "openai", tempo = 2 }', "backends.mine.options has no 'tempo'"),
        ('host = "acp"\noptions = { profile = "nobody" }', "the options of [backends.mine] name no agent"),
        ('host = "claude"\noptions = { programm = "x" }', "unknown field `programm`; known are program, "),
        ('host = "codex"\noptions = { retries = "x" }', "Expected `int`, got `str` - at `$.retries`"),
        ('host = "acp"\noptions = { profile = "qwen", silence = 3 }', "unknown field `silence`"),
        ('host = "claude"\noptions = { program = 3 }', "the options of [backends.mine] name no agent"),
        ('host = "shell"\noptions = { fast = true }', "the options of [backends.mine]: 'shell' takes none"),
        ('host = "nobody"', "no shipped host 'nobody'"),
        ('host = "claude"', None),
        ('host = "api"\noptions = { preset = "openai" }', None),
    ],
)
def test_validate_holds_a_shipped_hosts_options_against_what_it_takes(
    cli: Cli, work: Path, declared: str, said: str | None
) -> None:
    (work / "mine.toml").write_text(f"[backends.mine]\n{declared}\n")
    done = cli("validate", "mine.toml")
    (line,) = lines(done.stdout)
    if said is None:
        assert (line, done.returncode) == ("mine.toml: configuration, valid", 0)
    else:
        assert line.startswith("mine.toml: configuration: /backends/mine: ")
        assert said in line
        assert "; " in line, "a next step"
        assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "fact", "step"),
    [
        (["run", "-b", "shell", "--policy", "strct", "x"], "no policy 'strct'", "did you mean strict?"),
        (["run", "-b", "shell", "--context", "none", "x"], "none cannot be read", "name a file"),
        (["run", "-b", "shell", "--env-file", "none", "x"], "none cannot be read", "name a file"),
        (["run", "--order", "none"], "none cannot be read", "name a file"),
        (["validate", "none"], "none cannot be read", "name a file"),
        (["--config", "none", "backends"], "none cannot be read", "name a file"),
        (["run", "-b", "shell", "--timeout", "0", "x"], "--timeout is wrong: it is a number > 0", "see `backplane"),
        (["run", "-b", "shell", "--dry-run", "--receipt", "r", "x"], "no effect with --dry-run", "leave one"),
        (["run", "-b", "shell", "--dry-run", "--sign-key", "none", "x"], "none", ""),
        (["run", "-b", "shell", os.fsdecode(b"\xff\xfe")], "the task is no UTF-8 text", "write it in UTF-8"),
    ],
)
def test_what_cannot_be_used_is_told_with_the_next_step(cli: Cli, words: list[str], fact: str, step: str) -> None:
    done = cli(*words)
    code = "usage_invalid" if fact.startswith(("no effect", "the task")) else "config_invalid"
    assert (fault(done), done.returncode) == (code, 2), done
    first, *rest = lines(done.stderr)
    assert fact in first
    assert any(line.startswith(f"  {step}") for line in rest), done.stderr


@pytest.mark.parametrize("words", [["run", "--nosuch", "x"], ["route", "--prefer", "fast", "x"]])
def test_nothing_is_suggested_that_is_hardly_alike(cli: Cli, words: list[str]) -> None:
    assert b"did you mean" not in cli(*words).stderr


MINE = '[backends.mine]\ncommand = ["sh"]\n'


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ('policy = "strct"', "policy"),
        ('[policy]\ndeny_write = ["[z"]', "policy"),
        ('signing_key = "nokey"', "signing_key"),
        ('[[hooks]]\nevent = "pre_tool"\ncommand = ["./nope.sh"]', "hooks/0"),
        ('[[hooks]]\nevent = "pre_tool"\ncommand = ["true"]\ntools = ["[z"]', "hooks/0"),
        (f"{MINE}options.prices = {{ inptu = 1 }}", "backends/mine/options/prices"),
        ('[routing.models."m-1.5"]\nprices = { inptu = 1 }', "routing/models/m-1.5/prices"),
        ('[web]\nroots = ["/nonexist"]', "web/roots/0"),
        ('default_backend = "shel"', "default_backend"),
        (f'default_backend = "mine"\npolicy = "own.json"\n{MINE}', None),
    ],
)
def test_validate_and_doctor_refuse_settings_that_every_run_would(
    cli: Cli, work: Path, settings: str, place: str | None
) -> None:
    below = work / "below"
    below.mkdir()
    (below / "own.json").write_text("{}")  # Paths count from the file's folder.
    (below / "mine.toml").write_text(settings + "\n")
    validated, looked = cli("validate", "below/mine.toml"), cli("doctor", "--json", "--config", "below/mine.toml")
    missing = {row["name"] for row in map(json.loads, lines(looked.stdout)) if row["state"] == "missing"}
    if place is None:
        assert (validated.returncode, missing) == (0, set()), validated
    else:
        assert validated.stdout.startswith(f"below/mine.toml: configuration: /{place}: ".encode()), validated
        assert (validated.returncode, looked.returncode) == (1, 1)
        assert place in missing


@pytest.mark.parametrize(
    "text",
    [
        '{"deny_write": ["[z"]}',
        '{"task": "x", "policy": {"deny_write": ["[z"]}}',
        '{"task": " "}',
        '{"task": "x", "workspace": {"mode": "pass_through", "exclude": ["a"]}}',
    ],
)
def test_validate_refuses_what_every_run_would(cli: Cli, text: str) -> None:
    done = cli("validate", "-", stdin=text.encode())
    assert (done.returncode, b", valid" in done.stdout) == (1, False), done


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        (["schema", "nope"], b"`backplane schema` lists all"),
        (["schema", "work_orde"], b"did you mean work_order?"),
        (["compare", "x", "-b", "shell"], b"backends: "),
        (["run", "x", "--param", "nope"], b"KEY=JSON"),
        (["run", "x", "--mcp", "nope"], b"NAME=COMMAND"),
        (["run", "x", "--require", "a=nope"], b"native"),
        (["doctor", "--url", "x"], b"anthropic"),
        (["replay", "--policy", "ci"], b"--all"),
        (["compare", "x", "-b", "shell", "-b", "shell"], b", mock"),
        (["compare", "x", "-b", "shell", "-b", "mock/"], b"BACKEND/MODEL"),
    ],
)
def test_a_wrong_word_is_usage_and_names_the_choice(cli: Cli, words: list[str], choice: bytes) -> None:
    done = cli(*words)
    assert (fault(done), done.returncode) == ("usage_invalid", 2), done
    assert choice in done.stderr


def test_conform_says_a_line_a_check_and_the_level(cli: Cli) -> None:
    done = cli("conform", "--", "false")
    assert done.returncode == 1
    *checks, level = lines(done.stdout)
    assert level.startswith("level: none")
    assert all(line.split()[0] in ("pass", "fail", "skip") for line in checks if not line.startswith(" "))
    skips = [line for line in checks if line.startswith("skip")]
    assert len(skips) == len({line.partition("): ")[2] for line in skips}) == 1, "one line a reason"
    report = json.loads(cli("conform", "--json", "--", "false").stdout)
    assert skips[0].startswith(f"skip  {sum(one['verdict'] == 'skip' for one in report['results'])} checks (S")
    assert report["level"] == "none"
    assert report["command"] == ["false"]


def test_doctor_says_what_is_missing_and_how_to_mend_it(cli: Cli, work: Path) -> None:
    good = cli("doctor")
    assert good.returncode == 0, good.stdout
    names = [json.loads(line)["name"] for line in lines(cli("doctor", "--json").stdout)]
    assert names[:4] == ["python", "git", "sqlite", "state"]
    assert {"landlock", "bubblewrap", "network namespace", "cgroup", "configuration", "backend mock"} <= set(names)
    bad = cli("doctor", env={"PATH": "/nonexistent", "BACKPLANE_HOME": "/dev/null/x", "BACKPLANE_IDEL_S": "3"})
    assert bad.returncode == 1
    text = bad.stdout.decode()
    assert re.search(r"MISSING +git .*\n +install git", text)
    assert re.search(r"MISSING +state .*/dev/null/x cannot be written\n +set BACKPLANE_HOME", text)
    assert "BACKPLANE_IDEL_S is no setting" in text
    (work / "backplane.toml").write_text("default_backend = 'gone'\n[backends.mine]\ncommand = ['surely-not-there']\n")
    text = cli("doctor").stdout.decode()
    assert re.search(r"MISSING +backend mine", text)
    assert re.search(r"MISSING +default_backend", text)


def test_backends_are_listed_with_what_keeps_them_from_being_ready(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text("[backends.mine]\ncommand = ['surely-not-there']\n")
    found = {entry["id"]: entry for entry in map(json.loads, lines(cli("backends", "--json").stdout))}
    assert found["mock"]["ready"]
    assert not found["mine"]["ready"]
    assert "surely-not-there" in found["mine"]["why"]
    assert "mine not ready: surely-not-there" in " ".join(cli("backends").stdout.decode().split())


def test_backends_are_listed_with_what_they_said_of_themselves_last(cli: Cli) -> None:
    assert json.loads(cli("backends", "--json", "mock").stdout)["manifest"] is None
    assert cli("run", "task", "--backend", "mock").returncode == 0
    assert json.loads(cli("backends", "--json", "mock").stdout)["manifest"]["tool_edit"] == "emulated"
    assert "tool_edit (emulated), tool_read" in cli("backends", "mock").stdout.decode()


def test_a_look_at_what_backends_can_do_makes_no_state_folder(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "none"
    done = cli("backends", "--matrix", "claude", env={"BACKPLANE_HOME": str(home)})
    assert (done.returncode, done.stderr, home.exists()) == (0, b"", False)
    assert b"never tried" in done.stdout


COUNTED = """
import sys
opened = []
sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)
from backplane.cli import main
main(["backends"])
print(sum(name.endswith("claude.toml") for name in opened), file=sys.stderr)
"""


def test_each_backend_of_a_list_is_looked_up_once(work: Path) -> None:
    own = f'host = "claude"\noptions = {{ program = "{sys.executable}" }}\n'
    (work / "backplane.toml").write_text(f"[backends.claude]\n{own}[backends.other]\n{own}")
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=work, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert re.findall(r"^(\S+) +ready$", done.stdout, re.MULTILINE)[:2] == ["claude", "mock"]
    assert int(done.stderr) == 2, "the table of the host, once for each of its backends"


def test_an_agent_without_its_key_is_told_which_one_unless_it_has_a_login(cli: Cli, work: Path) -> None:
    program = f'program = "{sys.executable}"'
    (work / "backplane.toml").write_text(
        f'[backends.keyless]\nhost = "claude"\noptions = {{ {program} }}\n'
        f'[backends.of_a_table]\nhost = "qwen"\noptions = {{ {program} }}\n'
        f'[backends.any_key]\nhost = "opencode"\noptions = {{ {program} }}\n'
        f'[backends.loggedin]\nhost = "claude"\noptions = {{ {program}, own_state = true }}\n'
        f'[backends.keyed]\nhost = "claude"\noptions = {{ {program} }}\nenv = {{ ANTHROPIC_API_KEY = "k" }}\n'
    )
    found = {entry["id"]: entry for entry in map(json.loads, lines(cli("backends", "--json").stdout))}
    assert all(found[name]["ready"] for name in ("keyless", "loggedin", "keyed")), "it may have another way"
    assert "ANTHROPIC_API_KEY is not set" in found["keyless"]["fix"]
    assert "OPENAI_API_KEY is not set" in found["of_a_table"]["fix"]
    assert (found["loggedin"]["fix"], found["keyed"]["fix"], found["any_key"]["fix"]) == ("", "", "")
    assert "no key: ANTHROPIC_API_KEY" in cli("backends", "keyless").stdout.decode()


# Receipts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(backplane_home: Path) -> list[str]:
    """Run ids of three stored receipts."""
    with Store.open(backplane_home) as store:
        return [
            store.adopt(seal(receipt_of([delta(f"text {number}"), delta("\x1b[2J")]))).run_id for number in range(3)
        ]


def test_receipts_are_listed_newest_first(cli: Cli, stored: list[str]) -> None:
    done = cli("receipts", "list")
    assert [line.split()[0] for line in lines(done.stdout)] == stored[::-1]
    assert cli("receipts").stdout == done.stdout
    done = cli("receipts", "list", "--limit", "2", "--json")
    assert [json.loads(line)["run_id"] for line in lines(done.stdout)] == stored[:0:-1]


def test_a_list_has_the_name_that_a_backend_has_here(cli: Cli, work: Path, stored: list[str]) -> None:
    (work / "backplane.toml").write_text('[backends.house]\nhost = "mock"\n')
    for name in ("house", "mock"):
        assert cli("run", "do it", "--backend", name).returncode == 0
    done = cli("receipts", "list")
    assert [line.split("  ")[-1] for line in lines(done.stdout)] == ["mock", "house (mock)", "mock", "mock", "mock"]
    told = [json.loads(line) for line in lines(cli("receipts", "list", "--json").stdout)]
    named = [(row["backend"], row["backend_name"]) for row in told]
    assert named == [("mock", "mock"), ("mock", "house"), *[("mock", None)] * 3]
    shown = [cli("receipts", "show", row["run_id"]).stdout.decode() for row in told[:3]]
    assert [re.findall("^backend (.*)$", text, re.M) for text in shown] == [["mock"], ["house (mock)"], ["mock"]]
    cli("receipts", "prune", "--keep", "0")
    assert lines(cli("receipts", "list").stdout)[1].endswith("  mock")


def test_an_empty_store_is_an_empty_list_and_is_not_made(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "new"
    done = cli("receipts", "list", env={"BACKPLANE_HOME": str(home)})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"no receipts\n")
    assert not home.exists()


def test_without_a_command_it_shows_what_there_is(cli: Cli) -> None:
    done = cli()
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == cli("--help").stdout


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
    trace = backplane_home / "runs" / stored[2] / "trace.jsonl"
    trace.write_bytes(trace.read_bytes().replace(b"text 2", b"text 3"))
    assert cli("receipts", "verify", stored[2]).returncode == 1
    done = cli("receipts", "verify")
    assert done.returncode == 1
    assert stored[2] in done.stdout.decode()


def test_diff_says_where_two_receipts_differ(cli: Cli, stored: list[str]) -> None:
    same = cli("receipts", "diff", stored[0], stored[0])
    assert (same.returncode, same.stdout) == (0, b"")
    done = cli("receipts", "diff", stored[0], stored[1])
    assert done.returncode == 1
    assert '/trace/0/text\n  - "text 0"\n  + "text 1"\n' in done.stdout.decode()


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
        return store.list()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (mock({"say": "hello"}), 0, "complete"),
        (mock({"say": "x"}, {"outcome": "failed"}), 1, "failed"),
        (mock({"say": "x"}, {"outcome": "partial"}), 3, "partial"),
        (mock({"fail": {"message": "no", "code": "backend_auth_failed"}}), 1, "failed"),
        (mock({"say": "x"}, {"exit": 7}), 1, "host_exit"),
        (mock({"raw": '{"t":\n'}), 1, "protocol"),
        ([*mock({"say": "x"}, {"sleep_s": 60}), "--idle-timeout", "0.2"], 3, "idle"),
        ([*mock({"sleep_s": 60}), "--timeout", "4"], 3, "deadline"),
        (["--backend", "mock", "--require", "vision"], 4, "refused"),
        (["--backend", "mock", "--require", "streaming=native"], 0, "complete"),
        (["--sidecar", "/surely/not/there"], 1, "failed"),
        (["--sidecar", "cat"], 1, None),
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


def test_a_sidecars_relative_paths_count_from_the_callers_folder(cli: Cli, work: Path) -> None:
    shutil.copy(ROOT / "hosts" / "mock.py", work / "host.py")
    done = cli("run", "task", "--sidecar", f"{sys.executable} host.py")
    assert done.returncode == 0, done
    assert b"I was asked: task" in done.stdout


def test_a_policy_that_cannot_be_used_refuses_the_run(cli: Cli, work: Path) -> None:
    (work / "policy.json").write_text('{"deny_read": ["[a"]}')
    done = cli("run", "task", "--backend", "mock", "--policy", "policy.json")
    assert done.returncode == 4
    assert fault(done) == "policy_invalid"


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


@pytest.mark.parametrize("code", ["\x1b]0;gotcha\x07\x1b[2J", "complete\nbackend_crashed: forged", "x" * 100_000])
def test_a_code_of_a_child_is_one_short_escaped_word(cli: Cli, work: Path, code: str) -> None:
    hello = {
        "t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "odd", "backend_version": None,
        "adapter_version": None}, "capabilities": {}, "mode": "mapped", "extensions": [],
    }  # fmt: skip
    says = (
        f"import json, sys; print(json.dumps({hello}), flush=True); ref = json.loads(input())['id']; "
        f"print(json.dumps(dict(t='fatal', ref_id=ref, error='died', error_code={code!r})), flush=True); input()"
    )
    (work / "odd.py").write_text(says)
    done = cli("run", "task", "--sidecar", f"{sys.executable} -I odd.py")
    assert done.returncode == 1
    assert lines(done.stderr) == [f"internal (its own code: {streams.one_line(code, streams.CODE_CHARS_MAX)}): died"]
    assert not set(b"\x1b\x07\r") & set(done.stderr)


def test_every_error_code_has_a_next_step(cli: Cli) -> None:
    assert set(REMEDIES) == set(CODES | OWN_CODES)
    for code in ("usage_invalid", "backend_auth_failed", "receipt_chain_broken"):
        assert f"  next: {REMEDIES[code]}\n" in cli("errors", code).stdout.decode()
    named = {word for step in REMEDIES.values() for word in re.findall(r"backplane ([a-z]+)", step)}
    assert named <= {*COMMANDS, "help"}


@pytest.mark.parametrize(
    ("name", "meant"), [("shel", "shell"), ("claud", "claude"), ("opencod", "opencode"), ("Gemini", "gemini")]
)
def test_a_misspelt_backend_is_told_with_the_nearest_one(cli: Cli, name: str, meant: str) -> None:
    done = cli("run", "-b", name, "x")
    assert fault(done) == "backend_not_found"
    assert f"did you mean {meant}? choose one of: ".encode() in done.stderr
    assert b"did you mean" not in cli("run", "-b", "zzzzzz", "x").stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"isolation": "maybe"}, "isolation"), ({"isolation": 1}, "isolation"), ({"isolation": "require"}, "isolation"),
        ({"enforcement": {"deny_read": "kernel"}}, "enforcement"), ({"credentials": ["nowhere"]}, "credentials"),
        ({"isolation": "required", "enforcement": {"deny_read": "os"}, "credentials": ["git"]}, None),
    ],
)  # fmt: skip
def test_validate_refuses_settings_that_a_run_refuses(
    cli: Cli, work: Path, settings: dict[str, Any], words: str | None
) -> None:
    (work / "o.json").write_text(json.dumps({"task": "x", "config": {"vendor": {"abp": settings}}}))
    done = cli("validate", "o.json")
    assert done.returncode == (0 if words is None else 1), done
    assert words is None or words in done.stdout.decode()
    if words is not None:
        assert cli("run", "--order", "o.json", "-b", "mock").returncode in (2, 4)


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("code", ["config_invalid", "capability_unsupported", "policy_denied", "backend_auth_failed"])
@pytest.mark.parametrize("way", ["fatal", "final"])
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


@pytest.mark.parametrize("cut_at", [200, 8192])
def test_a_secret_that_goes_through_the_end_of_a_preview_is_told_nowhere(
    cli: Cli, cut_at: int, backplane_home: Path
) -> None:
    secret = "hunter2-and-quite-some-more"
    task = f"""printf '%{cut_at - 20}s%s%9000s' x "$A_KEY" y"""
    done = cli("run", task, "--backend", "shell", "--json", "--env", f"A_KEY={secret}")
    assert done.returncode == 0
    files = [path.read_bytes() for path in backplane_home.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [data for data in (done.stdout, done.stderr, *files) if secret[:8].encode() in data]


KEEPER = """
from backplane.host import EXTENSIONS, Done, Host, main
async def work(run):
    await run.carry("session", {"id": "s-1"}, "session s-1")
    return Done()
main(Host(id="keeper", capabilities={}, extensions=(*EXTENSIONS, "session/1"), heeds=("session",)), work)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_the_id_of_a_conversation_that_is_kept_is_shown(cli: Cli, work: Path, kept: bool) -> None:
    (work / "keeper.py").write_text(KEEPER)
    wish = ["--param", 'abp.session={"keep": true}'] if kept else []
    done = cli("run", "task", "--sidecar", f"{sys.executable} {work / 'keeper.py'}", *wish)
    assert done.returncode == 0
    assert ("conversation: s-1\n" in done.stdout.decode()) == kept


def test_the_last_words_of_a_dead_host_are_lines(cli: Cli) -> None:
    done = cli("run", "x", "--sidecar", f"{sys.executable} -c 'def f(): return 1/0\nf()'")
    assert [line[:13] for line in lines(done.stderr)][1:3] == ["  Traceback (", '    File "<st']
    assert b"\\n" not in done.stderr


def test_a_control_plane_as_a_host_that_has_no_place_for_its_receipts_says_what_to_do(cli: Cli) -> None:
    words = ["run", "echo hi", "--sidecar", f"{sys.executable} -m backplane serve", "--param", "abp.backend=shell"]
    done = cli(*words, "--env", "BACKPLANE_HOME=/proc/none")
    assert done.returncode == 1
    assert b"BACKPLANE_HOME" in done.stderr
    assert b'{"artifacts"' not in done.stdout, "the outer store has it"
    assert cli(*words, "--env", "BACKPLANE_HOME=/tmp/inner").returncode == 0


def test_piped_output_is_readable_text(cli: Cli) -> None:
    done = cli("run", "task", *mock({"delta": "hel"}, {"delta": "lo"}, {"say": "hello"}, {"say": "bye"}))
    text = done.stdout.decode()
    assert "hello\nbye\n" in text
    assert "hellohello" not in text
    assert re.search(r"^complete after \d+\.\d s\nrun [0-9a-f-]{36}  receipt [0-9a-f]{16}$", text, re.MULTILINE)


def test_the_shell_shows_its_commands_output_once(cli: Cli) -> None:
    done = cli("run", "echo one; echo two", "--backend", "shell")
    assert done.returncode == 0
    assert lines(done.stdout).count("two") == 1


def test_an_order_comes_from_stdin_and_options_go_over_it(cli: Cli, backplane_home: Path) -> None:
    order = {
        "task": "do it",
        "lane": "workspace_first",
        "config": {"model": "m", "vendor": {"abp": {"x": 1}}, "env": {"A": "1"}},
    }
    done = cli(
        "run", "--order", "-", "--backend", "mock", "--lane", "patch_first", "--model", "n", "--isolation", "off",
        "--param", "abp.y=two", "--env", "B=geheim-9", "--exclude", "*.log", "--deny-tool", "bash", "--max-turns", "3",
        stdin=json.dumps(order).encode(),
    )  # fmt: skip
    assert done.returncode == 0, done
    assert b"I was asked: do it" in done.stdout
    assert b"\nwithout effect in the order: /config/vendor/abp/x, /config/vendor/abp/y\n" in done.stdout
    (row,) = rows(backplane_home)
    head = (backplane_home / "runs" / row.run_id / "head.jsonl").read_bytes()
    kept = json.loads(head.splitlines()[0])["order"]
    assert kept["lane"] == "patch_first"
    assert kept["config"]["model"] == "n"
    assert kept["config"]["vendor"]["abp"] == {"x": 1, "y": "two", "isolation": "off"}
    assert kept["config"]["env"] == ["A", "B"]
    assert kept["config"]["max_turns"] == 3
    assert kept["workspace"]["exclude"] == ["*.log"]
    assert kept["policy"]["disallowed_tools"] == ["bash"]
    assert kept["policy"]["deny_write"] == list(PROFILES["default"].deny_write), "a rule is added to the default ones"
    assert b"geheim-9" not in head


UNASKED = """
from backplane.host import Done, Host, main

async def work(run):
    for number in range(7):
        for _ in range(2):
            await run.file_changed(f"secret/{number}", "written")
    return Done()

main(Host(id="unasked", capabilities={}), work)
"""


def test_what_was_done_against_the_policy_is_told_at_the_end(cli: Cli, work: Path) -> None:
    (work / "host.py").write_text(UNASKED)
    (work / "policy.json").write_text('{"deny_write": ["secret/**"]}')
    done = cli("run", "task", "--sidecar", f"{sys.executable} host.py", "--policy", "policy.json")
    told = re.findall("^policy not kept: (.*)$", done.stdout.decode(), re.MULTILINE)
    assert len(told) == 6
    assert all(f"secret/{number}" in line for number, line in enumerate(told[:5]))
    assert told[5] == "and 2 more, see the receipt"


ASKS = """
from backplane.host import EXTENSIONS, Done, Host, main

async def work(run):
    await run.tool_call("bash", {"command": "ls"}, "c1")
    verdict = await run.may("bash", {"command": "ls"}, cwd=run.order.workspace.root)
    await run.command_executed("ls", 0, "")
    return Done()

main(Host(id="asks", capabilities={}, extensions=EXTENSIONS), work)
"""


def test_a_command_that_was_approved_is_no_fault_at_the_end(cli: Cli, work: Path) -> None:
    (work / "host.py").write_text(ASKS)
    (work / "policy.json").write_text('{"require_approval_for": ["bash"]}')
    options = ("--policy", "policy.json", "--on-ask", "allow")
    done = cli("run", "task", "--sidecar", f"{sys.executable} host.py", *options)
    assert done.returncode == 0
    assert "allow by caller" in done.stdout.decode()
    assert "policy not kept" not in done.stdout.decode()


def test_a_patch_that_is_gone_is_not_taken_for_one_that_never_was(cli: Cli, work: Path, backplane_home: Path) -> None:
    cli("run", "echo x > made", "--backend", "shell")
    (row,) = rows(backplane_home)
    (backplane_home / "runs" / row.run_id / "patch.diff").unlink()
    done = cli("apply", row.run_id)
    assert done.returncode != 0
    assert b"changed nothing" not in done.stdout
    assert not (work / "made").exists()


def test_a_pipe_in_the_place_of_a_journal_keeps_no_receipt_from_being_shown(cli: Cli, backplane_home: Path) -> None:
    cli("run", "task", *mock())
    (row,) = rows(backplane_home)
    head = backplane_home / "runs" / row.run_id / "head.jsonl"
    head.unlink()
    os.mkfifo(head)
    done = cli("receipts", "show", row.run_id)
    assert done.returncode == 0, done
    assert b"backend mock" in done.stdout


def test_an_empty_name_of_a_folder_is_refused(cli: Cli, backplane_home: Path) -> None:
    cli("run", "task", *mock())
    (row,) = rows(backplane_home)
    done = cli("receipts", "export", row.run_id, "--to", "")
    assert done.returncode == 2
    assert b"--to is empty" in done.stderr


def test_a_state_folder_that_is_a_link_to_nothing_is_named_so(cli: Cli, backplane_home: Path) -> None:
    backplane_home.rmdir()
    backplane_home.symlink_to(backplane_home.with_name("nowhere"))
    assert b"it is a link to nothing" in cli("run", "task", "--backend", "mock").stderr


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


@pytest.mark.parametrize(("how", "said"), [("deny", "answer: deny"), ("allow", "answer: allow")])
def test_questions_are_answered_as_on_ask_says(cli: Cli, how: str, said: str) -> None:
    done = cli("run", "task", *mock({"ask": {"question": "really?"}}), "--on-ask", how)
    assert said in done.stdout.decode()
    assert done.returncode == 0


def test_a_run_of_one_line_leaves_a_patch_that_apply_puts_in(cli: Cli, work: Path) -> None:
    done = cli("run", "echo two >> a.txt", "--backend", "shell")
    run = re.search(r"^run (\S+)", done.stdout.decode(), re.MULTILINE)
    assert run is not None
    assert (work / "a.txt").read_text() == "one\n"
    assert cli("apply", run[1][:8], "--check").returncode == 0
    assert (work / "a.txt").read_text() == "one\n"
    assert "changed 1 file\n  a.txt" in cli("apply", run[1]).stdout.decode()
    assert (work / "a.txt").read_text() == "one\ntwo\n"
    again = cli("apply", run[1])
    assert again.returncode == 1
    assert fault(again) == "execution_workspace_error"


def test_a_patch_that_a_rule_forbids_makes_the_run_partial_and_is_applied_only_when_that_is_accepted(
    cli: Cli, work: Path
) -> None:
    (work / "policy.json").write_text('{"deny_write": ["made"]}')
    done = cli("run", "echo x > made", "--backend", "shell", "--policy", "policy.json")
    assert (done.returncode, b"policy_denied: the policy was not kept" in done.stderr) == (3, True)
    assert b"policy not kept:" in done.stdout
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


class Running:
    """A run that said one word and now waits."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child

    def until(self, text: bytes) -> bytes:
        assert self.child.stdout is not None
        seen, deadline = b"", time.monotonic() + WAIT_S
        while text not in seen:
            ready = select.select([self.child.stdout], [], [], max(deadline - time.monotonic(), 0))[0]
            assert ready, seen
            more = os.read(self.child.stdout.fileno(), 65536)
            assert more, seen
            seen += more
        return seen


@pytest.fixture
def running(work: Path) -> Iterator[Callable[..., Running]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, before: str = "", pipe: Any = subprocess.PIPE) -> Running:
        command = f"{before} exec {shlex.join([*PROGRAM, 'run', 'task', *words])}"
        child = subprocess.Popen(
            ["sh", "-c", command],
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(child)
        return Running(child)

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=WAIT_S)


WAITING: Sequence[Any] = ({"say": "ready"}, {"sleep_s": 60})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_ends_the_run_in_order(
    running: Callable[..., Running], number: int, code: int, to_group: bool, backplane_home: Path
) -> None:
    run = running(*mock(*WAITING))
    run.until(b"ready")
    (os.killpg if to_group else os.kill)(run.child.pid, number)
    _, stderr = run.child.communicate(timeout=WAIT_S)
    assert run.child.returncode == code
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
        "--mode",
        "pass_through",
    ]
    with subprocess.Popen(words, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert select.select([ours], [], [], WAIT_S)[0]
        os.close(ours)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=WAIT_S)[1] == b""
    assert child.returncode == 130


INTERRUPTED_WHILE_LOADING = """
import signal, sys
from backplane.cli import main

class Named:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            type("Owner", (), {"member": Named()}) if sys.argv[2] == "class" else signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.exit(main(["receipts", "list"]))
"""


@pytest.mark.parametrize("module", ["datetime", "_datetime", "msgspec._core", "backplane.receipts.trace"])
@pytest.mark.parametrize("where", ["module", "class"])
def test_an_interrupt_while_a_command_is_loaded_ends_it_without_words(module: str, where: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_LOADING, module, where]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


INTERRUPTED_AT = """
import signal, sys
import backplane.__main__ as front

seen, at, only = 0, int(sys.argv.pop(1)), sys.argv.pop(1)

def look(frame, event, argument):
    global seen
    seen += not only or frame.f_code.co_name == only
    if seen == at > 0:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

sys.setprofile(look)
code = front.main()
sys.setprofile(None)
if seen < at or not at:
    print(seen, file=sys.stderr)
sys.exit(code)
"""
"""Ctrl-C at the so-manieth call or return from the first line of `main` on, of all functions or of one; says how many
there were where that was none of them."""


@pytest.mark.parametrize(
    ("words", "only", "instants"),
    [
        (("version",), "", 25),
        (("receipts", "list", "--json"), "", 25),
        # What Python calls when an importing lock is given up: an interrupt there is printed and lost.
        pytest.param(("receipts", "list", "--json"), "cb", 25, id="lost"),
    ],
)
def test_an_interrupt_at_any_instant_ends_the_program_without_words(
    words: tuple[str, ...], only: str, instants: int, work: Path
) -> None:
    def ended(at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", INTERRUPTED_AT, str(at), only, *words]
        return subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=WAIT_S, check=False)

    # The first is the call of `main` itself, the last its return.
    last = int(ended(0).stderr)
    for instant in range(instants):
        at = 2 + instant * (last - 2) // instants
        done = ended(at)
        if done.returncode == 0 and 0.9 * last < int(done.stderr) < at:
            continue  # The first was a child whose lines are noted: that takes some calls more.
        assert (at, done.returncode, done.stderr) == (at, 130, "")


INTERRUPTED_IN_TEXT = """
import sys
import backplane.__main__ as front

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "backplane.cli.about":
            exec("raise KeyboardInterrupt")

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["version"]
sys.exit(front.main())
"""
"""Python remembers an interrupt of code made of a text, as that of named tuples is, and kills itself at its end."""


def test_an_interrupt_in_code_made_of_a_text_ends_with_its_code_too(tmp_path: Path) -> None:
    (tmp_path / "started.py").write_text(INTERRUPTED_IN_TEXT)
    command = [sys.executable, "-m", "started"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_signal_after_all_is_said_changes_nothing(work: Path) -> None:
    late = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM); import backplane.__main__"
    command = [sys.executable, "-c", f"{late} as front; import sys; sys.argv[1:] = ['version']; sys.exit(front.main())"]
    done = subprocess.run(command, cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout[:9], done.stderr) == (0, b"backplane", b"")


INTERRUPTED_IN_VAIN = """
import signal, sys, time
from backplane.cli import streams

class Given:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

try:
    with streams.Interrupts():
        try:
            Given()
            time.sleep(float(sys.argv[1]))
        finally:
            print("put right")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("work_s", [60, 0])
def test_an_interrupt_that_no_code_can_see_comes_once_more(work_s: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IN_VAIN, str(work_s)]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"put right\n", b"")


def test_a_second_signal_leaves_nothing_behind(running: Callable[..., Running], backplane_home: Path) -> None:
    run = running(*mock({"say": "ready"}, {"hang": None}))
    run.until(b"ready")
    os.killpg(run.child.pid, signal.SIGINT)
    os.killpg(run.child.pid, signal.SIGINT)
    run.child.send_signal(signal.SIGTERM)
    run.child.communicate(timeout=WAIT_S)
    assert run.child.returncode in (130, 143)
    (row,) = rows(backplane_home)
    assert row.reason == "cancelled"


def test_a_run_that_was_started_to_outlive_its_terminal_does(running: Callable[..., Running]) -> None:
    run = running(*mock({"say": "ready"}, {"sleep_s": 0.5}, {"say": "done"}), before="trap '' HUP INT;")
    run.until(b"ready")
    os.killpg(run.child.pid, signal.SIGHUP)
    os.kill(run.child.pid, signal.SIGINT)
    run.until(b"done")
    run.child.communicate(timeout=WAIT_S)
    assert run.child.returncode == 0


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_when_the_reader_leaves_the_run_is_stopped_and_stored(
    running: Callable[..., Running], json_lines: bool, busy: bool, backplane_home: Path
) -> None:
    steps = [{"repeat": {"times": 100000, "steps": [{"say": "ready " * 20}]}}] if busy else list(WAITING)
    run = running(*mock(*steps), *(["--json"] if json_lines else []))
    run.until(b"ready")
    assert run.child.stdout is not None
    run.child.stdout.close()
    run.child.stdout = None
    _, stderr = run.child.communicate(timeout=WAIT_S)
    assert (run.child.returncode, stderr) == (141, b"")
    (row,) = rows(backplane_home)
    assert (row.outcome, row.reason) == ("partial", "cancelled")


def test_head_takes_one_line_of_a_real_pipe(work: Path, backplane_home: Path) -> None:
    words = [*PROGRAM, "run", "task", *mock({"repeat": {"times": 5000, "steps": [{"say": "x" * 100}]}}), "--json"]
    command = f"{{ {shlex.join(words)}; echo code $? >&2; }} | head -1"
    done = subprocess.run(["sh", "-c", command], cwd=work, capture_output=True, timeout=WAIT_S, check=False)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b"code 141\n"
    assert len(rows(backplane_home)) == 1


def test_a_reader_that_stops_reading_does_not_keep_an_interrupted_run(
    running: Callable[..., Running], backplane_home: Path
) -> None:
    run = running(*mock({"repeat": {"times": 100000, "steps": [{"say": "ready " * 20}]}}))
    run.until(b"ready")
    run.child.send_signal(signal.SIGTERM)
    assert run.child.wait(WAIT_S) == 143
    assert len(rows(backplane_home)) == 1


# On a terminal --------------------------------------------------------------------------------------------------------


def on_terminal(words: Sequence[str], cwd: Path, answers: dict[bytes, bytes], **environ: str) -> tuple[int, bytes]:
    """Run the program on a terminal of its own, typing an answer when its prompt has been seen."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [*PROGRAM, *words], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm", **environ},
    )  # fmt: skip
    os.close(theirs)
    seen, waiting, deadline = b"", dict(answers), time.monotonic() + WAIT_S
    while select.select([ours], [], [], max(deadline - time.monotonic(), 0))[0]:
        try:
            more = os.read(ours, 65536)
        except OSError:  # EIO: nobody holds the other end any more
            break
        if not more:
            break
        seen += more
        for prompt in [prompt for prompt in waiting if prompt in seen]:
            os.write(ours, waiting.pop(prompt))
    os.close(ours)
    return child.wait(WAIT_S), seen


def test_a_terminal_gets_colour_and_the_diff_at_the_end(work: Path) -> None:
    code, seen = on_terminal(["run", "echo two >> a.txt", "--backend", "shell"], work, {})
    assert code == 0
    assert b"\x1b[32m+two\x1b[0m" in seen
    assert b"\x1b[32mcomplete\x1b[0m" in seen
    code, seen = on_terminal(["run", "true", "--backend", "shell"], work, {}, NO_COLOR="1")
    assert code == 0
    assert b"m" not in re.findall(rb"\x1b\[[0-9;]*([a-zA-Z])", seen)


def test_a_run_over_a_second_shows_that_it_is_alive(work: Path) -> None:
    _, seen = on_terminal(["run", "task", *mock({"sleep_s": 1.6}, {"say": "there"})], work, {})
    assert b"  1 s  mock" in seen


def test_the_live_line_is_gone_before_the_summary(work: Path) -> None:
    # A host that goes on for a while after its last event: the line is drawn, and no event comes to clear it.
    (work / "late.sh").write_text(
        'echo \'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"late"},"capabilities":{}}\'\n'
        'read -r line\nsleep 3\necho \'{"t":"fatal","ref_id":null,"error":"too late"}\'\n'
    )
    _, seen = on_terminal(["run", "task", "--sidecar", "sh late.sh"], work, {})
    assert re.search(rb"  \d s  sidecar:sh", seen), seen  # Of whichever second: a busy machine draws some of them.
    assert not any(re.search(r"\d s  sidecar:sh", line) for line in screen(seen.decode())), seen


def test_the_trials_of_an_agent_say_which_one_they_are_at(work: Path) -> None:
    (work / "agent").write_text("#!/bin/sh\nexit 3\n")
    (work / "agent").chmod(0o755)
    options = f'options = {{ program = "{work / "agent"}" }}'
    (work / "backplane.toml").write_text(f'[backends.mine]\nhost = "claude"\n{options}\n')
    code, seen = on_terminal(["backends", "--probe", "mine"], work, {})
    assert code == 1
    assert "\r\x1b[K… mine: tool_read\r\x1b[K… mine: ".encode() in seen
    assert re.search(rb"\r\x1b\[Kmine .*\r\n  streaming +native +FALSE CLAIM: not seen", seen), seen


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("-b", "nosuch", "x"), "backend_not_found"),
        (("x", "--timeout", "soon"), "usage_invalid"),
        (("x", "--tumeout", "1s"), "usage_invalid"),
        (("--order", "/no/such"), "config_invalid"),
        (("x", "-b", "shell", "--receipt", "/no/a-secret-value/r.json", "--env", "A=a-secret-value"), "config_invalid"),
        (("x", "-b", "shell"), "receipt_store_failed"),
    ],
)
def test_what_goes_wrong_before_a_json_run_is_one_fatal_of_no_run(cli: Cli, words: tuple[str, ...], code: str) -> None:
    home = {"BACKPLANE_HOME": "/proc/none"} if code == "receipt_store_failed" else {}
    plain, told = cli("run", *words, env=home), cli("run", *words, "--json", env=home)
    assert (told.returncode, told.stderr, plain.stdout) == (plain.returncode, plain.stderr, b"")
    (line,) = told.stdout.splitlines()
    fatal = json.loads(line)
    jsonschema.validate(fatal, json.loads((ROOT / "schemas" / "envelope_fatal.json").read_bytes()))
    # The line has the contract's codes alone.
    assert (fatal["ref_id"], fatal["error_code"]) == (None, "config_invalid" if code == "usage_invalid" else code)
    assert plain.stderr.decode().startswith(f"{code}: {fatal['error'].partition('; ')[0]}")
    assert b"a-secret-value" not in told.stdout + told.stderr


def test_an_agent_that_is_not_there_is_not_called_a_liar(cli: Cli, work: Path) -> None:
    (work / "backplane.toml").write_text('[backends.mine]\nhost = "claude"\noptions = { program = "/no/such" }\n')
    done = cli("backends", "--probe", "mine")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"backend_unavailable: /no/such is not found")


@pytest.mark.parametrize("command", ["serve", "mcp"])
def test_a_person_who_starts_a_server_by_hand_is_told_how_to_end_it(work: Path, command: str) -> None:
    code, seen = on_terminal([command], work, {b"end it with Ctrl-D\r\n": b"\x04"})
    assert code == 0, seen


@pytest.mark.parametrize(("typed", "said"), [(b"yes\n", b"answer: allow"), (b"blue\n", b"answer: allow blue")])
def test_a_person_is_asked_on_the_terminal(work: Path, typed: bytes, said: bytes) -> None:
    ask = {"question": "which colour?", "options": ["red", "blue"]}
    code, seen = on_terminal(["run", "task", *mock({"ask": ask})], work, {b"which colour?": typed})
    assert code == 0
    assert b"2. blue" in seen
    assert said in seen


@pytest.mark.parametrize(("typed", "denied"), [(b"y\n", False), (b"n too risky\n", True), (b"a\n", False)])
def test_a_tool_that_needs_approval_waits_for_the_persons_word(work: Path, typed: bytes, denied: bool) -> None:
    (work / "policy.json").write_text('{"require_approval_for": ["bash"]}')
    tool = {"tool": {"name": "bash", "input": {"command": "ls"}, "output": "listed"}}
    words = ["run", "task", *mock(tool), "--policy", "policy.json"]
    _, seen = on_terminal(words, work, {b"[y]es": typed})
    assert (b"policy_denied: too risky" in seen) is denied
    assert (b"listed" in seen) is not denied


def test_a_checkpoint_shows_a_cut_tail_and_pruning_keeps_the_chain(
    cli: Cli, stored: list[str], backplane_home: Path, work: Path
) -> None:
    (work / "kept.json").write_bytes(cli("receipts", "checkpoint").stdout)
    assert b"--checkpoint FILE" in cli("receipts", "verify").stdout
    assert cli("receipts", "prune", "--keep", "0").stdout.startswith(f"{len(stored)} receipts pruned".encode())
    checked = cli("receipts", "verify", "--checkpoint", "kept.json")
    assert (checked.returncode, b"0 faults" in checked.stdout) == (0, True), checked.stdout
    with closing(sqlite3.connect(backplane_home / "receipts.sqlite", isolation_level=None)) as connection:
        connection.execute("DELETE FROM receipts WHERE sequence = (SELECT max(sequence) FROM receipts)")
    assert cli("receipts", "verify").returncode == 0
    checked = cli("receipts", "verify", "--checkpoint", "kept.json")
    assert (checked.returncode, b"receipt_chain_broken" in checked.stdout) == (1, True), checked.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "3f2a", "--checkpoint", "x"),
        ("verify", "--checkpoint", "x"),
        ("prune", "--keep", "-1"),
        ("checkpoint",),
    ],
)
def test_a_wrong_word_about_the_chain_is_a_usage_error(cli: Cli, work: Path, words: tuple[str, ...]) -> None:
    (work / "x").write_text("{}")
    assert cli("receipts", *words).returncode == 2


COMMANDS_OF_THE_STATE = ["run --backend shell --isolation off true", "receipts list", "doctor", "backends", "apply abc"]


@pytest.mark.parametrize("command", COMMANDS_OF_THE_STATE)
@pytest.mark.parametrize("place", ["too long", "below a file", "a file", "a loop", "of nobody", "nowhere"])
def test_a_state_folder_that_cannot_be_had_is_an_error_with_its_code(
    place: str, command: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    home = {
        "too long": tmp_path / ("x" * 300), "below a file": tmp_path / "file" / "x", "a file": tmp_path / "file",
        "a loop": tmp_path / "loop" / "x", "of nobody": "~nobody-of-this-name/x", "nowhere": "/proc/nowhere/x",
    }[place]  # fmt: skip
    done = cli(*command.split(), env={"BACKPLANE_HOME": str(home)})
    words = (done.stdout + done.stderr).decode()
    assert done.returncode in (0, 1, 2), words
    assert "internal" not in words
    assert "Traceback" not in words
    if command.startswith("run"):
        assert done.returncode in (1, 2)
        assert words.startswith(("receipt_store_failed: ", "config_invalid: ")), words


# A first configuration ------------------------------------------------------------------------------------------------


def test_init_writes_a_configuration_that_works_and_overwrites_none(cli: Cli, work: Path) -> None:
    made = cli("init", "--backend", "shell", "--policy", "ci", "--yes")
    assert made.returncode == 0, made.stderr
    assert (work / "backplane.toml").read_bytes() in made.stdout
    assert cli("run", "echo hello").returncode == 0
    assert cli("validate", "backplane.toml").returncode == 0
    again = cli("init", "--yes")
    assert (again.returncode, b"is there already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [((), b"--yes"), (("--yes", "--backend", "nosuch"), b"one of: "), (("--yes", "--policy", "lax"), b"strict")],
)
def test_init_says_what_is_wrong_and_writes_nothing(cli: Cli, work: Path, words: tuple[str, ...], said: bytes) -> None:
    done = cli("init", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (work / "backplane.toml").exists()


@pytest.mark.parametrize(("last", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_init_asks_on_a_terminal_and_shows_before_it_writes(work: Path, last: bytes, code: int) -> None:
    answers = {b"that name none": b"shell\n", b"policy [default]: ": b"lax\n", b"one of: default": b"strict\n"}
    ended, seen = on_terminal(["init"], work, {**answers, b"[Y/n]": last})
    assert ended == code, seen
    assert b'policy = "strict"' in seen
    assert (work / "backplane.toml").exists() is (code == 0)


@pytest.mark.needs("bwrap")
def test_a_control_plane_in_the_sandbox_of_another_takes_an_order(cli: Cli) -> None:
    below = " ".join([*PROGRAM, "serve"])
    done = cli("run", "--sidecar", below, "--param", 'abp.backend="shell"', "--json", "echo hi > made.txt")
    assert done.returncode == 0, done.stderr
    final = json.loads(done.stdout.splitlines()[-1])
    inner = final["receipt"]["usage_raw"]["backplane"]["inner"]
    assert final["receipt"]["outcome"] == "complete"
    assert inner["receipt_sha256"]
    assert "made.txt" in final["receipt"]["verification"]["git_diff"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "task", "--backend", "mock", "--fail-on", "foo"],
        ["run", "task", "--backend", "mock", "--lane", "foo"],
        ["errors", "nope"],
        ["runs", "--since", "foo"],
        ["report", "last", "--omit", "foo"],
    ],
)
def test_a_word_that_is_none_of_its_choices_is_usage_invalid(cli: Cli, words: list[str]) -> None:
    done = cli(*words)
    assert (fault(done), done.returncode) == ("usage_invalid", 2)


def test_errors_takes_a_code_in_capitals(cli: Cli) -> None:
    assert cli("errors", "POLICY_DENIED").stdout == cli("errors", "policy_denied").stdout != b""
