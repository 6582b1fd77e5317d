"""Claude Code's own gate, asked by a bare client: a call runs only where its hook was answered with a yes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane.agents.claude import answers
from backplane.agents.claude.start import ARGUMENTS, QUIET
from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn
from tests.all.vendors.found import vendor

Request = dict[str, Any]
Reply = Callable[[Request], Any]
"""Returns the body of an answer; an exception is an error, and None leaves the question open."""
ANSWER_S = 2


class Bare:
    """A client that registers hooks as the host does, and answers each question by a function."""

    def __init__(self, folder: Path, url: str, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[Request] = []
        self.hello: dict[str, Any] = {}
        env = {**os.environ, **QUIET, "CLAUDE_CONFIG_DIR": str(folder / "config"), "ANTHROPIC_BASE_URL": url}
        env |= {"ANTHROPIC_API_KEY": "scripted-key-1", "TMPDIR": str(folder)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        work = folder / "work"
        work.mkdir()
        (work / "a.txt").write_text("secret-word\n")
        self._child = subprocess.Popen([vendor("claude"), *ARGUMENTS], cwd=work, env=env, text=True, **pipes)

    def say(self, **message: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def play(self) -> None:
        """Have one turn, to its result."""
        hooks = answers.wanted({"post_tool"}, answer_s=ANSWER_S)
        self.say(type="control_request", request_id="hello", request={"subtype": "initialize", "hooks": hooks})
        self.say(type="user", session_id="", message={"role": "user", "content": "work"}, parent_tool_use_id=None)
        assert self._child.stdout is not None
        for line in self._child.stdout:
            message = json.loads(line)
            if message["type"] == "control_response":
                self.hello = message["response"]["response"]
            elif message["type"] == "control_request":
                self._answer(message["request_id"], message["request"])
            elif message["type"] == "result":
                break
        self._child.stdin.close()  # type: ignore[union-attr]
        self._child.wait(20)
        self._child.stdout.close()

    def _answer(self, id: str, request: Request) -> None:
        self.asked.append(request)
        try:
            body = self.reply(request)
        except ValueError as error:
            self.say(type="control_response", response={"subtype": "error", "request_id": id, "error": str(error)})
            return
        if body is not None:
            self.say(type="control_response", response={"subtype": "success", "request_id": id, "response": body})


def refused(request: Request) -> Any:
    raise ValueError("the question cannot be read")


def unread(request: Request) -> Any:
    """Answer as the host answers what it cannot read."""
    return answers.block(request)


REPLIES: dict[str, Reply] = {
    "an error": refused,
    "no answer in time": lambda request: None,
    "an answer of another shape": lambda request: {"hookSpecificOutput": 7},
    "a block": unread,
}


def played(tmp_path: Path, reply: Reply, call: Call) -> tuple[Bare, str]:
    """Have a turn with one call; return the client, and what the model was given after it."""
    with ModelServer([*SIDE_TURNS, Turn(calls=(call,)), Turn(text="done")]) as server:
        client = Bare(tmp_path, server.url, reply)
        client.play()
        return client, json.dumps(server.requests[-1].body["messages"])


READ = Call(name="Read", input={"file_path": "a.txt"})


@pytest.mark.parametrize("name", REPLIES)
def test_a_call_whose_hook_was_not_answered_does_not_run(tmp_path: Path, name: str) -> None:
    client, told = played(tmp_path, REPLIES[name], READ)
    assert client.hello["hook_on_failure_supported"] is True
    assert [one["callback_id"] for one in client.asked] == [answers.BEFORE]
    assert "secret-word" not in told


@pytest.mark.parametrize("name", ["an error", "a block"])
def test_a_permission_that_was_not_answered_is_a_no(tmp_path: Path, name: str) -> None:
    def reply(request: Request) -> Any:
        return {} if request["subtype"] == "hook_callback" else REPLIES[name](request)

    client, _ = played(tmp_path, reply, Call(name="Bash", input={"command": "touch ran.txt", "description": "a step"}))
    assert "can_use_tool" in [one["subtype"] for one in client.asked]
    assert not (tmp_path / "work" / "ran.txt").exists()


def test_a_result_that_no_hook_has_seen_is_not_shown(tmp_path: Path) -> None:
    def reply(request: Request) -> Any:
        question = answers.read_question(request)
        assert question is not None
        return answers.allow(question) if question.when == answers.BEFORE else answers.block(request)

    client, told = played(tmp_path, reply, READ)
    assert [one.get("callback_id") for one in client.asked] == [answers.BEFORE, answers.AFTER]
    assert "secret-word" not in told
