"""No order spends more than its budget plus one call for each child at work, in any schedule of failures.

A scripted model on loopback counts what each call really costs, also the calls that no agent ever hears of: an answer
that is cut off, without counters, or to a run that was cancelled. `BUDGET_EXAMPLES=1000` before the command tries some
1,000 schedules.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from backplane.api import TaskRouter
from backplane.config import BackendSettings, Limits, RoutingSettings, Settings
from backplane.contract.events import AgentEvent
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.dialects.ir import TokenCounts
from backplane.errors import BackendError
from backplane.receipts.journal import Journal, head_fact
from backplane.runtime.backends import Backend, find
from backplane.runtime.budgets import last_usage
from backplane.runtime.plane import ControlPlane
from backplane.testing import Call, ModelServer, ScriptUsage, Turn
from backplane.testing.script import Fault
from backplane.upstream.cost import Price, actual

EXAMPLES: Final = int(os.environ.get("BUDGET_EXAMPLES", "30"))
MANY: Final = 1_000
"""Schedules from which on all kinds of ends come up."""
MICROS: Final = 1_000_000
PRICE: Final = Price(input=MICROS, output=10 * MICROS)
"""A millionth of a dollar for each token sent, ten for each token of an answer."""
OPTIONS: Final[dict[str, Any]] = {"protocol": "openai_compatible", "model": "m", "prices": {"input": 1, "output": 10}}
NAMES: Final = ("one", "two", "three")
ASKS_ON: Final = """
import http.client, json, os, sys, urllib.parse
address = urllib.parse.urlsplit(sys.argv[1])
def say(**m): print(json.dumps({"jsonrpc": "2.0", **m}), flush=True)
def ask(words):
    body = {"model": "m", "messages": [{"role": "user", "content": words}], "stream": True,
            "stream_options": {"include_usage": True}, **json.loads(sys.argv[2])}
    client = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        client.request("POST", f"{address.path}/chat/completions", json.dumps(body),
                       {"authorization": f"Bearer {os.environ['A_KEY']}", "content-type": "application/json"})
        answer = client.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        client.close()
for line in sys.stdin:
    m = json.loads(line)
    if m.get("method") == "initialize":
        say(id=m["id"], result={"protocolVersion": 1, "agentCapabilities": {}})
    elif m.get("method") == "session/new":
        say(id=m["id"], result={"sessionId": "s1"})
    elif m.get("method") == "session/prompt":
        for _ in range(20):
            if ask(m["params"]["prompt"][-1]["text"]) == 403:
                break
        said = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "done"}}
        say(method="session/update", params={"sessionId": "s1", "update": said})
        say(id=m["id"], result={"stopReason": "end_turn"})
"""
"""An agent that heeds no budget: it asks its model again after whatever comes, until it is refused."""
CLAIMS: Final = {"stopReason": "end_turn", "usage": {"inputTokens": 10, "outputTokens": 1}}
CUT: Final = {"cut": Fault(cut_after_bytes=150), "reset": Fault(cut_after_bytes=40, reset=True)}
NOW: Final = {"retry-after": "0"}
REFUSED: Final = {
    "429": Fault(status=429, headers=NOW),
    "503": Fault(status=503, headers=NOW),
    "500": Fault(status=500, headers=NOW),
    "down": Fault(status=503, headers=NOW),
}
READS: Final = (Call(name="read_file", input={"path": "none"}),)
"""A call without an effect, so that a failed order may go on elsewhere."""
ENDS: Final[Counter[str]] = Counter()
END_S_MAX: Final = 180.0
"""Most that one schedule may take, on a busy machine."""


class Answer(msgspec.Struct, frozen=True):
    """One answer of the model: what it is like, and what it costs whether or not its caller hears of it."""

    kind: str
    sent: int
    got: int

    @property
    def micros(self) -> int:
        if self.kind in REFUSED:
            return 0
        return actual(PRICE, TokenCounts(input=self.sent, output=self.got)) or 0

    @property
    def turn(self) -> Turn:
        usage = None if self.kind == "uncounted" else ScriptUsage(input=self.sent, output=self.got)
        calls = () if self.kind == "text" else READS
        fault = CUT.get(self.kind) or REFUSED.get(self.kind) or Fault(first_byte_ms=30 if self.kind == "slow" else 0)
        # Three tries of one request, so that the order goes on elsewhere.
        times = 3 if self.kind == "down" else 1
        return Turn(text="a word", calls=calls, usage=usage, fault=fault, times=times)


class Order(msgspec.Struct, frozen=True):
    """One order of a schedule."""

    budget: int
    stopped_at: int | None = None
    """The request of the model after whose arrival it is cancelled, or its worker is lost; None for never."""


class Schedule(msgspec.Struct, frozen=True):
    """What happens: one order on several backends, children of one run, or orders of a queue."""

    way: str
    answers: tuple[Answer, ...]
    orders: tuple[Order, ...]
    pot: int
    """The budget of all children, or of the queue."""
    max_tokens: int | None = None
    """The longest answer that the orders ask for; None leaves it open."""


WAYS: Final = ("fail-over", "children", "proxy", *(["queue"] if find_spec("sqlalchemy") else []))
"""The queue is an extra."""
KINDS: Final = ("call", "call", "call", "text", "slow", "uncounted", "down", *CUT, *REFUSED)
amounts = st.integers(1, 60_000) | st.integers(20_000, 2_000_000)
answers = st.builds(Answer, st.sampled_from(KINDS), st.integers(100, 1500), st.integers(1, 250))
orders = st.builds(Order, amounts, st.none() | st.none() | st.integers(1, 8))
schedules = st.builds(
    Schedule,
    st.sampled_from(WAYS),
    st.lists(answers, min_size=1, max_size=14).map(tuple),
    st.lists(orders, min_size=1, max_size=4).map(tuple),
    amounts,
    st.sampled_from((None, 300, 300)),
)


class Bill:
    """What the model's service charges, by the order whose words are in the request."""

    def __init__(self, server: ModelServer, schedule: Schedule) -> None:
        self.server, self.schedule = server, schedule

    def costs(self) -> dict[int, int]:
        found: Counter[int] = Counter()
        for request in self.server.requests:
            words = json.dumps(request.body)
            for number in range(len(self.schedule.orders)):
                if f"order {number}." in words and request.turn is not None:
                    found[number] += self._micros(request.turn)
        return found

    def _micros(self, turn: int) -> int:
        return self.schedule.answers[turn].micros if turn < len(self.schedule.answers) else 0

    @property
    def dearest(self) -> int:
        return max(answer.micros for answer in self.schedule.answers)

    async def until(self, count: int | None) -> None:
        while count is None or len(self.server.requests) < count:
            await anyio.sleep(0.005)


def settings_for(server: ModelServer) -> Settings:
    row = BackendSettings(host="api", options={**OPTIONS, "base_url": server.base_url("openai_compatible")})
    rows = dict.fromkeys(NAMES, row)
    routing = RoutingSettings(strategy="first_available")
    return Settings(backends=rows, routing=routing, isolation="off", limits=Limits(cancel_grace_s=0.2))


def order_of(number: int, schedule: Schedule, root: Path) -> WorkOrder:
    spec = WorkspaceSpec(str(root), mode="pass_through")
    budget, longest = schedule.orders[number].budget, schedule.max_tokens
    vendor: dict[str, Any] = {} if longest is None else {"api": {"max_tokens": longest}}
    config = RuntimeConfig(max_budget_usd=budget / MICROS, max_turns=20, vendor=vendor)
    return WorkOrder(f"order {number}.", workspace=spec, config=config)


async def fail_over(plane: ControlPlane, schedule: Schedule, bill: Bill, root: Path) -> None:
    """Run one order on the backends that the router chooses, one after the other."""
    order = schedule.orders[0]
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await bill.until(order.stopped_at)
                scope.cancel()

            tasks.start_soon(stop)
            run = await TaskRouter(plane).run(order_of(0, schedule, root))
            ENDS[f"fail-over {len(run.receipt.backplane['route'].get('tried', ()))} {run.receipt.outcome}"] += 1
            tasks.cancel_scope.cancel()
    assert bill.costs().get(0, 0) <= order.budget + bill.dearest


async def children(plane: ControlPlane, schedule: Schedule, bill: Bill, root: Path) -> None:
    """Run children of one parent at once; some are cancelled."""
    # These agents make a call only if the most that it can cost is left: the bound is exact.
    await family(plane, schedule, bill, root, plane.find_backend("one"), beyond=0)


async def proxy(plane: ControlPlane, schedule: Schedule, bill: Bill, root: Path) -> None:
    """Run children that heed no budget, behind the proxy that keeps their key."""
    limit = {} if schedule.max_tokens is None else {"max_completion_tokens": schedule.max_tokens}
    options = {"program": sys.executable, "arguments": ["-c", ASKS_ON, "{base_url}", json.dumps(limit)],
               "key_env": "A_KEY", "base_url": bill.server.base_url("openai_compatible"),
               "prices": OPTIONS["prices"]}  # fmt: skip
    row = BackendSettings(host="acp", options=options, env={"A_KEY": "a-key-of-the-service"}, key_proxy=True)
    backend = find("asks", msgspec.structs.replace(plane.settings, backends={"asks": row}), plane.environ)
    await family(plane, schedule, bill, root, backend, beyond=1)


async def family(
    plane: ControlPlane, schedule: Schedule, bill: Bill, root: Path, backend: Backend, *, beyond: int
) -> None:
    """Run the orders twice as children of one parent, the second time with what the first ones left.

    Args:
        beyond: calls by which each child may go beyond its budget.
    """
    parent = str(uuid.uuid4())
    order = WorkOrder("parent").with_abp("children_budget_usd_micros", schedule.pot)
    head = head_fact(order, run_id=parent, started_at="2026-11-24T00:00:00Z", backend="b")
    Journal.create(plane.home, parent, head).close()
    begun: Counter[int] = Counter()

    async def child(number: int, one: Order) -> None:
        order = order_of(number, schedule, root).with_abp("parent", parent)
        if beyond:  # The agent takes neither of them.
            abp: dict[str, Any] = {"abp": order.config.vendor["abp"]}
            order = msgspec.structs.replace(
                order, config=msgspec.structs.replace(order.config, max_turns=None, vendor=abp)
            )
        async with plane.start(order, backend) as run, anyio.create_task_group() as tasks:

            async def stop() -> None:
                await bill.until(one.stopped_at)
                await run.cancel("enough")

            tasks.start_soon(stop)
            await run.wait()
            tasks.cancel_scope.cancel()
        assert run.end is not None
        begun[number] += run.end.reason != "refused"
        ENDS[f"{schedule.way} {run.receipt.outcome} {run.end.reason}"] += 1
        assert schedule.max_tokens is None or "is unknown" not in str(run.error)

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(schedule.orders):
                tasks.start_soon(child, number, one)
        spent = bill.costs()
        assert sum(spent.values()) <= schedule.pot + beyond * bill.dearest * begun.total()
    for number, one in enumerate(schedule.orders):
        assert spent.get(number, 0) <= 2 * one.budget + beyond * bill.dearest * begun[number]


async def queue(plane: ControlPlane, schedule: Schedule, bill: Bill, root: Path) -> None:
    """Run orders of a queue with a budget at once; some lose their worker, and the next one takes the order over."""
    from backplane.scale.content import Contents
    from backplane.scale.engine import Attempt, Control, Job, Notes, OrderResult, VoidAttempt
    from backplane.scale.ledger import Ledger
    from backplane.scale.runner import Runner

    ledger = Ledger(f"sqlite:///{root / 'ledger.sqlite'}")
    ledger.prepare()
    ledger.set_budget(schedule.pot)
    void: dict[str, tuple[VoidAttempt, ...]] = {}
    runner = Runner(plane, Contents(root / "content"))
    attempts: Counter[int] = Counter()

    async def attempted(number: int, one: Order, job: Job, told: dict[str, list[AgentEvent]]) -> OrderResult | None:
        """One worker's attempt, as `scale.worker` makes it; None if the worker was lost."""
        worker, order_id = str(uuid.uuid4()), job.order.id
        ledger.enter(worker, "default", 1)
        share = ledger.begin(worker, one.budget)
        assert share is not None
        earlier = void.get(order_id, ())
        reported = tuple(last_usage(told.get(lost.id, ())) for lost in earlier)
        attempt = Attempt(str(uuid.uuid4()), order_id, Notes(earlier), share, reported)
        control = Control()

        async def emit(records: Sequence[bytes]) -> None:
            told.setdefault(attempt.id, []).extend(msgspec.json.decode(record, type=AgentEvent) for record in records)

        before = bill.costs().get(number, 0)
        async with anyio.create_task_group() as tasks:

            async def lose() -> None:
                await bill.until(None if one.stopped_at is None or len(attempt.all) > 2 else one.stopped_at)
                control.fenced = "its worker is lost"

            tasks.start_soon(lose)
            try:
                ended = await runner(job, attempt, emit, control)
                assert isinstance(ended, OrderResult)
                result: OrderResult | None = ended
            except BackendError:
                void[order_id] = (*earlier, VoidAttempt(attempt.id, "lost", 0))
                result = None
            tasks.cancel_scope.cancel()
        attempts[number] += bill.costs().get(number, 0) > before
        if result is not None and result.cost_usd_micros is not None:
            ledger.settle(share.usd_micros, result.cost_usd_micros)
        return result

    async def run(number: int, one: Order) -> None:
        order = order_of(number, schedule, root)
        order = msgspec.structs.replace(order, workspace=WorkspaceSpec(".", mode="staged"))
        job, told = Job(order, "rerun", backend="one"), dict[str, list[AgentEvent]]()
        for _ in range(4):
            result = await attempted(number, one, job, told)
            if result is not None:
                ENDS[f"queue {len(result.attempts)} {result.outcome}"] += 1
                break

    async with anyio.create_task_group() as tasks:
        for number, one in enumerate(schedule.orders):
            tasks.start_soon(run, number, one)
    ledger.close()
    spent = bill.costs()
    for number, one in enumerate(schedule.orders):
        assert spent.get(number, 0) <= one.budget + bill.dearest * max(attempts[number], 1)
    assert sum(spent.values()) <= schedule.pot + bill.dearest * sum(attempts.values())


async def play(schedule: Schedule, base: Path) -> None:
    root = base / uuid.uuid4().hex
    (root / "work").mkdir(parents=True)
    rest = Turn(text="done", usage=ScriptUsage(input=0, output=0), times=None)
    script = [*(answer.turn for answer in schedule.answers), rest]
    with ModelServer(script) as server:
        bill = Bill(server, schedule)
        async with ControlPlane(settings_for(server), root / "home", os.environ) as plane:
            await anyio.to_thread.run_sync(plane.state_folder.store)
            way = {"fail-over": fail_over, "children": children, "proxy": proxy, "queue": queue}[schedule.way]
            with anyio.fail_after(END_S_MAX):
                await way(plane, schedule, bill, root / "work")


def test_a_child_whose_answer_was_cut_counts_as_all_the_tokens_it_may_have_used(tmp_path: Path) -> None:
    anyio.run(two_children_behind_a_cut_answer, tmp_path)


async def two_children_behind_a_cut_answer(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    agent = ASKS_ON.replace('result={"stopReason": "end_turn"}', f"result={CLAIMS}")
    with ModelServer([]) as server:
        options = {"program": sys.executable, "arguments": ["-c", agent, "{base_url}", '{"max_completion_tokens": 50}'],
                   "key_env": "A_KEY", "base_url": server.base_url("openai_compatible"), "usage": "turn"}  # fmt: skip
        row = BackendSettings(host="acp", options=options, env={"A_KEY": "a-key-of-the-service"}, key_proxy=True)
        async with ControlPlane(Settings(isolation="off"), tmp_path / "home", os.environ) as plane:
            backend = find("asks", msgspec.structs.replace(plane.settings, backends={"asks": row}), plane.environ)
            parent = str(uuid.uuid4())
            order = WorkOrder("parent").with_abp("children_budget_tokens", 10_000)
            head = head_fact(order, run_id=parent, started_at="2026-11-24T00:00:00Z", backend="b")
            Journal.create(plane.home, parent, head).close()
            child = WorkOrder("order 0.", workspace=WorkspaceSpec(str(tmp_path / "work"), mode="pass_through"))
            child = child.with_abp("parent", parent).with_abp("budget_tokens", 4_000)
            for left in (6_000, 2_000):
                server.play([Turn(text="a word", fault=CUT["cut"]), Turn(fault=Fault(status=403))])
                async with plane.start(child, backend) as run:
                    await run.wait()
                assert (run.receipt.outcome, run.receipt.usage.input_tokens) == ("complete", 10)
                assert run.receipt.backplane["budget"]["left_tokens"] == left
                assert run.receipt.backplane["key_proxy"]["answers"]["uncounted"]


@pytest.mark.timeout(max(240, EXAMPLES * 8))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # A failing schedule is short; to shrink it takes minutes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=schedules)
@example(schedule=Schedule("fail-over", (Answer("cut", 100, 1), Answer("call", 100, 1)), (Order(1),), 1))
@example(
    schedule=Schedule(
        "fail-over", (Answer("call", 900, 90), Answer("down", 1, 1), Answer("text", 900, 9)), (Order(10**6),), 1
    )
)
@example(schedule=Schedule("proxy", (Answer("cut", 900, 250),) * 9, (Order(5_000),) * 2, 12_000, 300))
@example(
    schedule=Schedule("proxy", (Answer("uncounted", 900, 90), Answer("reset", 900, 9)) * 4, (Order(9_000),) * 3, 30_000)
)
@example(schedule=Schedule("children", (Answer("reset", 900, 90),) * 6, (Order(40_000), Order(60_000)), 90_000, 300))
def test_no_order_spends_more_than_its_budget_and_one_call(schedule: Schedule, tmp_path: Path) -> None:
    try:
        anyio.run(play, schedule, tmp_path)
    except ExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def test_the_schedules_reach_every_end() -> None:
    print(dict(ENDS))
    if EXAMPLES < MANY:
        pytest.skip(f"needs BUDGET_EXAMPLES={MANY} or more")
    of_children = ("children complete", "children partial", "proxy partial budget")
    of_queue = ("queue 2",) if "queue" in WAYS else ()
    for end in ("fail-over 0 complete", "fail-over 1", "fail-over 2", *of_children, *of_queue):
        assert any(one.startswith(end) for one in ENDS), end
