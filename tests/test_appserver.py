"""Agents that serve an app, without any: their items as events, their failures by code, and a small one by hand.

What only a real program can show is in `tests/all/vendors/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from backplane.agents.codex.agent import plain, status_of
from backplane.agents.codex.answers import read_question
from backplane.agents.codex.items import called
from backplane.agents.codex.reader import EventReader
from backplane.agents.events import plain_command
from backplane.agents.rows import rows_of
from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall, ToolResult, Warned
from backplane.protocol.jsonrpc import Notification
from backplane.resources import find
from backplane.runtime.run import Run
from backplane.upstream.failure import code_of
from tests import by_hand

ROOT = "/work"


def new_reader() -> EventReader:
    made = EventReader(lambda: "2026-11-22T00:00:00.000Z", ROOT)
    made.thread = "t"
    take(made, "turn/started", {"threadId": "t", "turn": {"id": "u"}})
    return made


def take(reader: EventReader, method: str, params: dict[str, Any]) -> list[AgentEvent]:
    return reader.read(Notification(method, params))


def item(**members: Any) -> dict[str, Any]:
    return {"threadId": "t", "turnId": "u", "item": {"id": "i", **members}}


def told(made: EventReader, **members: Any) -> list[AgentEvent]:
    """An item from its beginning to its end."""
    return [*take(made, "item/started", item(**members)), *take(made, "item/completed", item(**members))]


def test_a_command_is_a_call_what_ran_and_a_result() -> None:
    events = told(
        new_reader(), type="commandExecution", command="/bin/bash -c 'ls | wc'", cwd=ROOT, status="failed", exitCode=2,
        aggregatedOutput="x" * 9000,
    )  # fmt: skip
    call, ran, result = events
    assert isinstance(call, ToolCall)
    assert call.input == {"command": "ls | wc"}
    assert isinstance(ran, CommandExecuted)
    assert (ran.exit_code, len(ran.output_preview or "")) == (2, 8192)
    assert isinstance(result, ToolResult)
    assert (result.is_error, len(str(result.output))) == (True, 9000)


def test_an_item_that_was_never_begun_is_told_all_the_same() -> None:
    made = new_reader()
    events = take(made, "item/completed", item(type="webSearch", query="q", action=None))
    assert [type(event) for event in events] == [ToolCall, ToolResult]
    assert made.calls.open == {}


def test_a_patch_is_called_by_what_it_does_and_its_files_by_their_place() -> None:
    add = {"path": f"{ROOT}/new.txt", "kind": {"type": "add"}, "diff": "--- a\n"}
    move = {"path": f"{ROOT}/a", "kind": {"type": "update", "move_path": f"{ROOT}/b"}, "diff": "@@\n-x\n+y\n"}
    made = called({"type": "fileChange", "changes": [add]}, ROOT)
    assert made is not None
    assert (made.name, made.input) == (
        "write_file",
        {"changes": [{"path": "new.txt", "kind": "add", "diff": "+--- a\n"}]},
    )
    both = told(new_reader(), type="fileChange", changes=[add, move], status="completed")
    assert isinstance(both[0], ToolCall)
    assert both[0].tool_name == "apply_patch"
    assert [event.path for event in both if isinstance(event, FileChanged)] == ["new.txt", "a", "b"]


def test_a_declined_call_ran_nothing() -> None:
    events = told(new_reader(), type="commandExecution", command="ls", status="declined", exitCode=None)
    assert [type(event) for event in events] == [ToolCall, ToolResult]


def test_what_has_no_word_here_is_kept_as_it_came() -> None:
    made = new_reader()
    for method, params in (("thread/dreamt", {"threadId": "t"}), ("item/completed", item(type="hologram"))):
        (event,) = take(made, method, params)
        assert event.ext["raw_message"]  # type: ignore[index]
    assert take(made, "item/completed", item(type="userMessage")) == []


def test_a_warning_is_told_unless_it_is_of_a_sandbox_that_is_off() -> None:
    made = new_reader()
    for words in (
        "the sandbox wants user namespaces for its bubblewrap",
        "there is no bubblewrap on the PATH, so another one is taken",
    ):
        assert take(made, "configWarning", {"summary": words}) == []
    other: Any
    (other,) = take(made, "warning", {"message": "the command `bubblewrap --help` is a thing of the past"})
    assert "a thing of the past" in other.message
    assert take(made, "thread/goal/cleared", {"threadId": "t"}) == []
    (event,) = take(made, "deprecationNotice", {"summary": "an old word", "details": None})
    assert isinstance(event, Warned)
    assert event.message == "the agent warns: an old word"


@pytest.mark.parametrize("thread", ["", "t"])
def test_a_server_that_is_not_there_is_told_also_before_the_thread_has_its_name(thread: str) -> None:
    made = new_reader()
    made.thread = thread
    status = {"threadId": "t", "name": "house", "error": None, "failureReason": None}
    for well in ("starting", "ready"):
        assert take(made, "mcpServer/startupStatus/updated", {**status, "status": well}) == []
    event: Any
    (event,) = take(made, "mcpServer/startupStatus/updated", {**status, "status": "failed", "error": "no such file"})
    assert isinstance(event, Warned)
    assert event.message == "the MCP server 'house' is not there: no such file"
    (event,) = take(made, "warning", {"threadId": "t", "message": "an old word"})
    assert event.message == "the agent warns: an old word"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ('{"error":{"message":"no such model","type":"invalid_request_error","code":null}}', "no such model"),
        ('{"message":"slow down"}', "slow down"),
        ('{"error":"closed"}', '{"error":"closed"}'),
        ('{"error":{"message":""}}', '{"error":{"message":""}}'),
        ("stream closed", "stream closed"),
        ("3", "3"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_services_answer_that_is_handed_on_as_it_came_is_told_by_its_words(words: str, told: str) -> None:
    assert plain(words) == told


def test_counters_of_another_turn_or_thread_are_not_this_runs() -> None:
    made = new_reader()
    usage = {"last": {"inputTokens": 5, "outputTokens": 2}, "total": {"inputTokens": 500, "outputTokens": 200}}
    made.thread = ""
    assert take(made, "thread/tokenUsage/updated", {"threadId": "t", "turnId": "older", "tokenUsage": usage}) == []
    made.thread = "t"
    take(made, "thread/tokenUsage/updated", {"threadId": "t", "turnId": "older", "tokenUsage": usage})
    assert made.used().input_tokens is None
    for _ in range(2):
        take(made, "thread/tokenUsage/updated", {"threadId": "t", "turnId": "u", "tokenUsage": usage})
    take(made, "thread/tokenUsage/updated", {"threadId": "other", "turnId": "u", "tokenUsage": usage})
    used = made.used()
    assert (used.input_tokens, used.output_tokens, used.cache_read_tokens, used.request_units) == (10, 4, None, 2)
    assert used.estimated_cost_usd is None


def test_a_call_that_is_open_at_the_end_gets_its_result() -> None:
    made = new_reader()
    take(made, "item/started", item(type="commandExecution", command="sleep 9"))
    (result,) = made.close()
    assert isinstance(result, ToolResult)
    assert result.is_error
    assert made.close() == []


@pytest.mark.parametrize(
    ("command", "plain"),
    [
        ("/bin/bash -lc 'echo \"a b\"'", 'echo "a b"'),
        ("bash -c ls", "ls"),
        ("python3 -c 'print(1)'", "python3 -c 'print(1)'"),
        ("echo 'unclosed", "echo 'unclosed"),
        ("", ""),
        (["/bin/zsh", "-lc", "ls | wc"], "ls | wc"),
        (["ls", "a b"], "ls 'a b'"),
    ],
)
def test_a_command_is_shown_without_the_shell_around_it(command: str | list[Any], plain: str) -> None:
    assert plain_command(command) == plain


@pytest.mark.parametrize(
    ("info", "words", "code"),
    [
        ("contextWindowExceeded", "", "backend_context_length"),
        ("usageLimitExceeded", "", "backend_rate_limited"),
        ("cyberPolicy", "", "backend_content_filtered"),
        ({"httpConnectionFailed": {"httpStatusCode": 401}}, "", "backend_auth_failed"),
        ({"responseTooManyFailedAttempts": {"httpStatusCode": 429}}, "", "backend_rate_limited"),
        ({"responseStreamDisconnected": {"httpStatusCode": None}}, "the stream ended", "backend_unavailable"),
        ({"responseStreamDisconnected": None}, "idle timeout waiting", "backend_timeout"),
        ("other", "unexpected status 404 Not Found", "backend_model_not_found"),
        ("other", "the log of an unexpected status 404 Not Found", "backend_unavailable"),
        ("other", "Missing environment variable: KEY", "backend_auth_failed"),
        ("internalServerError", "", "backend_unavailable"),
        (None, "", "backend_unavailable"),
        ([], "", "backend_unavailable"),
    ],
)
def test_a_failure_has_the_contracts_code(info: Any, words: str, code: str) -> None:
    labels = rows_of(str(find("hosts")))["codex"]["labels"]
    assert code_of(words, info, status=status_of(info, words), own=labels) == code


def test_a_question_about_more_than_its_call_says_so() -> None:
    params = {"itemId": "i", "command": "/bin/bash -c ls", "cwd": ROOT}
    calls = new_reader().calls
    plain = read_question("item/commandExecution/requestApproval", params, calls, ROOT)
    more = {**params, "additionalPermissions": {"network": True}}
    wider = read_question("item/commandExecution/requestApproval", more, calls, ROOT)
    assert [one.wider for one in (plain, wider) if one] == [False, True]
    assert read_question("item/fileChange/requestApproval", {"itemId": "never seen"}, calls, ROOT) is None
    assert read_question("item/dream/requestApproval", params, calls, ROOT) is None


# A small agent by hand ------------------------------------------------------------------------------------------------

AGENT = """#!{python}
import json, sys

def say(**message):
    print(json.dumps(message), flush=True)

def tell(method, **params):
    say(method=method, params={{"threadId": "t", "turnId": "u", **params}})

for line in sys.stdin:
    asked = json.loads(line)
    method = asked.get("method")
    if method == "initialize":
        say(id=asked["id"], result={{"userAgent": "by hand"}})
    elif method == "thread/start":
        say(id=asked["id"], result={{"thread": {{"id": "t"}}, "model": "m"}})
    elif method == "turn/start":
        say(id=asked["id"], result={{"turn": {{"id": "u"}}}})
        tell("turn/started", turn={{"id": "u"}})
{script}
    elif "id" in asked and method:
        say(id=asked["id"], result={{}})
"""


async def play(folder: Path, script: str) -> tuple[Run, list[AgentEvent]]:
    """Run an order on an agent that does this once a turn has begun."""
    agent = AGENT.format(python=sys.executable, script=by_hand.steps(script, 8))
    return await by_hand.play(folder, "codex", agent)


DONE = """tell("turn/completed", turn={"id": "u", "status": "completed", "error": None})"""


@pytest.mark.anyio
async def test_noise_and_unknown_messages_are_kept_and_end_nothing(tmp_path: Path) -> None:
    script = f"""
print("not for you", flush=True)
tell("thread/dreamt", of="sheep")
say(id=99, method="item/dream/requestApproval", params={{"threadId": "t"}})
tell("item/completed", item={{"type": "agentMessage", "id": "m", "text": "here I am"}})
{DONE}"""
    run, events = await play(tmp_path, script)
    assert run.receipt.outcome == "complete"
    assert any("not for you" in str(getattr(event, "message", "")) for event in events)
    assert {"threadId": "t", "turnId": "u", "of": "sheep"} in [
        event.ext["raw_message"] for event in events if isinstance(event.ext, dict) and "raw_message" in event.ext
    ]


@pytest.mark.anyio
async def test_an_agent_that_dies_in_its_turn_is_a_crash_with_its_last_words(tmp_path: Path) -> None:
    script = 'sys.stderr.write("out of ink\\n")\nsys.stderr.flush()\nsys.exit(3)'
    run, _ = await play(tmp_path, script)
    assert (run.receipt.outcome, run.receipt.usage_raw["backplane"]["end"]["code"]) == ("failed", "backend_crashed")
    assert "out of ink" in str(run.error)


@pytest.mark.anyio
async def test_done_without_a_word_is_not_done(tmp_path: Path) -> None:
    run, events = await play(tmp_path, DONE)
    assert run.receipt.outcome == "failed"
    assert "backend_unavailable" in [getattr(event, "error_code", None) for event in events]


@pytest.mark.anyio
async def test_a_failure_told_before_the_end_counts_where_the_end_tells_none(tmp_path: Path) -> None:
    script = """
tell("error", willRetry=False, error={"message": "no more of this", "agentErrorInfo": "usageLimitExceeded"})
tell("turn/completed", turn={"id": "u", "status": "failed", "error": None})"""
    run, events = await play(tmp_path, script)
    assert run.receipt.outcome == "failed"
    assert "backend_rate_limited" in [getattr(event, "error_code", None) for event in events]
