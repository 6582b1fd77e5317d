"""backplane as an agent of an editor, over the Agent Client Protocol."""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from backplane import api
from backplane.config import BackendSettings, Settings
from backplane.contract.approval import Decision
from backplane.contract.events import Approval
from backplane.contract.work import PolicyProfile
from backplane.serve.editor import decision_of
from backplane.testing import Call, Fault, ModelServer, Turn

WAIT_S = 20.0
WRITE = Call(name="write_file", input={"path": "made.txt", "content": "marmot\n"})
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()
WORDS = [{"type": "text", "text": "make it"}]


class Editor:
    """A client of the protocol: it sends requests, collects updates, and answers permissions."""

    def __init__(self, program: subprocess.Popen[bytes], permit: Callable[[Any], str | None]) -> None:
        self.program, self._permit = program, permit
        self._answers: queue.Queue[Any] = queue.Queue()
        self._number = -1
        self.updates: list[Any] = []
        self.asked: list[Any] = []
        self.withdrawn: list[Any] = []
        self.code = 0
        """Exit code that the agent should have."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            message = json.loads(line)
            if message.get("method") == "session/update":
                self.updates.append(message["params"]["update"])
            elif message.get("method") == "session/request_permission":
                self.asked.append(message)
                chosen = self._permit(message["params"])
                if chosen == "later":
                    continue
                outcome = {"outcome": "cancelled"} if chosen is None else {"outcome": "selected", "optionId": chosen}
                self.send({"jsonrpc": "2.0", "id": message["id"], "result": {"outcome": outcome}})
            elif message.get("method") == "$/cancel_request":
                self.withdrawn.append(message["params"]["requestId"])
            else:
                self._answers.put(message)

    def send(self, *messages: Any) -> None:
        assert self.program.stdin is not None
        self.program.stdin.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        self.program.stdin.flush()

    def begin(self, method: str, **params: Any) -> int:
        self._number += 1  # The first id is 0, which is a good id.
        self.send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        return self._number

    def answer(self) -> Any:
        return self._answers.get(timeout=WAIT_S)

    def ask(self, method: str, **params: Any) -> Any:
        """Return the result of a request, or its error."""
        number = self.begin(method, **params)
        message = self.answer()
        assert message["id"] == number
        return message.get("result", message.get("error"))

    def new(self, folder: Path) -> str:
        return str(self.ask("session/new", cwd=str(folder), mcpServers=[])["sessionId"])

    def said(self, kind: str = "agent_message_chunk") -> str:
        return "".join(update["content"]["text"] for update in self.updates if update["sessionUpdate"] == kind)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def settings_in(folder: Path, server: ModelServer, more: str = "") -> list[str]:
    """Write a configuration with two backends and a policy; return the command of the agent."""
    address = server.base_url("anthropic")
    row = f'host = "api"\noptions = {{ protocol = "anthropic", base_url = "{address}", model = "m" }}\n'
    rows = f'default_backend = "one"\n[backends.one]\n{row}[backends.two]\n{row}{more}'
    (folder / "backplane.toml").write_text(rows)
    (folder / "policy.json").write_text('{"require_approval_for": ["write_file"]}')
    files = ["--config", str(folder / "backplane.toml"), "--policy", str(folder / "policy.json")]
    return [sys.executable, "-m", "backplane", "acp", *files]


@contextmanager
def editor(
    folder: Path, server: ModelServer, permit: Callable[[Any], str | None] = lambda _: "allow", more: str = ""
) -> Iterator[Editor]:
    (folder / "work").mkdir(exist_ok=True)
    env = {**os.environ, "BACKPLANE_HOME": str(folder / "home")}
    command = settings_in(folder, server, more)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as program:
        one = Editor(program, permit)
        hello = one.ask("initialize", protocolVersion=1, clientCapabilities={})
        assert hello["protocolVersion"] == 1
        try:
            yield one
        finally:
            assert program.stdin is not None
            with suppress(BrokenPipeError):
                program.stdin.close()
            assert program.wait(WAIT_S) == one.code


@pytest.mark.parametrize(("chosen", "made"), [("allow", True), ("reject", False), (None, False)])
def test_an_editor_permits_a_call_or_not(tmp_path: Path, chosen: str | None, made: bool) -> None:
    script = [Turn(reasoning="hm", calls=(WRITE,)), Turn(text="all done")]
    with ModelServer(script) as server, editor(tmp_path, server, lambda _: chosen) as one:
        id = one.new(tmp_path / "work")
        assert one.ask("session/prompt", sessionId=id, prompt=WORDS) == {"stopReason": "end_turn"}
    (asked,) = [message["params"] for message in one.asked]
    assert asked["toolCall"]["kind"] == "edit"
    assert asked["toolCall"]["locations"] == [{"path": str(tmp_path / "work" / "made.txt")}]
    assert {option["kind"] for option in asked["options"]} == {"allow_once", "allow_always", "reject_once"}
    assert (tmp_path / "work" / "made.txt").exists() == made
    kinds = [update["sessionUpdate"] for update in one.updates]
    assert kinds.index("tool_call") < kinds.index("tool_call_update")
    (end,) = [update["status"] for update in one.updates if update["sessionUpdate"] == "tool_call_update"]
    assert end == ("completed" if made else "failed")
    assert one.said() == "all done"
    assert one.said("agent_thought_chunk") == "hm"


def test_a_stored_session_is_listed_loaded_and_goes_on(tmp_path: Path) -> None:
    with ModelServer([Turn(text="first"), Turn(text="second")]) as server:
        with editor(tmp_path, server) as one:
            id = one.new(tmp_path / "work")
            one.ask("session/prompt", sessionId=id, prompt=WORDS)
            assert one.ask("session/close", sessionId=id) == {}
        with editor(tmp_path, server) as one:
            rows = one.ask("session/list", cwd=str(tmp_path / "work"))["sessions"]
            assert [(row["sessionId"], row["title"]) for row in rows] == [(id, "make it")]
            assert one.ask("session/list", cwd="/elsewhere")["sessions"] == []
            one.ask("session/load", sessionId=id, cwd=str(tmp_path / "work"), mcpServers=[])
            assert (one.said("user_message_chunk"), one.said()) == ("make it", "first")
            one.updates.clear()
            one.ask("session/prompt", sessionId=id, prompt=[{"type": "text", "text": "on"}])
            assert one.said() == "second"
        said = json.dumps(server.requests[-1].body["messages"])
        assert "make it" in said
        assert "first" in said


def test_another_mode_continues_on_another_backend(tmp_path: Path) -> None:
    absent = '[backends.absent]\nhost = "acp"\noptions = { program = "no-such-program" }\n'
    script = [Turn(text="first"), Turn(text="second")]
    with ModelServer(script) as server, editor(tmp_path, server, more=absent) as one:
        made = one.ask("session/new", cwd=str(tmp_path / "work"), mcpServers=[])
        assert made["modes"]["currentModeId"] == "one"
        modes = {mode["id"] for mode in made["modes"]["availableModes"]}
        assert {"one", "two"} <= modes
        assert "absent" not in modes  # Its program is not on this machine.
        id = made["sessionId"]
        one.ask("session/prompt", sessionId=id, prompt=WORDS)
        assert one.ask("session/set_mode", sessionId=id, modeId="two") == {}
        one.ask("session/prompt", sessionId=id, prompt=WORDS)
        assert "no backend" in one.ask("session/set_mode", sessionId=id, modeId="three")["message"]
        assert "first" in json.dumps(server.requests[-1].body["messages"])


def test_a_cancelled_prompt_ends_as_cancelled(tmp_path: Path) -> None:
    slow = Turn(text="word " * 200, pieces=200, fault=Fault(pause_ms=50))
    with ModelServer(slow) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        number = one.begin("session/prompt", sessionId=id, prompt=WORDS)
        server.wait_requests(1)
        one.send({"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": id}})
        assert one.answer() == {"jsonrpc": "2.0", "id": number, "result": {"stopReason": "cancelled"}}


def test_a_cancel_right_behind_its_prompt_is_heeded(tmp_path: Path) -> None:
    slow = Turn(text="word " * 200, pieces=200, fault=Fault(pause_ms=50), times=None)
    with ModelServer(slow) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        prompt = {"id": 77, "method": "session/prompt", "params": {"sessionId": id, "prompt": WORDS}}
        cancel = {"method": "session/cancel", "params": {"sessionId": id}}
        one.send(*({"jsonrpc": "2.0", **message} for message in (prompt, cancel)))
        assert one.answer() == {"jsonrpc": "2.0", "id": 77, "result": {"stopReason": "cancelled"}}


def test_a_cancel_closes_the_question_that_is_open(tmp_path: Path) -> None:
    with ModelServer(Turn(calls=(WRITE,))) as server, editor(tmp_path, server, lambda _: "later") as one:
        id = one.new(tmp_path / "work")
        number = one.begin("session/prompt", sessionId=id, prompt=WORDS)
        wait_until(lambda: bool(one.asked))
        one.send({"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": id}})
        assert one.answer() == {"jsonrpc": "2.0", "id": number, "result": {"stopReason": "cancelled"}}
    assert one.withdrawn == [one.asked[0]["id"]]
    assert not (tmp_path / "work" / "made.txt").exists()


def test_a_question_is_closed_at_the_time_limit_of_the_run(tmp_path: Path) -> None:
    script = [Turn(calls=(WRITE,)), Turn(text="all done")]
    limit = "[limits]\nask_s = 0.5\n"
    with ModelServer(script) as server, editor(tmp_path, server, lambda _: "later", limit) as one:
        id = one.new(tmp_path / "work")
        assert one.ask("session/prompt", sessionId=id, prompt=WORDS) == {"stopReason": "end_turn"}
        asked = one.asked[0]["id"]
        late = {"outcome": {"outcome": "selected", "optionId": "allow"}}
        one.send({"jsonrpc": "2.0", "id": asked, "result": {"outcome": late}})  # It changes nothing any more.
    assert one.withdrawn == [asked]
    assert "no answer within 0.5 s" in json.dumps(one.updates)
    assert not (tmp_path / "work" / "made.txt").exists()


def test_all_blocks_that_are_announced_reach_the_model(tmp_path: Path) -> None:
    prompt = [
        {"type": "text", "text": "look"},
        {"type": "resource_link", "uri": "file:///a/b.py", "name": "b.py"},
        {"type": "resource", "resource": {"uri": "file:///c.py", "text": "import marmot"}},
        {"type": "image", "data": PNG, "mimeType": "image/png"},
    ]
    with ModelServer(Turn(text="seen")) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        assert one.ask("session/prompt", sessionId=id, prompt=prompt) == {"stopReason": "end_turn"}
        sent = json.dumps(server.requests[-1].body["messages"])
    assert [words for words in ("look", "[b.py](file:///a/b.py)", "import marmot", PNG) if words not in sent] == []


def test_a_session_without_a_prompt_leaves_nothing(tmp_path: Path) -> None:
    with ModelServer([]) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        one.ask("session/set_mode", sessionId=id, modeId="two")
        assert one.ask("session/list")["sessions"] == []
    assert list((tmp_path / "home" / "sessions").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "fact"),
    [(["--backend", "nope"], "no backend 'nope'"), (["--policy", "nope.json"], "no policy 'nope.json'")],
)
def test_a_wrong_option_is_named_at_the_start(words: list[str], fact: str, tmp_path: Path) -> None:
    with ModelServer([]) as server:
        command = [*settings_in(tmp_path, server), *words]
        env = {**os.environ, "BACKPLANE_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, input="", env=env, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert fact in done.stderr


def test_a_list_names_the_time_of_the_last_change(tmp_path: Path) -> None:
    with ModelServer([Turn(text="a"), Turn(text="b")]) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        times = []
        for _ in range(2):
            one.ask("session/prompt", sessionId=id, prompt=WORDS)
            times.append(one.ask("session/list")["sessions"][0]["updatedAt"])
    assert times[0] < times[1]


def test_of_two_loads_at_once_one_is_refused(tmp_path: Path) -> None:
    with ModelServer([Turn(text="a"), Turn(text="b")]) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        one.ask("session/prompt", sessionId=id, prompt=WORDS)
        one.ask("session/close", sessionId=id)
        for _ in range(2):
            one.begin("session/load", sessionId=id, cwd=str(tmp_path / "work"), mcpServers=[])
        answers = [one.answer(), one.answer()]
        assert sorted("error" in answer for answer in answers) == [False, True]
        (error,) = [answer["error"] for answer in answers if "error" in answer]
        assert (error["code"], "open already" in error["message"]) == (-32602, True)
        assert one.ask("session/prompt", sessionId=id, prompt=WORDS) == {"stopReason": "end_turn"}


def test_a_second_prompt_is_refused_while_one_is_under_way(tmp_path: Path) -> None:
    with ModelServer(Turn(text="slow", fault=Fault(first_byte_ms=1500))) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        first = one.begin("session/prompt", sessionId=id, prompt=WORDS)
        server.wait_requests(1)
        second = one.begin("session/prompt", sessionId=id, prompt=WORDS)
        refused, ended = one.answer(), one.answer()
    assert (refused["id"], refused["error"]["code"]) == (second, -32602)
    assert (ended["id"], ended["result"]) == (first, {"stopReason": "end_turn"})


def test_a_failure_of_the_model_is_an_error_and_no_quiet_end(tmp_path: Path) -> None:
    with (
        ModelServer(Turn(fault=Fault(status=401, message="no key"), times=None)) as server,
        editor(tmp_path, server) as one,
    ):
        error = one.ask("session/prompt", sessionId=one.new(tmp_path / "work"), prompt=WORDS)
    assert error["code"] == -32603
    assert "backend_auth_failed" in error["message"]


def test_the_end_of_the_editor_ends_everything(tmp_path: Path) -> None:
    slow = Turn(text="word " * 500, pieces=500, fault=Fault(pause_ms=50))
    with ModelServer(slow) as server:
        with editor(tmp_path, server) as one:
            one.begin("session/prompt", sessionId=one.new(tmp_path / "work"), prompt=WORDS)
            server.wait_requests(1)
        assert server.wait_end(1) == "left"


def test_our_own_host_for_such_agents_drives_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with ModelServer([Turn(calls=(WRITE,)), Turn(text="all done")]) as server:
        command = settings_in(tmp_path, server)
        options = {"program": command[0], "arguments": command[1:], "silence_s": 20}
        env = {"BACKPLANE_HOME": str(tmp_path / "home")}
        outer = Settings(backends={"outer": BackendSettings(host="acp", options=options, env=env)}, isolation="off")
        policy = PolicyProfile(require_approval_for=("write_file",))
        asked = []

        def on_ask(approval: Approval) -> Decision:
            asked.append(approval.tool)
            return approval.allow()

        run = api.run("make it", backend="outer", root=str(work), settings=outer, policy=policy, on_ask=on_ask).check()
    assert (run.receipt.outcome, run.text) == ("complete", "all done")
    assert asked == ["write_file"]


def processes(mark: str) -> list[str]:
    """The processes whose command line has these words."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if mark in line]


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_no_child_outlives_its_editor(tmp_path: Path, number: signal.Signals | None) -> None:
    with ModelServer([]) as server, editor(tmp_path, server) as one:
        id = one.new(tmp_path / "work")
        assert one.ask("session/set_mode", sessionId=id, modeId="shell") == {}
        words = [{"type": "text", "text": f"touch begun; sleep 600; : {tmp_path}/mark"}]
        one.begin("session/prompt", sessionId=id, prompt=words)
        wait_until((tmp_path / "work" / "begun").exists)
        assert processes(f"{tmp_path}/mark")
        if number is not None:
            one.program.send_signal(number)
            one.code = 128 + number
    wait_until(lambda: not processes(f"{tmp_path}/mark"))


WRONG: list[tuple[str, dict[str, Any], int]] = [
    ("nothing/here", {}, -32601),
    ("session/new", {"cwd": "relative", "mcpServers": []}, -32602),
    ("session/new", {"mcpServers": []}, -32602),
    ("session/new", {"cwd": "/", "mcpServers": [{"name": "a", "type": "sse", "url": "http://127.0.0.1:9"}]}, -32602),
    ("session/new", {"cwd": "/", "mcpServers": [{"name": "a"}]}, -32602),
    ("session/new", {"cwd": "/", "mcpServers": 3}, -32602),
    ("session/prompt", {"sessionId": "none", "prompt": WORDS}, -32002),
    ("session/close", {"sessionId": "none"}, -32002),
    ("session/load", {"sessionId": "none", "cwd": "/", "mcpServers": []}, -32002),
    ("session/list", {"cursor": "x"}, -32602),
    # Not announced, so not there.
    ("authenticate", {"methodId": "a"}, -32601),
    ("session/fork", {"sessionId": "none", "cwd": "/"}, -32601),
    ("session/delete", {"sessionId": "none"}, -32601),
    ("session/set_config_option", {"sessionId": "none", "configId": "a", "value": "b"}, -32601),
]
BAD_PROMPTS: list[Any] = [
    [], "text", [{"type": "audio", "data": "", "mimeType": "a/b"}], [{"type": "text", "text": " "}],
    [{"type": "image", "data": "no base64!", "mimeType": "image/png"}],
    [{"type": "resource", "resource": {"uri": "file:///x", "blob": "AA=="}}],
]  # fmt: skip


def test_wrong_requests_are_answered_with_the_reason(tmp_path: Path) -> None:
    with ModelServer([]) as server, editor(tmp_path, server) as one:
        for method, params, code in WRONG:
            error = one.ask(method, **params)
            assert (error["code"], bool(error["message"])) == (code, True), (method, error)
        id = one.new(tmp_path / "work")
        for prompt in BAD_PROMPTS:
            assert one.ask("session/prompt", sessionId=id, prompt=prompt)["code"] == -32602


@pytest.mark.parametrize(
    ("answer", "words"),
    [({"outcome": {"outcome": "selected", "optionId": "reject"}}, "the user rejected"),
     ({"outcome": {"outcome": "cancelled"}}, "gave no permission"), (None, "gave no permission"),
     ({"outcome": {"outcome": "selected", "optionId": "other"}}, "gave no permission")],
)  # fmt: skip
def test_a_denial_says_that_the_user_rejected_only_if_that_is_so(answer: Any, words: str) -> None:
    decision = decision_of(answer)
    assert decision.decision == "deny"
    assert words in (decision.reason or "")
