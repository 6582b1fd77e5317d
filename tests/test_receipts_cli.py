"""Receipts of others, and stores that somebody changed, through the real commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.canonical import sha256_hex
from backplane.contract.events import (
    AgentEvent,
    CommandExecuted,
    Failed,
    FileChanged,
    ToolCall,
    ToolResult,
    Warned,
)
from backplane.contract.receipt import BackendIdentity, Receipt, Verification
from backplane.receipts.bundle import write_receipt
from backplane.receipts.pieces import seal
from backplane.receipts.store import Store
from tests.in_process import in_process
from tests.receipt_writer import TS, delta, receipt_of

WAIT_S = 30
ACTS = "\x1b]0;owned\x07\x9b2J\u202e"
"""What a terminal acts on."""

Cli = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def cli(tmp_path: Path, home: Path) -> Cli:
    def call(*words: str | Path, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "BACKPLANE_HOME": str(home)}
        if not program:
            done = in_process(*words, cwd=tmp_path, env=env)
            return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())
        return subprocess.run(
            [*program, sys.executable, "-m", "backplane", *map(str, words)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )

    return call


def written(path: Path, receipt: Receipt) -> Receipt:
    """The receipt as its maker sealed it, in a file."""
    sealed = seal(receipt)
    write_receipt(sealed, path)
    return sealed


# What a terminal acts on ----------------------------------------------------------------------------------------------


def check_plain(done: subprocess.CompletedProcess[bytes]) -> None:
    for shown in (done.stdout.decode(), done.stderr.decode()):
        assert not set(shown) & set("\x1b\x07\x9b\u202e"), shown
        assert "Traceback" not in shown


def hostile() -> Receipt:
    """Valid, and every text in it that its maker is free in has what a terminal acts on."""
    trace: list[AgentEvent] = [
        delta(ACTS),
        Warned(ts=TS, message=ACTS),
        Failed(ts=TS, message=ACTS, error_code=ACTS),
        ToolCall(ts=TS, tool_name=ACTS, input={"command": ACTS}),
        ToolResult(ts=TS, tool_name=ACTS, output=ACTS, is_error=True),
        FileChanged(ts=TS, path=ACTS, summary=ACTS),
        CommandExecuted(ts=TS, command=ACTS, exit_code=1, output_preview=ACTS),
    ]
    added = {
        "end": {"reason": ACTS},
        "unheard": [ACTS],
        "enforcement": {"violations": [{"reason": ACTS}]},
        "checkpoints": {
            "made": [{"id": ACTS, "name": ACTS, "at": ACTS, "why": "asked", "tree": ACTS, "files": 1}],
        },
    }
    return receipt_of(
        trace,
        backend=BackendIdentity(ACTS, ACTS, ACTS),
        usage_raw={"backplane": added, "structured_output": ACTS, ACTS: 1},
        verification=Verification(harness_ok=True, git_diff=ACTS, git_status=ACTS),
        outcome="failed",
    )


def test_no_command_prints_what_a_terminal_acts_on_of_an_imported_receipt(cli: Cli, home: Path, tmp_path: Path) -> None:
    receipt = written(tmp_path / "r.json", hostile())
    written(tmp_path / "plain.json", receipt_of([], receipt.meta.run_id))
    run_id = receipt.meta.run_id
    assert cli("receipts", "import", "r.json").returncode == 0
    for words, code in (
        (("show", run_id), 0),
        (("verify",), 0),
        (("verify", run_id, "r.json"), 0),
        (("export", run_id, "--to", f"out{ACTS}"), 0),
        (("import", "r.json"), 1),
    ):
        done = cli("receipts", *words)
        assert done.returncode == code, done
        check_plain(done)
    check_plain(cli("rewind", run_id))


# What is valid and yet nonsense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [True, "7", 1])
def test_a_receipt_that_is_wrong_about_the_size_of_its_patch_brings_none(
    cli: Cli, tmp_path: Path, size: object
) -> None:
    patch = {"sha256": sha256_hex(b"a patch"), "bytes": size}
    for diff in ("a patch", None):
        verification = Verification(harness_ok=True, git_diff=diff)
        written(
            tmp_path / "r.json", receipt_of([], usage_raw={"backplane": {"patch": patch}}, verification=verification)
        )
        done = cli("receipts", "import", "r.json")
        is_refused = diff is not None and size != "7"  # A text is no size, and the hash is right.
        assert (done.returncode, done.stderr.startswith(b"receipt_hash_mismatch")) == (int(is_refused), is_refused)
    assert cli("receipts", "verify").returncode == 0


NONSENSE: list[Any] = [5, "text", [[]], {"reason": [1]}, {"violations": 5}, {"made": 5}, None]


def test_whatever_stands_where_our_members_do_is_shown_and_verified(cli: Cli, home: Path) -> None:
    names = ("end", "unheard", "enforcement", "duration", "checkpoints", "lane", "counts", "capabilities")
    with Store.open(home) as store:
        stored = [
            store.append(seal(receipt_of([delta("a")], usage_raw={"backplane": dict.fromkeys(names, value)}))).run_id
            for value in NONSENSE
        ]
        stored += [store.append(seal(receipt_of([], usage_raw=value))).run_id for value in ({"backplane": 5}, [5], 7)]
    for run_id in stored:
        done = cli("receipts", "show", run_id)
        assert (done.returncode, done.stderr) == (0, b""), done
    assert cli("receipts", "verify", *stored).returncode == 0
