"""A run waits for a limit of its model's service, as long as the order allows."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.agents.limits import BACKOFF_S, MARGIN_S, LimitWait
from backplane.config import Limits
from backplane.contract.events import AgentEvent, FileChanged, RetryReported
from backplane.contract.work import WorkOrder
from backplane.receipts.memory import remembered
from backplane.runtime.run import Run
from backplane.testing import Fault, ModelServer, Turn
from backplane.upstream.failure import retry_after_s
from backplane.view.picture import Picture
from backplane.view.why_kinds import Moment
from backplane.view.why_live import live
from tests.api_agent import LIMITS, api, call, job, of
from tests.runs import ended, go, order, plane

pytestmark = pytest.mark.anyio
LONG_S = 32
"""A pause that the service's client does not wait out by itself."""


@pytest.fixture
def anyio_backend() -> str:
    # What is tested here runs in a child with a loop of its own.
    return "asyncio"


def limited(after: str, **members: Any) -> Turn:
    return Turn(fault=Fault(status=429, message="slow down", headers={"retry-after": after}), **members)


def waiting(work: WorkOrder, seconds: int) -> WorkOrder:
    return work.with_abp("wait_for_limit_s", seconds)


async def solve(
    home: Path, turns: list[Turn], work: WorkOrder, limits: Limits = LIMITS
) -> tuple[Run, list[AgentEvent], ModelServer]:
    with ModelServer(turns) as server:
        async with plane(home, limits) as control:
            backend = msgspec.structs.replace(api(server), limits=None)
            run, events = await go(control, work, backend)
    return run, events, server


def pauses(events: list[AgentEvent]) -> list[str]:
    return [event.body["until"] for event in of(RetryReported, events) if "until" in event.body]


async def test_a_run_waits_for_the_time_that_the_service_names_and_goes_on(
    tmp_path: Path, backplane_home: Path
) -> None:
    """After an effect: the conversation is gone on with, and nothing is done twice. The idle limit stands still."""
    turns = [
        Turn(calls=(call("bash", command="echo x >> count"),)),
        limited(str(LONG_S)),
        Turn(text="done"),
    ]
    limits = msgspec.structs.replace(LIMITS, idle_s=8.0)
    began_s = time.monotonic()
    run, events, server = await solve(backplane_home, turns, waiting(job(tmp_path, mode="pass_through"), 60), limits)
    assert ended(run) == ("complete", None, "complete")
    assert time.monotonic() - began_s >= LONG_S
    assert (tmp_path / "count").read_text() == "x\n"
    (until,) = pauses(events)
    assert until.endswith("Z")
    bodies: list[Any] = [request.body for request in server.requests]
    assert bodies[1]["messages"] == bodies[2]["messages"]


async def test_a_limit_that_ends_too_late_fails_with_its_time(tmp_path: Path, backplane_home: Path) -> None:
    began_s = time.monotonic()
    run, events, server = await solve(backplane_home, [limited("7200")], waiting(job(tmp_path), 60))
    assert ended(run)[1:] == ("backend_rate_limited", "failed")
    then = datetime.now(UTC) + timedelta(seconds=7200)
    assert f"{then:%Y-%m-%dT}" in str(run.error)
    assert "wait_for_limit_s" in str(run.error)
    assert pauses(events) == []
    assert len(server.requests) == 1
    assert time.monotonic() - began_s < 30


async def test_without_the_setting_a_limit_ends_the_run_at_once(tmp_path: Path, backplane_home: Path) -> None:
    run, events, _ = await solve(backplane_home, [limited(str(LONG_S))], job(tmp_path))
    assert ended(run)[1:] == ("backend_rate_limited", "failed")
    assert pauses(events) == []


async def test_a_run_that_waits_is_cancelled_at_once_and_sealed(tmp_path: Path, backplane_home: Path) -> None:
    turns = [Turn(calls=(call("write_file", path="a", content="1"),)), limited("3000")]
    events: list[AgentEvent] = []
    with ModelServer(turns) as server:
        async with (
            plane(backplane_home, LIMITS) as control,
            control.start(waiting(job(tmp_path), 3600), api(server)) as run,
        ):
            with anyio.fail_after(30):
                async for event in run:
                    events.append(event)
                    if pauses([event]):
                        (row,) = remembered(control.state_folder.store())
                        assert row.cause == f"waiting until {pauses([event])[0]}"
                        picture = Picture()
                        picture.begin({"fact": "sent"})
                        picture.take(event)
                        assert picture.state == row.cause
                        (cause,) = live(picture, Moment(now_ms=0, state="live"))
                        assert cause.kind == "limit_waits"
                        await run.cancel()
    assert ended(run)[0] == "cancelled"
    assert run.receipt.outcome == "partial"
    assert of(FileChanged, events)


async def test_the_limit_of_the_run_counts_while_it_waits(tmp_path: Path, backplane_home: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, run_s=6.0)
    began_s = time.monotonic()
    run, events, _ = await solve(backplane_home, [limited("3000")], waiting(job(tmp_path), 3600), limits)
    assert ended(run)[:2] == ("deadline", "backend_timeout")
    assert len(pauses(events)) == 1
    assert time.monotonic() - began_s < 20


async def test_a_host_that_cannot_wait_refuses_the_setting(mock: Any, tmp_path: Path, backplane_home: Path) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, waiting(order(tmp_path, {"say": "x"}), 60), mock)
    assert ended(run) == ("refused", "capability_unsupported", "failed")


def test_the_pauses_are_bounded_by_what_the_order_allows() -> None:
    wait = LimitWait(100.0)
    assert [wait.next_s(None) for _ in range(4)] == [BACKOFF_S[0], BACKOFF_S[1], 100.0 - sum(BACKOFF_S[:2]), None]
    wait = LimitWait(100.0)
    assert wait.next_s(50.0) == 50.0 + MARGIN_S
    assert wait.next_s(50.0) is None
    assert LimitWait(10.0).next_s(-5.0) == MARGIN_S
    assert LimitWait(0.0).next_s(None) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "9", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 9),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "60"}, 60),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1000000600"}, 600),
        ({"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "2001-09-09T01:47:10Z"}, 30),
        (
            {"anthropic-ratelimit-unified-status": "rejected", "anthropic-ratelimit-unified-reset": "1000003600"},
            3600,
        ),
        ({"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "soon"}, None),
    ],
)
def test_the_end_of_a_limit_is_read_from_the_headers_of_each_service(
    headers: dict[str, str], seconds: float | None
) -> None:
    now = datetime.fromtimestamp(1_000_000_000, UTC)
    assert retry_after_s(headers, None, now) == (seconds if seconds is None else pytest.approx(seconds))
