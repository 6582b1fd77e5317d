"""A client of the Agent Client Protocol, and the host on it, against agents of a few lines."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane import api
from backplane.agents.acp.agent import choose, read_session, words_of
from backplane.agents.acp.log import FAILURES_MAX, FailedRequest, FileLines, StderrLines, failed_requests
from backplane.agents.acp.reader import EventReader, exit_code_of, read_usage
from backplane.agents.acp.start import let_see
from backplane.agents.rows import rows_of
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.events import (
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    Reasoning,
    RetryReported,
    ToolCall,
    ToolResult,
    TurnEnded,
    carried,
)
from backplane.contract.receipt import Receipt, Usage
from backplane.contract.work import ContextPacket, PolicyProfile, RuntimeConfig, Snippet, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError, ConfigError
from backplane.protocol.jsonrpc import Notification, RpcError
from backplane.runtime.backends import find
from backplane.runtime.hooks import Hook
from backplane.runtime.readiness import known
from backplane.runtime.run import Run

ROOT = Path(__file__).resolve().parents[3]
NOW = "2026-01-15T12:00:00Z"
ONCE = [{"optionId": "yes", "kind": "allow_once"}, {"optionId": "no", "kind": "reject_once"}]


# Updates to events ----------------------------------------------------------------------------------------------------


def new_reader(tools: dict[str, str] | None = None, servers: tuple[str, ...] = ()) -> Any:
    return EventReader(lambda: NOW, "/w", tools or {}, servers=servers)


def read(reader: Any, update: dict[str, Any]) -> list[Any]:
    events: list[Any] = reader.read(Notification("session/update", {"update": update}))
    return events


def chunk(text: str, kind: str = "agent_message_chunk", **members: Any) -> dict[str, Any]:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}, **members}


def call(status: str, **members: Any) -> dict[str, Any]:
    return {"sessionUpdate": "tool_call_update", "toolCallId": "c1", "status": status, **members}


def kinds(events: list[Any]) -> list[str]:
    return [type(carried(event)).__name__ for event in events]


def test_text_comes_as_deltas_and_then_whole() -> None:
    told = new_reader()
    events = [event for text in ("Hel", "lo", "") for event in read(told, chunk(text))] + told.end("end_turn")
    assert kinds(events) == ["AssistantDelta", "AssistantDelta", "AssistantMessage", "TurnEnded"]
    assert events[2].text == "Hello"
    assert told.spoke


@pytest.mark.parametrize("data", ["status 401", {"message": "status 401"}, {"details": "status 401"}])
def test_a_refusal_is_told_with_its_details(data: Any) -> None:
    assert words_of(RpcError(-32603, "Internal error", data)) == "Internal error; status 401"


def test_thoughts_are_reasoning_and_no_answer() -> None:
    told = new_reader()
    (event,) = read(told, chunk("hm", "agent_thought_chunk"))
    assert isinstance(event, Reasoning)
    assert event.reasoning == "hm"
    assert not told.spoke


def test_a_call_is_told_once_its_input_is_known_and_its_result_once() -> None:
    told = new_reader({"write": "write_file"})
    first = {"sessionUpdate": "tool_call", "toolCallId": "c1", "title": "write", "kind": "edit", "rawInput": {}}
    diff = {"type": "diff", "path": "/w/a.txt", "oldText": "", "newText": "x"}
    events = read(told, {**first, "status": "pending"})
    events += read(told, call("in_progress", rawInput={"path": "/w/a.txt"}))
    events += read(told, call("completed", title="a.txt", content=[diff]))
    events += read(told, call("completed"))
    assert kinds(events) == ["ToolCall", "FileChanged", "ToolResult"]
    assert next(event.tool_name for event in events if isinstance(event, ToolCall)) == "write_file"
    assert next(event.path for event in events if isinstance(event, FileChanged)) == "a.txt"


def test_a_command_streams_its_output_and_ends_with_its_exit_code() -> None:
    told = new_reader()
    start = call("in_progress", kind="execute", title="bash", rawInput={"command": "x"})
    texts = [[{"type": "content", "content": {"type": "text", "text": text}}] for text in ("a\n", "a\nb\n")]
    events = read(told, start) + read(told, call("in_progress", content=texts[0]))
    events += read(told, call("in_progress", content=texts[1]))
    events += read(told, call("completed", rawOutput={"output": "a\nb\n", "metadata": {"exit": 3}}))
    outputs = [event.ext["output"]["text"] for event in events if event.ext and "output" in event.ext]
    assert outputs == ["a\n", "b\n"]
    (command,) = [event for event in events if isinstance(event, CommandExecuted)]
    assert (command.command, command.exit_code, command.output_preview) == ("x", 3, "a\nb\n")


def test_a_description_shown_before_the_command_ran_is_no_output() -> None:
    told = new_reader()
    shown = [{"type": "content", "content": {"type": "text", "text": "make a file"}}]
    start = call("in_progress", kind="execute", title="bash", content=shown)
    events = read(told, {**start, "rawInput": {"command": "x", "description": "make a file"}})
    events += read(told, call("completed", rawOutput={"output": "", "metadata": {"exit": 0}}))
    assert kinds(events) == ["ToolCall", "CommandExecuted", "ToolResult"]
    assert next(event.output_preview for event in events if isinstance(event, CommandExecuted)) == ""


def test_a_question_without_a_call_before_it_tells_the_call() -> None:
    told = new_reader()
    asked, events = told.asked({"toolCallId": "write_file__call_1", "kind": "execute", "title": "make all"})
    assert kinds(events) == ["ToolCall"]
    assert (asked.name, asked.input["command"]) == ("write_file", "make all")
    (result,) = told.refuse(asked, "no")
    assert isinstance(result, ToolResult)
    assert result.is_error
    assert read(told, {**call("failed"), "toolCallId": "write_file__call_1"}) == []


def test_a_command_is_one_whatever_its_agent_takes_it_for() -> None:
    told = new_reader()
    reads = call("in_progress", title="Read a.txt", kind="read", rawInput={"command": ["/bin/sh", "-c", "cat a.txt"]})
    events = read(told, reads) + read(told, call("completed", rawOutput={"exit_code": 0}))
    assert kinds(events) == ["ToolCall", "CommandExecuted", "ToolResult"]
    assert (events[0].tool_name, events[1].command) == ("bash", "cat a.txt")


@pytest.mark.parametrize(
    ("kind", "title", "neutral"),
    [
        ("execute", "rm", "bash"), ("execute", "read", "bash"), ("execute", "ls -la", "bash"),
        ("execute", "Bash", "bash"), ("execute", "shell", "bash"), ("execute", "srv_tool", "mcp__srv__tool"),
        ("read", "bash", "read_file"),
        ("read", "list", "list_files"), ("read", "cat", "read_file"), ("edit", "write", "write_file"),
        ("edit", "scribble", "edit_file"), ("edit", "read", "edit_file"), ("delete", "rm", "edit_file"),
        ("search", "glob", "glob"), ("search", "rg", "grep"), ("fetch", "curl", "web_fetch"),
        ("fetch", "WebSearch", "web_search"), ("other", "todo", "todo"), ("other", "write", "write_file"),
        ("think", "plan", "plan"), (None, "todo", "todo"), ("novel", "Read", "read_file"), (None, None, "other"),
    ],
)  # fmt: skip
def test_the_kind_of_a_call_decides_its_name_and_a_title_chooses_within_it(
    kind: str | None, title: str | None, neutral: str
) -> None:
    told = new_reader({"write": "write_file", "list": "list_files", "read": "read_file"}, servers=("srv",))
    asked, _ = told.asked({"toolCallId": "c1", "kind": kind, "title": title})
    assert asked.name == neutral


@pytest.mark.parametrize("kind", ["execute", "read", "other", None])
@pytest.mark.parametrize("title", ["rm", "rm x", "Read", "shell", "write", None])
def test_a_call_with_a_command_is_a_command_by_every_title_and_kind(kind: str | None, title: str | None) -> None:
    told = new_reader({"write": "write_file"})
    asked, _ = told.asked({"toolCallId": "c1", "kind": kind, "title": title, "rawInput": {"command": "rm x"}})
    assert asked.name == "bash"


@pytest.mark.parametrize(("kind", "neutral"), [("execute", "bash"), ("edit", "edit_file"), ("other", "scribble")])
def test_an_unknown_tool_that_its_agent_names_has_the_neutral_name_of_its_kind(kind: str, neutral: str) -> None:
    told = new_reader()
    asked, _ = told.asked({"toolCallId": "c1", "kind": kind, "title": "x", "_meta": {"toolName": "scribble"}})
    assert asked.name == neutral


def test_a_question_about_less_takes_nothing_from_what_is_known() -> None:
    told = new_reader({"write": "write_file"})
    read(told, call("pending", title="write", kind="edit", rawInput={}))
    told.asked({"toolCallId": "c1", "title": "/o", "kind": "other", "rawInput": {"parentDir": "/o"}})
    asked, _ = told.asked({"toolCallId": "c1", "kind": "edit", "rawInput": {"filepath": "/o/x"}})
    assert (asked.name, asked.kind) == ("write_file", "edit")
    assert asked.input == {"parentDir": "/o", "filepath": "/o/x"}


def test_what_is_open_at_the_end_of_the_turn_gets_its_result() -> None:
    told = new_reader()
    read(told, call("in_progress", rawInput={"a": 1}))
    assert told.at_work
    assert kinds(told.end("cancelled")) == ["ToolResult", "TurnEnded"]
    assert not told.spoke


def test_an_answer_after_a_tool_whose_end_was_never_told_is_the_last_word() -> None:
    told = new_reader()
    read(told, call("in_progress", rawInput={"a": 1}))
    read(told, chunk("done"))
    assert kinds(told.end("end_turn")) == ["AssistantMessage", "ToolResult", "TurnEnded"]
    assert told.spoke


def test_words_before_a_tool_that_is_open_at_the_end_are_no_answer() -> None:
    told = new_reader()
    read(told, chunk("first"))
    read(told, call("in_progress", rawInput={"a": 1}))
    told.end("end_turn")
    assert not told.spoke


def test_a_turn_of_the_model_ends_when_something_new_follows_a_result() -> None:
    told = new_reader()
    read(told, call("completed", rawInput={"a": 1}))
    assert kinds(read(told, chunk("done"))) == ["TurnEnded", "AssistantDelta"]
    assert isinstance(carried(told.end("end_turn")[-1]), TurnEnded)


@pytest.mark.parametrize(
    "update",
    [None, [], {}, {"sessionUpdate": 3}, {"sessionUpdate": "from_the_future", "x": 1}, chunk("x") | {"content": 3},
     {"sessionUpdate": "tool_call"},
     call("completed", content=3, locations=3, rawInput=3, rawOutput=[], kind=3, title=3),
     call("completed", content=[3, {"type": "diff"}], locations=[3])],
)  # fmt: skip
def test_no_update_is_too_odd_to_be_taken(update: Any) -> None:
    told = new_reader()
    read(told, update)
    assert kinds(told.end("end_turn"))[-1] == "TurnEnded"


def test_an_update_of_an_unknown_kind_is_kept() -> None:
    (event,) = read(new_reader(), {"sessionUpdate": "from_the_future", "x": 1})
    assert event.ext == {"raw_message": {"sessionUpdate": "from_the_future", "x": 1}}


def test_options_are_chosen_by_their_kind() -> None:
    assert (choose(ONCE, True), choose(ONCE, False)) == ("yes", "no")
    assert choose([{"optionId": "a", "kind": "allow_always"}], True) == "a"
    assert choose([{"optionId": "a", "kind": "allow_once"}], False) is None
    assert choose("nonsense", True) is None


def test_a_session_is_read_from_either_place() -> None:
    grouped = {"id": "model", "options": [{"name": "g", "options": [{"value": "m1"}]}, {"value": "m2"}]}
    session = read_session(
        {"sessionId": "s", "modes": {"availableModes": [{"id": "plan"}]}, "configOptions": [grouped]}
    )
    assert (session.modes, session.options) == (("plan",), {"model": ("m1", "m2")})


@pytest.mark.parametrize(
    ("total", "thought", "expected"),
    [
        (160, None, (150, 10)),  # cached tokens are beside the input
        (110, None, (100, 10)),  # in it
        (None, None, (100, 10)),  # the agent does not say
        (167, 7, (150, 17)),  # both are beside
        (117, 7, (100, 17)),  # thinking alone is beside the output
        (160, 7, (150, 10)),  # cached tokens alone are beside
        (999, 7, (100, 10)),  # the total says nothing
    ],
)
def test_cached_tokens_are_a_part_of_the_input(total: Any, thought: Any, expected: tuple[int, int]) -> None:
    told = {"inputTokens": 100, "outputTokens": 10, "cachedReadTokens": 30, "cachedWriteTokens": 20}
    found = read_usage({**told, "totalTokens": total, "thoughtTokens": thought})
    assert found is not None
    assert (found.input, found.output, found.cache_read, found.cache_write) == (*expected, 30, 20)


def test_counters_nobody_reported_stay_unknown() -> None:
    assert read_usage({"inputTokens": 0, "outputTokens": 0}) is None
    assert read_usage({"inputTokens": -1, "outputTokens": True}) is None
    reader = new_reader()
    reader.count(read_usage({"inputTokens": 1, "outputTokens": 1}))
    reader.count(read_usage({"inputTokens": 2}))
    assert reader.used() == Usage(input_tokens=3)
    assert exit_code_of({"exit": True}) is None


# The host and an agent of a few lines ---------------------------------------------------------------------------------

AGENT = """
import json, os, subprocess, sys
def say(**m): print(json.dumps({"jsonrpc": "2.0", **m}), flush=True)
def update(**m): say(method="session/update", params={"sessionId": "s1", "update": m})
def text(words): update(sessionUpdate="agent_message_chunk", content={"type": "text", "text": words})
def take(): return json.loads(sys.stdin.readline() or "{}")
def ask(**call):
    options = [{"optionId": "y", "kind": "allow_once"}, {"optionId": "n", "kind": "reject_once"}]
    say(id="q", method="session/request_permission", params={"toolCall": call, "options": options})
    while (m := take()).get("id") != "q": pass
    return m["result"]["outcome"]
def end(reason="end_turn", **m): say(id=PROMPT["id"], result={"stopReason": reason, **m})
def fail(code, message): say(id=PROMPT["id"], error={"code": code, "message": message})
print("a banner that is no message")
SPOKEN, CAPS, OPENED = 1, {}, None
def prompted():
    global PROMPT, NEW, OPENED
    while True:
        m = take()
        if m.get("method") == "initialize":
            info = {"protocolVersion": SPOKEN, "agentInfo": {"name": "few-lines"}, "agentCapabilities": CAPS}
            say(id=m["id"], result=info)
        elif m.get("method") in ("session/new", "session/load", "session/resume", "session/fork"):
            NEW, OPENED = m["params"], m["method"]
            if OPENED in ("session/load", "session/fork"): text("words of old")
            id = {"session/fork": "s2", "session/new": "s1"}.get(OPENED)
            say(id=m["id"], result={"sessionId": id, "models": {"availableModels": [{"modelId": "m1"}]}})
        elif m.get("method") == "session/set_model":
            say(id=m["id"], result={})
        elif m.get("method") == "session/prompt":
            PROMPT = m
            return m["params"]["prompt"][-1]["text"]
        elif "method" not in m:
            sys.exit(0)
"""

Start = Callable[..., tuple[Receipt, list[Any]]]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, workspace: Path) -> Start:
    """Run an order on an agent whose turn is this piece of Python; its receipt and events."""

    def go(
        body: str,
        *,
        at: str = "",
        do: Callable[[Run], Awaitable[None] | None] = Run.cancel,
        caps: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        hooks: tuple[Hook, ...] = (),
        **order: Any,
    ) -> tuple[Receipt, list[Any]]:
        agent = tmp_path / "agent.py"
        agent.write_text(f"{AGENT}CAPS = {caps or {}}\nWORDS = prompted()\n{body}")
        given = {"program": sys.executable, "arguments": ["-I", str(agent)], "silence_s": 20, **(options or {})}
        backends = {"few": BackendSettings(host="acp", options=given)}
        settings = Settings(backends=backends, isolation="off", limits=Limits(cancel_grace_s=2.0))
        work = WorkOrder("do it", **{"workspace": WorkspaceSpec(root=str(workspace)), **order})

        async def run() -> tuple[Receipt, list[Any]]:
            events: list[Any] = []
            async with api.start(work, backend="few", settings=settings, hooks=hooks) as running:
                async for event in running:
                    events.append(event)
                    if at and at in str(event) and not any(at in str(older) for older in events[:-1]):
                        step = do(running)
                        if step is not None:
                            await step
            return running.receipt, events

        return anyio.run(run)

    return go


def failure(events: list[Any]) -> str | None:
    return next((str(event.error_code) for event in events if isinstance(event, Failed)), None)


def test_a_plain_answer_is_complete_and_its_session_is_named(start: Start) -> None:
    receipt, events = start('text("Hello."); end()')
    assert receipt.outcome == "complete"
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["Hello."]
    assert any(event.ext and event.ext.get("session", {}).get("id") == "s1" for event in events)


@pytest.mark.needs("bwrap")
def test_an_agent_below_tmp_runs_contained(workspace: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # As `npm install` lays it out: a link, and a neighbour.
        packages = Path(folder) / "node_modules"
        for name in (".bin", "few", "neighbour"):
            (packages / name).mkdir(parents=True)
        (packages / "neighbour" / "words.py").write_text('WORDS = "Hello."')
        agent = packages / "few" / "agent.py"
        turn = f"prompted()\nsys.path.append({str(packages / 'neighbour')!r})\nimport words; text(words.WORDS)"
        agent.write_text(f"#!{sys.executable}\n{AGENT}{turn}\nend()")
        agent.chmod(0o755)
        (packages / ".bin" / "few-agent").symlink_to("../few/agent.py")
        program = str(packages / ".bin" / "few-agent")
        settings = Settings(backends={"few": BackendSettings(host="acp", options={"program": program})})
        assert next(row for row in known(settings, os.environ) if row.id == "few").ready
        run = api.run("do it", backend="few", root=workspace, settings=settings)
    assert (run.receipt.outcome, run.text) == ("complete", "Hello."), run.error


def test_the_prompt_holds_the_context_and_the_agent_is_offered_nothing(start: Start, workspace: Path) -> None:
    (workspace / "a.txt").write_text("a")
    body = 'text(json.dumps([PROMPT["params"]["prompt"], NEW["mcpServers"]])); end()'
    _, events = start(body, context=ContextPacket(files=("a.txt",), snippets=(Snippet("rules", "be kind"),)))
    prompt, servers = json.loads(next(event.text for event in events if isinstance(event, AssistantMessage)))
    assert [block["type"] for block in prompt] == ["text", "resource_link", "text"]
    assert "be kind" in prompt[0]["text"]
    assert prompt[2]["text"] == "do it"
    assert servers == []


WRITES = """
outcome = ask(toolCallId="c1", title="write", kind="edit", rawInput={"path": "b.txt"})
if outcome.get("optionId") == "y":
    open("b.txt", "w").write("new")
    places = [{"path": os.path.abspath("b.txt")}]
    update(sessionUpdate="tool_call_update", toolCallId="c1", status="completed", locations=places)
text(outcome.get("optionId", outcome["outcome"])); end()
"""


def test_an_allowed_tool_changes_files_and_the_patch_shows_it(start: Start) -> None:
    receipt, events = start(WRITES)
    assert receipt.outcome == "complete"
    assert "b.txt" in (receipt.verification.git_diff or "")
    assert [event.path for event in events if isinstance(event, FileChanged)] == ["b.txt"]
    rules = receipt.backplane["enforcement"]["rules"]
    assert {rule["layer"] for rule in rules} == {"host"}, "every call was asked for first"


def test_a_denied_tool_is_a_result_and_the_agent_is_told_no(start: Start) -> None:
    receipt, events = start(WRITES, policy=PolicyProfile(disallowed_tools=("write",)))
    assert receipt.verification.git_diff in (None, "")
    (result,) = [event for event in events if isinstance(event, ToolResult)]
    assert result.is_error
    assert "policy_denied" in str(result.output)
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["n"]
    assert "violations" not in receipt.backplane["enforcement"]


def test_a_tool_on_the_approval_list_is_denied_where_nobody_answers(start: Start) -> None:
    _, events = start(WRITES, policy=PolicyProfile(require_approval_for=("write",)))
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["n"]


@pytest.mark.parametrize(
    "names",
    [
        {"disallowed_tools": ("my_write",)},
        {"require_approval_for": ("write_file",)},
    ],
)
def test_a_rule_may_name_the_agents_own_tool_or_the_neutral_one(start: Start, names: dict[str, Any]) -> None:
    body = WRITES.replace('title="write"', 'title="my_write"')
    receipt, events = start(body, options={"tools": {"my_write": "write_file"}}, policy=PolicyProfile(**names))
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["n"]
    assert "violations" not in receipt.backplane["enforcement"]


@pytest.mark.parametrize("name", ["my_write", "write_file"])
def test_an_allow_list_may_name_the_agents_own_tool_or_the_neutral_one(start: Start, name: str) -> None:
    body = WRITES.replace('title="write"', 'title="my_write"')
    receipt, _ = start(body, options={"tools": {"my_write": "write_file"}}, policy=PolicyProfile(allowed_tools=(name,)))
    assert "b.txt" in (receipt.verification.git_diff or "")
    assert "violations" not in receipt.backplane["enforcement"]


def test_a_rule_about_a_kind_of_tool_holds_one_of_a_name_that_nobody_knows(start: Start) -> None:
    body = WRITES.replace('title="write"', 'title="scribble"')
    _, events = start(body, policy=PolicyProfile(require_approval_for=("Edit",)))
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["n"]


OUTSIDE = [
    'ask(toolCallId="c1", title="write", kind="edit", rawInput={"filePath": "/nowhere/b.txt"})',
    'ask(toolCallId="c1", title="write", kind="edit", rawInput={"content": "x"}, locations=[{"path": "/nowhere/b"}])',
    'ask(toolCallId="c1", title="Edit", kind="edit", rawInput={"changes": {"/nowhere/b.txt": {"type": "add"}}},'
    ' content=[{"type": "diff", "path": "/nowhere/b.txt", "newText": "x"}])',
    'ask(toolCallId="c1", title="Delete it", kind="delete", locations=[{"path": "a"}, {"path": "/nowhere/b.txt"}])',
    'ask(toolCallId="c1", title="write", kind="edit", rawInput={"path": "b.txt"});'
    ' outcome = ask(toolCallId="c1", kind="edit", rawInput={"path": "/nowhere/b.txt"})',
]


@pytest.mark.parametrize("question", OUTSIDE)
def test_a_write_outside_is_denied_wherever_the_agent_says_its_place(start: Start, question: str) -> None:
    body = f"outcome = {question}\ntext(outcome.get('optionId', outcome['outcome'])); end()"
    receipt, events = start(body)
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["n"]
    assert next(event for event in events if isinstance(event, ToolResult)).is_error
    assert "violations" not in receipt.backplane["enforcement"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("end()", "backend_unavailable"),
        ('fail(401, "bad")', "backend_auth_failed"),
        ('fail(-32603, "HTTP 429: slow down")', "backend_rate_limited"),
        ('fail(500, "oops")', "backend_unavailable"),
        ('fail(-32603, "prompt is too long")', "backend_context_length"),
        ('text("no"); end("refusal")', "backend_content_filtered"),
    ],
)
def test_a_failure_of_the_model_has_its_code(start: Start, body: str, code: str) -> None:
    receipt, events = start(body)
    assert receipt.outcome == "failed"
    assert failure(events) == code


OPENCODE_LINE = rows_of(str(ROOT / "hosts"))["opencode"]["failed_request"]


@pytest.mark.parametrize(
    ("error", "words", "label"),
    [
        ('error.error="ApiError: the boiler is broken"', "ApiError: the boiler is broken", None),
        ('error.error.message="too many" error.error.type=x error.error.code=overloaded', "too many", "overloaded"),
        ('error.error="cut in the mid', "cut in the mid", None),
    ],
)
def test_a_line_of_the_log_tells_a_failed_request(error: str, words: str, label: str | None) -> None:
    line = f'level=ERROR message="stream error" id=s {error}'
    whole, tail = f"level=INFO message=stream id=s\n{line}\n".encode(), [b""]
    lines = StderrLines(lambda: tail[0])

    def new(said: bytes) -> list[FailedRequest]:
        tail[0] = said
        return failed_requests(re.compile(OPENCODE_LINE), lines.read())

    assert new(whole[:-1]) == [], "the line has not ended"
    assert new(whole) == [FailedRequest(words, label)]
    assert new(whole) == []
    assert new(whole + b"again " + line.encode() + b"\n") == [FailedRequest(words, label)]


FAILS = r"""
import time
for number in range(1, {count} + 1):
    print(f"request {{number}} failed: boiler {{number}}", file=sys.stderr, flush=True)
    time.sleep(0.05)
    {more}
text("whole"); end()
"""
SAID = {"failed_request": "failed: (?P<words>.*)"}


def test_an_agent_that_repeats_a_failed_request_for_ever_ends_with_the_words_of_its_service(start: Start) -> None:
    receipt, events = start(
        FAILS.format(count=FAILURES_MAX, more="").replace('text("whole")', "time.sleep(60)"), options=SAID
    )
    assert (receipt.outcome, failure(events)) == ("failed", "backend_unavailable")
    told = [event.message for event in map(carried, events) if isinstance(event, RetryReported)]
    assert told == [f"the model's service failed: boiler {number}" for number in range(1, FAILURES_MAX)]
    assert next(event.message for event in events if isinstance(event, Failed)).endswith(f"boiler {FAILURES_MAX}")


def test_requests_that_fail_with_words_between_them_are_no_reason_to_end(start: Start) -> None:
    body = FAILS.format(count=FAILURES_MAX, more='text("a word "); time.sleep(1.2)')
    receipt, events = start(body, options=SAID)
    assert receipt.outcome == "complete"
    assert len([event for event in events if isinstance(carried(event), RetryReported)]) == FAILURES_MAX


def test_a_failed_request_in_an_agents_log_file_is_read_once_and_whole(tmp_path: Path) -> None:
    pattern = re.compile(rows_of(str(ROOT / "hosts"))["qwen"]["failed_request"])
    log = tmp_path / "a" / "chats" / "one.jsonl"
    log.parent.mkdir(parents=True)

    def line(words: str) -> bytes:
        event = {"event.name": "qwen-code.api_error", "duration_ms": 1, "error_message": words, "status_code": 500}
        return json.dumps({"systemPayload": {"uiEvent": event}}, separators=(",", ":")).encode() + b"\n"

    log.write_bytes(line("of an older run"))
    lines = FileLines(tmp_path, "*/chats/one.jsonl")

    def new() -> list[FailedRequest]:
        return failed_requests(pattern, lines.read())

    assert new() == []
    said = json.dumps({"text": line("said by the model").decode()}).encode() + b"\n"
    with log.open("ab") as file:
        file.write(said + line('500 {"why":\n"too many"}')[:-9])
    assert new() == [], "the line has not ended"
    with log.open("ab") as file:
        file.write(line('500 {"why":\n"too many"}')[-9:] + line("again"))
    (log.parent / "other.jsonl").write_bytes(line("of another session"))
    assert new() == [FailedRequest('500 {"why": "too many"}'), FailedRequest("again")]
    assert new() == []
    (tmp_path / "b" / "chats").mkdir(parents=True)
    (tmp_path / "b" / "chats" / "one.jsonl").write_bytes(line("in a file that is new"))
    assert new() == [FailedRequest("in a file that is new")]


LOGS = """
import pathlib, time
log = pathlib.Path(os.environ["STATE"], "s.log")
for number in range(1, 10):
    with log.open("a") as file:
        print(f"request {number} failed: boiler {number}", file=file)
    time.sleep(0.05)
time.sleep(60)
"""


def test_failed_requests_in_a_log_file_end_the_run(start: Start) -> None:
    options = {**SAID, "log": "state/*.log", "home": {"STATE": "state"}}
    receipt, events = start(LOGS, options=options)
    assert (receipt.outcome, failure(events)) == ("failed", "backend_unavailable")
    told = [event.message for event in map(carried, events) if isinstance(event, RetryReported)]
    assert told == [f"the model's service failed: boiler {number}" for number in range(1, FAILURES_MAX)]


BREAKS = """
import time
text("half an "); text("ans")
print("request failed: the pipe broke", file=sys.stderr, flush=True)
time.sleep(0.3)
text("Whole."); end()
"""


@pytest.mark.parametrize(("asks_anew", "answer"), [(True, "Whole."), (False, "half an ansWhole.")])
def test_words_before_a_failed_request_count_where_the_agent_goes_on_from_them(
    start: Start, asks_anew: bool, answer: str
) -> None:
    receipt, events = start(BREAKS, options={**SAID, "asks_anew": asks_anew})
    assert receipt.outcome == "complete"
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == [answer]
    retries = [event.ext["retry"] for event in events if event.ext and "retry" in event.ext]
    assert [retry.get("taken_back") for retry in retries] == [11 if asks_anew else None]


@pytest.mark.parametrize(("given", "names"), [("(", "regular expression"), ("failed", "(?P<words>…)")])
def test_a_pattern_for_failed_requests_that_says_nothing_is_refused(given: str, names: str) -> None:
    declared = BackendSettings(host="acp", options={"program": sys.executable, "failed_request": given})
    with pytest.raises(ConfigError) as refused:
        find("few", Settings(backends={"few": declared}), {})
    assert names in str(refused.value)


def test_an_agent_that_ends_before_it_said_anything_is_a_crash(tmp_path: Path) -> None:
    backend = BackendSettings(host="acp", options={"program": "/bin/false"})
    settings = Settings(backends={"short": backend}, isolation="off")
    run = api.run("work", backend="short", root=tmp_path, settings=settings)
    assert run.error is not None
    assert run.error.code == "backend_crashed"
    assert "program ended before it answered initialize (exit code 1)" in str(run.error)


def test_an_agent_that_ends_in_the_middle_is_a_crash_with_its_last_words(start: Start) -> None:
    receipt, _ = start('sys.stderr.write("out of luck"); sys.stderr.flush(); sys.exit(3)')
    assert receipt.backplane["end"]["code"] == "backend_crashed"
    assert receipt.outcome == "failed"


def test_an_agent_that_says_nothing_is_given_up_by_our_own_clock(start: Start) -> None:
    receipt, events = start("import time; time.sleep(300)", options={"silence_s": 1})
    assert (receipt.outcome, failure(events)) == ("failed", "backend_timeout")


def test_a_turn_cut_by_a_limit_is_partial(start: Start) -> None:
    assert start('text("so far"); end("max_tokens")')[0].outcome == "partial"


def test_a_cancelled_turn_ends_in_order(start: Start) -> None:
    body = 'text("working"); m = take(); assert m["method"] == "session/cancel"; end("cancelled")'
    receipt, _ = start(body, at="working")
    assert (receipt.outcome, receipt.backplane["end"]["reason"]) == ("partial", "cancelled")
    assert receipt.usage_raw["stopReason"] == "cancelled"


def test_an_agent_deaf_to_cancel_is_ended_with_all_it_started(start: Start) -> None:
    body = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
text("working")
while True: time = __import__("time").sleep(1)
"""
    receipt, _ = start(body, at="working")
    assert receipt.backplane["end"]["reason"] == "cancelled"


def test_a_question_that_is_open_at_the_cancel_is_answered_as_cancelled(start: Start, workspace: Path) -> None:
    receipt, _ = start(WRITES, at="ask", policy=PolicyProfile(require_approval_for=("write",)))
    assert receipt.backplane["end"]["reason"] in ("cancelled", "complete")
    assert not (workspace / "b.txt").exists()


def test_a_model_the_agent_does_not_have_is_named_before_the_work(start: Start) -> None:
    receipt, _ = start('text("x"); end()', config=RuntimeConfig(model="m9"))
    assert receipt.backplane["end"]["code"] == "backend_model_not_found"
    assert start('text("x"); end()', config=RuntimeConfig(model="m1"))[0].outcome == "complete"


def test_a_model_of_the_configuration_is_looked_for_among_those_the_agent_has(start: Start) -> None:
    # An agent that does not find the model of its configuration takes another one, and another service.
    options = {"config": {"variable": "CONFIGURED", "model": "model"}}
    receipt, _ = start('text("x"); end()', config=RuntimeConfig(model="m9"), options=options)
    assert receipt.backplane["end"]["code"] == "backend_model_not_found"
    _, events = start('text(os.environ["CONFIGURED"]); end()', config=RuntimeConfig(model="m1"), options=options)
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ['{"model":"m1"}']


def test_an_agents_own_server_is_asked_for_by_no_proxy(start: Start) -> None:
    body = 'text(json.dumps([os.environ[name].split(",")[-2:] for name in ("NO_PROXY", "no_proxy")])); end()'
    config = RuntimeConfig(env={"NO_PROXY": "house.example", "no_proxy": ""})
    _, events = start(body, config=config, options={"own_server": "127.0.0.1:9"})
    (told,) = [event.text for event in events if isinstance(event, AssistantMessage)]
    assert json.loads(told) == [["[redacted]", "127.0.0.1:9"], ["127.0.0.1:9"]], "the order's own value stays, unseen"


@pytest.mark.parametrize(
    "asked",
    [
        RuntimeConfig(max_budget_usd=1.0),
        RuntimeConfig(vendor={"abp": {"session": {"resume": "s1"}}}),
        RuntimeConfig(vendor={"abp": {"hooks": [{"event": "post_tool", "command": ["true"], "name": "look"}]}}),
    ],
)
def test_what_would_have_no_effect_is_refused(start: Start, asked: RuntimeConfig) -> None:
    receipt, events = start('text("x"); end()', config=asked)
    assert receipt.backplane["end"]["code"] == "capability_unsupported"
    assert not [event for event in events if isinstance(event, AssistantMessage)]


def test_turns_of_the_model_are_held(start: Start) -> None:
    call = 'update(sessionUpdate="tool_call_update", toolCallId=str(n), status="completed", rawInput={"n": n})'
    receipt, _ = start(f"for n in range(9): {call}\nend()", config=RuntimeConfig(max_turns=2))
    assert receipt.backplane["end"]["reason"] == "max_turns"


# What an order can say ------------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def abp(**members: Any) -> RuntimeConfig:
    return RuntimeConfig(vendor={"abp": members})


def words(events: list[Any]) -> list[str]:
    return [event.text for event in events if isinstance(event, AssistantMessage)]


def test_an_answer_of_a_shape_is_asked_for_checked_and_asked_for_again(start: Start) -> None:
    body = """
assert '"integer"' in WORDS and PROMPT["params"]["prompt"][0]["text"] == "do it"
text("seven"); end()
assert "is not one JSON value" in prompted()
text('{"n": 7}'); end()
"""
    receipt, events = start(body, config=abp(output_schema=SCHEMA))
    assert (receipt.outcome, receipt.usage_raw["structured_output"]) == ("complete", {"n": 7})
    assert words(events) == ["seven", '{"n": 7}']
    assert any("repair 1" in str(event) for event in events)


def test_an_answer_that_never_has_the_shape_fails_the_run(start: Start) -> None:
    body = "while True:\n    text('seven'); end(); WORDS = prompted()"
    receipt, events = start(body, config=abp(output_schema=SCHEMA))
    assert (receipt.outcome, failure(events), len(words(events))) == ("failed", "validation_failed", 3)


def test_in_passthrough_every_message_of_the_agent_is_kept_with_its_first_event(start: Start) -> None:
    receipt, events = start('text("Hello."); end()', config=abp(mode="passthrough"))
    assert receipt.outcome == "complete"
    kept = [event.ext["raw_message"] for event in events if event.ext and "raw_message" in event.ext]
    methods = [message.get("method", "an answer") for message in kept]
    assert methods == ["an answer", "an answer", "session/update", "an answer"]
    assert all(
        event.ext["raw_line"].startswith('{"jsonrpc": "2.0"')
        for event in events
        if event.ext and "raw_line" in event.ext
    )
    assert any("a banner" in str(event) for event in events)


RESUMES = {"sessionCapabilities": {"resume": {}, "fork": {}}, "loadSession": True}
KEEPS = {"sessions": True}


@pytest.mark.parametrize(
    ("caps", "asked", "method", "id"),
    [
        (RESUMES, "resume", "session/resume", "s1"),
        ({"loadSession": True}, "resume", "session/load", "s1"),
        (RESUMES, "fork", "session/fork", "s2"),
    ],
)
def test_a_kept_conversation_is_gone_on_with_by_the_way_that_the_agent_has(
    start: Start, caps: dict[str, Any], asked: str, method: str, id: str
) -> None:
    first, _ = start("text('noted'); end()", caps=caps, options=KEEPS, config=abp(session={"keep": True}))
    assert first.outcome == "complete"
    body = 'text(json.dumps([OPENED, NEW.get("sessionId")])); end()'
    receipt, events = start(body, caps=caps, options=KEEPS, config=abp(session={asked: "s1"}))
    assert receipt.outcome == "complete"
    assert [json.loads(text) for text in words(events)] == [[method, "s1"]], "and no words of old"
    (named,) = [event.ext["session"] for event in events if event.ext and "session" in event.ext]
    assert (named["id"], named["kept"], named[f"{asked}ed" if asked == "fork" else "resumed"]) == (id, True, "s1")


def test_a_conversation_that_is_not_kept_is_refused_before_the_agent_starts(start: Start) -> None:
    for id in ("s7", "../s1"):
        receipt, events = start("", caps=RESUMES, options=KEEPS, config=abp(session={"resume": id}))
        assert receipt.backplane["end"]["code"] == "config_invalid"
        assert not words(events)


@pytest.mark.parametrize("wish", [{"resum": "s1"}, {"resume": "s1", "fork": "s1"}])
def test_a_wish_for_a_conversation_that_is_not_understood_is_refused(start: Start, wish: Any) -> None:
    receipt, events = start("", caps=RESUMES, options=KEEPS, config=abp(session=wish))
    assert receipt.backplane["end"]["code"] == "config_invalid"
    assert not words(events)


def test_a_conversation_that_stays_with_its_folder_is_held_to_it(start: Start, tmp_path: Path) -> None:
    bound, keep = {**KEEPS, "in_place": True}, abp(session={"keep": True})
    copied, _ = start("", options=bound, config=keep)
    assert copied.backplane["end"]["code"] == "capability_unsupported"
    ends = []
    for root, session in ((tmp_path / "a", keep), (tmp_path / "b", abp(session={"resume": "s1"}))):
        root.mkdir()
        place = WorkspaceSpec(root=str(root), mode="pass_through")
        ends.append(
            start("text('x'); end()", caps=RESUMES, options=bound, config=session, workspace=place)[0].backplane["end"]
        )
    assert ends[0]["reason"] == "complete"
    assert ends[1]["code"] == "config_invalid"


def test_an_agent_that_announces_no_way_to_go_on_is_not_asked_for_one(start: Start) -> None:
    start("text('noted'); end()", options=KEEPS, config=abp(session={"keep": True}))
    receipt, _ = start("", options=KEEPS, config=abp(session={"resume": "s1"}))
    assert receipt.backplane["end"]["code"] == "capability_unsupported"


GOES_ON = """
text("working")
while (m := take()).get("method") != "session/cancel": pass
end("cancelled")
text("heard: " + prompted()); end()
"""


def test_an_interrupted_turn_ends_the_run_as_partial(start: Start) -> None:
    receipt, _ = start(GOES_ON, at="working", do=Run.interrupt)
    assert (receipt.outcome, receipt.backplane["end"]["reason"]) == ("partial", "partial")
    assert receipt.usage_raw["stopReason"] == "cancelled"


ASKS_TOO_LATE = """
text("working"); m = take(); assert m["method"] == "session/cancel"
say(method="session/update", params={"update": {"sessionUpdate": "tool_call", "toolCallId": "c", "kind": "execute",
    "status": "pending", "rawInput": {"command": "true"}}})
assert ask(toolCallId="c") == {"outcome": "cancelled"}
say(method="session/update", params={"update": {"sessionUpdate": "tool_call_update", "toolCallId": "c",
    "status": "failed"}})
end("cancelled"); prompted(); __import__("time").sleep(300)
"""


def test_a_question_after_an_interrupt_is_no_reason_to_wait_for_ever(start: Start) -> None:
    def steer(run: Run) -> None:
        run.input("rather this")
        run.interrupt()

    receipt, events = start(ASKS_TOO_LATE, at="working", do=steer, options={"silence_s": 1})
    assert (receipt.outcome, failure(events)) == ("failed", "backend_timeout")
    assert not any(isinstance(event, CommandExecuted) for event in events)
    assert [event.is_error for event in events if isinstance(event, ToolResult)] == [True]


def test_after_an_interrupt_the_words_that_wait_are_said(start: Start) -> None:
    def steer(run: Run) -> None:
        run.input("rather this")
        run.interrupt()

    receipt, events = start(GOES_ON, at="working", do=steer)
    assert (receipt.outcome, words(events)[-1]) == ("complete", "heard: rather this")


def test_words_during_a_turn_are_said_after_it(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = f"""
text("working")
while not os.path.exists({str(go)!r}): __import__("time").sleep(0.01)
end(); text("heard: " + prompted()); end()
"""

    def say(run: Run) -> None:
        run.input("and this")
        go.touch()

    receipt, events = start(body, at="working", do=say)
    assert receipt.outcome == "complete"
    assert words(events) == ["working", "heard: and this"]


PRICED = {"usage": "chunks", "prices": {"input": 1_000_000, "output": 1}}


def test_a_budget_is_held_where_tokens_are_told_a_call_and_have_a_price(start: Start) -> None:
    body = """
for n in range(9):
    content = {"type": "text", "text": "a"}
    update(sessionUpdate="agent_message_chunk", content=content, _meta={"usage": {"inputTokens": 2, "outputTokens": 1}})
while (m := take()).get("method") != "session/cancel": pass
end("cancelled")
"""
    receipt, _ = start(body, options=PRICED, config=RuntimeConfig(max_budget_usd=5.0))
    assert (receipt.outcome, receipt.backplane["end"]["reason"]) == ("partial", "budget")


def test_a_budget_that_cannot_be_counted_ends_the_run(start: Start) -> None:
    receipt, events = start('text("x"); end()', options=PRICED, config=RuntimeConfig(max_budget_usd=5.0))
    assert (receipt.outcome, failure(events)) == ("partial", "policy_denied")


@pytest.mark.parametrize(
    ("usage", "budget"),
    [("none", {"max_budget_usd": 5.0}), ("last_call", {"vendor": {"abp": {"budget_tokens": 5}}})],
)
def test_a_budget_is_refused_where_no_call_is_counted(start: Start, usage: str, budget: dict[str, Any]) -> None:
    receipt, _ = start("", options={"usage": usage}, config=RuntimeConfig(**budget))
    assert receipt.backplane["end"]["code"] == "capability_unsupported"


SEES = {"modalities": {"input": ["text", "image"], "output": ["text"]}}


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ({"model": "p/m"}, SEES),
        ({"model": "p/m", "provider": {"p": {"models": {"m": {"name": "M"}}}}}, {"name": "M", **SEES}),
        ({"model": "p/m", "provider": {"p": {"models": {"m": SEES}}}}, SEES),
        ({}, "named"),
        ({"model": "m"}, "named"),
        ({"model": "p/m", "provider": {"p": 3}}, "not an object"),
    ],
)
def test_an_orders_pictures_enter_its_model_as_one_that_takes_images(content: dict[str, Any], entry: Any) -> None:
    if isinstance(entry, str):
        with pytest.raises(BackplaneError, match=entry):
            let_see(content, content.get("model"))
        return
    let_see(content, content.get("model"))
    provider, _, name = content["model"].partition("/")
    assert content["provider"][provider]["models"][name] == (entry or SEES)


def test_a_budget_without_a_price_is_refused(start: Start) -> None:
    receipt, _ = start("", options={"usage": "chunks"}, config=RuntimeConfig(max_budget_usd=5.0))
    assert receipt.backplane["end"]["code"] == "config_invalid"


def test_servers_of_tools_reach_the_agent_in_the_protocols_words(start: Start) -> None:
    rows = [{"name": "house", "command": "run-it", "env": {"A": "b"}}, {"name": "far", "url": "http://127.0.0.1:9/"}]
    body = 'text(json.dumps(NEW["mcpServers"])); end()'
    _, events = start(body, caps={"mcpCapabilities": {"http": True}}, config=abp(mcp_servers=rows))
    near, far = json.loads(words(events)[0])
    assert near == {"name": "house", "command": "run-it", "args": [], "env": [{"name": "A", "value": "b"}]}
    assert far == {"name": "far", "type": "http", "url": "http://127.0.0.1:9/", "headers": []}


def test_a_server_by_its_address_is_refused_where_the_agent_reaches_none(start: Start) -> None:
    rows = [{"name": "far", "url": "http://127.0.0.1:9/"}]
    receipt, _ = start("", config=abp(mcp_servers=rows))
    assert receipt.backplane["end"]["code"] == "capability_unsupported"


def test_a_command_is_no_name_of_a_tool(start: Start) -> None:
    body = """
outcome = ask(toolCallId="c1", title="ls", kind="execute", rawInput={"command": ["/bin/bash", "-lc", "ls"]})
text(outcome["optionId"]); end()
"""
    _, events = start(body, policy=PolicyProfile(disallowed_tools=("bash",)))
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    assert (call.tool_name, call.input["command"]) == ("bash", "ls")
    assert words(events) == ["n"]


# Backends -------------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_not_installed_is_not_ready_and_the_command_is_said() -> None:
    (status,) = [one for one in known(Settings(), {"PATH": "/nowhere"}) if one.id == "opencode"]
    assert not status.ready
    assert "npm install -g opencode-ai" in status.fix


def test_a_profile_nobody_knows_is_refused_with_those_there_are() -> None:
    settings = Settings(backends={"x": BackendSettings(host="acp", options={"profile": "nobody"})})
    with pytest.raises(ConfigError) as caught:
        find("x", settings, {"PATH": ""})
    assert "opencode, qwen" in str(caught.value.hint)
