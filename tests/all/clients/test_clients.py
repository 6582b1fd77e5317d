"""The clients of `contracts/clients/`, each through the same orders, judged by the same results.

A small driver a language plays all cases of a file over one server and prints a line of JSON for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane import resources

HERE = Path(__file__).parent
CLIENTS = resources.find("contracts") / "clients"
BUILD_S_MAX = 100
PLAY_S_MAX = 100
"""For all cases of one client: some 10 s on a quiet machine."""
GONE_S_MAX = 5.0
"""The contract's: a peer that is really gone ends every run within it."""
POLL_S = 0.02
RUNS = 50
BIG_BYTES = 10_000_000
LONG_TEXTS = 20
LONG_BYTES = 1_000_000
"""Twenty of these are over the 16 MiB of a line, one of them is not."""

Record = dict[str, Any]
Command = list[str]


# The cases ------------------------------------------------------------------------------------------------------------


def order(backend: str, task: str = "a task", **members: Any) -> Record:
    vendor = {"abp": {"backend": backend}, **members.pop("vendor", {})}
    return {"task": task, "lane": "patch_first", "config": {"vendor": vendor}, **members}


def mock(*steps: Record, **members: Any) -> Record:
    return order("mock", vendor={"mock": {"scenario": list(steps)}}, **members)


def texts(count: int, size: int = 3, wait_s: float = 0) -> Record:
    return order("texts", vendor={"texts": {"count": count, "bytes": size, "wait_s": wait_s}})


DEPLOY = {"tool": {"name": "deploy", "input": {"to": "production"}, "output": "deployed"}}
ASKING = mock(DEPLOY, {"say": "done"}, policy={"require_approval_for": ["deploy"]})
AUDIO = {"required": [{"capability": "audio", "min_support": "native"}]}

CASES: list[Record] = [
    {"cell": "complete", "order": mock({"say": "one"}, {"say": "zwei é 漢 😀 \u2028"})},
    {"cell": "fatal", "order": mock({"say": "one"}, {"fail": {"code": "backend_model_not_found", "message": "no"}})},
    {"cell": "refused", "order": mock({"say": "one"}, requirements=AUDIO)},
    {"cell": "order without a task", "order": {"lane": "patch_first"}},
    {"cell": "ask allow", "order": ASKING, "answer": {"decision": "allow"}},
    {"cell": "ask deny", "order": ASKING, "answer": {"decision": "deny", "reason": "not on a Friday"}},
    {"cell": "cancel", "order": texts(1, wait_s=60), "when": "cancel"},
    {"cell": "50 runs at once", "order": order("echo", "say"), "times": RUNS},
    {"cell": "10 MB event", "order": texts(1, BIG_BYTES)},
    {"cell": "trace beyond the line limit", "order": texts(LONG_TEXTS, LONG_BYTES), "change": True},
    {"cell": "one digit changed", "order": mock({"say": "one"}), "change": True},
    {"cell": "server killed", "order": texts(1, wait_s=60), "when": "kill the server"},
]
KILLED = {"cell": "client killed", "order": texts(1, wait_s=60), "when": "wait"}

TOLD = ["run_started", "assistant_message", "run_completed"]


def result(said: str, types: list[str], **members: Any) -> Record:
    text = said.encode()
    usual = {
        "types": types,
        "text_bytes": len(text),
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "tool_errors": 0,
        "asks": [],
        "end": "final",
        "code": None,
        "outcome": "complete",
        "reason": "complete",
        "as_streamed": False,
        "verified": True,
        "changed_verifies": None,
    }
    assert set(members) <= set(usual)
    return usual | members


TOOL = ["run_started", "tool_call", "tool_result", "assistant_message", "run_completed"]
LONG = "".join(chr(ord("a") + number) * LONG_BYTES for number in range(LONG_TEXTS))

EXPECTED: dict[str, Record] = {
    "complete": result("onezwei é 漢 😀 \u2028", ["run_started", *["assistant_message"] * 2, "run_completed"]),
    "fatal": result(
        "one", TOLD[:2], end="fatal", code="backend_model_not_found", outcome="failed", reason="failed"
    ),
    "refused": result("", [], end="fatal", code="capability_unsupported", outcome="failed", reason="refused"),
    "order without a task": result(
        "", [], end="fatal", code="contract_schema_violation", outcome=None, reason=None, verified=False
    ),
    "ask allow": result("done", TOOL, asks=["deploy"]),
    "ask deny": result("done", TOOL, asks=["deploy"], tool_errors=1),
    "cancel": result("aaa", TOLD[:2], outcome="partial", reason="cancelled"),
    "50 runs at once": {"runs": RUNS, "finals": RUNS, "verified": RUNS, "own": RUNS},
    "10 MB event": result("a" * BIG_BYTES, TOLD),
    "trace beyond the line limit": result(
        LONG, ["run_started", *["assistant_message"] * LONG_TEXTS, "run_completed"],
        as_streamed=True, changed_verifies=False,
    ),
    "one digit changed": result("one", TOLD, changed_verifies=False),
    "server killed": result(
        "aaa", TOLD[:2], end="fatal", code="backend_crashed", outcome=None, reason=None, verified=False
    ),
}  # fmt: skip


# The drivers ----------------------------------------------------------------------------------------------------------


class Bench:
    """A folder with a configuration and a home, and the server's command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        host = shutil.copy(HERE / "host.py", folder / "host.py")
        echo = resources.find("hosts") / "sh" / "echo.sh"
        backends = {"texts": [sys.executable, str(host)], "echo": ["sh", str(echo)]}
        config = folder / "backplane.toml"
        config.write_text(
            "".join(f"[backends.{name}]\ncommand = {json.dumps(command)}\n" for name, command in backends.items())
        )
        self.server = [sys.executable, "-m", "backplane", "--config", str(config), "serve"]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"BACKPLANE_HOME": str(self.home), "PYTHONPATH": str(resources.find("contracts").parent)}

    def write(self, name: str, cases: list[Record]) -> Path:
        placed = [one | {"order": one["order"] | {"workspace": {"root": str(self.workspace)}}} for one in cases]
        path = self.folder / name
        path.write_text(json.dumps({"command": self.server, "cases": placed}), encoding="utf-8")
        return path

    def alive(self) -> list[str]:
        """Command lines of the processes that name this folder: server, guard and hosts."""
        mark, found = str(self.folder).encode(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if mark in words and b"drive" not in words:
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
        return found

    def emptied(self, within_s: float) -> list[str]:
        deadline = time.monotonic() + within_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left


Driver = Callable[[Callable[[str], str], Path], Command]
"""From the finder of programs and a folder for what is built to the words before the file of cases."""


def build(command: Command, folder: Path) -> None:
    env = os.environ | {"GOFLAGS": "-mod=mod", "GOWORK": "off"}
    made = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=BUILD_S_MAX)
    assert made.returncode == 0, made.stdout + made.stderr


def node(needs: Callable[[str], str], built: Path) -> Command:
    return [needs("node"), str(HERE / "drive.mjs"), str(CLIENTS / "backplane.mjs")]


def go(needs: Callable[[str], str], built: Path) -> Command:
    compiler, program = needs("go"), built / "drive-go"
    if not program.exists():
        module = built / "go"
        (module / "backplane").mkdir(parents=True, exist_ok=True)
        (module / "go.mod").write_text("module driver\n\ngo 1.22\n")
        shutil.copy(HERE / "drive.go", module / "main.go")
        shutil.copy(CLIENTS / "backplane.go", module / "backplane")
        build([compiler, "vet", "./..."], module)
        build([compiler, "build", "-o", str(program), "."], module)
    return [str(program)]


def sh(needs: Callable[[str], str], built: Path) -> Command:
    needs("jq")
    return [needs("sh"), str(HERE / "drive.sh"), str(CLIENTS / "backplane.sh")]


def java(needs: Callable[[str], str], built: Path) -> Command:
    compiler, machine = needs("javac"), needs("java")
    classes = built / "java"
    if not classes.exists():
        sources = [str(CLIENTS / "Backplane.java"), str(HERE / "Drive.java")]
        build([compiler, "-Xlint:all", "-Werror", "-d", str(classes), *sources], built)
    # One core for the collector and the quick compiler: the cases are short.
    return [machine, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", str(classes), "Drive"]


DRIVERS: dict[str, Driver] = {"node": node, "go": go, "sh": sh, "java": java}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    return lambda: Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def played(needs: Callable[[str], str], built: Path, bench: Callable[[], Bench]) -> Callable[[str], dict[str, Record]]:
    """What a client made of every case; each client plays once."""
    known: dict[str, dict[str, Record]] = {}

    def play(client: str) -> dict[str, Record]:
        if client not in known:
            place = bench()
            command = [*DRIVERS[client](needs, built), str(place.write("cases.json", CASES))]
            ran = subprocess.run(command, env=place.env, cwd=place.folder, capture_output=True, timeout=PLAY_S_MAX)
            records = [json.loads(line) for line in ran.stdout.splitlines()]
            known[client] = {record.pop("cell"): record for record in records}
            known[client][""] = {
                "exit": ran.returncode, "stderr": ran.stderr.decode(errors="replace"), "left": place.emptied(GONE_S_MAX)
            }  # fmt: skip
        return known[client]

    return play


# The matrix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", EXPECTED)
@pytest.mark.parametrize("client", DRIVERS)
def test_every_client_finds_the_same(client: str, cell: str, played: Callable[[str], dict[str, Record]]) -> None:
    found = played(client)
    assert found.get(cell) == EXPECTED[cell], found[""]


@pytest.mark.parametrize("client", DRIVERS)
def test_a_client_ends_in_order_and_leaves_nothing(client: str, played: Callable[[str], dict[str, Record]]) -> None:
    assert played(client)[""] == {"exit": 0, "stderr": "", "left": []}


@pytest.mark.parametrize("client", DRIVERS)
def test_a_killed_client_leaves_a_cancelled_run_and_no_process(
    client: str, needs: Callable[[str], str], built: Path, bench: Callable[[], Bench]
) -> None:
    place = bench()
    command = [*DRIVERS[client](needs, built), str(place.write("cases.json", [KILLED]))]
    with subprocess.Popen(command, env=place.env, cwd=place.folder, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert json.loads(driver.stdout.readline()) == {"cell": "client killed", "ready": True}
        assert place.alive()
        driver.send_signal(signal.SIGKILL)
    assert place.emptied(GONE_S_MAX) == []
    ends = [(receipt["outcome"], receipt["usage_raw"]["backplane"]["end"]["reason"]) for receipt in receipts(place)]
    assert ("partial", "cancelled") in ends


def receipts(place: Bench) -> Iterator[Record]:
    """The receipts that the server sealed."""
    words = [sys.executable, "-m", "backplane", "receipts"]
    listed = subprocess.run([*words, "list", "--json"], env=place.env, capture_output=True, timeout=30, check=True)
    for line in listed.stdout.splitlines():
        shown = [*words, "show", json.loads(line)["run_id"], "--json"]
        yield json.loads(subprocess.run(shown, env=place.env, capture_output=True, timeout=30, check=True).stdout)
