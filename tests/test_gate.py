"""The gate of driven agents: in which order a call is decided, and that one call gets one answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from backplane.agents.calls import CUT_SHORT, OpenCall, OpenCalls, read_exit
from backplane.agents.claude.reader import _EXIT as CLAUDE_EXIT
from backplane.agents.events import EventFactory
from backplane.agents.gate import OWN_INPUT, WIDER, Gate, ToolRequest, ToolVerdict
from backplane.agents.kimi.reader import _CODE as KIMI_EXIT
from backplane.contract.approval import Decision
from backplane.contract.events import CommandExecuted, ToolCall, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.policy.rules import Policy

pytestmark = pytest.mark.anyio


class Above:
    """A run whose control plane gives one answer, and keeps what it was asked."""

    def __init__(self, answer: Decision, **rules: Any) -> None:
        self.policy = Policy(PolicyProfile(**rules))
        self.order = SimpleNamespace(workspace=SimpleNamespace(root="/w"))
        self.answer = answer
        self.asked: list[str] = []
        self.recorded: list[str] = []

    async def may(self, name: str, input: Any, **more: Any) -> Decision:
        self.asked.append(name)
        return self.answer

    async def pass_on(self, ask: dict[str, Any]) -> None:
        self.recorded.append(ask["name"])


def made(answer: Decision | None = None, *, is_closed: bool = False, **rules: Any) -> tuple[Gate, Above]:
    above: Any = Above(answer or Decision("allow"), **rules)
    return Gate(above, {}, lambda: is_closed), above


def bash(command: str = "ls", **more: Any) -> ToolRequest:
    return ToolRequest(**{"id": "c1", "tool": "exec_command", "name": "bash", "input": {"command": command}, **more})


async def test_a_call_that_asks_for_more_than_itself_is_refused_whatever_the_policy_says() -> None:
    gate, above = made()
    assert (await gate.decide(bash(wider=True))).refused == WIDER
    assert (above.asked, above.recorded) == ([], ["bash"])


@pytest.mark.parametrize("name", ["bash", "exec_command"])
async def test_a_rule_may_mean_either_name_of_a_tool(name: str) -> None:
    gate, above = made(disallowed_tools=(name,))
    assert (await gate.decide(bash())).refused is not None
    assert (above.asked, above.recorded) == ([], ["bash"])


async def test_a_file_that_the_agent_sees_a_command_read_is_judged() -> None:
    gate, _ = made(deny_read=("**/*.pem",))
    assert (await gate.decide(bash("cat key.pem", reads=(("key.pem", "/w"),)))).refused is not None
    assert (await gate.decide(bash("cat a.txt", id="c2", reads=(("a.txt", "/w"),)))).refused is None


async def test_above_is_asked_by_the_name_that_decides_as_all_names_do() -> None:
    gate, above = made(require_approval_for=("exec_command",))
    await gate.decide(bash())
    assert above.asked == ["exec_command"]


async def test_a_second_question_about_a_call_gets_the_same_answer() -> None:
    gate, above = made(Decision("deny", "said so"))
    assert [(await gate.decide(bash())).refused for _ in range(2)] == ["said so"] * 2
    assert above.asked == ["bash"]
    await gate.decide(bash("rm -r ."))
    assert above.asked == ["bash", "bash"]


async def test_what_a_second_question_shows_of_an_allowed_call_is_judged() -> None:
    gate, above = made(deny_read=("**/*.pem",))
    assert (await gate.decide(bash("cat key.pem"))).refused is None
    assert (await gate.decide(bash("cat key.pem", reads=(("key.pem", "/w"),)))).refused is not None
    assert (above.asked, above.recorded) == (["bash"], ["bash"])


async def test_a_changed_input_is_judged_again_and_taken_only_by_an_agent_that_can() -> None:
    other = Decision("modify", input={"path": "/etc/x"})
    request = ToolRequest(id="c1", tool="Write", name="write_file", input={"path": "a"}, takes_input=True)
    gate, _ = made(other)
    assert "outside" in str((await gate.decide(request)).refused)
    gate, _ = made(Decision("modify", input={"path": "b"}))
    verdict = await gate.decide(request)
    assert (verdict.refused, verdict.input) == (None, {"path": "b"})
    gate, _ = made(Decision("modify", input={"command": "true"}))
    assert (await gate.decide(bash())).refused == OWN_INPUT


async def test_after_a_limit_no_call_gets_an_answer() -> None:
    gate, above = made(is_closed=True)
    with anyio.move_on_after(0.05) as waited:
        await gate.decide(bash())
    assert waited.cancelled_caught
    assert above.asked == []


# The book of calls ----------------------------------------------------------------------------------------------------


def book() -> OpenCalls:
    return OpenCalls(EventFactory(lambda: "2026-11-28T00:00:00.000Z", "/w"))


def test_a_refused_call_ends_with_its_refusal_and_has_run_nothing() -> None:
    calls = book()
    call = OpenCall("c1", "Bash", "bash", {"command": "ls"})
    assert [type(event) for event in [*calls.begin(call), *calls.begin(call)]] == [ToolCall]
    calls.verdicts["c1"] = ToolVerdict(bash(), "said so", {"command": "ls"})
    (result,) = calls.end("c1", "anything", failed=False, ran=(0, "x"))
    assert isinstance(result, ToolResult)
    assert (result.output, result.is_error) == ("policy_denied: said so", True)
    assert (calls.end("c1", "again", failed=False), calls.verdicts) == ([], {})


def test_a_command_is_reported_with_the_input_that_it_ran_with() -> None:
    calls = book()
    calls.begin(OpenCall("c1", "Bash", "bash", {"command": "ls"}))
    calls.verdicts["c1"] = ToolVerdict(bash(), None, {"command": "true"})
    ran, result = calls.end("c1", "out", failed=False, ran=(3, "out"))
    assert isinstance(ran, CommandExecuted)
    assert isinstance(result, ToolResult)
    assert (ran.command, ran.exit_code, result.is_error) == ("true", 3, True)


def test_a_question_without_an_id_is_about_a_call_that_was_not_decided() -> None:
    calls = book()
    for id in ("c1", "c2"):
        calls.begin(OpenCall(id, "mcp__a__b", "mcp__a__b", {"n": 1}))
    calls.verdicts["c1"] = ToolVerdict(ToolRequest(tool="mcp__a__b", name="mcp__a__b", input={"n": 1}), None, {"n": 1})
    assert (calls.find("mcp__a__b", {"n": 1}), calls.find("mcp__a__b", {"n": 2})) == ("c2", "")


def test_calls_that_are_open_at_the_end_are_cut_short() -> None:
    calls = book()
    calls.begin(OpenCall("c1", "Read", "read_file", {}))
    (result,) = calls.close()
    assert isinstance(result, ToolResult)
    assert (result.output, result.is_error) == (CUT_SHORT, True)


@pytest.mark.parametrize(
    ("pattern", "output", "found"),
    [
        (CLAUDE_EXIT, "Error: Exit code 3\nseen\n", (3, "seen\n")),
        (CLAUDE_EXIT, "Permission denied", (None, "Permission denied")),
        (KIMI_EXIT, "seen\nCommand failed with exit code: 3.", (3, "seen")),
    ],
)
def test_an_exit_code_in_words_is_read_and_taken_out(pattern: Any, output: str, found: Any) -> None:
    assert read_exit(pattern, output, failed=True) == found
    assert read_exit(pattern, output, failed=False) == (0, output)
