"""`backplane mcp`: spoken with by hand; wrong input, cancellation, a client that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.receipt import Receipt
from backplane.receipts.store import Store
from backplane.serve.mcp import DOCUMENT_BYTES_MAX
from tests.peers import ROOT, Child

SERVER = (sys.executable, "-m", "backplane", "mcp")
WAIT_S = 20.0
"""For an answer on a loaded machine; usual are some milliseconds, and half a second for a run."""
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Client(Child):
    """A client by hand."""

    ids = 0

    def say(self, **message: Any) -> None:
        self.send({"jsonrpc": "2.0", **message})

    def ask(self, method: str, params: Any = None) -> Any:
        """The answer, notifications before it skipped."""
        self.ids += 1
        self.say(id=self.ids, method=method, params=params or {})
        while (message := self.read(WAIT_S)).get("id") != self.ids:
            continue
        return message

    def call(self, name: str, **arguments: Any) -> Any:
        answer = self.ask("tools/call", {"name": name, "arguments": arguments})
        assert answer["result"]["structuredContent"] == json.loads(answer["result"]["content"][0]["text"])
        return answer["result"]


@contextmanager
def serving(folder: Path, *, greet: bool = True, code: int = 0) -> Iterator[Client]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Client([*SERVER, "--root", folder], cwd=folder, env=env) as client:
        if greet:
            assert client.ask("initialize", HELLO)["result"]["protocolVersion"] == "2025-06-18"
            client.say(method="notifications/initialized")
        yield client
        client.close_stdin()
        assert client.wait(WAIT_S) == code


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path) as found:
        yield found


def receipts(home: Path) -> list[Receipt]:
    with Store.open(home, readonly=True) as store:
        return [store.load(row.run_id) for row in store.rows()]


def test_a_run_leaves_the_folder_as_it_was_and_gives_back_a_patch(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old\n")
    answer = client.call("run", task="echo new > a.txt", backend="shell")
    assert not answer["isError"]
    assert "-old\n+new\n" in answer["structuredContent"]["patch"]
    assert (tmp_path / "a.txt").read_text() == "old\n"
    shown = client.call("receipts", id=answer["structuredContent"]["run_id"][:8])["structuredContent"]
    assert (shown["verifies"], shown["outcome"]) == (True, "complete")
    assert shown["patch"] == answer["structuredContent"]["patch"]


def test_runs_of_other_folders_are_out_of_reach(client: Client, tmp_path: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    with serving(other) as elsewhere:
        theirs = elsewhere.call("run", task="echo theirs", backend="shell")["structuredContent"]["run_id"]
    assert client.call("receipts")["structuredContent"]["receipts"] == []
    for name in (theirs, theirs[:8], "last"):
        for answer in (client.call("receipts", id=name), client.call("run", task="x", backend=f"replay:{name}")):
            assert (answer["isError"], answer["structuredContent"]["code"]) == (True, "policy_denied")
    (tmp_path / "sub").mkdir()
    ours = client.call("run", task="echo ours", backend="shell", root="sub")["structuredContent"]["run_id"]
    (listed,) = client.call("receipts", limit=1)["structuredContent"]["receipts"]
    assert listed["run_id"] == ours
    assert not client.call("run", task="x", backend=f"replay:{ours[:8]}")["isError"]


def test_a_patch_that_the_receipt_withholds_is_shown_to_nobody(tmp_path: Path) -> None:
    secret = "kq7-hunter-2xyz-and-more"
    words = ("run", f"printf '{secret}' > a.txt", "--backend", "shell", "--env", f"A_KEY={secret}", "--json")
    command = [sys.executable, "-m", "backplane", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=WAIT_S, check=True)
    run_id = json.loads(done.stdout.splitlines()[-1])["receipt"]["meta"]["run_id"]
    with serving(tmp_path) as client:
        shown = client.call("receipts", id=run_id)["structuredContent"]
    assert shown["patch"] is None
    assert "hunter" not in json.dumps(shown)


def test_a_backend_is_told_by_its_name_here_and_by_its_own(client: Client, tmp_path: Path) -> None:
    (tmp_path / "backplane.toml").write_text('[backends.house]\nhost = "shell"\n')
    answer = client.call("run", task="true", backend="house")["structuredContent"]
    shown = client.call("receipts", id=answer["run_id"])["structuredContent"]
    (listed,) = client.call("receipts")["structuredContent"]["receipts"]
    for said in (answer, shown, listed):
        assert (said["backend_name"], said["backend"]) == ("house", "shell")


def test_a_run_that_fails_is_an_error_with_its_reason(client: Client) -> None:
    answer = client.call("run", task="exit 3", backend="shell")
    assert answer["isError"]
    assert answer["structuredContent"]["outcome"] == "failed"
    assert "exit code 3" in answer["structuredContent"]["error"]


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("run", {}, "missing required field `task`"),
        ("run", {"task": "x", "bogus": 1}, "unknown field `bogus`"),
        ("run", {"task": "x", "root": "link"}, "is not in"),
        ("run", {"task": "x", "backend": "nobody"}, "no backend"),
        ("receipts", {"id": "ffff"}, "ffff"),
    ],
)
def test_wrong_arguments_are_an_error_that_says_what_is_wrong(
    tmp_path: Path, client: Client, tool: str, arguments: dict[str, Any], words: str
) -> None:
    (tmp_path / "link").symlink_to("/etc")
    answer = client.call(tool, **arguments)
    assert answer["isError"]
    assert words in answer["structuredContent"]["error"]


def test_calls_outside_the_protocol_are_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, greet=False) as client:
        assert client.ask("ping")["result"] == {}
        assert "initialize" in client.ask("tools/list")["error"]["message"]
        assert client.ask("initialize", {"protocolVersion": "1999-01-01"})["result"]["protocolVersion"] == "2025-11-25"
        assert client.ask("resources/list")["error"]["code"] == -32601
        assert client.ask("tools/call", {"name": "rm"})["error"]["code"] == -32602
        assert client.ask("tools/call", {"name": "run", "arguments": []})["result"]["isError"]
        client.send(b"no json\n[]\n")
        assert [client.read(WAIT_S)["error"]["code"] for _ in range(2)] == [-32700, -32600]
        assert len(client.ask("tools/list")["result"]["tools"]) == 3


SLOW = "touch begun; sleep 300"


def begin_slow_run(client: Client, folder: Path) -> None:
    arguments = {"task": SLOW, "backend": "shell", "mode": "pass_through"}
    client.say(id="slow", method="tools/call", params={"name": "run", "arguments": arguments})
    end_s = time.monotonic() + WAIT_S
    while not (folder / "begun").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_cancelled_call_ends_its_run_in_order_and_gets_no_answer(
    tmp_path: Path, client: Client, backplane_home: Path
) -> None:
    begin_slow_run(client, tmp_path)
    client.say(method="notifications/cancelled", params={"requestId": "slow", "reason": "changed my mind"})
    client.say(method="notifications/cancelled", params={"requestId": "nobody"})
    end_s = time.monotonic() + WAIT_S
    while not client.call("receipts")["structuredContent"]["receipts"]:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    (receipt,) = receipts(backplane_home)
    assert receipt.backplane["end"]["reason"] == "cancelled"


def test_what_was_asked_before_the_end_of_stdin_is_answered(client: Client) -> None:
    client.say(id="last", method="tools/call", params={"name": "validate", "arguments": {"document": "{}"}})
    client.close_stdin()
    answer = client.read(WAIT_S)
    assert (answer["id"], "result" in answer) == ("last", True)


def test_a_run_that_is_open_at_the_end_of_stdin_is_cancelled_and_answered(tmp_path: Path, client: Client) -> None:
    begin_slow_run(client, tmp_path)
    client.close_stdin()
    answer = client.read(WAIT_S)
    assert answer["id"] == "slow"
    assert answer["result"]["structuredContent"]["end"]["reason"] == "cancelled"


@pytest.mark.parametrize("way", ["stdin", "signal"])
def test_a_client_that_goes_away_ends_its_runs(tmp_path: Path, backplane_home: Path, way: str) -> None:
    with serving(tmp_path, code=143 if way == "signal" else 0) as client:
        begin_slow_run(client, tmp_path)
        if way == "signal":
            client.process.send_signal(signal.SIGTERM)
            assert client.process.wait(WAIT_S) == 143
    (receipt,) = receipts(backplane_home)
    assert receipt.backplane["end"]["reason"] == "cancelled"


def test_the_configured_policy_holds_and_cannot_be_widened(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"allowed_tools": ["read"]}')
    (tmp_path / "backplane.toml").write_text('policy = "policy.json"\ndefault_backend = "shell"\n')
    with serving(tmp_path) as client:
        assert client.call("run", task="true")["structuredContent"]["outcome"] == "failed"
        widened = client.call("run", task="true", allow_tools=["bash"])
        assert "would widen" in widened["structuredContent"]["error"]


def test_a_document_over_its_bound_is_refused(client: Client) -> None:
    said = client.call("validate", document=" " * (DOCUMENT_BYTES_MAX + 1))
    assert said["isError"]
    assert "over the limit" in said["structuredContent"]["error"]
    assert client.call("validate", document='{"task":"t"}')["structuredContent"]["valid"]
