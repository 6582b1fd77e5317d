"""More of `tests/test_cli.py`: what takes many processes, or seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.in_process import in_process
from tests.test_cli import PROGRAM, ROOT, WAIT_S, Cli, Running, lines, mock, rows, running, until, work  # noqa: F401


@pytest.fixture
def cli(work: Path) -> Cli:
    """Do a command in the folder `work`, in this process."""

    def call(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        done = in_process(*words, cwd=work, env={**os.environ, **(env or {})})
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())

    return call


SECRET = "hunter2secret-value+99=="


@pytest.mark.parametrize(
    "words",
    [
        ["--include", "[" + SECRET],
        ["--context", "c-" + SECRET],
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


MINE = '[backends.mine]\ncommand = ["sh"]\n'


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ('[policy]\ndeny_write = ["[z"]', "policy"),
        ('signing_key = "nokey"', "signing_key"),
        ('[[hooks]]\nevent = "pre_tool"\ncommand = ["true"]\ntools = ["[z"]', "hooks/0"),
        (f"{MINE}options.prices = {{ inptu = 1 }}", "backends/mine/options/prices"),
        ('[backends.mine]\nhost = "acp"\noptions = { profile = "nobody" }', "backends/mine"),
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
        assert missing & {place, place.replace("backends/", "backend ")}


def with_settings(**settings: Any) -> str:
    return json.dumps({"task": "x", "config": {"vendor": {"abp": settings}}})


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"task": "x", "policy": {"deny_write": ["[z"]}}', False),
        ('{"task": " "}', False),
        (with_settings(credentials=["nowhere"]), False),
        (with_settings(isolation="required", enforcement={"deny_read": "os"}, credentials=["git"]), True),
    ],
)
def test_validate_refuses_what_every_run_would(cli: Cli, work: Path, text: str, valid: bool) -> None:
    (work / "o.json").write_text(text)
    assert cli("validate", "o.json").returncode == (0 if valid else 1)
    assert valid or cli("run", "--order", "o.json", "-b", "mock").returncode in (2, 4)


def test_a_second_signal_leaves_nothing_behind(running: Running, backplane_home: Path) -> None:
    run = running(*mock({"say": "ready"}, {"hang": None}))
    until(run, b"ready")
    os.killpg(run.pid, signal.SIGINT)
    os.killpg(run.pid, signal.SIGINT)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=WAIT_S)
    assert run.returncode in (130, 143)
    (row,) = rows(backplane_home)
    assert row.reason == "cancelled"


def test_a_reader_that_stops_reading_does_not_keep_an_interrupted_run(running: Running, backplane_home: Path) -> None:
    run = running(*mock({"repeat": {"times": 100000, "steps": [{"say": "ready " * 20}]}}))
    until(run, b"ready")
    run.send_signal(signal.SIGTERM)
    assert run.wait(WAIT_S) == 143
    assert len(rows(backplane_home)) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("-b", "nosuch", "x"), "backend_not_found"),
        (("x", "--tumeout", "1s"), "usage_invalid"),
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


def test_an_error_after_the_final_adds_no_message(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.cli.follow.remarks", lambda *_: 1 / 0)
    done = cli("run", "true", "-b", "shell", "--json")
    assert (done.returncode, done.stderr.partition(b":")[0]) == (1, b"internal")
    assert [json.loads(line)["t"] for line in lines(done.stdout) if '"t":"event"' not in line] == ["final"]


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
