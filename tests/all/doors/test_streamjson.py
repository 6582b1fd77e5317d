"""A run with an agent that speaks in JSON lines: what the real one cannot be made to do, by a few lines of Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backplane.agents.claude.answers import UNREAD
from backplane.cli.ended import summary
from backplane.contract.approval import Decision
from backplane.contract.events import (
    AgentEvent,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    RetryReported,
    ToolResult,
    Warned,
)
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.runtime.hook_calls import HookCall
from backplane.runtime.hooks import Hook
from backplane.runtime.run import Run
from backplane.view.console import Look
from tests import by_hand

pytestmark = pytest.mark.anyio

BEGIN = """#!{python}
import json, sys

def say(**message):
    print(json.dumps(message), flush=True)

def hear():
    line = sys.stdin.readline()
    return json.loads(line) if line else {{"type": "eof"}}

def result(**more):
    usage = {{"m": {{"inputTokens": 3, "outputTokens": 2, "costUSD": 0.5}}}}
    body = {{"subtype": "success", "is_error": False, "terminal_reason": "completed", "result": "done",
            "model_usage_since_last_result": usage}}
    say(type="result", **{{**body, **more}})

def text(words):
    block = {{"type": "text", "text": words}}
    say(type="assistant", message={{"id": "1", "content": [block]}}, parent_tool_use_id=None)

def call(name, input):
    block = {{"type": "tool_use", "id": "t1", "name": name, "input": input}}
    say(type="assistant", message={{"id": "1", "content": [block]}}, parent_tool_use_id=None)

def hook(when, name, input, **more):
    body = {{"tool_name": name, "tool_input": input, "tool_use_id": "t1", **more}}
    say(type="control_request", request_id=when,
        request={{"subtype": "hook_callback", "callback_id": when, "input": body}})
    return hear()["response"]["response"].get("hookSpecificOutput", {{}})

def came(content, **more):
    block = {{"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": False}}
    say(type="user", message={{"content": [block]}}, parent_tool_use_id=None, **more)

hello = hear()
reply = {{"hook_on_failure_supported": True}} if {confirms} else {{}}
say(type="control_response", response={{"subtype": "success", "request_id": hello["request_id"], "response": reply}})
assert hear()["type"] == "user"
"""


async def play(
    tmp_path: Path,
    script: str,
    *,
    hooks: Sequence[Hook] = (),
    vendor: dict[str, Any] | None = None,
    policy: PolicyProfile | None = None,
    confirms: bool = True,
    max_budget_usd: float | None = None,
    **options: Any,
) -> tuple[Run, list[AgentEvent]]:
    """A run with an agent of these lines, told as events."""
    agent = BEGIN.format(python=sys.executable, confirms=confirms) + script
    config = RuntimeConfig(vendor=vendor or {}, max_budget_usd=max_budget_usd)
    order = {"policy": policy or PolicyProfile(), "config": config}
    return await by_hand.play(tmp_path, "claude", agent, hooks=hooks, options=options, **order)


def of(events: list[AgentEvent], kind: type[Any]) -> list[Any]:
    return [event for event in events if type(event) is kind]


async def test_what_is_unknown_is_kept_and_ends_nothing(tmp_path: Path) -> None:
    script = 'say(type="news", body=[1]); say(type="system", subtype="weather"); print("hello"); text("done"); result()'
    run, events = await play(tmp_path, script)
    raws = [event.ext["raw_message"] for event in of(events, Warned) if isinstance(event.ext, dict)]
    assert {"type": "news", "body": [1]} in raws
    assert {"subtype": "weather"}.items() <= json.loads(json.dumps(raws[-1])).items()
    assert any("no message" in event.message for event in of(events, Warned))
    assert run.receipt.outcome == "complete"


@pytest.mark.parametrize(("effort", "code"), [("high", None), ("silly", "config_invalid")])
async def test_an_effort_that_the_agent_would_pass_over_is_refused(
    tmp_path: Path, effort: str, code: str | None
) -> None:
    run, _ = await play(tmp_path, 'text("done"); result()', vendor={"claude": {"effort": effort}})
    assert (run.end_error.code if run.end_error is not None else None) == code


async def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    states = ("connected", "pending", "failed", "needs-auth")
    rows = [{"name": f"of-{state}", "status": state} for state in states]
    script = f'say(type="system", subtype="init", tools=[], mcp_servers={rows!r}); text("done"); result()'
    _, events = await play(tmp_path, script)
    told = [event.message for event in of(events, Warned) if "MCP" in event.message]
    assert told == [f"the MCP server 'of-{state}' is not there: {state}" for state in states[2:]]


async def test_words_of_a_broken_stream_are_taken_back_before_they_come_again(tmp_path: Path) -> None:
    script = """
def stream(event, **more):
    say(type="stream_event", event=event, parent_tool_use_id=None, **more)
stream({"type": "message_start", "message": {"id": "0"}})
stream({"type": "content_block_start", "index": 0})
stream({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "all is"}})
stream({"type": "message_stop"}, abandoned_blocks={"from_block_index": 0})
text("all is done"); result()"""
    run, events = await play(tmp_path, script)
    assert run.receipt.outcome == "complete"
    (retry,) = of(events, RetryReported)
    assert retry.body == {"reason": "broken_stream", "taken_back": 6}
    look = Look(False)
    shown = "".join(look.event(event) for event in events)
    assert "all is\nnote: the stream broke: 6 characters of the answer are taken back\nall is done\n" in shown


async def test_an_answer_of_a_wanted_shape_is_told_at_the_end(tmp_path: Path) -> None:
    run, _ = await play(tmp_path, 'text("done"); result(structured_output={"n": 7})')
    assert 'value {"n":7}\n' in summary(run.receipt, Look(terminal=False), None)


async def test_a_version_that_never_says_it_is_idle_is_believed_after_its_result(tmp_path: Path) -> None:
    run, events = await play(tmp_path, 'text("done"); result(); hear()')
    assert [event.text for event in of(events, AssistantMessage)] == ["done"]
    assert (run.receipt.usage.input_tokens, run.receipt.usage.output_tokens) == (3, 2)


async def test_what_a_model_of_no_list_costs_stays_unknown(tmp_path: Path) -> None:
    run, _ = await play(tmp_path, 'text("done"); result()')
    assert run.receipt.usage.estimated_cost_usd is None


async def test_a_success_that_says_nothing_hides_a_failure(tmp_path: Path) -> None:
    run, events = await play(tmp_path, 'result(result="")')
    assert run.receipt.outcome == "failed"
    assert of(events, Failed)[-1].error_code == "backend_unavailable"


async def test_an_error_that_calls_itself_a_success_is_none(tmp_path: Path) -> None:
    script = 'result(is_error=True, terminal_reason="api_error", api_error_status=403, result="no")'
    run, events = await play(tmp_path, script)
    assert run.receipt.outcome == "failed"
    assert of(events, Failed)[-1].error_code == "backend_auth_failed"


async def test_who_is_not_logged_in_is_told_what_helps_here(tmp_path: Path) -> None:
    _, events = await play(tmp_path, 'result(is_error=True, result="Not logged in · Please run /login")')
    failure = of(events, Failed)[-1]
    assert failure.error_code == "backend_auth_failed"
    assert failure.message.startswith("Not logged in")
    assert "`backplane backends` names the variable" in failure.message
    assert "own_state" in failure.message


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_ends_the_run_though_the_agent_would_ask_for_minutes(tmp_path: Path, status: int) -> None:
    script = f'[say(type="system", subtype="api_retry", attempt=n, error_status={status}) for n in (1, 2)]; hear()'
    run, events = await play(tmp_path, script)
    assert run.receipt.outcome == "failed"
    assert of(events, Failed)[-1].error_code == "backend_auth_failed"
    assert len(of(events, RetryReported)) == 2


async def test_a_login_that_is_renewed_after_a_refusal_goes_on(tmp_path: Path) -> None:
    script = 'say(type="system", subtype="api_retry", attempt=1, error_status=401); text("done"); result()'
    run, _ = await play(tmp_path, script)
    assert run.receipt.outcome == "complete"


async def test_a_prompt_that_is_too_long_is_the_callers(tmp_path: Path) -> None:
    script = 'result(is_error=True, terminal_reason="prompt_too_long", api_error_status=400, result="too long")'
    _, events = await play(tmp_path, script)
    assert of(events, Failed)[-1].error_code == "backend_context_length"


async def test_words_that_wait_are_answered_before_the_run_ends(tmp_path: Path) -> None:
    script = 'text("first"); result(queued_turn_count=1); text("second"); result()'
    run, events = await play(tmp_path, script)
    assert [event.text for event in of(events, AssistantMessage)] == ["first", "second"]
    assert run.receipt.usage.input_tokens == 6


async def test_silence_ends_the_run_by_our_clock(tmp_path: Path) -> None:
    run, events = await play(tmp_path, "hear(); hear()", silence_s=1)
    assert of(events, Failed)[-1].error_code == "backend_timeout"
    assert run.receipt.outcome == "failed"


async def test_a_question_that_is_not_understood_is_refused_and_not_left_open(tmp_path: Path) -> None:
    script = (
        'say(type="control_request", request_id="q", request={"subtype": "riddle"})\n'
        'answer = hear()["response"]; text(answer["subtype"] + ": " + answer["error"]); result()'
    )
    _, events = await play(tmp_path, script)
    assert of(events, AssistantMessage)[0].text == "error: this host answers no riddle"


OVER = [
    'result(is_error=True, terminal_reason="budget_exhausted", total_cost_usd=0.5)',
    'result(is_error=True, subtype="error_max_budget_usd", terminal_reason="", total_cost_usd=0.5, result="")',
    'result(is_error=True, subtype="error_max_budget_usd", terminal_reason="completed", total_cost_usd=None)',
]


@pytest.mark.parametrize("script", OVER)
async def test_a_budget_that_is_used_up_is_the_orders_limit(tmp_path: Path, script: str) -> None:
    run, events = await play(tmp_path, script, max_budget_usd=0.5)
    assert run.end is not None
    assert (run.receipt.outcome, run.end.reason, run.end.code) == ("partial", "budget", "policy_denied")
    assert of(events, Failed) == [] or of(events, Failed)[-1].error_code == "policy_denied"


HOOK_OF_NOTHING = '{"subtype": "hook_callback", "callback_id": "%s", "input": {"hook_event_name": "any"}}'


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (HOOK_OF_NOTHING % "before", {"decision": "block", "reason": UNREAD}),
        (HOOK_OF_NOTHING % "after", {"continue": False, "stopReason": UNREAD}),
        (HOOK_OF_NOTHING % "failed", {"continue": False, "stopReason": UNREAD}),
        (HOOK_OF_NOTHING % "of-nobody", {"decision": "block", "reason": UNREAD}),
        ('{"subtype": "hook_callback", "callback_id": "before", "input": 7}', {"decision": "block", "reason": UNREAD}),
        ('{"subtype": "can_use_tool", "input": {}}', {"behavior": "deny", "message": UNREAD}),
    ],
)
async def test_a_question_about_a_tool_that_cannot_be_read_is_a_no(
    tmp_path: Path, question: str, answer: dict[str, Any]
) -> None:
    script = (
        f'say(type="control_request", request_id="q", request={question})\n'
        'text(json.dumps(hear()["response"])); result()'
    )
    _, events = await play(tmp_path, script)
    said = json.loads(of(events, AssistantMessage)[0].text)
    assert (said["subtype"], said["response"]) == ("success", answer)


async def test_a_program_whose_hooks_may_not_hold_gets_no_order(tmp_path: Path) -> None:
    run, events = await play(tmp_path, 'text("done"); result()', confirms=False)
    assert run.error is not None
    assert run.error.code == "capability_unsupported"
    assert "2.1.332" in str(run.error)
    assert of(events, AssistantMessage) == []


async def test_an_event_names_what_ran_and_not_what_the_model_wanted(tmp_path: Path) -> None:
    inputs = {"bash": {"command": "echo other"}, "write_file": {"file_path": "other.txt", "content": ""}}

    def answer(call: HookCall) -> Decision:
        return Decision(decision="modify", input=inputs[call.tool])

    script = (
        'for name, input in (("Bash", {"command": "echo first"}), ("Write", {"file_path": "first.txt"})):\n'
        '    call(name, input); got = hook("before", name, input)["updatedInput"]; came("ok", tool_use_result={})\n'
        'text("done"); result()'
    )
    run, events = await play(tmp_path, script, hooks=(Hook("pre_tool", answer),))
    assert [event.command for event in of(events, CommandExecuted)] == ["echo other"]
    assert [event.path for event in of(events, FileChanged)] == ["other.txt"]
    assert run.receipt.outcome == "complete"


async def withheld(tmp_path: Path, tool: str, input: str, output: str) -> tuple[Run, list[AgentEvent]]:
    """A tool that went well, and a hook that lets nobody have its result; the agent knows no error that it gave."""
    script = (
        f'call("{tool}", {input}); hook("before", "{tool}", {input})\n'
        f'hook("after", "{tool}", {input}, tool_response={output})\n'
        'came("as the agent shows it", tool_use_result={})\n'
        'text("done"); result()'
    )

    def deny(call: HookCall) -> Decision:
        return Decision(decision="deny", reason="not for models")

    return await play(tmp_path, script, hooks=(Hook("post_tool", deny, name="look"),))


@pytest.mark.parametrize(
    ("tool", "output"),
    [
        ("Bash", '{"stdout": "walrus"}'),
        ("mcp__house__word", '"walrus"'),
    ],
)
async def test_a_result_that_a_hook_withholds_is_told_as_an_error(tmp_path: Path, tool: str, output: str) -> None:
    run, events = await withheld(tmp_path, tool, '{"command": "ls"}', output)
    (told,) = of(events, ToolResult)
    assert (told.is_error, told.output) == (True, "policy_denied: hook 'look': not for models")
    assert [event.exit_code for event in of(events, CommandExecuted)] == ([0] if tool == "Bash" else [])
    assert run.receipt.outcome == "complete"


async def test_a_file_that_was_written_is_told_though_the_result_is_withheld(tmp_path: Path) -> None:
    run, events = await withheld(tmp_path, "Write", '{"file_path": "new.txt", "content": "1"}', '{"type": "create"}')
    assert [event.path for event in of(events, FileChanged)] == ["new.txt"]
    assert of(events, ToolResult)[-1].is_error
    assert run.receipt.outcome == "failed"
