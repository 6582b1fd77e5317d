"""Any order of messages, cuts, deadlines and acts of the caller ends a run once, with one receipt, and leaves nothing.

The host is a function of this process over real pipes. Deadlines are real, too, and short. `DRIVE_EXAMPLES=1000` before
the command tries some 5,000 stories.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backplane.config import Limits
from backplane.contract import canonical
from backplane.contract.approval import Decision
from backplane.contract.events import AgentEvent
from backplane.contract.work import PolicyProfile
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.runtime import channel, memory
from backplane.runtime.memory import MemoryBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests.runs import check, order, plane

EXAMPLES: Final = int(os.environ.get("DRIVE_EXAMPLES", "30"))
LINE_BYTES: Final = 4096
SHORT_S: Final = 0.04
"""A limit that passes during one `long` pause of the host."""
LONG_S: Final = 0.2
"""A limit that passes only if the host hangs."""
END_S_MAX: Final = 30.0
"""Most that some of these runs may take together, on a busy machine."""
ENDS: Final[Counter[str]] = Counter()
PLAYED: Final[list[int]] = []
"""Stories of each example, for a look at what was tried (`pytest -s`)."""

TS: Final = "2026-01-15T12:00:00Z"
HELLO: Final[dict[str, Any]] = {
    "t": "hello",
    "contract_version": "abp/v0.1",
    "backend": {"id": "states"},
    "capabilities": {"streaming": "native"},
    "extensions": ["ask/1", "cancel/1", "input/1", "interrupt/1", "ping/1"],
}
RUN: Final = "11111111-2222-4333-8444-555555555555"
"""Stands for the run's id, which each run has anew."""
RECEIPT: Final[dict[str, Any]] = {
    "meta": {
        "run_id": RUN, "work_order_id": RUN, "contract_version": "abp/v0.1", "started_at": TS, "finished_at": TS,
        "duration_ms": 0,
    },
    "backend": {"id": "states"}, "capabilities": {"streaming": "native"}, "usage_raw": {}, "usage": {}, "trace": [],
    "artifacts": [], "verification": {"harness_ok": True}, "outcome": "complete",
}  # fmt: skip


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def body(kind: str, **members: Any) -> bytes:
    return line(t="event", ref_id=RUN, event={"ts": TS, "type": kind, **members})


def ask(number: str, name: str) -> bytes:
    return line(t="ask", ref_id=RUN, id=number, kind="tool", name=name, input={"command": "ls"})


def final(**members: Any) -> bytes:
    return line(t="final", ref_id=RUN, receipt={**RECEIPT, **members})


GOOD_HELLO: Final = line(**HELLO)
GOOD_FINAL: Final = final()
LINES: Final[dict[str, bytes]] = {
    "hello": GOOD_HELLO,
    "hello without extensions": line(**{**HELLO, "extensions": []}),
    "hello of another version": line(**{**HELLO, "contract_version": "abp/v9.0"}),
    "hello of a wrong shape": line(t="hello", contract_version=1),
    "text": body("assistant_delta", text="a"),
    "empty text": body("assistant_delta", text=""),
    "call": body("tool_call", tool_name="bash", tool_use_id="c", input={}),
    "result": body("tool_result", tool_name="bash", tool_use_id="c", output="", is_error=False),
    "many texts": body("assistant_delta", text="b" * 100) * 60,
    "event of a wrong shape": line(t="event", ref_id=RUN, event={"type": 7}),
    "event of another run": line(t="event", ref_id="other", event={"ts": TS, "type": "assistant_delta", "text": "a"}),
    "ask": ask("1", "bash"),
    "another ask": ask("2", "bash"),
    "ask that is denied": ask("3", "rm"),
    "ask that is allowed": ask("4", "ls"),
    "ask of a wrong shape": line(t="ask", ref_id=RUN, id="5", kind="tool"),
    "pong": line(t="pong", seq=1),
    "noise": b"Compiling...\n",
    "blank": b"\r\n\n",
    "unknown": line(t="progress", ref_id=RUN, percent=1),
    "message of the other side": line(t="cancel", ref_id=RUN),
    "final": GOOD_FINAL,
    "partial final": final(outcome="partial"),
    "failed final": final(outcome="failed"),
    "final with a trace": final(trace=[{"ts": TS, "type": "assistant_message", "text": "late"}]),
    "final of a wrong shape": line(t="final", ref_id=RUN, receipt={}),
    "final of another run": GOOD_FINAL.replace(b'"ref_id": "' + RUN.encode(), b'"ref_id": "other'),
    "fatal": line(t="fatal", ref_id=RUN, error="out of luck", error_code="backend_crashed"),
    "fatal without a run": line(t="fatal", ref_id=None, error="out of luck"),
    "half a line": b'{"t":"event","ref',
    "half a final": GOOD_FINAL[:-20],
    "no UTF-8": b"\xff\xfe{\x00\n",
    "no JSON": b'{"t":\n',
    "too long": b"x" * (LINE_BYTES + 10) + b"\n",
    "too long a message": body("assistant_delta", text="y" * LINE_BYTES),
}
COMPLETE: Final = frozenset({"final", "final with a trace"})
"""Only these say that the agent has done its work."""
ACTS: Final = ("take", "pause", "long", "close output", "close input", "exit", "raise", "take all", "hang")
CALLER: Final = (
    "cancel", "cancel at once", "interrupt", "input", "leave", "raise", "fail", "fail late", "sleep", "wait", "nothing",
)  # fmt: skip


class Story(msgspec.Struct, frozen=True):
    """What the host does, what the caller does after so many events and after so long, and which limits are short."""

    host: tuple[str, ...]
    reader: dict[int, str]
    beside: tuple[tuple[float, str], ...]
    scope_s: float | None
    """After which the caller is cancelled."""
    short: frozenset[str]
    answers: str


def stories() -> st.SearchStrategy[Story]:
    anything = st.sampled_from([*LINES, *ACTS])
    usual = st.sampled_from(["text", "call", "result", "ask", "another ask", "many texts", "pause", "final", "noise"])
    begun = st.lists(st.one_of(usual, anything), max_size=10).map(lambda rest: ("hello", "take", *rest))
    good = st.lists(usual, max_size=10).map(lambda rest: ("hello", "take", *rest, "final"))
    host = st.one_of(begun, begun, good, st.lists(anything, max_size=8).map(tuple))
    act, soon = st.sampled_from(CALLER), st.sampled_from([0.0, 0.001, 0.01, 0.05])
    return st.builds(
        Story,
        host=host,
        reader=st.dictionaries(st.integers(1, 5), act, max_size=2),
        beside=st.lists(st.tuples(soon, act), max_size=2).map(tuple),
        scope_s=st.sampled_from([None] * 7 + [0.0, 0.01, 0.05]),
        short=st.frozensets(st.sampled_from(["hello_s", "idle_s", "tool_s", "run_s", "ask_s"]), max_size=2),
        answers=st.sampled_from(["allow", "deny", "remember", "raise", "never", "nobody"]),
    )


class Host:
    """Plays a story's host over two descriptors, and notes what it wrote."""

    def __init__(self, story: Story, run_id: str) -> None:
        self.story, self.run_id = story, run_id.encode()
        self.wrote: list[str] = []
        self._input = b""

    async def serve(self, stdin: int, stdout: int) -> None:
        for step in (*self.story.host, "take all"):
            if step in LINES:
                self.wrote.append(step)
                await self._write(stdout, LINES[step].replace(RUN.encode(), self.run_id))
            elif step == "take":
                with anyio.move_on_after(0.2):
                    await self._take(stdin)
            elif step in ("pause", "long"):
                await anyio.sleep(0.003 if step == "pause" else 3 * SHORT_S)
            elif step in ("close output", "close input"):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, stdout if step == "close output" else stdin, inheritable=False)
                os.close(nowhere)
                if step == "close input":
                    return await anyio.sleep(2 * SHORT_S)
            elif step == "exit":
                return None
            elif step == "raise":
                raise RuntimeError("the host's own bug")
            elif step == "hang":
                await anyio.sleep(60)
            else:
                while await self._take(stdin):
                    pass
        return None

    async def _take(self, stdin: int) -> bytes:
        """Read until there is a line, and return it; nothing at the end."""
        while b"\n" not in self._input:
            await anyio.wait_readable(stdin)
            piece = os.read(stdin, 65536)
            if not piece:
                return b""
            self._input += piece
        taken, _, self._input = self._input.partition(b"\n")
        return taken + b"\n"

    async def _write(self, stdout: int, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(stdout, data) :]
            except BlockingIOError:
                await anyio.wait_writable(stdout)
            except BrokenPipeError:
                return


class LeftError(Exception):
    """Raised by a caller inside of its block."""


class Caller:
    """Plays a story's caller, and notes what it has read and done."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.events: list[AgentEvent] = []
        self.did: list[str] = []

    async def on_ask(self, _: object) -> Decision:
        answers = self.story.answers
        if answers == "raise":
            raise RuntimeError("the caller's own bug")
        await anyio.sleep(60 if answers == "never" else 0.001)
        if answers == "deny":
            return Decision("deny", "x")
        return Decision("allow", "x", remember="run" if answers == "remember" else "once")

    async def read(self, run: Run) -> None:
        async with anyio.create_task_group() as tasks:
            for after_s, act in self.story.beside:
                tasks.start_soon(self._beside, run, after_s, act)
            async for one in run:
                self.events.append(one)
                act = self.story.reader.get(len(self.events), "nothing").removesuffix(" late")
                if act == "leave":
                    self.did.append(act)
                    break
                if act == "raise":
                    self.did.append(act)
                    raise LeftError
                await self.do(run, act)
            tasks.cancel_scope.cancel()

    async def _beside(self, run: Run, after_s: float, act: str) -> None:
        await anyio.sleep(after_s)
        if act not in ("leave", "raise", "wait"):  # Those end the block, which this task cannot.
            await self.do(run, act)

    async def do(self, run: Run, act: str) -> None:
        at = len(self.did)
        self.did.append(act)
        try:
            if act == "cancel":
                await run.cancel("enough")
            elif act == "cancel at once":
                await run.cancel("at once", grace_s=0.0)
            elif act == "interrupt":
                run.interrupt()
            elif act == "input":
                run.input("and this")
            elif act in ("fail", "fail late"):
                while act == "fail late" and not run.is_ending:
                    await anyio.sleep(0.001)
                if run.is_ending:  # It may come too late to be in the receipt.
                    self.did[at] = "fail late"
                run.fail(RuntimeError("a bug of the caller"))
            elif act == "sleep":
                await anyio.sleep(SHORT_S)
            elif act == "wait":
                await run.wait()
        except BackplaneError:
            self.did[at] = f"{act} refused"


def limits_of(story: Story) -> Limits:
    names = ("hello_s", "idle_s", "tool_s", "ask_s")
    values: dict[str, Any] = {name: SHORT_S if name in story.short else LONG_S for name in names}
    run_s = 2 * SHORT_S if "run_s" in story.short else 10 * LONG_S
    return Limits(**values, run_s=run_s, cancel_grace_s=0.05, line_bytes_max=LINE_BYTES)


async def play_all(stories: list[Story], home: Path, root: Path) -> None:
    """Play stories at once on one control plane, and look for what they leave."""
    gc.collect()  # Other tests leave stores, whose descriptors the collector would close meanwhile.
    tasks, opened = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
    ids: list[str] = []
    with anyio.fail_after(END_S_MAX):
        async with plane(home) as control, anyio.create_task_group() as playing:
            for story in stories:
                playing.start_soon(play, story, control, root, ids)
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) == opened
    with Store.open(home, readonly=True) as store:
        stored = [row.run_id for row in store.newest()]
        assert all(stored.count(run_id) == 1 for run_id in ids)
        assert store.orphans() == []
    PLAYED.append(len(stories))


async def play(story: Story, control: ControlPlane, root: Path, ids: list[str]) -> None:
    run_id = str(uuid.uuid4())
    host, caller = Host(story, run_id), Caller(story)
    policy = PolicyProfile(require_approval_for=("bash",), disallowed_tools=("rm",))
    backend = MemoryBackend(id="states", serve=host.serve, limits=limits_of(story))
    on_ask = None if story.answers == "nobody" else caller.on_ask
    found: list[Run] = []
    with anyio.CancelScope() as scope:
        if story.scope_s is not None:
            scope.deadline = anyio.current_time() + story.scope_s
        try:
            async with control.start(order(root, policy=policy), backend, on_ask=on_ask, run_id=run_id) as run:
                found.append(run)
                await caller.read(run)
        except* LeftError:
            pass
    for run in found:
        judge(run, story, host, caller)
        await after_the_end(run, caller)
        ids.append(run_id)
    assert found or story.scope_s is not None


def judge(run: Run, story: Story, host: Host, caller: Caller) -> None:
    """What holds of every run that has ended."""
    assert run.is_sealed
    assert run.drive.stream.ended.is_set()
    check(run)
    trace = [canonical.encode(one) for one in run.receipt.trace]
    read = [canonical.encode(one) for one in caller.events]
    assert read == trace[: len(read)] or "wait" in caller.did
    if not {"leave", "raise", "wait"} & set(caller.did) and story.scope_s is None:
        assert read == trace
    if run.folder is not None:
        assert (run.folder / "trace.jsonl").read_bytes() == b"".join(one + b"\n" for one in trace)
    assert run.end is not None
    ENDS[run.end.reason] += 1
    if run.receipt.outcome == "complete":
        hellos = [one for one in host.wrote if one.startswith("hello")]
        assert hellos[0] in ("hello", "hello without extensions")
        assert COMPLETE.intersection(host.wrote)
        assert run.end.reason == "complete"
        assert run.end_error is None
        assert "fail" not in caller.did
    else:
        assert run.end.reason != "complete"
    if (channel_ := run.drive.host) is not None:
        assert channel_.gone.is_set()
        assert channel_.link.exit is not None
        assert (channel_.link.stdin, channel_.link.stdout) == (-1, -1)
        assert not channel_.backlog or channel_.unwritten or run.receipt.outcome != "complete"


async def after_the_end(run: Run, caller: Caller) -> None:
    """Nothing that is done later changes anything."""
    stored, end, count = run.stored, run.end, len(caller.did)
    for act in CALLER:
        if act not in ("leave", "raise", "sleep", "fail", "fail late"):
            await caller.do(run, act)
    del caller.did[count:]
    assert (run.stored, run.end) == (stored, end)
    assert [one async for one in run] == []


@pytest.fixture
def quick_steps() -> Iterator[None]:
    with mock.patch.object(memory, "LADDER_STEP_S", 0.03), mock.patch.object(channel, "EXIT_WAIT_S", 0.05):
        yield
    print(f"{sum(PLAYED)} stories in {len(PLAYED)} examples: {dict(ENDS)}")


@pytest.mark.timeout(max(120, EXAMPLES * 2))
@pytest.mark.usefixtures("quick_steps")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(told=st.lists(stories(), min_size=1, max_size=12))
def test_every_story_ends_once_with_one_receipt_and_leaves_nothing(
    told: list[Story], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp() / "states"
    (base / "work").mkdir(parents=True, exist_ok=True)
    anyio.run(play_all, told, base / "home", base / "work")
