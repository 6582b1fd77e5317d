"""What a host adds to the cold start of its agent: from a process's start to the first request at the model.

`bench/agents.py AGENT bare|host` prints JSON: milliseconds on the clock, and the host's own CPU until then. Bare is
the agent's program with the command, environment and words that our host gives it, all of them ready; the host is
started as a control plane does it, and given its order at its hello.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import anyio
import msgspec

from backplane.agents.claude import answers
from backplane.agents.claude import start as claude_start
from backplane.agents.claude.agent import HOOK_S
from backplane.agents.codex import start as codex_start
from backplane.agents.order import prompt_of
from backplane.agents.rows import OPTIONS, agent_of, read_options
from backplane.agents.start import AgentStart
from backplane.contract import envelope as wire
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.host import Given
from backplane.policy.rules import compile_policy
from backplane.testing import SIDE_TURNS, ModelServer, Turn
from tests.all.vendors import found

ROOT = Path(__file__).resolve().parent.parent
START_S_MAX = 60.0
"""For the first request: a second is usual, a cold disk and a loaded machine need more."""
END_S_MAX = 10.0
KEYS = {"claude": "ANTHROPIC_API_KEY", "codex": "OPENAI_API_KEY"}
HOSTS = ROOT / "hosts"

Json = dict[str, Any]
Speak = Callable[[subprocess.Popen[bytes]], None]


def options_of(agent: str, url: str) -> str:
    """What a control plane sends to the host, all of it."""
    program = str(found.program(agent))
    more = {"base_url": f"{url}/v1", "retries": 1, "model": "gpt-5.5"} if agent == "codex" else {"base_url": url}
    whole = agent_of(HOSTS, agent, {"program": program, **more}, {}, "the options")
    return msgspec.json.encode(whole).decode()


@contextlib.contextmanager
def ground() -> Iterator[tuple[ModelServer, wire.RunMessage]]:
    """A scripted model, and an order in an empty folder."""
    with tempfile.TemporaryDirectory() as root, ModelServer([*SIDE_TURNS, Turn(text="one")]) as server:
        order = WorkOrder("say one word", workspace=WorkspaceSpec(root=root, mode="pass_through"))
        yield server, wire.RunMessage(id=str(uuid.uuid4()), work_order=order)


@contextlib.contextmanager
def started(argv: list[str], env: dict[str, str], cwd: str) -> Iterator[subprocess.Popen[bytes]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, env=env, cwd=cwd, **pipes) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            # What ends by its closed stdin takes its own children with it.
            child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S_MAX)
            child.kill()


def say(child: subprocess.Popen[bytes], message: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(message) + b"\n")
    child.stdin.flush()


def answer(lines: IO[bytes], id: int) -> Json:
    for line in lines:
        message: Json = json.loads(line)
        if message.get("id") == id and "method" not in message:
            result: Json = message["result"]
            return result
    raise RuntimeError("the agent's program ended before it was asked for words")


def first_request(server: ModelServer) -> None:
    """Wait until the model is asked for words."""
    seen = server.wait_requests(1, START_S_MAX)
    while not any(request.asks == "generate" for request in seen):
        seen = server.wait_requests(len(seen) + 1, START_S_MAX)


def bare(agent: str) -> Json:
    with ground() as (server, message), tempfile.TemporaryDirectory() as state:
        (argv, env), speak = anyio.run(ready, agent, server, message, Path(state))
        began = time.perf_counter()
        with started(argv, env, message.work_order.workspace.root) as child:
            speak(child)
            first_request(server)
            return {"ms": (time.perf_counter() - began) * 1000, "cpu_ms": 0.0}


async def ready(
    agent: str, server: ModelServer, message: wire.RunMessage, state: Path
) -> tuple[tuple[list[str], dict[str, str]], Speak]:
    """The command that our host would start with its environment, and what says its words."""
    run: Any = Given(message, compile_policy(message.work_order.policy))
    begun = AgentStart(run, read_options(str(HOSTS), agent, options_of(agent, server.url)), str(state))
    if agent == "claude":
        return (claude_start.start(begun), begun.env), functools.partial(speak_claude, text=prompt_of(run))
    argv = codex_start.start(begun)
    return (argv, begun.env), functools.partial(speak_codex, thread=codex_start.thread_of(begun), text=prompt_of(run))


def speak_claude(child: subprocess.Popen[bytes], text: str) -> None:
    hooks = answers.wanted((), answer_s=HOOK_S)
    request = {"subtype": "initialize", "hooks": hooks}
    say(child, {"type": "control_request", "request_id": "backplane-1", "request": request})
    words = {"role": "user", "content": text}
    say(child, {"type": "user", "session_id": "", "message": words, "parent_tool_use_id": None})


def speak_codex(child: subprocess.Popen[bytes], thread: tuple[str, Json], text: str) -> None:
    assert child.stdout is not None
    offer = {"clientInfo": {"name": "bench", "version": "1"}, "capabilities": {"experimentalApi": True}}
    say(child, {"id": 1, "method": "initialize", "params": offer})
    answer(child.stdout, 1)
    say(child, {"method": "initialized", "params": {}})
    say(child, {"id": 2, "method": thread[0], "params": thread[1]})
    id = answer(child.stdout, 2)["thread"]["id"]
    said = {"threadId": id, "input": [{"type": "text", "text": text}]}
    say(child, {"id": 3, "method": "turn/start", "params": said})


def through_host(agent: str) -> Json:
    with ground() as (server, message):
        env = {**os.environ, OPTIONS: options_of(agent, server.url)}
        argv = [sys.executable, "-E", "-s", str(HOSTS / "agent.py"), agent]
        began = time.perf_counter()
        with started(argv, env, message.work_order.workspace.root) as child:
            assert child.stdout is not None
            child.stdout.readline()
            say(child, message)
            first_request(server)
            ms = (time.perf_counter() - began) * 1000
            tasks = Path(f"/proc/{child.pid}/task").glob("*/schedstat")
            return {"ms": ms, "cpu_ms": sum(int(path.read_text().split()[0]) for path in tasks) / 1e6}


if __name__ == "__main__":
    os.environ[KEYS[sys.argv[1]]] = "scripted-key-1"
    print(json.dumps({"bare": bare, "host": through_host}[sys.argv[2]](sys.argv[1])))
