"""The host kits of `contracts/kits/`: a short host on each, held to the protocol page and run by a control plane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import backplane
from backplane import resources
from backplane.config import Settings
from backplane.conform.runner import LEVELS, conform
from backplane.contract.approval import Decision
from backplane.contract.events import Approval, OutputReported
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.run import Run
from tests.all.clients.compiled import compiled
from tests.peers import PLAIN, Child
from tests.peers import run as message

HOSTS = resources.find("hosts")
SOURCES = {"node": HOSTS / "node" / "shell.mjs", "go": HOSTS / "go" / "shell.go"}
LINES_MAX = 60
END_S_MAX = 10
KILLED_LOOKS_MAX, KILLED_POLL_S = 50, 0.01

Host = Callable[[str], tuple[str, ...]]


@pytest.fixture(scope="module")
def host(needs: Callable[[str], str]) -> Host:
    """From a language to the command of its shell host."""

    def command(language: str) -> tuple[str, ...]:
        if language == "node":
            return (needs("node"), str(SOURCES["node"]))
        go = needs("go")
        sources = {"contracts/kits/go": resources.find("contracts") / "kits" / "go", "hosts/go": HOSTS / "go"}
        steps = [go, "vet", "-C", "hosts/go", "./..."], [go, "build", "-C", "hosts/go", "-o", "../../shell", "."]
        return (str(compiled("shell-go", sources, *steps) / "shell"),)

    return command


def play(command: tuple[str, ...], order: WorkOrder, root: Path, *, cancel: bool = False, allow: bool = False) -> Run:
    async def on_ask(event: Approval) -> Decision:
        return Decision(decision="allow" if allow else "deny", reason="a test")

    async def main() -> Run:
        backend = ProcessBackend(id="kit", argv=command)
        async with backplane.start(order, backend=backend, root=root, on_ask=on_ask, settings=Settings()) as run:
            async for event in run:
                if cancel and isinstance(event, OutputReported) and "ready" in event.message:
                    await run.cancel()
        return run

    return anyio.run(main)


def told(run: Run) -> list[str]:
    return [getattr(event, "output", "") for event in run.receipt.trace if hasattr(event, "output")]


@pytest.mark.parametrize("language", SOURCES)
def test_a_short_host_on_a_kit_reaches_the_highest_level(language: str, host: Host) -> None:
    assert len(SOURCES[language].read_text().splitlines()) < LINES_MAX
    report = anyio.run(partial(conform, host(language)))
    assert [(result.name, result.seen) for result in report.results if result.verdict == "fail"] == []
    assert report.level == LEVELS[-1]
    assert set(report.extensions) >= {"cancel/1", "ping/1", "ask/1", "many/1"}


@pytest.mark.parametrize("language", SOURCES)
def test_a_command_runs_and_tells_its_output(language: str, host: Host, tmp_path: Path) -> None:
    run = play(host(language), WorkOrder("echo 'hé 漢'; echo $TONE > made; exit 3"), tmp_path)
    assert run.error is not None
    assert (run.error.code, told(run)) == ("execution_tool_failed", ["hé 漢\n"])
    assert run.receipt.outcome == "failed"
    assert run.patch is not None
    assert "+++ b/made" in run.patch.read_text()


@pytest.mark.parametrize("root", [".", "within"])
@pytest.mark.parametrize("language", [*SOURCES, "python"])
def test_a_relative_root_counts_from_the_folder_that_a_host_was_started_in(
    language: str, root: str, host: Host, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    (start / "within").mkdir(parents=True)
    command = host(language) if language in SOURCES else (sys.executable, str(HOSTS / "shell.py"))
    with Child(command, cwd=start) as child:
        child.send(message("r1", "pwd; touch made", PLAIN, workspace={"root": root}))
        child.close_stdin()
        ended = child.until("final", "fatal", wait_s=15.0)
    assert ended[-1]["t"] == "final", ended
    assert [path.relative_to(start) for path in start.rglob("made")] == [
        Path(root if root == "within" else "") / "made"
    ]


@pytest.mark.parametrize("allow", [True, False], ids=["allowed", "denied"])
@pytest.mark.parametrize("language", SOURCES)
def test_what_needs_approval_is_asked_for(language: str, allow: bool, host: Host, tmp_path: Path) -> None:
    order = WorkOrder("echo done", policy=PolicyProfile(require_approval_for=("bash",)))
    run = play(host(language), order, tmp_path, allow=allow)
    assert run.receipt.outcome == ("complete" if allow else "failed")
    assert told(run) == (["done\n"] if allow else ["policy_denied: a test"])


@pytest.mark.parametrize(
    "answer",
    [
        {"decision": "modify"},
        {"decision": "modify", "input": {"cmd": "touch other"}},
        {"decision": "allow", "input": {"command": "touch other"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("language", [*SOURCES, "python"])
def test_what_was_to_be_changed_never_runs_as_it_was(
    language: str, answer: dict[str, Any], host: Host, tmp_path: Path
) -> None:
    command = host(language) if language in SOURCES else (sys.executable, str(HOSTS / "shell.py"))
    with Child(command) as child:
        child.send(message("r1", "touch made", ["ask/1"], workspace={"root": str(tmp_path)}))
        ask = child.until("ask", wait_s=15.0)[-1]
        child.send({"t": "answer", "ref_id": "r1", "id": ask["id"], **answer})
        ended = child.until("final", "fatal", wait_s=15.0)
    assert (ended[-1]["t"], ended[-1]["receipt"]["outcome"]) == ("final", "failed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("language", SOURCES)
def test_a_cancelled_command_ends_within_the_grace(language: str, host: Host, tmp_path: Path) -> None:
    began_s = time.monotonic()
    run = play(host(language), WorkOrder("echo ready; sleep 60 & sleep 60"), tmp_path, cancel=True)
    assert run.end is not None
    assert run.end.reason == "cancelled"
    assert run.receipt.outcome == "partial"
    assert run.receipt.usage_raw.get("cancelled"), run.receipt.usage_raw
    assert time.monotonic() - began_s < END_S_MAX


def plain(command: tuple[str, ...], root: Path, task: str) -> list[dict[str, Any]]:
    """The messages of a run for a peer that announces nothing and kills the host at `final`."""
    order = {
        "id": "6f1c1f0e-5d0a-4c6e-9b8e-0d3a2f4b5c6d",
        "task": task,
        "workspace": {"root": str(root)},
    }
    messages: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps({"t": "run", "id": "r1", "work_order": order}).encode() + b"\n")
        child.stdin.close()
        while not messages or messages[-1]["t"] not in ("final", "fatal"):
            messages.append(json.loads(child.stdout.readline()))
        child.kill()
    return messages


@pytest.mark.parametrize("language", SOURCES)
def test_everything_is_cleaned_up_before_the_final(language: str, host: Host, tmp_path: Path) -> None:
    seconds = f"61.{os.getpid()}"  # Recognised among all processes.
    messages = plain(host(language), tmp_path, f"sleep {seconds} & echo hi")
    for _ in range(KILLED_LOOKS_MAX):  # What was killed may still be on its way out.
        alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if runs(path, f"sleep\0{seconds}\0")]
        if not alive:
            break
        time.sleep(KILLED_POLL_S)
    assert alive == []
    assert messages[-1]["receipt"]["outcome"] == "complete"


def runs(path: Path, words: str) -> bool:
    try:
        return path.read_bytes() == words.encode()
    except OSError:
        return False


@pytest.mark.needs("perl")
def test_a_host_written_from_the_protocol_page_alone_conforms() -> None:
    report = anyio.run(partial(conform, ("perl", str(HOSTS / "perl" / "echo.pl"))))
    assert [(result.name, result.seen) for result in report.results if result.verdict == "fail"] == []
    assert report.level == "robust", "one run at a time is all it does"
