"""`backplane serve` over its real process: many runs, asks, cancels, bad input, ends of every kind, bounded memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.peers import Child, is_gone
from tests.served import (
    CLIENT,
    SERVE,
    STAGE,
    carried,
    ends,
    holds,
    mock,
    serve,
    stored,
    texts,
    until_ended,
)

SAY = {"say": "done"}
SLEEP = {"sleep_s": 60}
HELD = {"require_approval_for": ["write_file"]}
WRITE = {"write": {"path": "a.txt", "content": "new\n"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.txt").write_text("old\n")
    return folder


def greeted(**options: Any) -> Child:
    child = serve(**options)
    assert child.read(10)["t"] == "hello"
    return child


def test_an_order_that_names_no_root_works_in_an_empty_folder_of_its_own(root: Path, backplane_home: Path) -> None:
    with greeted(cwd=root, BACKPLANE_DEFAULT_BACKEND="shell") as child:
        child.send({"t": "run", "id": "r1", "work_order": {"task": "ls -A > seen; cat seen"}})
        child.send({"t": "run", "id": "r2", "work_order": {"task": "ls -A", "workspace": {"root": "."}}})
        told = ends(until_ended(child, "r1", "r2"))
        ended_in_order(child)
    assert {path.name: path.read_text() for path in root.iterdir()} == {"a.txt": "old\n"}
    first, second = told["r1"]["receipt"], told["r2"]["receipt"]
    assert "+seen" in first["verification"]["git_diff"]
    assert [event["output_preview"] for event in second["trace"] if event["type"] == "command_executed"] == ["a.txt\n"]
    assert list((backplane_home / "incoming").iterdir()) == []


def ended_in_order(child: Child, code: int = 0) -> None:
    child.close_stdin()
    while child.read() is not None:
        pass
    assert child.wait() == code
    assert "Traceback" not in child.stderr()


def begun(child: Child, *run_ids: str) -> None:
    """Wait until these runs have said something."""
    missing = set(run_ids)
    while missing:
        message = child.read(10)
        if message["t"] == "event":
            missing.discard(message["ref_id"])


# Runs -----------------------------------------------------------------------------------------------------------------


def test_the_hello_has_the_union_of_abilities_and_the_backends(backplane_home: Path, root: Path) -> None:
    with serve() as child:
        hello = child.read(10)
        assert {*CLIENT, "stage/1"} <= set(hello["extensions"])
        assert hello["backend"]["id"] == "backplane"
        assert {"mock", "shell"} <= {entry["id"] for entry in hello["backends"] if entry["ready"]}
        assert hello["capabilities"] == {}, "nothing was started for the hello"
        child.send(mock("r1", root, SAY))
        until_ended(child, "r1")
    with serve() as child:
        hello = child.read(10)
    (entry,) = [entry for entry in hello["backends"] if entry["id"] == "mock"]
    assert entry["capabilities"]["tool_edit"] == "emulated"
    assert hello["capabilities"]["streaming"] == "native"


def test_many_runs_at_once_each_with_its_own_events_and_a_receipt_whose_bytes_hold(
    backplane_home: Path, root: Path
) -> None:
    names = [str(uuid.uuid4()) for _ in range(6)]
    with greeted() as child:
        child.send(
            *[mock(name, root, {"repeat": {"times": 20, "steps": [{"say": f"{name} {{n}}"}]}}) for name in names]
        )
        told = until_ended(child, *names, wait_s=60)
        for line in child.lines:
            message = json.loads(line)
            if message["t"] == "final":
                mine = [
                    event["event"] for event in told if event["t"] == "event" and event["ref_id"] == message["ref_id"]
                ]
                assert message["receipt"]["trace"] == mine
                assert holds(line, child.lines)
        ended_in_order(child)
    for name in names:
        assert texts(told, name) == [f"{name} {number}" for number in range(20)]
        assert ends(told)[name]["receipt"]["meta"]["run_id"] == name, "S31: a run that has a UUID keeps it"
    assert stored(backplane_home) == dict.fromkeys(names, "complete")


def test_a_runs_name_that_is_known_here_or_no_uuid_gets_an_id_of_its_own(backplane_home: Path, root: Path) -> None:
    name = str(uuid.uuid4())
    with greeted() as child:
        for run_id in (name, name, "r1"):
            child.send(mock(run_id, root, SAY))
            assert ends(until_ended(child, run_id))[run_id]["t"] == "final"
    found = stored(backplane_home)
    assert len(found) == 3
    assert name in found


def test_a_cancel_ends_one_run_among_many_within_its_grace(backplane_home: Path, root: Path) -> None:
    with greeted() as child:
        child.send(*[mock(name, root, SAY, {"sleep_s": 3}) for name in ("r1", "r3")], mock("r2", root, SAY, SLEEP))
        begun(child, "r1", "r2", "r3")
        began = time.monotonic()
        child.send({"t": "cancel", "ref_id": "r2", "reason": "enough", "grace_ms": 2000})
        told = until_ended(child, "r2")
        assert time.monotonic() - began < 5.0
        final = ends(told)["r2"]
        assert (final["t"], final["receipt"]["outcome"]) == ("final", "partial")
        assert final["receipt"]["usage_raw"]["backplane"]["end"]["reason"] == "cancelled"
        assert final["receipt"]["usage_raw"]["backplane"]["cancel_reason"] == "enough"
        assert holds(child.lines[-1], child.lines)
        others = ends(until_ended(child, "r1", "r3"))
        assert {others[name]["receipt"]["outcome"] for name in ("r1", "r3")} == {"complete"}
        ended_in_order(child)


@pytest.mark.parametrize(
    ("answer", "content", "words"),
    [
        ({"decision": "deny", "reason": "not today"}, "old\n", "policy_denied: not today"),
        ({"decision": "modify", "input": {"path": "a.txt", "content": "other\n"}}, "other\n", "wrote"),
    ],
)
def test_what_the_policy_leaves_open_is_asked_above_and_done_as_answered(
    root: Path, answer: dict[str, Any], content: str, words: str
) -> None:
    with greeted() as child:
        child.send(mock("r1", root, WRITE, policy=HELD, workspace={"mode": "pass_through"}))
        ask = child.until("ask")[-1]
        assert (ask["ref_id"], ask["kind"], ask["name"]) == ("r1", "tool", "write_file")
        child.send({"t": "answer", "ref_id": "r1", "id": "nobody", "decision": "allow"})
        child.send({"t": "answer", "ref_id": "r1", "id": ask["id"], **answer})
        told = until_ended(child, "r1")
    results = [message["event"] for message in told if message["t"] == "event"]
    assert any(words in str(event["output"]) for event in results if event["type"] == "tool_result")
    assert (root / "a.txt").read_text() == content
    assert carried(told, "answer")[-1]["decision"] == answer["decision"]


# Places ---------------------------------------------------------------------------------------------------------------


def test_with_stage_the_order_is_staged_here_and_its_lane_has_its_effect(root: Path) -> None:
    with greeted() as child:
        child.send(mock("r1", root, WRITE, lane="patch_first"))
        first = ends(until_ended(child, "r1"))["r1"]
        assert "+new" in first["receipt"]["verification"]["git_diff"]
        assert (root / "a.txt").read_text() == "old\n"
        child.send(mock("r1", root, WRITE, lane="workspace_first"))
        final = ends(until_ended(child, "r1"))["r1"]
    assert "+new" in final["receipt"]["verification"]["git_diff"]
    assert (root / "a.txt").read_text() == "new\n"


def test_without_stage_the_root_is_the_place_to_work_in_whatever_the_mode(root: Path) -> None:
    with greeted() as child:
        where = {
            "mode": "staged",
            "exclude": ["a.txt"],
        }  # Whoever staged has selected; here it would only hide the work.
        child.send(mock("r1", root, WRITE, workspace=where, extensions=("cancel/1",)))
        final = ends(until_ended(child, "r1"))["r1"]
    assert (root / "a.txt").read_text() == "new\n"
    assert "+new" in final["receipt"]["verification"]["git_diff"]


def test_a_selection_in_place_is_refused_as_it_would_hide_the_work(root: Path) -> None:
    with greeted() as child:
        child.send(mock("r1", root, WRITE, workspace={"mode": "pass_through", "exclude": ["a.txt"]}))
        fatal = ends(until_ended(child, "r1"))["r1"]
    assert (fatal["t"], fatal["error_code"], (root / "a.txt").read_text()) == ("fatal", "config_invalid", "old\n")


# Backends -------------------------------------------------------------------------------------------------------------


def needing(*capabilities: str) -> dict[str, Any]:
    return {"required": [{"capability": name, "min_support": "native"} for name in capabilities]}


def configured(tmp_path: Path, **abilities: dict[str, str]) -> str:
    """A configuration with scripted agents of these abilities."""
    mock_host = Path(__file__).parents[3] / "hosts" / "mock.py"
    lines = []
    for name, levels in abilities.items():
        words = [sys.executable, str(mock_host), "--capabilities", json.dumps(levels)]
        lines.append(f"[backends.{name}]\ncommand = {json.dumps(words)}\n")
    file = tmp_path / "backplane.toml"
    file.write_text("".join(lines))
    return str(file)


def test_without_a_name_some_one_backend_must_satisfy_all(root: Path, tmp_path: Path) -> None:
    eyes = {"streaming": "native", "image_input": "native"}
    ears = {"streaming": "native", "audio": "native"}
    scenario = {"vendor": {"mock": {"scenario": [SAY]}}}
    with greeted(BACKPLANE_CONFIG=configured(tmp_path, eyes=eyes, ears=ears)) as child:
        for name in ("eyes", "ears"):
            message = mock(name, root, SAY)
            message["work_order"]["config"]["vendor"]["abp"]["backend"] = name
            child.send(message)
            assert ends(until_ended(child, name))[name]["receipt"]["backend"]["id"] == "mock"
        child.send(mock("r1", root, requirements=needing("audio"), config=scenario))
        final = ends(until_ended(child, "r1"))["r1"]
        assert "audio" in final["receipt"]["capabilities"]
        child.send(mock("r2", root, requirements=needing("audio", "image_input"), config=scenario))
        fatal = ends(until_ended(child, "r2"))["r2"]
        assert (fatal["t"], fatal["error_code"]) == ("fatal", "capability_unsupported")
        assert final["receipt"]["usage_raw"]["backplane"]["route"]["chosen"]["backend"] == "ears"


# Input ----------------------------------------------------------------------------------------------------------------


def test_bad_lines_are_answered_and_the_rest_goes_on(root: Path) -> None:
    with greeted() as child:
        child.send(mock("r1", root, SAY, {"sleep_s": 0.6}, SAY))
        begun(child, "r1")
        twice = msgspec.json.encode(mock("r3", root))[:-1] + b',"work_order":{"task":"another"}}\n'
        bad: list[dict[str, Any] | bytes] = [
            b"hello?\n",
            b"{not json\n",
            b'{"t":"run","id":"r2"}\n',
            mock("r1", root),
            twice,
            {"t": "hello"},
        ]
        child.send(*bad)
        told: list[Any] = []
        while sum(message["t"] == "fatal" for message in told) < len(bad):
            told += child.until("fatal")
        fatals = [message for message in told if message["t"] == "fatal"]
        assert [fatal["ref_id"] for fatal in fatals] == [None, None, "r2", None, "r3", None]
        assert [fatal["error_code"] for fatal in fatals] == [
            "protocol_invalid_envelope",
            "protocol_invalid_envelope",
            "contract_schema_violation",
            "protocol_unexpected_message",
            "contract_schema_violation",
            "protocol_unexpected_message",
        ]
        told += until_ended(child, "r1")
        assert texts(told, "r1")[-1] == "done"
        child.send(mock("r2", root, SAY))
        assert ends(until_ended(child, "r2"))["r2"]["t"] == "final"
        ended_in_order(child)


LINE = 64 * 1024


@pytest.mark.parametrize("over", [0, 1])
def test_a_line_at_the_limit_is_read_and_a_longer_one_is_answered_without_a_name(root: Path, over: int) -> None:
    message = mock("r1", root, SAY)
    message["work_order"]["task"] += "x" * (LINE - len(json.dumps(message).encode()) + over)
    with greeted(BACKPLANE_LINE_BYTES_MAX=LINE) as child:
        child.send(message)
        (answer,) = ends(child.until("fatal", "final")).values()
        # Read whole, it is one the host below has no room for: its frame is a little larger there.
        assert answer["ref_id"] == ("r1" if over == 0 else None)
        child.send(mock("r2", root, SAY))
        assert ends(until_ended(child, "r2"))["r2"]["t"] == "final"


def test_a_trace_beyond_the_line_is_left_out_and_the_hash_still_holds(root: Path) -> None:
    steps = {"repeat": {"times": 100, "steps": [{"say": "x" * 1000}]}}
    with greeted(BACKPLANE_LINE_BYTES_MAX=LINE) as child:
        child.send(mock("r1", root, steps))
        final = ends(until_ended(child, "r1"))["r1"]
        assert (final["trace"], final["receipt"]["trace"]) == ("as_streamed", [])
        assert holds(child.lines[-1], child.lines)
        assert not holds(child.lines[-1].replace(b'"duration_ms":', b'"duration_ms":1'), child.lines)


# Places at once -------------------------------------------------------------------------------------------------------


def test_runs_beyond_the_places_wait(backplane_home: Path, root: Path) -> None:
    with greeted(BACKPLANE_RUNS_MAX=1) as child:
        child.send(mock("r1", root, SAY, SLEEP))
        begun(child, "r1")
        child.send(*[mock(name, root, SAY) for name in ("r2", "r3")])
        # One that waits can be cancelled like any other, and leaves a receipt as well.
        child.send({"t": "cancel", "ref_id": "r3", "reason": "changed my mind"})
        waited = ends(until_ended(child, "r3"))["r3"]
        assert (waited["t"], waited["receipt"]["outcome"]) == ("final", "failed")
        assert waited["receipt"]["usage_raw"]["backplane"]["cancel_reason"] == "changed my mind"
        assert holds(child.lines[-1], child.lines)
        child.send({"t": "cancel", "ref_id": "r1", "grace_ms": 1500})
        told = ends(until_ended(child, "r1", "r2"))
        assert told["r2"]["receipt"]["outcome"] == "complete"
        ended_in_order(child)
    assert sorted(map(str, stored(backplane_home).values())) == ["cancelled", "cancelled", "complete"]


# Ends -----------------------------------------------------------------------------------------------------------------


def test_a_plain_peer_that_closes_stdin_at_once_gets_its_final(root: Path) -> None:
    with greeted() as child:
        child.send(mock("r1", root, {"sleep_s": 0.3}, SAY, extensions=STAGE))
        child.close_stdin()
        assert ends(until_ended(child, "r1"))["r1"]["receipt"]["outcome"] == "complete"
        assert child.read() is None
        assert child.wait() == 0


def test_the_end_of_stdin_cancels_runs_of_a_peer_that_would_have_kept_it_open(backplane_home: Path, root: Path) -> None:
    with greeted() as child:
        child.send(mock("r1", root, SAY, SLEEP), mock("r2", root, SAY, {"hang": None}))
        begun(child, "r1", "r2")
        began = time.monotonic()
        child.close_stdin()
        told = ends(until_ended(child, "r1", "r2"))
        assert {message["receipt"]["outcome"] for message in told.values()} == {"partial"}
        assert child.read() is None
        assert child.wait() == 0
        assert time.monotonic() - began < 5
    assert list(stored(backplane_home).values()) == ["cancelled", "cancelled"]


def hosts_of(child: Child) -> list[int]:
    """Every process below, by its pid."""
    found = [child.process.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found[1:]


def test_a_signal_ends_every_run_in_order_and_leaves_nothing(backplane_home: Path, root: Path) -> None:
    with greeted() as child:
        child.send(*[mock(name, root, SAY, SLEEP) for name in ("r1", "r2", "r3")])
        begun(child, "r1", "r2", "r3")
        below = hosts_of(child)
        assert len(below) >= 3
        began = time.monotonic()
        child.process.send_signal(signal.SIGINT)
        told = ends(until_ended(child, "r1", "r2", "r3"))
        assert {message["receipt"]["usage_raw"]["backplane"]["end"]["reason"] for message in told.values()} == {
            "cancelled"
        }
        child.wait()
        assert time.monotonic() - began < 5
        assert all(is_gone(pid) for pid in below)
    assert list(stored(backplane_home).values()) == ["cancelled"] * 3


def test_a_peer_that_closes_its_ear_ends_every_run_in_order(backplane_home: Path, root: Path) -> None:
    with greeted() as child:
        child.send(*[mock(name, root, SAY, SLEEP, extensions=STAGE) for name in ("r1", "r2")])
        begun(child, "r1", "r2")
        below = hosts_of(child)
        began = time.monotonic()
        assert child.process.stdout is not None
        child.process.stdout.close()
        child.wait(10)
        assert time.monotonic() - began < 5
        assert all(is_gone(pid) for pid in below)
    assert list(stored(backplane_home).values()) == ["cancelled", "cancelled"]


PEER = """
import json, os, subprocess, sys
child = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write(sys.argv[2].encode() + b"\\n"); child.stdin.flush()
while b'"say"' not in (line := child.stdout.readline()) and b"done" not in line: pass
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_peer_that_is_killed_ends_every_run_in_order(backplane_home: Path, root: Path) -> None:
    order = json.dumps(mock("r1", root, SAY, SLEEP, extensions=STAGE))
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, json.dumps(SERVE), order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdout is not None
    assert peer.stdin is not None
    pid = int(peer.stdout.readline())
    began = time.monotonic()
    peer.kill()
    peer.wait()
    peer.stdout.close()
    peer.stdin.close()
    assert is_gone(pid)
    assert time.monotonic() - began < 5
    assert list(stored(backplane_home).values()) == ["cancelled"]


def test_a_server_that_is_killed_leaves_no_process_and_its_runs_are_sealed_at_the_next_start(
    backplane_home: Path, root: Path
) -> None:
    with greeted() as child:
        child.send(*[mock(name, root, SAY, SLEEP) for name in ("r1", "r2")])
        begun(child, "r1", "r2")
        below = hosts_of(child)
        child.process.kill()
        child.wait()
        assert all(is_gone(pid) for pid in below)
    with greeted() as child:
        child.send(mock("r3", root, SAY))
        until_ended(child, "r3")
    assert sorted(map(str, stored(backplane_home).values())) == ["complete", "interrupted", "interrupted"]


# Slow readers ---------------------------------------------------------------------------------------------------------


def rss_kib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def wait_for(seen: Callable[[], bool], wait_s: float = 10.0) -> None:
    deadline = time.monotonic() + wait_s
    while not seen():
        assert time.monotonic() < deadline
        os.sched_yield()


FLOOD = {"repeat": {"times": 4_000, "steps": [{"say": "x" * 5_000}]}}
"""20 MB: hundreds of times what the pipes hold."""


def test_a_reader_that_stops_reading_costs_no_memory_and_loses_nothing(backplane_home: Path, root: Path) -> None:
    in_place = {"mode": "pass_through"}
    with greeted() as child:
        before = rss_kib(child.process.pid)
        child.send(mock("flood", root, FLOOD))
        # Nothing is read from here on. The others are begun all the same, and go on until they have to be heard (S76).
        written = [root / f"{number}.txt" for number in range(8)]
        for number, path in enumerate(written):
            step = {"write": {"path": path.name, "content": "x"}}
            child.send(mock(f"r{number}", root, step, SAY, workspace=in_place))
        wait_for(lambda: len([*backplane_home.glob("runs/*")]) >= 9)
        assert rss_kib(child.process.pid) - before < 64 * 1024
        # Reading goes on: nothing was lost.
        told = until_ended(child, "flood", *[f"r{number}" for number in range(8)], wait_s=60)
        assert len(texts(told, "flood")) == 4_000
        assert {message["receipt"]["outcome"] for message in ends(told).values()} == {"complete"}
        assert all(path.exists() for path in written)
        assert rss_kib(child.process.pid) - before < 96 * 1024
        ended_in_order(child)


def test_a_reader_that_stopped_reading_does_not_keep_runs_from_ending_in_order(
    backplane_home: Path, root: Path
) -> None:
    with greeted() as child:
        child.send(*[mock(name, root, FLOOD) for name in ("r1", "r2")])
        begun(child, "r1", "r2")
        below = hosts_of(child)
        began = time.monotonic()
        child.process.terminate()
        child.wait(10)
        assert time.monotonic() - began < 8
        assert all(is_gone(pid) for pid in below)
    assert list(stored(backplane_home).values()) == ["cancelled", "cancelled"]
