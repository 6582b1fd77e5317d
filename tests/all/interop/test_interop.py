"""Strangers on the line: hosts in the manner of the public family, and a control plane that knows nothing of ours."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.events import EVENT_TYPES
from backplane.errors import CODES
from backplane.runtime.backends import Backend, ProcessBackend
from tests import closed
from tests.peers import PLAIN, PYTHON, ROOT, Child, run
from tests.runs import QUICK, SLACK_S, backplane_of, go, order, plane, texts

INTEROP = Path(__file__).parent


@pytest.fixture(params=["python", "node"])
def family(request: pytest.FixtureRequest) -> str:
    if request.param == "node":
        request.getfixturevalue("needs")("node")
    return str(request.param)


def stranger(family: str, *what: str) -> Backend:
    program = {
        "python": (sys.executable, "-I", "-S", str(INTEROP / "family.py")),
        "node": ("node", str(INTEROP / "family.mjs")),
    }[family]
    return ProcessBackend(id=family, argv=(*program, *what))


# Their hosts, our control plane ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_plain_host_of_the_family_runs_and_its_receipt_is_made_whole(
    family: str, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        ended, events = await go(
            control, order(root, task="say hi"), stranger(family, "extra", "wrong_hash", "hash", "trace")
        )
    assert ended.end_error is None
    assert texts(events) == ["say hi"]
    receipt = ended.receipt
    assert receipt is not None
    assert receipt.mode == "mapped"
    assert receipt.outcome == "complete"
    assert receipt.verification.harness_ok
    claims = backplane_of(ended)["claims"]
    assert claims["receipt_sha256"] in ("0" * 64, "f" * 64)
    if family == "python":
        assert claims["fields"] == {"tool_calls": [{"name": "Read"}], "stream_equivalent": True}
        assert claims["run_id"] == "550e8400-e29b-41d4-a716-446655440000"
        assert receipt.usage.estimated_cost_usd == 0.0
        assert all(re.search(r"\.\d{3}(\d{3})?Z$|:\d\dZ$", event.ts) for event in events)
    else:
        assert receipt.usage_raw["value"] is None
        assert "trace" not in claims, "the same events, spelt otherwise"
        assert len({type(event) for event in events}) == 7


@pytest.mark.anyio
async def test_what_a_host_says_outside_the_contract_does_not_end_its_run(backplane_home: Path, root: Path) -> None:
    async with plane(backplane_home) as control:
        ended, events = await go(control, order(root), stranger("python", "odd", "partial"))
    assert ended.end_error is None
    receipt = ended.receipt
    assert receipt is not None
    assert receipt.outcome == "partial"
    assert receipt.capabilities == {"streaming": "native", "tool_read": "emulated"}
    assert backplane_of(ended)["capabilities"] == {"telepathy": "native", "vision": "superb"}
    exts = [event.ext for event in events if isinstance(event.ext, dict)]
    assert [sorted(ext) for ext in exts] == [["raw_event"], ["raw_event"], ["error_code"], ["unknown"]]


@pytest.mark.anyio
@pytest.mark.parametrize("what", [("stays", "deaf"), ("late",)])
async def test_a_host_that_lives_until_its_stdin_ends_or_longer_is_stopped(
    what: tuple[str, ...], backplane_home: Path, root: Path
) -> None:
    began = time.monotonic()
    async with plane(backplane_home) as control:
        ended, _ = await go(control, order(root), stranger("python", *what))
    assert ended.end_error is None
    assert time.monotonic() - began < 0.5 + 0.5 + QUICK.cancel_grace_s + SLACK_S


# Our hosts, their control plane ---------------------------------------------------------------------------------------

TYPED = {name: {"type", *kind.__struct_fields__} for name, kind in EVENT_TYPES.items()}

OURS: dict[str, tuple[str, ...]] = {
    "shell": (*PYTHON, str(ROOT / "hosts" / "shell.py")),
    "mock": (*PYTHON, str(ROOT / "hosts" / "mock.py")),
    "node": ("node", str(ROOT / "hosts" / "node" / "echo.mjs")),
    "sh": ("sh", str(ROOT / "hosts" / "sh" / "echo.sh")),
}


@pytest.fixture(params=OURS)
def ours(request: pytest.FixtureRequest) -> str:
    if request.param == "node":
        request.getfixturevalue("needs")("node")
    return str(request.param)


def task_of(name: str) -> str:
    return "echo hi; echo there > made.txt" if name == "shell" else 'say "hi" — é\\n'


def obeys_the_typed_set(lines: list[bytes], run_id: str, order_id: str) -> dict[str, Any]:
    """Everything a closed peer wants of a host's lines; gives the receipt."""
    assert all(line.strip() for line in lines), "no blank line"
    hello, *events, final = [json.loads(line) for line in lines]
    assert hello["t"] == "hello"
    assert hello["contract_version"] == "abp/v0.1"
    assert hello.get("mode", "mapped") in ("mapped", "passthrough")
    closed.manifest(hello["capabilities"], "capabilities")
    for message in events:
        # No cancel, ping, pong or ask that nobody asked for.
        assert message["t"] == "event"
        assert message["ref_id"] == run_id
        event = message["event"]
        assert event["type"] in TYPED
        assert set(event) <= TYPED[event["type"]]
        assert event.get("error_code") in (None, *CODES)
        assert event.get("ext", {}) is not None
        assert isinstance(event.get("exit_code"), int | None)
    assert final["t"] == "final"
    assert final["ref_id"] == run_id
    receipt: dict[str, Any] = final["receipt"]
    assert receipt["meta"]["work_order_id"] == order_id
    assert receipt["trace"] in ([], [message["event"] for message in events])
    counters = [value for name, value in receipt["usage"].items() if name != "estimated_cost_usd"]
    assert all(value is None or type(value) is int for value in [*counters, receipt["meta"]["duration_ms"]])
    closed.manifest(receipt["capabilities"], "capabilities")
    assert receipt["outcome"] in ("complete", "partial", "failed")
    return receipt


def test_our_hosts_finish_their_run_under_a_control_plane_that_says_no_more(ours: str, tmp_path: Path) -> None:
    message = run("6f1c1f0e-5d0a-4c6e-9b8e-0d3a2f4b5c6d", task_of(ours), PLAIN, workspace={"root": str(tmp_path)})
    del message["extensions"]
    with Child(OURS[ours], cwd=ROOT) as child:
        hello = child.read()
        assert hello["t"] == "hello", "the hello is first, and unasked"
        child.send(message)
        child.close_stdin()
        child.until("final")
        child.process.kill()
        child.process.wait()
        receipt = obeys_the_typed_set(child.lines, message["id"], message["work_order"]["id"])
    assert receipt["outcome"] == "complete"
    if ours == "shell":
        assert (tmp_path / "made.txt").read_text() == "there\n"
    else:
        said = [json.loads(line)["event"].get("text", "") for line in child.lines[1:-1]]
        assert any(task_of(ours) in text for text in said)


def test_our_hosts_take_a_second_run_and_answer_nothing_else(ours: str, tmp_path: Path) -> None:
    first, second = (run(name, task_of(ours), PLAIN, workspace={"root": str(tmp_path)}) for name in ("one", "two"))
    with Child(OURS[ours], cwd=ROOT) as child:
        child.send(first, {"t": "cancel", "ref_id": "nobody"}, b"\n", {"t": "unheard_of"})
        told = child.until("final", wait_s=10.0)
        child.send(second)
        again = child.until("final", wait_s=10.0)
        child.close_stdin()
        assert child.wait() == 0
        assert child.read() is None
    assert {message.get("ref_id") for message in told[1:]} == {"one"}
    assert {message.get("ref_id") for message in again} == {"two"}
