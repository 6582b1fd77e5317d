"""What hosts claim against what was seen: lies of every kind in random places, and honest runs without an alarm.

The host is a real one on the kit: it does what it says, or says what it did not do. `docs/guide/claims.md` is the list.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane import host as kit
from backplane.contract import canonical
from backplane.contract.capability import NATIVE
from backplane.contract.envelope import Final
from backplane.contract.events import CommandExecuted, FileChanged, ToolCall, ToolResult, carry
from backplane.contract.receipt import Artifact, Receipt, Usage, receipt_hash
from backplane.receipts.claims import Files, Judge, Seen
from backplane.runtime.run import Run
from tests.all.faults import sizes
from tests.peers import ROOT
from tests.runs import backplane_of, ended, go, memory, order, plane
from tests.test_runs import cli

pytestmark = pytest.mark.anyio

LIES_EACH = 10
HOST = kit.Host(id="agent", version="1.2", capabilities={"streaming": NATIVE, "tool_bash": NATIVE})
FIXED = "2020-01-15T12:00:00Z"

TABLES = (ROOT / "docs" / "guide" / "claims.md").read_text().split("## Kinds that nobody sees")
KINDS = {
    kind
    for row in re.findall(r"^\| (`.*?) \|", TABLES[0].split("## Kinds that can be seen")[1], re.M)
    for kind in re.findall(r"`([^`]+)`", row)
}
UNSEEN = {kind for row in re.findall(r"^\| (`.*?) \|", TABLES[1], re.M) for kind in re.findall(r"`([^`]+)`", row)}

replace = msgspec.structs.replace

SEEN = Seen(
    run_id="", order_id="", backend_id="agent", backend_version="1.2", capabilities={}, mode="mapped", violations=0,
    changed=None,
)  # fmt: skip


class Agent:
    """A scripted agent that does what it says; lies are put between its steps."""

    def __init__(self, run: kit.HostRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.root = Path(run.order.workspace.root)
        self.calls: list[tuple[str, str]] = []
        self.lies: Counter[str] = Counter()
        self.told = self.untouched = 0
        self.usage = 0
        self._paths = [f"d{n % 3}/f{n}.txt" for n in range(9)]

    async def emit(self, event: Any) -> None:
        self.told += 1
        await self.run.emit(event)

    def id(self) -> str:
        return f"c{len(self.calls)}-{self.rng.randrange(10**9)}"

    async def call(self, name: str, input: Any, parent: str | None = None) -> str:
        id = self.id()
        self.calls.append((id, name))
        await self.emit(
            ToolCall(ts=self.run.now(), tool_name=name, input=input, tool_use_id=id, parent_tool_use_id=parent)
        )
        return id

    async def result(self, id: str, name: str, *, is_error: bool = False) -> None:
        await self.emit(ToolResult(ts=self.run.now(), tool_name=name, output="x", is_error=is_error, tool_use_id=id))

    async def changed(self, path: str) -> None:
        await self.emit(FileChanged(ts=self.run.now(), path=path, summary="did it"))

    # What an honest agent does

    async def write(self) -> None:
        path, text = self.rng.choice(self._paths), f"é {self.rng.random()}\n"
        id = await self.call("write_file", {"path": path, "content": text})
        if self.rng.random() < 0.2:
            await self.result(id, "write_file", is_error=True)
            return
        (self.root / path).parent.mkdir(exist_ok=True)
        (self.root / path).write_text(text)
        await self.result(id, "write_file")
        if self.rng.random() < 0.7:
            await self.changed(path if self.rng.random() < 0.7 else str(self.root / path))

    async def same(self) -> None:
        """Write what is there already, and say that the file changed."""
        text = (self.root / "kept.txt").read_text()
        id = await self.call("Write", {"path": "kept.txt", "content": text})
        await self.result(id, "Write")
        await self.changed("kept.txt")

    async def delete(self) -> None:
        path = self.rng.choice(self._paths)
        id = await self.call("delete_file", {"path": path})
        there = (self.root / path).exists()
        (self.root / path).unlink(missing_ok=True)
        await self.result(id, "delete_file", is_error=not there)
        if there:
            await self.changed(path)

    async def command(self) -> None:
        path = self.rng.choice(self._paths)
        id = await self.call("bash", {"command": f"rm -f {path}; echo x > made.txt"})
        (self.root / path).unlink(missing_ok=True)
        (self.root / "made.txt").write_text("x\n")
        await self.emit(CommandExecuted(ts=self.run.now(), command="rm", exit_code=self.rng.choice((0, 1, None))))
        await self.result(id, "bash")

    async def ignored(self) -> None:
        (self.root / "build").mkdir(exist_ok=True)
        (self.root / "build/out.o").write_text(str(self.rng.random()))
        await self.changed("build/out.o")

    async def nested(self) -> None:
        outer = await self.call("task", {"prompt": "look"})
        inner = await self.call("read_file", {"path": "kept.txt"}, parent=outer)
        await self.result(inner, "read_file")
        await self.result(outer, "task")

    async def asked(self) -> None:
        verdict = await self.run.may("read_file", {"path": "kept.txt"})
        assert verdict.decision == "allow"

    async def words(self) -> None:
        await self.emit(carry("session", {"id": "s"}, ts=self.run.now(), message="session"))
        self.usage += self.rng.randrange(50)
        usage = dict.fromkeys(Usage.__struct_fields__, self.usage)
        await self.emit(carry("usage", usage, ts=self.run.now(), message="so far"))
        self.told += 2
        await self.run.delta("a")
        await self.run.message("a")

    def receipt(self) -> Receipt:
        usage = Usage(**dict.fromkeys(Usage.__struct_fields__, self.usage + self.rng.randrange(2)))
        made = self.run.receipt(kit.Done(usage=usage, artifacts=(Artifact("file", "kept.txt"),)))
        return replace(made, receipt_sha256=None)


STEPS = (Agent.write, Agent.write, Agent.same, Agent.delete, Agent.command, Agent.ignored, Agent.nested, Agent.asked,
         Agent.words)  # fmt: skip


# Lies in events ---------------------------------------------------------------------------------------------------


async def lie_file_changed(agent: Agent) -> None:
    agent.untouched += 1
    await agent.changed(agent.rng.choice((f"never/{agent.rng.random()}.py", f"still{agent.untouched}.txt")))


async def lie_file_content(agent: Agent) -> None:
    path = f"lie{agent.rng.randrange(10**9)}.txt"
    id = await agent.call("write_file", {"path": path, "content": "as told"})
    if agent.rng.random() < 0.5:
        (agent.root / path).write_text("otherwise")
    await agent.result(id, "write_file")


async def lie_result_id(agent: Agent) -> None:
    await agent.result(f"no-such-call-{agent.rng.random()}", "bash")


async def lie_result_name(agent: Agent) -> None:
    id = await agent.call("read_file", {"path": "kept.txt"})
    await agent.result(id, "grep")


async def lie_call_id(agent: Agent) -> None:
    id = await agent.call("read_file", {"path": "kept.txt"})
    await agent.emit(ToolCall(ts=agent.run.now(), tool_name="read_file", input={"path": "a"}, tool_use_id=id))


async def lie_parent(agent: Agent) -> None:
    await agent.call("read_file", {"path": "kept.txt"}, parent=f"nobody-{agent.rng.random()}")


def lie_of_ours(name: str, body: dict[str, Any]) -> Callable[[Agent], Any]:
    async def tell(agent: Agent) -> None:
        await agent.emit(carry(name, body, ts=agent.run.now(), message="as if"))

    return tell


IN_EVENTS: dict[str, Callable[[Agent], Any]] = {
    "file_changed": lie_file_changed,
    "file_content": lie_file_content,
    "tool_result.id": lie_result_id,
    "tool_result.name": lie_result_name,
    "tool_call.id": lie_call_id,
    "tool_call.parent": lie_parent,
    "ask": lie_of_ours("ask", {"id": "a", "kind": "tool", "name": "bash"}),
    "answer": lie_of_ours("answer", {"id": "a", "decision": "allow", "by": "caller"}),
    "checkpoint": lie_of_ours("checkpoint", {"what": "made", "id": "c1"}),
}

OTHER_ID = "0b0e7ba5-1111-4222-8333-0123456789ab"


def in_meta(**members: Any) -> Callable[[Receipt, Agent], Receipt]:
    return lambda receipt, agent: replace(receipt, meta=replace(receipt.meta, **members))


def less_usage(name: str) -> Callable[[Receipt, Agent], Receipt]:
    return lambda receipt, agent: replace(
        receipt, usage=replace(receipt.usage, **{name: agent.rng.randrange(agent.usage)})
    )


def other_trace(receipt: Receipt, agent: Agent) -> Receipt:
    return replace(receipt, trace=[FileChanged(ts=FIXED, path=str(agent.rng.random()), summary="")])


def verified(**members: Any) -> Callable[[Receipt, Agent], Receipt]:
    return lambda receipt, agent: replace(receipt, verification=replace(receipt.verification, **members))


IN_RECEIPT: dict[str, Callable[[Receipt, Agent], Receipt]] = {
    "meta.run_id": in_meta(run_id=OTHER_ID),
    "meta.work_order_id": in_meta(work_order_id=OTHER_ID),
    "meta.contract_version": in_meta(contract_version="abp/v0.9"),
    "backend.id": lambda receipt, agent: replace(receipt, backend=replace(receipt.backend, id="other")),
    "backend.version": lambda receipt, agent: replace(receipt, backend=replace(receipt.backend, backend_version="1.3")),
    "capabilities": lambda receipt, agent: replace(
        receipt, capabilities={**receipt.capabilities, "mcp_client": "native"}
    ),
    "outcome": lambda receipt, agent: receipt,  # Complete, it says, and an event told of a violation.
    "mode": lambda receipt, agent: replace(receipt, mode="passthrough"),
    "git_diff": verified(git_diff="diff --git a/x b/x\n"),
    "git_status": verified(git_status="M never.py\n"),
    "trace": other_trace,
    "artifact": lambda receipt, agent: replace(receipt, artifacts=(Artifact("file", f"no/{agent.rng.random()}"),)),
    **{f"usage.{name}": less_usage(name) for name in Usage.__struct_fields__},
}


async def end(run: kit.HostRun, receipt: Receipt) -> kit.Done:
    """Send this receipt as the last word; the kit's own comes too late for anybody."""
    value = canonical.decode(canonical.encode(replace(receipt, trace=list(receipt.trace))))
    await run.write_raw(msgspec.json.encode(Final(ref_id=run.id, receipt=value)) + b"\n")
    return kit.Done()


class Scene:
    """One host whose agent is scripted by a generator."""

    def __init__(
        self, seed: int, *, events: tuple[str, ...] = (), each: int = 0, receipt: tuple[str, ...] = ()
    ) -> None:
        self.rng = random.Random(seed)
        self.events = [kind for kind in events for _ in range(each)]
        self.receipt = receipt
        self.agent: Agent | None = None

    async def work(self, run: kit.HostRun) -> kit.Done:
        agent = self.agent = Agent(run, self.rng)
        steps: list[Any] = [self.rng.choice(STEPS) for _ in range(self.rng.randrange(1, 6))]
        steps += [(kind, IN_EVENTS[kind]) for kind in self.events]
        self.rng.shuffle(steps)
        for step in steps:
            if isinstance(step, tuple):
                await step[1](agent)
                agent.lies[step[0]] += 1
            else:
                await step(agent)
        if "outcome" in self.receipt:
            await agent.changed("/somewhere/else.txt")
        if self.receipt:
            agent.usage += 1
            usage = dict.fromkeys(Usage.__struct_fields__, agent.usage)
            await agent.emit(carry("usage", usage, ts=run.now(), message="so far"))
        told = agent.receipt()
        for kind in self.receipt:
            told = IN_RECEIPT[kind](told, agent)
            agent.lies[kind] += 1
        return await end(run, told)


def workspace(folder: Path) -> Path:
    folder.mkdir()
    (folder / "kept.txt").write_text("kept\n")
    for number in range(1, 9):
        (folder / f"still{number}.txt").write_text("still\n")
    (folder / ".gitignore").write_text("build/\n")
    return folder


def claimed(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = backplane_of(run)["claimed"]
    return found


def found(run: Run) -> Counter[str]:
    """Count by kind what is false or not there."""
    counts = claimed(run)["counts"]
    return Counter({kind: one.get("false", 0) + one.get("not_seen", 0) for kind, one in counts.items()})


def missed(run: Run, agent: Agent) -> dict[str, Any]:
    """The lies that were not found."""
    seen = found(run)
    return {kind: (lies, claimed(run)["counts"].get(kind)) for kind, lies in agent.lies.items() if seen[kind] < lies}


async def test_lies_of_every_kind_in_random_places_are_found(tmp_path: Path, anyio_backend: str) -> None:
    lies: Counter[str] = Counter()
    async with plane(tmp_path / "home") as open_plane:
        for seed in range(3 * LIES_EACH):
            rng = random.Random(seed)
            kinds = tuple(kind for kind in IN_RECEIPT if rng.random() < 0.75)
            # A wrong name hides a wrong version of it, and repeated events any other trace.
            scene = Scene(seed, events=tuple(rng.sample(list(IN_EVENTS), 4)), each=4, receipt=kinds)
            root = workspace(tmp_path / f"w{seed}")
            run, _ = await go(open_plane, order(root), memory(scene.work, HOST))
            assert scene.agent is not None
            assert missed(run, scene.agent) == {}, seed
            lies.update(found(run))
            shutil.rmtree(root)
    tried = {*IN_EVENTS, *IN_RECEIPT}
    assert {kind: lies[kind] for kind in tried if lies[kind] < LIES_EACH} == {}
    assert tried | {"inner"} == KINDS
    assert len(KINDS) >= 20


async def honest_runs(folder: Path, count: int) -> Counter[str]:
    """Play so many, none of which raises an alarm; how often each kind of claim had each verdict."""
    counts: Counter[str] = Counter()
    async with plane(folder / "home") as open_plane:
        for seed in range(count):
            scene = Scene(1000 + seed)
            root = workspace(folder / f"w{seed}")
            run, _ = await go(open_plane, order(root, mode="pass_through"), memory(scene.work, HOST))
            assert ended(run) == ("complete", None, "complete")
            assert claimed(run)["false"] == [], seed
            for kind, by in claimed(run)["counts"].items():
                assert "false" not in by
                counts.update({f"{kind} {verdict}": number for verdict, number in by.items()})
            shutil.rmtree(root)
    assert {key.split(" ")[0] for key in counts} <= KINDS | UNSEEN
    return counts


@pytest.mark.timeout(360)
async def test_honest_runs_raise_no_alarm(tmp_path: Path) -> None:
    count = sizes.of(40, 500)
    counts = await honest_runs(tmp_path, count)
    assert min(counts["file_changed true"], counts["file_content true"]) > count // 5


PLANE = replace(HOST, backends=({"id": "x", "ready": True, "capabilities": {"streaming": "native"}},))


async def test_a_plane_inside_is_believed_by_its_hash_alone(tmp_path: Path, anyio_backend: str) -> None:
    """Its ids, times and asks are its own; whose hash does not hold is found each time."""
    verdicts: Counter[tuple[bool, str]] = Counter()
    async with plane(tmp_path / "home") as open_plane:
        for seed in range(2 * LIES_EACH):
            rng, honest = random.Random(seed), seed % 2 == 0

            async def work(run: kit.HostRun, rng: random.Random = rng, honest: bool = honest) -> kit.Written:
                events = [
                    carry("ask", {"id": str(n), "kind": "tool", "name": "bash"}, ts=run.now(), message="asks")
                    for n in range(rng.randrange(1, 9))
                ]
                for event in events:
                    await run.emit(event)
                inner = replace(run.receipt(kit.Done(usage_raw={"backplane": {"end": {"reason": "complete"}}})))
                told = [*events, events[0]] if not honest else list(events)
                sha256 = receipt_hash(replace(inner, trace=told))
                value = canonical.decode(canonical.encode(replace(inner, receipt_sha256=sha256)))
                return kit.Written([msgspec.json.encode(Final(ref_id=run.id, receipt=value)) + b"\n"])

            run, _ = await go(open_plane, order(workspace(tmp_path / f"w{seed}")), memory(work, PLANE))
            counts = claimed(run)["counts"]
            assert counts["ask"].keys() == counts["meta.run_id"].keys() == {"unwitnessed"}
            verdicts.update((honest, verdict) for verdict in counts["inner"])
    assert verdicts == {(True, "true"): LIES_EACH, (False, "false"): LIES_EACH}


async def test_where_a_layer_is_not_in_force_nothing_is_called_true(tmp_path: Path, anyio_backend: str) -> None:
    """A difference of too many files is none that names could be held against."""

    async def work(run: kit.HostRun) -> kit.Done:
        agent = Agent(run, random.Random(1))
        for number in range(1001):
            (agent.root / f"n{number}").touch()
        await lie_file_changed(agent)
        await agent.changed("n1")
        return kit.Done()

    async with plane(tmp_path / "home") as open_plane:
        run, _ = await go(open_plane, order(workspace(tmp_path / "w")), memory(work, HOST))
    assert claimed(run)["counts"]["file_changed"] == {"unwitnessed": 2}
    assert claimed(run)["layers"] == ["plane", "final"]


@pytest.mark.parametrize(
    ("counted", "verdict"), [(None, "unwitnessed"), (100, "true"), (99, "false"), (101, "unwitnessed")]
)
async def test_tokens_are_held_against_what_the_service_counted(
    tmp_path: Path, anyio_backend: str, counted: int | None, verdict: str
) -> None:
    async def work(run: kit.HostRun) -> kit.Done:
        return kit.Done(usage=Usage(input_tokens=100))

    async with plane(tmp_path / "home") as open_plane:
        run, _ = await go(open_plane, order(workspace(tmp_path / "w")), memory(work, HOST))
    # No host of a test asks a service by the key's proxy, so what was seen of one is given here.
    usage = None if counted is None else Usage(input_tokens=counted)
    seen = replace(SEEN, run_id=run.id, order_id=run.order.id, usage=usage)
    judge = Judge(lambda path: path)
    judge.end(seen, Files(), run.receipt)
    told: Any = judge.to_wire()
    assert told["counts"]["usage.input_tokens"] == {verdict: 1}
    assert ("service" in told["layers"]) == (counted is not None)
    assert ("the service counted 99" in [row["seen"] for row in told["false"]]) == (verdict == "false")


async def test_what_a_later_command_may_have_undone_is_no_lie(tmp_path: Path, anyio_backend: str) -> None:
    async def work(run: kit.HostRun) -> kit.Done:
        agent = Agent(run, random.Random(1))
        await lie_file_content(agent)
        await lie_file_changed(agent)
        await agent.command()
        return kit.Done()

    async with plane(tmp_path / "home") as open_plane:
        run, _ = await go(open_plane, order(workspace(tmp_path / "w")), memory(work, HOST))
    counts = claimed(run)["counts"]
    assert (counts["file_changed"], counts["file_content"]) == ({"not_seen": 1}, {"not_seen": 1})
    assert claimed(run)["not_seen"][0]["seen"] == "not in the difference"


async def test_a_link_out_of_the_workspace_is_not_followed(tmp_path: Path, anyio_backend: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f.txt").write_text("as told")

    async def work(run: kit.HostRun) -> kit.Done:
        agent = Agent(run, random.Random(1))
        (agent.root / "link").symlink_to(outside)
        (agent.root / "also.txt").symlink_to(outside / "f.txt")
        for path in ("link/f.txt", "also.txt"):
            id = await agent.call("write_file", {"path": path, "content": "as told"})
            await agent.result(id, "write_file")
        return kit.Done()

    async with plane(tmp_path / "home") as open_plane:
        run, _ = await go(open_plane, order(workspace(tmp_path / "w")), memory(work, HOST))
    assert claimed(run)["counts"]["file_content"] == {"unwitnessed": 2}


def calls_at_the_end(tmp_path: Path, count: int) -> int:
    """Count the Python calls in the worker threads of a run of so many text events, and of one file."""
    calls = 0

    def counted(frame: Any, what: str, _: Any) -> None:
        nonlocal calls
        calls += what == "call"

    async def work(run: kit.HostRun) -> kit.Done:
        agent = Agent(run, random.Random(1))
        for number in range(count):
            await run.delta(f"word {number}")
        await agent.write()
        return kit.Done()

    async def one() -> None:
        async with plane(tmp_path / f"home{count}") as open_plane:
            run, _ = await go(open_plane, order(workspace(tmp_path / f"w{count}")), memory(work, HOST))
        assert claimed(run)["counts"]["tool_call"] == {"unwitnessed": 1}

    threading.setprofile(counted)
    try:
        anyio.run(one)
    finally:
        threading.setprofile(None)
    return calls


def test_events_that_claim_nothing_cost_nothing_at_the_end(tmp_path: Path) -> None:
    few, many = calls_at_the_end(tmp_path, 100), calls_at_the_end(tmp_path, 1_600)
    assert many - few < 500


def test_thousands_of_files_that_are_not_in_the_difference_are_judged_at_once() -> None:
    judge, count = Judge(lambda path: path), 5_000
    for number in range(count):
        judge.take(number, FileChanged(ts=FIXED, path=f"build/{number}.o", summary="compiled"))
        judge.take(number, ToolCall(ts=FIXED, tool_name="edit_file", input={"path": f"src/{number}.c"}))
    started = time.process_time()
    judge.end(replace(SEEN, changed={f"out/{number}" for number in range(1_000)}), Files(), None)
    assert time.process_time() - started < 1
    assert judge.to_wire()["counts"]["file_changed"] == {"false": count}


def test_the_audit_says_what_is_false_and_what_nobody_saw(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lie = {"ts": FIXED, "type": "file_changed", "path": "never.py", "summary": "fixed\x1b[31m"}
    body = f"""
import json, sys
def put(t, **members): print(json.dumps(dict(t=t, **members)), flush=True)
put("hello", contract_version="abp/v0.1", backend=dict(id="b"), capabilities=dict())
run = json.loads(sys.stdin.readline())
put("event", ref_id=run["id"], event={lie!r})
put("fatal", ref_id=run["id"], error="no")
sys.stdin.read()
"""
    Path("agent.py").write_text(body)
    cli("run", "x", "--sidecar", "python3 agent.py", "--isolation", "off")
    lied = cli("receipts", "audit", "last")
    assert lied.returncode == 1
    assert "claims are false: 0 true, 1 false" in lied.stdout
    assert "file_changed (event 0): claimed never.py; seen: not in the difference" in lied.stdout
    assert cli("run", "true", "--backend", "shell").returncode == 0
    honest = cli("receipts", "audit", "last")
    assert (honest.returncode, "no claim is false" in honest.stdout) == (0, True)
    assert " 0 false, " in honest.stdout
    assert cli("run", "x", "--backend", "replay:last").returncode == 0
    again = cli("receipts", "audit", "last", "--json")
    assert (again.returncode, json.loads(again.stdout)["verdict"]) == (4, "not_judged")
    assert cli("receipts", "audit", "last").returncode == 4
    told = cli("receipts", "audit", "--help").stdout
    assert "4 if no claim could be judged" in " ".join(told.split())
