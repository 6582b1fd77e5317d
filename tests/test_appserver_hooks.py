"""Hooks of agents that serve an app: the small program that asks, the socket, what is held, and who saw what."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.agents import hook, hooked
from backplane.agents.codex.hold import held, unheld
from backplane.agents.codex.reader import UNSEEN, EventReader
from backplane.agents.hooked import PATH_BYTES_MAX
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, CommandExecuted, ToolResult
from backplane.errors import BackendError
from backplane.process.tool import run_tool
from backplane.protocol.jsonrpc import Notification

WAIT_S_MAX = 30.0
QUESTION = b'{"hook_event_name":"PreToolUse","tool_name":"Bash"}'


async def ask(path: Path, question: bytes = QUESTION) -> Json:
    """What the program says that the agent starts."""
    env = {hook.SOCKET: str(path)}
    argv = (sys.executable, "-I", "-S", hook.__file__)
    run = functools.partial(run_tool, argv, env=env, stdin=question, timeout_s=WAIT_S_MAX)
    done = await anyio.to_thread.run_sync(run)
    assert done.code == 0
    said: Json = json.loads(done.stdout)
    return said


@pytest.mark.anyio
async def test_an_answer_comes_back_as_it_was_given(tmp_path: Path) -> None:
    async def answer(said: dict[str, Any]) -> Json:
        return {"heard": said["tool_name"], "long": "x" * 300_000}

    async with anyio.create_task_group() as tasks:
        await tasks.start(hooked.Hooked(str(tmp_path / "s"), answer).run)
        assert await ask(tmp_path / "s") == {"heard": "Bash", "long": "x" * 300_000}
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_nobody_answers_is_denied(tmp_path: Path) -> None:
    assert await ask(tmp_path / "nobody") == json.loads(hook.DENIED)


@pytest.mark.anyio
@pytest.mark.parametrize("question", [b"", b"no json", b"[1]", b"[" * 1000])
async def test_a_question_that_cannot_be_read_is_denied(question: bytes, tmp_path: Path) -> None:
    async def answer(said: dict[str, Any]) -> Json:
        raise AssertionError(said)

    async with anyio.create_task_group() as tasks:
        await tasks.start(hooked.Hooked(str(tmp_path / "s"), answer).run)
        assert await ask(tmp_path / "s", question) == json.loads(hook.DENIED)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_question_that_is_withdrawn_is_denied(tmp_path: Path) -> None:
    async def answer(said: dict[str, Any]) -> Json:
        return None

    async with anyio.create_task_group() as tasks:
        await tasks.start(hooked.Hooked(str(tmp_path / "s"), answer).run)
        assert await ask(tmp_path / "s") == json.loads(hook.DENIED)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_path_that_no_socket_takes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def answer(said: dict[str, Any]) -> Json:
        return {}

    hooked.Hooked("x" * PATH_BYTES_MAX, answer)
    with pytest.raises(BackendError, match="too long") as caught:
        hooked.Hooked("x" * (PATH_BYTES_MAX + 1), answer)
    assert "TMPDIR" in str(caught.value.hint)


# What is held ---------------------------------------------------------------------------------------------------------


@given(st.text())
def test_a_held_command_is_known_again(command: str) -> None:
    assert unheld(held(command)) == command


@given(st.text())
def test_any_other_command_is_left_as_it_is(command: str) -> None:
    assert unheld(command) == command


@pytest.mark.parametrize("command", ["echo out; echo err; exit 3", "}; echo it's; (exit 4)", "sleep 9 & echo x"])
def test_a_held_command_says_the_same_and_ends_the_same(command: str) -> None:
    env = {"PATH": os.environ["PATH"]}
    plain, kept = [run_tool(("/bin/sh", "-c", one), env=env, timeout_s=WAIT_S_MAX) for one in (command, held(command))]
    assert (kept.code, kept.stdout) == (plain.code, plain.stdout + plain.stderr)


# Who saw what ---------------------------------------------------------------------------------------------------------


def take(reader: EventReader, method: str, params: dict[str, Any]) -> list[AgentEvent]:
    return reader.read(Notification(method, params))


def new_reader(**members: Any) -> tuple[EventReader, list[AgentEvent]]:
    """A reader whose results are to be seen first, after one whole command."""
    made = EventReader(lambda: "2026-11-22T00:00:00.000Z", "/work", shows=True)
    made.thread = "t"
    body = {"id": "i", "type": "commandExecution", "command": shlex.join(["bash", "-c", held("ls")]), **members}
    whole = {**body, "status": "completed", "exitCode": 0, "aggregatedOutput": "raw"}
    began = take(made, "item/started", {"threadId": "t", "item": body})
    return made, [*began, *take(made, "item/completed", {"threadId": "t", "item": whole})]


def results(events: list[AgentEvent]) -> list[tuple[Any, bool]]:
    return [(event.output, event.is_error) for event in events if isinstance(event, ToolResult)]


def test_a_result_is_told_as_it_was_shown_and_not_before() -> None:
    made, events = new_reader()
    assert results(events) == []
    told = made.seen("i", "shown", False)
    assert results(told) == [("shown", False)]
    assert [(event.command, event.output_preview) for event in told if isinstance(event, CommandExecuted)] == [
        ("ls", "shown")
    ]
    assert made.seen("i", "again", False) == []


def test_a_result_that_nobody_saw_is_not_told_at_the_end() -> None:
    made, _ = new_reader()
    assert results(made.close()) == [(UNSEEN, True)]


@pytest.mark.parametrize(("status", "told"), [("failed", [("raw", False)]), ("completed", []), ("blocked", [])])
def test_a_result_that_passed_a_failing_hook_is_told_as_the_model_has_it(status: str, told: list[Any]) -> None:
    made, _ = new_reader()
    run = {"id": "post-tool-use:1:/flags/config.toml:i", "eventName": "postToolUse", "status": status}
    assert results(take(made, "hook/completed", {"threadId": "t", "run": run})) == told
