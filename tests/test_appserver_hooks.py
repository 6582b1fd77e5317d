"""Hooks of driven agents: the small program that asks, and the socket that it asks at."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.agents import hook, hooked
from backplane.agents.hooked import PATH_BYTES_MAX
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.tool import run_tool

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
