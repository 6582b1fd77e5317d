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
from tests.all.clients.compiled import Sources, compiled

HERE = Path(__file__).parent
CLIENTS = resources.find("contracts") / "clients"
PLAY_S_MAX = 100
"""For all cases of one client: some 10 s on a quiet machine."""
GONE_S_MAX = 5.0
"""The contract's: a peer that is really gone ends every run within it."""
POLL_S = 0.02
RUNS = 8
BIG_BYTES = 5_000_000
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
    {"cell": "many runs at once", "order": order("echo", "say"), "times": RUNS},
    {"cell": "5 MB event", "order": texts(1, BIG_BYTES)},
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
    "many runs at once": {"runs": RUNS, "finals": RUNS, "verified": RUNS, "own": RUNS},
    "5 MB event": result("a" * BIG_BYTES, TOLD),
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
        self.server = [sys.executable, "-m", "backplane", "serve", "--config", str(config)]

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


Driver = Callable[[Callable[[str], str]], Command]
"""From the finder of programs to the words before the file of cases."""


def node(needs: Callable[[str], str]) -> Command:
    return [needs("node"), str(HERE / "drive.mjs"), str(CLIENTS / "backplane.mjs")]


def go(needs: Callable[[str], str]) -> Command:
    compiler = needs("go")
    sources: Sources = {
        "go.mod": "module driver\n\ngo 1.22\n",
        "main.go": HERE / "drive.go",
        "backplane/backplane.go": CLIENTS / "backplane.go",
    }
    made = compiled("drive-go", sources, [compiler, "vet", "./..."], [compiler, "build", "-o", "drive", "."])
    return [str(made / "drive")]


def sh(needs: Callable[[str], str]) -> Command:
    needs("jq")
    return [needs("sh"), str(HERE / "drive.sh"), str(CLIENTS / "backplane.sh")]


def java(needs: Callable[[str], str]) -> Command:
    compiler, machine = needs("javac"), needs("java")
    sources = {path.name: path for path in (CLIENTS / "Backplane.java", HERE / "Drive.java")}
    classes = compiled("drive-java", sources, [compiler, "-Xlint:all", "-Werror", "-d", ".", *sources])
    # One core for the collector and the quick compiler: the cases are short.
    return [machine, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", str(classes), "Drive"]


DRIVERS: dict[str, Driver] = {"node": node, "go": go, "sh": sh, "java": java}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    return lambda: Bench(tmp_path_factory.mktemp("bench"))


def played(command: Command, place: Bench, cases: list[Record], within_s: float) -> tuple[dict[str, Record], Record]:
    """What a client made of each case, and how it ended itself."""
    words = [*command, str(place.write("cases.json", cases))]
    ran = subprocess.run(words, env=place.env, cwd=place.folder, capture_output=True, timeout=within_s)
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    end = {"exit": ran.returncode, "stderr": ran.stderr.decode(errors="replace")}
    return {record.pop("cell"): record for record in records}, end


# The matrix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", DRIVERS)
def test_every_client_finds_the_same_ends_in_order_and_leaves_nothing(
    client: str, needs: Callable[[str], str], bench: Callable[[], Bench]
) -> None:
    place = bench()
    found, end = played(DRIVERS[client](needs), place, CASES, PLAY_S_MAX)
    assert {"left": place.emptied(GONE_S_MAX), **end} == {"exit": 0, "stderr": "", "left": []}
    assert found == EXPECTED


@pytest.mark.parametrize("client", ["node", "sh"])  # The server sees it; a shell's stands behind other processes.
def test_a_killed_client_leaves_a_cancelled_run_and_no_process(
    client: str, needs: Callable[[str], str], bench: Callable[[], Bench]
) -> None:
    place = bench()
    command = [*DRIVERS[client](needs), str(place.write("cases.json", [KILLED]))]
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
    words = [sys.executable, "-m", "backplane"]
    listed = subprocess.run([*words, "runs", "--json"], env=place.env, capture_output=True, timeout=30, check=True)
    for line in listed.stdout.splitlines():
        shown = [*words, "receipts", "show", json.loads(line)["run_id"], "--json"]
        yield json.loads(subprocess.run(shown, env=place.env, capture_output=True, timeout=30, check=True).stdout)
