"""A backplane as another backplane's host: what it changed, what it asked, and its receipt inside the outer one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.config import Settings
from backplane.contract.approval import Decision
from backplane.contract.events import Approval
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests.peers import Child
from tests.served import SERVE, mock, until_ended

pytestmark = pytest.mark.anyio

WRITE = {"write": {"path": "a.txt", "content": "new\n"}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.txt").write_text("old\n")
    return folder


def order(root: Path, *steps: dict[str, Any], **members: Any) -> WorkOrder:
    config = RuntimeConfig(vendor={"abp": {"backend": "mock"}, "mock": {"scenario": list(steps)}})
    return WorkOrder("x", workspace=WorkspaceSpec(str(root)), config=config, **members)


def below(home: Path, argv: Sequence[str] = SERVE, **env: str) -> ProcessBackend:
    """`backplane serve` with a state folder of its own, which it may write although it is contained."""
    home.mkdir(exist_ok=True)
    writable = (str(home), *filter(None, [env.pop("ALSO", "")]))
    return ProcessBackend(id="below", argv=tuple(argv), env={"BACKPLANE_HOME": str(home), **env}, writable=writable)


async def nested(
    home: Path,
    asked: WorkOrder,
    *,
    inner: Path | None = None,
    answer: str = "deny",
    argv: Sequence[str] = SERVE,
    **env: str,
) -> tuple[Run, list[Any]]:
    """One run of an outer control plane whose host is `backplane serve`."""
    backend = below(inner or home.parent / "inner", argv, **env)
    questions: list[Any] = []

    async def on_ask(event: Approval) -> Decision:
        questions.append(event.body)
        return Decision(decision=answer)  # type: ignore[arg-type]

    with anyio.fail_after(30):
        async with (
            ControlPlane(Settings(), home, os.environ) as plane,
            plane.start(asked, backend, on_ask=on_ask) as run,
        ):
            async for _ in run:
                pass
    return run, questions


def inner_of(run: Run) -> Any:
    return run.receipt.backplane["inner"]


async def test_the_outer_patch_holds_what_the_inner_agent_changed(backplane_home: Path, root: Path) -> None:
    run, _ = await nested(backplane_home, order(root, WRITE, {"usage": {"input_tokens": 7}}))
    assert run.end_error is None
    receipt = run.receipt
    assert receipt is not None
    assert receipt.outcome == "complete"
    assert "+new" in str(receipt.verification.git_diff)
    assert (root / "a.txt").read_text() == "old\n"
    assert receipt.backend.id == "backplane"
    assert receipt.usage.input_tokens == 7
    assert "git_diff" not in receipt.backplane.get("claims", {}), "the same patch need not stand there twice"
    assert "trace" not in receipt.backplane.get("claims", {}), "it streamed what it says it streamed"
    inner = inner_of(run)
    assert inner["verified"] is True
    with Store.open(backplane_home.parent / "inner", readonly=True) as store:
        (row,) = store.scan()
        assert inner["receipt_sha256"] == row.sha256
        assert row.run_id == run.id, "the chain has one name"
    assert inner["backplane"]["end"]["reason"] == "complete"


async def test_planes_that_share_their_state_keep_both_receipts(backplane_home: Path, root: Path) -> None:
    run, _ = await nested(backplane_home, order(root, WRITE), inner=backplane_home)
    with Store.open(backplane_home, readonly=True) as store:
        assert store.verify_all().findings == ()
        hashes = [row.sha256 for row in store.scan()]
    assert hashes == [inner_of(run)["receipt_sha256"], run.receipt.receipt_sha256]


@pytest.mark.parametrize(("answer", "content"), [("allow", "+new"), ("deny", "")])
async def test_an_inner_ask_goes_through_to_whoever_answers_outside(
    backplane_home: Path, root: Path, answer: str, content: str
) -> None:
    asked = order(root, WRITE, {"say": "then"}, policy=PolicyProfile(require_approval_for=("write_file",)))
    run, questions = await nested(backplane_home, asked, answer=answer)
    assert [question["name"] for question in questions] == ["write_file"]
    assert content in str(run.receipt.verification.git_diff)
    # Both planes noted the ask; the inner receipt is checked without the outer one's notes.
    assert inner_of(run)["verified"] is True


async def test_a_long_inner_trace_is_put_back_from_what_was_streamed(backplane_home: Path, root: Path) -> None:
    chatter = {"repeat": {"times": 300, "steps": [{"say": "x" * 500}, {"tool": {"name": "look", "input": {"n": 1.5}}}]}}
    run, _ = await nested(backplane_home, order(root, chatter), BACKPLANE_LINE_BYTES_MAX="65536")
    assert run.end_error is None
    assert inner_of(run)["verified"] is True
    assert len(run.receipt.trace) > 900


async def test_an_inner_failure_brings_its_receipt_along(backplane_home: Path, root: Path) -> None:
    steps = ({"say": "x"}, {"usage": {"output_tokens": 3}}, {"kill": "SIGKILL"})
    run, _ = await nested(backplane_home, order(root, *steps))
    assert run.error is not None
    assert run.error.code == "backend_crashed"
    assert inner_of(run)["verified"] is True
    assert inner_of(run)["backplane"]["end"]["reason"] == "host_exit"
    assert run.receipt.outcome == "failed"


TAMPER = """
import re, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=sys.stdin, stdout=subprocess.PIPE)
for line in child.stdout:
    sys.stdout.buffer.write(re.sub(rb'"duration_ms":', b'"duration_ms":1', line))
    sys.stdout.buffer.flush()
"""


async def test_one_digit_of_an_inner_receipt_changed_on_the_way_is_seen(backplane_home: Path, root: Path) -> None:
    run, _ = await nested(backplane_home, order(root, WRITE), argv=(sys.executable, "-c", TAMPER, *SERVE))
    assert run.receipt.outcome == "complete"
    assert inner_of(run)["verified"] is False


async def test_two_floors_down_the_chain_is_whole(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    config = tmp_path / "backplane.toml"
    lowest = tmp_path / "lowest"
    lowest.mkdir()
    env = f'{{BACKPLANE_HOME = "{lowest}", BACKPLANE_DEFAULT_BACKEND = "mock"}}'
    floor = f"[backends.floor]\ncommand = {json.dumps(SERVE)}\nenv = {env}\nwritable = ['{lowest}']\n"
    config.write_text(f"default_backend = 'floor'\n{floor}")
    asked = order(root, WRITE)
    asked.config.vendor["abp"].pop("backend")
    run, _ = await nested(backplane_home, asked, BACKPLANE_CONFIG=str(config), ALSO=str(lowest))
    assert run.end_error is None
    assert inner_of(run)["verified"] is True
    assert inner_of(run)["backplane"]["inner"]["verified"] is True
    assert "+new" in str(run.receipt and run.receipt.verification.git_diff)


async def test_the_ladder_of_the_outer_plane_gives_the_inner_one_time_to_end(backplane_home: Path, root: Path) -> None:
    backend = below(backplane_home.parent / "inner")
    asked = order(root, {"say": "x"}, {"hang": None})
    with anyio.fail_after(30):
        async with ControlPlane(Settings(), backplane_home, os.environ) as plane, plane.start(asked, backend) as run:
            async for event in run:
                if getattr(event, "text", "") == "x":
                    await run.cancel("enough")
    assert run.receipt.outcome == "partial"
    assert inner_of(run)["backplane"]["end"]["reason"] == "cancelled"
    assert inner_of(run)["verified"] is True


def test_under_a_plain_outer_plane_the_change_is_there_before_the_final(root: Path) -> None:
    # It announces nothing, closes stdin after `run`, and kills at the final.
    with Child(SERVE) as child:
        assert child.read(10)["t"] == "hello"
        child.send(mock("r1", root, {"sleep_s": 0.2}, WRITE, extensions=()))
        child.close_stdin()
        final = until_ended(child, "r1")[-1]
        child.process.kill()
        assert (root / "a.txt").read_text() == "new\n"
    assert (final["t"], final["receipt"]["outcome"]) == ("final", "complete")
    assert "+new" in final["receipt"]["verification"]["git_diff"]
