"""A table of honest ways to claim something and of lies, one run for each cell: no false alarm, and every lie is found.

A lie is found where its kind has a verdict `false` or `not_seen`; an honest claim is never `false`. The texts of git's
are git's own, given by the agent after its work.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane import host as kit
from backplane.contract import canonical
from backplane.contract.capability import NATIVE
from backplane.contract.envelope import Final
from backplane.contract.events import (
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    RunStarted,
    ToolCall,
    ToolResult,
    Warned,
    carry,
)
from backplane.contract.receipt import Artifact, Receipt, Usage
from tests.runs import go, memory, order, plane
from tests.test_claims import FIXED, HOST, OTHER_ID, Agent, claimed, end, in_meta, verified, workspace

pytestmark = pytest.mark.anyio

replace = msgspec.structs.replace
Act = Callable[[Agent], Any]
Tell = Callable[[Receipt, Agent], Any]


AGENT = replace(
    HOST, heeds=(*HOST.heeds, "mode", "session"), capabilities={**HOST.capabilities, "session_resume": NATIVE}
)


class Cell:
    """One host: what it does and says, and what its receipt says."""

    def __init__(
        self, name: str, kind: str = "", act: Act | None = None, tell: Tell | None = None, **order: Any
    ) -> None:
        self.name, self.kind, self.act, self.tell, self.order = name, kind, act, tell, order

    async def work(self, run: kit.HostRun) -> kit.Done | kit.Written:
        agent = Agent(run, random.Random(self.name))
        if self.act is not None:
            await self.act(agent)
        receipt = agent.receipt()
        told = receipt if self.tell is None else self.tell(receipt, agent)
        if isinstance(told, dict):  # A receipt as it is written, not as it is read.
            await run.write_raw(msgspec.json.encode(Final(ref_id=run.id, receipt=told)) + b"\n")
            return kit.Done()
        return await end(run, told)


async def verdicts(cell: Cell, folder: Path) -> dict[str, Any]:
    root = folder / "w"
    shutil.copytree(committed(folder.parent), root)
    work = order(root, mode="pass_through")
    vendor = {**work.config.vendor, "abp": {**work.config.vendor.get("abp", {}), **cell.order}}
    work = replace(work, config=replace(work.config, vendor=vendor)) if cell.order else work
    async with plane(folder / "home") as open_plane:
        run, _ = await go(open_plane, work, memory(cell.work, AGENT))
    return claimed(run)


def committed(base: Path) -> Path:
    """The workspace as each agent finds it, under git; made once beside the folders of the tests."""
    root = base / "committed"
    if not root.exists():
        workspace(root)
        for words in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-qm", "one")):
            git(root, *words)
    return root


def git(root: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.autocrlf=false")
    return subprocess.run(("git", *names, *words), cwd=root, capture_output=True, check=True).stdout.decode()


# What an agent does ---------------------------------------------------------------------------------------------------


async def work_on_files(agent: Agent) -> None:
    """Change, add, delete and rename; one name is quoted by git."""
    root = agent.root
    (root / "kept.txt").write_text("kept\nand more\n")
    (root / "café ü.txt").write_text("new\n")
    (root / "sub").mkdir()
    (root / "sub/new.txt").write_text("new\n")
    (root / "still1.txt").unlink()
    (root / "still2.txt").rename(root / "moved.txt")


def after(*words: str, stage: bool = False, shape: Callable[[str], str] = str) -> Tell:
    """Put git's answer into the receipt, as a diff or a status."""

    def tell(receipt: Receipt, agent: Agent) -> Receipt:
        if stage:
            git(agent.root, "add", "-A")
        text = shape(git(agent.root, *words))
        name = "git_status" if "status" in words else "git_diff"
        return replace(receipt, verification=replace(receipt.verification, **{name: text}))

    return tell


def diff(words: str) -> Tell:
    return after("diff", *words.split())


def status(words: str) -> Tell:
    return after("status", *words.split())


def in_turn(first: Tell, second: Tell) -> Tell:
    def tell(receipt: Receipt, agent: Agent) -> Receipt:
        told = first(receipt, agent)
        assert isinstance(told, Receipt)
        again = second(told, agent)
        assert isinstance(again, Receipt)
        return again

    return tell


DIFFS = (
    "", "-U0", "-U10", "--stat", "--numstat", "--shortstat", "--name-only", "--name-status", "--raw", "--no-color",
    "--color=always", "--no-prefix", "--src-prefix=old/ --dst-prefix=new/", "--abbrev=4", "--full-index", "--binary",
    "-M", "--no-renames", "-C", "-w", "--word-diff", "--patience", "-W", "--relative", "--patch-with-stat", "--summary",
    "--compact-summary", "--dirstat", "-a", "--inter-hunk-context=3", "--stat=30", "-z",
)  # fmt: skip
STATUSES = (
    "", "-s", "--porcelain", "--porcelain=v1", "--porcelain=v2", "--porcelain=v2 --branch", "-sb", "-s -uno",
    "-s -uall", "-s -unormal", "--porcelain -z", "--ignored", "-s --ignored", "--no-renames", "-v",
    "--show-stash", "--long",
)  # fmt: skip


async def call(agent: Agent, name: str, value: Any, id: str | None, parent: str | None = None) -> None:
    ts = agent.run.now()
    await agent.emit(ToolCall(ts=ts, tool_name=name, input=value, tool_use_id=id, parent_tool_use_id=parent))


async def result(agent: Agent, name: str, id: str | None, output: str = "x", is_error: bool = False) -> None:
    ts = agent.run.now()
    await agent.emit(ToolResult(ts=ts, tool_name=name, output=output, is_error=is_error, tool_use_id=id))


async def command(agent: Agent, text: str = "true") -> None:
    await agent.emit(CommandExecuted(ts=agent.run.now(), command=text, exit_code=0))


def steps(*made: tuple[Any, ...]) -> Act:
    """Calls `(name, input, id, parent)` and results `("=", name, id)` in this order; `"turn"` ends one."""

    async def act(agent: Agent) -> None:
        for row in made:
            if row[0] == "=":
                await result(agent, *row[1:])
            elif row[0] == "turn":
                await agent.emit(carry("turn", {"stop_reason": "tool_use"}, ts=agent.run.now(), message="turn"))
            else:
                await call(agent, *row)

    return act


READ = {"path": "kept.txt"}

WRITERS = {
    "write_file": ("path", "content"),
    "Write": ("file_path", "content"),
    "WriteFile": ("path", "content"),
    "create": ("path", "file_text"),
    "write": ("filePath", "content"),
}
TEXT = 'def total(rows):\n    return sum(row["price"] for row in rows)\n'


def writing(
    tool: str,
    on_disk: str | bytes | None,
    text: str = TEXT,
    *,
    then: Act | None = None,
    id: str | None = "w1",
    **more: Any,
) -> Act:
    """Say that a tool wrote a text, and leave another one on the disk."""
    path_name, content_name = WRITERS[tool]

    async def act(agent: Agent) -> None:
        await call(agent, tool, {path_name: "made.py", content_name: text, **more}, id)
        if on_disk is not None:
            (agent.root / "made.py").write_bytes(on_disk if isinstance(on_disk, bytes) else on_disk.encode())
        await result(agent, tool, id)
        if then is not None:
            await then(agent)

    return act


def changed(*paths: str, do: Callable[[Path], object] | None = None, then: Act | None = None) -> Act:
    """Do something to the files, and say that these changed."""

    async def act(agent: Agent) -> None:
        if do is not None:
            do(agent.root)
        for path in paths:
            await agent.changed(path.replace("ROOT", str(agent.root)))
        if then is not None:
            await then(agent)

    return act


def both(first: Act, second: Act) -> Act:
    async def act(agent: Agent) -> None:
        await first(agent)
        await second(agent)

    return act


def put(path: str, text: str = "x\n") -> Callable[[Path], object]:
    def do(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return do


def link(root: Path) -> None:
    put("real/f.txt")(root)
    (root / "way").symlink_to("real")


def usage(reported: dict[str, Any], final: dict[str, Any]) -> tuple[Act, Tell]:
    async def act(agent: Agent) -> None:
        await agent.emit(carry("usage", reported, ts=agent.run.now(), message="so far"))

    return act, lambda receipt, agent: replace(receipt, usage=Usage(**final))


async def some_events(agent: Agent) -> None:
    """Events with optional members and a time of another precision."""
    agent.kept = []  # type: ignore[attr-defined]
    for event in (
        AssistantDelta(ts="2026-01-15T12:00:00.123456Z", text="a"),
        ToolCall(ts="2026-01-15T12:00:00.500Z", tool_name="read_file", input=READ, tool_use_id="c1"),
        ToolResult(ts="2026-01-15T12:00:01Z", tool_name="read_file", output="x", is_error=False, tool_use_id="c1"),
        CommandExecuted(ts="2026-01-15T12:00:02Z", command="true", exit_code=0),
        AssistantMessage(ts="2026-01-15T12:00:03Z", text="a"),
    ):
        await agent.emit(event)
        agent.kept.append(event)  # type: ignore[attr-defined]


def trace(change: Callable[[list[dict[str, Any]]], Any]) -> Tell:
    """Repeat the trace in the receipt, written in another way, or changed."""

    def tell(receipt: Receipt, agent: Agent) -> dict[str, Any]:
        events = [msgspec.to_builtins(event) for event in agent.kept]  # type: ignore[attr-defined]
        value: dict[str, Any] = canonical.decode(canonical.encode(replace(receipt, trace=[])))
        return {**value, "trace": change(events) or events}

    return tell


def times(form: Callable[[str], str]) -> Tell:
    return trace(lambda events: [{**event, "ts": form(event["ts"])} for event in events])


def each(**members: Any) -> Tell:
    return trace(lambda events: [{**event, **members} for event in events])


def without_null(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in event.items() if value is not None} for event in events]


def with_null(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    none = {"tool_call": "parent_tool_use_id", "command_executed": "output_preview"}
    return [
        {**event, "ext": None, **({none[event["type"]]: None} if event["type"] in none else {})} for event in events
    ]


def artifact(path: str) -> Tell:
    return lambda receipt, agent: replace(receipt, artifacts=(Artifact("file", path.replace("ROOT", str(agent.root))),))


def backend(**members: Any) -> Tell:
    return lambda receipt, agent: replace(receipt, backend=replace(receipt.backend, **members))


def capabilities(**levels: Any) -> Tell:
    return lambda receipt, agent: replace(receipt, capabilities={**receipt.capabilities, **levels})


def riding(kind: type[Any], **fields: Any) -> Callable[[dict[str, Any]], Act]:
    """Make an event of this type carry something in `ext`."""

    def with_ext(ext: dict[str, Any]) -> Act:
        async def act(agent: Agent) -> None:
            if kind is ToolResult:
                await call(agent, "read_file", READ, "carrier")
            await agent.emit(kind(ts=agent.run.now(), ext=ext, **fields))

        return act

    return with_ext


CARRIERS = {
    "warning": riding(Warned, message="as if"),
    "error": riding(Failed, message="as if"),
    "message": riding(AssistantMessage, text="as if"),
    "delta": riding(AssistantDelta, text="as if"),
    "call": riding(ToolCall, tool_name="read_file", input=READ),
    "result": riding(ToolResult, tool_name="read_file", output="x", is_error=False, tool_use_id="carrier"),
    "file": riding(FileChanged, path="/elsewhere", summary="as if"),
    "command": riding(CommandExecuted, command="true"),
    "started": riding(RunStarted, message="as if"),
}
FORGED = {
    "ask": {"id": "a", "kind": "tool", "name": "bash"},
    "answer": {"id": "a", "decision": "allow", "by": "caller"},
    "checkpoint": {"what": "made", "id": "c1"},
}

HONEST = [
    *(
        Cell(f"git diff {words}, git status {other}", act=work_on_files, tell=in_turn(diff(words), status(other)))
        for words, other in zip_longest(DIFFS, STATUSES, fillvalue="")
    ),
    *(
        Cell(
            f"staged, git diff --cached {words}, git status {other}",
            act=work_on_files,
            tell=in_turn(after("diff", "--cached", *words.split(), stage=True), status(other)),
        )
        for words, other in (
            ("", "-s"),
            ("--stat", "--porcelain=v2"),
            ("-M", "--porcelain -z"),
            ("--no-renames", "-s --no-renames"),
            ("--raw", "-sb"),
            ("--name-status", ""),
        )
    ),
    Cell("git diff HEAD", act=work_on_files, tell=after("diff", "HEAD", stage=True)),
    Cell("git diff, mnemonic prefixes", act=work_on_files, tell=after("-c", "diff.mnemonicPrefix=true", "diff")),
    Cell("git diff, names not quoted", act=work_on_files, tell=after("-c", "core.quotePath=false", "diff", stage=True)),
    Cell("git diff without its blanks", act=work_on_files, tell=after("diff", shape=str.strip)),
    Cell("git diff with CRLF", act=work_on_files, tell=after("diff", shape=lambda text: text.replace("\n", "\r\n"))),
    Cell("git diff of nothing", act=work_on_files, tell=verified(git_diff="")),
    Cell("git diff in a folder", act=work_on_files, tell=after("-C", "sub", "diff", "--relative", "HEAD", stage=True)),
    Cell("git diff, a file that was changed before", act=changed(do=put("still8.txt", "mine\n")), tell=after("diff")),
    Cell("git status without its blanks", act=work_on_files, tell=after("status", "-s", shape=str.strip)),
    Cell("git status, names not quoted", act=work_on_files, tell=after("-c", "core.quotePath=false", "status", "-s")),
    Cell("git status of nothing", act=work_on_files, tell=verified(git_status="")),
    Cell("git status in words", act=work_on_files, tell=verified(git_status="some files were changed")),
    # A trace that is repeated
    Cell("trace as it was", act=some_events, tell=trace(list)),
    Cell("trace, null absent", act=some_events, tell=trace(without_null)),
    Cell("trace, absent null", act=some_events, tell=trace(with_null)),
    Cell("trace, +00:00", act=some_events, tell=times(lambda ts: ts.replace("Z", "+00:00"))),
    Cell("trace, whole seconds", act=some_events, tell=times(lambda ts: ts[:19] + "Z")),
    Cell("trace, milliseconds", act=some_events, tell=times(lambda ts: ts[:19] + ".123Z")),
    Cell("trace, nanoseconds", act=some_events, tell=times(lambda ts: ts[:19] + ".123456789Z")),
    Cell("trace, of an hour ahead", act=some_events, tell=times(lambda ts: ts[:19] + "+01:00")),
    Cell(
        "trace, order of members",
        act=some_events,
        tell=trace(lambda events: [dict(reversed(list(event.items()))) for event in events]),
    ),
    Cell("trace without deltas", act=some_events, tell=trace(lambda events: events[1:])),
    # Ids
    Cell(
        "ids of agents inside",
        act=steps(
            ("task", {}, "1"),
            ("read_file", READ, "2", "1"),
            ("bash", {"command": "ls"}, "2"),
            ("grep", {}, "2", "x1"),
            ("task", {}, "x1"),
            ("=", "bash", "2"),
            ("=", "grep", "2"),
            ("=", "read_file", "2"),
        ),
    ),
    Cell(
        "ids begin anew with each turn",
        act=steps(
            ("bash", {"command": "a"}, "call_0"),
            ("=", "bash", "call_0"),
            ("read_file", READ, "call_0"),
            ("=", "read_file", "call_0"),
        ),
    ),
    Cell("ids begin anew, no results", act=steps(("bash", {"command": "a"}, "call_0"), ("read_file", READ, "call_0"))),
    Cell(
        "ids begin anew, turns alone",
        act=steps(
            ("bash", {"command": "a"}, "call_0"), ("turn",), ("read_file", READ, "call_0"), ("=", "read_file", "call_0")
        ),
    ),
    Cell(
        "result in pieces",
        act=steps(
            ("bash", {"command": "a"}, "c1"),
            ("=", "bash", "c1", "one"),
            ("=", "bash", "c1", "two"),
            ("=", "bash", "c1", "three"),
        ),
    ),
    Cell(
        "call told twice",
        act=steps(("bash", {"command": "a"}, "c1"), ("bash", {"command": "a"}, "c1"), ("=", "bash", "c1")),
    ),
    Cell(
        "call told first without input",
        act=steps(("bash", {}, "c1"), ("bash", {"command": "a"}, "c1"), ("=", "bash", "c1")),
    ),
    Cell(
        "call told first with null",
        act=steps(("bash", None, "c1"), ("bash", {"command": "a"}, "c1"), ("=", "bash", "c1")),
    ),
    Cell("result by the other spelling", act=steps(("Read", READ, "c1"), ("=", "read_file", "c1"))),
    Cell("result by a title", act=steps(("read_file", READ, "c1"), ("=", "Read File", "c1"))),
    Cell("result by a longer title", act=steps(("edit", READ, "c1"), ("=", "edit_file", "c1"))),
    Cell("result of a server's tool", act=steps(("mcp__db__query", {}, "c1"), ("=", "query", "c1"))),
    Cell("result of an unknown name", act=steps(("bash", {}, "c1"), ("=", "unknown", "c1"))),
    Cell("result without a name", act=steps(("bash", {}, "c1"), ("=", "", "c1"))),
    Cell("result before its call", act=steps(("=", "bash", "c1"), ("bash", {}, "c1"))),
    Cell(
        "parent told later",
        act=steps(("read_file", READ, "c2", "c1"), ("task", {}, "c1"), ("=", "read_file", "c2"), ("=", "task", "c1")),
    ),
    Cell("no ids", act=steps(("bash", {}, None), ("=", "bash", None))),
    Cell("ids in results alone", act=steps(("bash", {}, None), ("=", "bash", "c1"))),
    Cell("results alone", act=steps(("=", "bash", "c1"))),
    Cell(
        "a call of an earlier run",
        act=steps(("bash", {}, "c2"), ("=", "task", "c1"), ("=", "bash", "c2")),
        session={"id": "s1"},
    ),
    # Files that a tool wrote
    *(Cell(f"{tool} writes as it says", act=writing(tool, TEXT)) for tool in WRITERS),
    Cell("CRLF on the disk", act=writing("Write", TEXT.replace("\n", "\r\n"))),
    Cell("CRLF in the call", act=writing("Write", TEXT, TEXT.replace("\n", "\r\n"))),
    Cell("a byte order mark", act=writing("Write", "\ufeff" + TEXT)),
    Cell("a byte order mark in the call", act=writing("Write", TEXT, "\ufeff" + TEXT)),
    Cell("UTF-16", act=writing("Write", TEXT.encode("utf-16"))),
    Cell("latin-1", act=writing("Write", "# é\nprint(1)\n".encode("latin-1"), "# é\nprint(1)\n")),
    Cell("no newline at the end", act=writing("Write", TEXT.rstrip())),
    Cell("more newlines at the end", act=writing("Write", TEXT + "\n\n")),
    Cell("blanks at the ends of lines", act=writing("Write", TEXT.replace("\n", "  \n"))),
    Cell("tabs", act=writing("Write", TEXT.replace("    ", "\t"))),
    Cell("a formatter's quotes", act=writing("Write", TEXT.replace('"', "'"))),
    Cell(
        "a formatter's lines",
        act=writing("Write", TEXT.replace("sum(", "sum(\n        ").replace("rows)\n", "rows\n    )\n", 2)),
    ),
    Cell("a formatter's commas", act=writing("Write", "x = [\n    1,\n    2,\n]\n", "x = [1, 2]\n")),
    Cell("a linter removes an import", act=writing("Write", TEXT, "import os\n" + TEXT)),
    Cell("imports sorted", act=writing("Write", "import ast\nimport os\n" + TEXT, "import os\nimport ast\n" + TEXT)),
    Cell("a header is added", act=writing("Write", "# Copyright\n" + TEXT)),
    Cell("a command later", act=writing("Write", "other\n", then=command)),
    Cell(
        "a tool later",
        act=writing("Write", "other\n", then=steps(("bash", {"command": "make"}, "b1"), ("=", "bash", "b1"))),
    ),
    Cell(
        "an edit later",
        act=writing("Write", "other\n", then=steps(("Edit", {"file_path": "made.py"}, "e1"), ("=", "Edit", "e1"))),
    ),
    Cell("appended", act=writing("WriteFile", "before\n" + TEXT, mode="append")),
    Cell("appended, a flag", act=writing("write_file", "before\n" + TEXT, append=True)),
    Cell("written and removed by a command", act=writing("Write", None, then=command)),
    Cell("no call id", act=writing("Write", TEXT, id=None)),
    Cell("no result", act=steps(("Write", {"file_path": "made.py", "content": "x"}, "c1"))),
    Cell(
        "a failed result",
        act=steps(("Write", {"file_path": "made.py", "content": "x"}, "c1"), ("=", "Write", "c1", "no", True)),
    ),
    Cell(
        "a server's tool of that name",
        act=steps(
            ("mcp__notes__write_file", {"path": "made.py", "content": "x"}, "c1"), ("=", "mcp__notes__write_file", "c1")
        ),
    ),
    # Files that changed
    Cell("changed ./", act=changed("./a.txt", do=put("a.txt"))),
    Cell("changed, absolute", act=changed("ROOT/a.txt", do=put("a.txt"))),
    Cell("changed, a URL", act=changed("file://ROOT/a.txt", do=put("a.txt"))),
    Cell("changed, folded", act=changed("sub/../a.txt", do=put("a.txt"))),
    Cell("changed, a folder", act=changed("sub", do=put("sub/a.txt"))),
    Cell("changed, a folder with a slash", act=changed("sub/", do=put("sub/a.txt"))),
    Cell("changed, composed", act=changed("caf\u00e9.txt", do=put("cafe\u0301.txt"))),
    Cell("changed, decomposed", act=changed(unicodedata.normalize("NFD", "café.txt"), do=put("café.txt"))),
    Cell("changed through a link", act=changed("way/f.txt", do=link)),
    Cell("changed from another folder", act=changed("a.txt", do=put("sub/a.txt"))),
    Cell("changed, ignored", act=changed("build/out.o", do=put("build/out.o"))),
    Cell("changed twice", act=changed("a.txt", "a.txt", do=put("a.txt"))),
    Cell("made and removed", act=changed("a.txt", "a.txt")),
    Cell("removed by a command", act=changed("a.txt", then=command)),
    Cell("changed by a command to the same", act=both(command, changed("kept.txt"))),
    Cell(
        "an edit of nothing",
        act=both(steps(("Edit", {"file_path": "kept.txt"}, "c1"), ("=", "Edit", "c1")), changed("kept.txt")),
    ),
    Cell("a write of the same", act=Agent.same),
    Cell("renamed", act=changed("kept.txt", "b.txt", do=lambda root: (root / "kept.txt").rename(root / "b.txt"))),
    Cell("deleted", act=changed("kept.txt", do=lambda root: (root / "kept.txt").unlink())),
    Cell("a mode", act=changed("kept.txt", do=lambda root: (root / "kept.txt").chmod(0o755))),
    # Counters
    *(
        Cell(name, act=usage(before, final)[0], tell=usage(before, final)[1])
        for name, before, final in (
            ("an exact cost after an estimate", {"estimated_cost_usd": 0.5}, {"estimated_cost_usd": 0.4}),
            ("a subscription costs nothing", {"estimated_cost_usd": 0.5}, {"estimated_cost_usd": 0.0}),
            ("cached tokens beside the others", {"input_tokens": 100}, {"input_tokens": 10, "cache_read_tokens": 90}),
            ("no counters at the end", {"input_tokens": 100}, {}),
            ("more than on the way", {"output_tokens": 5}, {"output_tokens": 9}),
            ("fewer requests than estimated", {"request_units": 5}, {"request_units": 4}),
        )
    ),
    # Times and names
    Cell(
        "a clock that was set back", act=lambda agent: agent.emit(carry("turn", {"n": 1}, ts=FIXED, message="a turn"))
    ),
    Cell(
        "a clock ahead",
        act=lambda agent: agent.emit(carry("turn", {"n": 1}, ts="2999-12-31T23:59:59.5Z", message="a turn")),
    ),
    Cell("began long ago", tell=in_meta(started_at=FIXED, finished_at=FIXED)),
    Cell("a suspended machine", tell=in_meta(duration_ms=9_999_999)),
    Cell("no time at all", tell=in_meta(duration_ms=0)),
    Cell("a version with v", tell=backend(backend_version="v1.2")),
    Cell("a longer version", tell=backend(backend_version="1.2.0")),
    Cell("no version", tell=backend(backend_version=None)),
    Cell("fewer abilities", tell=lambda receipt, agent: replace(receipt, capabilities={})),
    Cell("a lower level", tell=capabilities(streaming="emulated")),
    Cell("an ability that is not there", tell=capabilities(mcp_client="unsupported")),
    Cell("an unknown ability", tell=capabilities(telepathy="native")),
    Cell(
        "the mode that was asked for",
        tell=lambda receipt, agent: replace(receipt, mode="passthrough"),
        mode="passthrough",
    ),
    # Artifacts
    *(
        Cell(f"artifact {path}", tell=artifact(path))
        for path in (
            "kept.txt",
            "./kept.txt",
            "ROOT/kept.txt",
            "file://ROOT/kept.txt",
            "/tmp/x",
            "https://example.org/x",
            ".",
            "out/x",
        )
    ),
    # Members of other meanings
    Cell("ext.ask of its own", act=CARRIERS["message"]({"ask": True})),
    Cell("ext.answer of its own", act=CARRIERS["warning"]({"answer": 42})),
    Cell("ext.checkpoint of its own", act=CARRIERS["warning"]({"checkpoint": "abc"})),
    Cell("ext.answer with words", act=CARRIERS["message"]({"answer": {"text": "42"}})),
    # The end
    Cell("no results ever", act=steps(("bash", {}, "c1"), ("bash", {}, "c2"))),
    Cell(
        "partial, with an open call",
        act=steps(("bash", {}, "c1")),
        tell=lambda receipt, agent: replace(receipt, outcome="partial"),
    ),
    Cell(
        "a last call that ends the run", act=steps(("bash", {}, "c1"), ("=", "bash", "c1"), ("task_complete", {}, "c2"))
    ),
]


# Lies -----------------------------------------------------------------------------------------------------------------

BUSY = steps(("bash", {"command": "true"}, "b1"), ("=", "bash", "b1"))
HIDERS: dict[str, Callable[[str], Act]] = {
    "alone": lambda path: changed(path),
    "a command after": lambda path: changed(path, then=command),
    "a command before": lambda path: both(command, changed(path)),
    "an ignored file": lambda path: changed(path, do=put("build/x.o")),
    "twice": lambda path: changed(path, path),
    "three times": lambda path: changed(path, path, path),
    "beside a true one": lambda path: changed("real.txt", path, do=put("real.txt")),
    "a tool after": lambda path: changed(path, then=BUSY),
    "an edit of it": lambda path: both(steps(("Edit", {"file_path": "x"}, "e1"), ("=", "Edit", "e1")), changed(path)),
}
OTHER = {
    "other bytes": "completely different\n",
    "no file": None,
    "empty": "",
    "a stub": "def total(rows):\n    pass\n",
}

LIES = [
    *(
        Cell(f"changed {path}, {hider}", "file_changed", act(path))
        for hider, act in HIDERS.items()
        for path in ("never/was.py", "still3.txt", "./never.py", "ROOT/still4.txt")
        if hider == "alone" or path == "still3.txt"
    ),
    *(
        Cell(f"{tool}, {what}, {hider}", "file_content", writing(tool, on_disk, then=then))
        for tool in WRITERS
        for what, on_disk in OTHER.items()
        for hider, then in (("alone", None), ("a command after", command))
        if (tool == "Write" or what == "other bytes") and (what == "a stub" or then is None)
    ),
    *(
        Cell(f"forged {name} on {carrier}", name, make({name: body}))
        for name, body in FORGED.items()
        for carrier, make in CARRIERS.items()
        if carrier == "warning" or name == "answer"
    ),
    Cell("no such call", "tool_result.id", steps(("bash", {}, "c1"), ("=", "bash", "c1"), ("=", "bash", "c9"))),
    Cell("no such call, no calls", "tool_result.id", steps(("=", "bash", "c9"))),
    Cell("of another tool", "tool_result.name", steps(("read_file", READ, "c1"), ("=", "grep", "c1"))),
    Cell(
        "of a forbidden tool", "tool_result.name", steps(("bash", {"command": "evil"}, "c1"), ("=", "read_file", "c1"))
    ),
    Cell(
        "one id, two inputs",
        "tool_call.id",
        steps(("bash", {"command": "ls"}, "c1"), ("bash", {"command": "evil"}, "c1"), ("=", "bash", "c1")),
    ),
    Cell(
        "one id, two tools",
        "tool_call.id",
        steps(("read_file", READ, "c1"), ("bash", {"command": "evil"}, "c1"), ("=", "bash", "c1")),
    ),
    Cell("one id, no results", "tool_call.id", steps(("read_file", READ, "c1"), ("bash", {"command": "evil"}, "c1"))),
    Cell("no such parent", "tool_call.parent", steps(("read_file", READ, "c1", "p9"), ("=", "read_file", "c1"))),
    Cell("its own parent", "tool_call.parent", steps(("read_file", READ, "c1", "nobody"))),
    Cell("complete, an open call", "outcome", steps(("bash", {"command": "make"}, "c1"))),
    Cell("complete, a call without id open", "outcome", steps(("bash", {"command": "make"}, None))),
    Cell("complete, one of two open", "outcome", steps(("bash", {}, "c1"), ("bash", {}, "c2"), ("=", "bash", "c1"))),
    Cell("complete, with a violation", "outcome", changed("/somewhere/else.txt")),
    Cell(
        "diff of a file that is nowhere",
        "git_diff",
        tell=verified(git_diff="diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"),
    ),
    Cell(
        "diff of a file that is nowhere, no prefix",
        "git_diff",
        tell=verified(git_diff="diff --git x x\n--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n"),
    ),
    Cell("diff of a name alone", "git_diff", tell=verified(git_diff="diff --git a/x b/x\n")),
    Cell("stat of a file that is nowhere", "git_diff", tell=verified(git_diff=" x.py | 2 +-\n 1 file changed\n")),
    Cell(
        "diff of an unchanged file",
        "git_diff",
        tell=verified(git_diff="--- a/kept.txt\n+++ b/kept.txt\n@@ -1 +1 @@\n-kept\n+better\n"),
    ),
    Cell(
        "diff of other lines",
        "git_diff",
        work_on_files,
        after("diff", shape=lambda text: text.replace("+and more", "+and tests")),
    ),
    Cell(
        "diff of one file more",
        "git_diff",
        work_on_files,
        after(
            "diff",
            shape=lambda text: (
                text + "diff --git a/still7.txt b/still7.txt\n--- a/still7.txt\n+++ b/still7.txt\n@@ -1 +1 @@\n-a\n+b\n"
            ),
        ),
    ),
    Cell("status of a file that is nowhere", "git_status", tell=verified(git_status="M never.py\n")),
    Cell(
        "status, long, nowhere",
        "git_status",
        tell=verified(git_status="On branch main\nChanges not staged for commit:\n\tmodified:   never.py\n"),
    ),
    Cell(
        "status, porcelain 2, nowhere",
        "git_status",
        tell=verified(git_status="1 .M N... 100644 100644 100644 aa bb never.py\n"),
    ),
    Cell("status of an unchanged file", "git_status", tell=verified(git_status=" M kept.txt\n")),
    Cell(
        "status of one file more",
        "git_status",
        work_on_files,
        after("status", "-s", shape=lambda text: text + " M still7.txt\n"),
    ),
    Cell(
        "trace with other words", "trace", some_events, trace(lambda events: [{**events[0], "text": "b"}, *events[1:]])
    ),
    Cell("trace with one more", "trace", some_events, trace(lambda events: [*events, events[0]])),
    Cell("trace in another order", "trace", some_events, trace(lambda events: events[::-1])),
    Cell(
        "trace with a better result",
        "trace",
        some_events,
        trace(
            lambda events: [
                {**event, "exit_code": 1} if event["type"] == "command_executed" else event for event in events
            ]
        ),
    ),
    Cell(
        "trace of something else",
        "trace",
        some_events,
        trace(lambda events: [{"type": "file_changed", "ts": FIXED, "path": "a", "summary": ""}]),
    ),
    *(
        Cell(f"less {name} than reported", f"usage.{name}", *usage({name: 100}, {name: 1}))
        for name in Usage.__struct_fields__
    ),
    Cell("another run", "meta.run_id", tell=in_meta(run_id=OTHER_ID)),
    Cell("another order", "meta.work_order_id", tell=in_meta(work_order_id=OTHER_ID)),
    Cell("another contract", "meta.contract_version", tell=in_meta(contract_version="abp/v0.9")),
    Cell("another backend", "backend.id", tell=backend(id="other")),
    Cell("another version", "backend.version", tell=backend(backend_version="1.3")),
    Cell("one more ability", "capabilities", tell=capabilities(mcp_client="native")),
    Cell("a higher level", "capabilities", tell=capabilities(tool_glob="emulated")),
    Cell("the vendor's messages", "mode", tell=lambda receipt, agent: replace(receipt, mode="passthrough")),
    Cell("no such artifact", "artifact", tell=artifact("ROOT/no/such")),
    Cell("no such artifact, relative", "artifact", tell=artifact("no/such")),
]


@pytest.mark.parametrize("cell", HONEST, ids=lambda cell: cell.name)
async def test_an_honest_host_is_not_called_a_liar(cell: Cell, tmp_path: Path, anyio_backend: str) -> None:
    assert (await verdicts(cell, tmp_path))["false"] == []


@pytest.mark.parametrize("cell", LIES, ids=lambda cell: cell.name)
async def test_a_lie_is_found(cell: Cell, tmp_path: Path, anyio_backend: str) -> None:
    found = (await verdicts(cell, tmp_path))["counts"].get(cell.kind, {})
    assert found.get("false", 0) + found.get("not_seen", 0) > 0, found


def dropped_call(path: str) -> Act:
    """A file that changed, beside another one that an event names."""
    return both(changed("named.txt", do=put("named.txt")), changed(do=put(path)))


@pytest.mark.parametrize(
    ("act", "unexplained", "unnamed"),
    [
        (dropped_call("silent.py"), ["silent.py"], None),
        (both(writing("Write", TEXT), changed(do=put("silent.py"))), ["silent.py"], None),
        (both(steps(("read_file", READ, "c1"), ("=", "read_file", "c1")), changed(do=put("a/b.py"))), ["a/b.py"], None),
        (both(command, dropped_call("by_a_command.py")), None, ["by_a_command.py"]),
        (both(BUSY, dropped_call("by_a_tool.py")), None, ["by_a_tool.py"]),
        (writing("Write", TEXT), None, None),
        (changed("sub", do=put("sub/a.py")), None, None),
        (changed(do=put("host_tells_nothing.py")), None, None),
    ],
)
async def test_a_changed_file_that_no_event_names_is_listed(
    tmp_path: Path, anyio_backend: str, act: Act, unexplained: list[str] | None, unnamed: list[str] | None
) -> None:
    found = await verdicts(Cell("unnamed", act=act), tmp_path)
    assert (found.get("unexplained"), found.get("unnamed")) == (unexplained, unnamed)


async def test_a_relay_that_drops_every_third_event_is_noticed(tmp_path: Path, anyio_backend: str) -> None:
    """The calls of changed files are gone, and results without a call are left."""

    async def act(agent: Agent) -> None:
        emit, count = agent.emit, 0

        async def two_of_three(event: Any) -> None:
            nonlocal count
            count += 1
            if count % 3:
                await emit(event)

        agent.emit = two_of_three  # type: ignore[method-assign]
        for number in range(6):
            put(f"f{number}.txt", f"{number}\n")(agent.root)
            await call(agent, "write_file", {"path": f"f{number}.txt", "content": f"{number}\n"}, f"w{number}")
            await result(agent, "write_file", f"w{number}")

    found = await verdicts(Cell("relay", act=act), tmp_path)
    assert found["counts"]["tool_result.id"]["false"] == 2
    assert found["unexplained"] == ["f1.txt", "f4.txt"]


def test_the_table_has_all_kinds() -> None:
    from tests.test_claims import KINDS

    assert len({cell.name for cell in HONEST}) == len(HONEST)
    assert {cell.kind for cell in LIES} | {"inner"} == KINDS
