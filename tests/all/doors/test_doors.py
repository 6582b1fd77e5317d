"""Live runs from another terminal: followed, answered, cancelled, interrupted; never by what a run has started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.contract.approval import Decision
from backplane.contract.events import Approval
from backplane.errors import ConfigError
from backplane.runtime.door import AnswerCommand, Desk
from tests.in_process import in_process
from tests.peers import ROOT
from tests.receipt_writer import TS
from tests.terminal import Window

WAIT_S = 30
CALL = {"tool": {"name": "bash", "input": {"command": "echo hi > made.txt"}}}
POLICY = {"require_approval_for": ["*"]}


def until(found: Callable[[], Any]) -> Any:
    ends = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.05)
    return value


def cli(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=cwd)


@contextmanager
def running(folder: Path, steps: list[Any], *words: str, policy: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A run of the scripted agent, in the background."""
    (folder / "policy.json").write_text(json.dumps(POLICY))
    held = ("--policy", "policy.json") if policy else ()
    command = [sys.executable, "-m", "backplane", "run", "do it", "--backend", "mock", *held, *words]
    command += ["--param", f"mock.scenario={json.dumps(steps)}"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def asked() -> str:
    """The id of the question that the newest run waits with, once there is one."""

    def look() -> str | None:
        told = cli("why", "--json").stdout
        found = re.search(r"backplane answer \w+ (\S+) allow", told)
        return found[1] if found else None

    return str(until(look))


def receipt() -> Any:
    return json.loads(cli("receipts", "show", "last", "--json").stdout)


def test_a_question_is_answered_from_another_terminal(tmp_path: Path, backplane_home: Path) -> None:
    with running(tmp_path, [CALL, {"say": "bye"}], "--on-ask", "wait") as child:
        id = asked()
        assert json.loads(cli("runs", "--live", "--json").stdout)["waits"]
        assert " waiting " in cli("runs").stdout
        assert cli("answer", "last", "nobody", "allow").returncode == 2
        assert cli("answer", "last", id, "allow", "--text", "no").returncode == 2
        assert cli("answer", "last", id[:-1] or id, "allow", "--reason", "it is fine").returncode == 0
        text = child.communicate(timeout=WAIT_S)[0]
        assert child.returncode == 0
    assert "allow by caller: it is fine (from process " in text
    assert "tool done: bash" in text
    assert cli("answer", "last", id, "allow").returncode == 2


def test_a_run_is_cancelled_from_another_terminal_in_order(tmp_path: Path, backplane_home: Path) -> None:
    with running(tmp_path, [{"say": "hello"}, {"sleep_s": 60}], policy=False) as child:
        until(lambda: " running " in cli("runs", "--live").stdout)
        done = cli("cancel", "last", "--reason", "wrong branch")
        assert (done.returncode, done.stderr) == (0, "")
        child.communicate(timeout=WAIT_S)
    sealed = receipt()
    assert sealed["usage_raw"]["backplane"]["end"]["reason"] == "cancelled"
    assert sealed["usage_raw"]["backplane"]["cancel_reason"].startswith("wrong branch (from process ")
    assert list((backplane_home / "doors").iterdir()) == []


AGENT = r"""
import glob, http.client, os, pathlib, socket, subprocess, sys
door, home, python, other, ask, port = sys.argv[1:]
told = []
env = {**os.environ, "BACKPLANE_HOME": home}
for words in (["answer", other, ask, "allow"], ["cancel", other], ["watch", other]):
    command = [python, "-m", "backplane", *words]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-2, env=env, text=True) as did:
        try:  # A watch goes on until its run ends.
            said = did.communicate("y\n", timeout=3 if words[0] == "watch" else 9)[0]
        except subprocess.TimeoutExpired:
            did.kill()
            said = did.communicate()[0]
        told.append(f"{words[0]}: {did.returncode} {said[-200:]!r}")
for path in glob.glob(door + "/*"):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(b'{"verb":"answer","ask":"%s","decision":"allow"}\n' % ask.encode())
        told.append(f"socket: {link.recv(9999)!r}")
try:
    web = http.client.HTTPConnection("127.0.0.1", int(port), timeout=2)
    web.request("GET", "/api/runs")
    told.append(f"web: {web.getresponse().status}")
except (OSError, http.client.HTTPException) as error:
    told.append(f"web: {error}")
seen = 0
for path in glob.glob("/proc/[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            seen += b"--on-ask" in pathlib.Path(path, name).read_bytes()
        except OSError:
            pass
print("\n".join(told)); print("others seen:", seen)
"""


@pytest.mark.parametrize("isolation", ["best_effort", "off"])
def test_an_agent_approves_nothing_by_watch_socket_loopback_or_proc(
    isolation: str, tmp_path: Path, backplane_home: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    from tests.all.doors.test_web import Page  # Here, as it skips where a server of pages cannot be.

    words = ("--on-ask", "wait")
    with closing(Page(tmp_path)) as page, running(tmp_path, [CALL, {"say": "bye"}], *words) as other:
        ask = asked()
        run_id = json.loads(cli("runs", "--live", "--json").stdout)["run_id"]
        known = (backplane_home / "doors", backplane_home, sys.executable, run_id, ask, page.origin.rpartition(":")[2])
        task = f"{sys.executable} agent.py {' '.join(map(str, known))}"
        command = [sys.executable, "-m", "backplane", "run", "--backend", "shell", "--isolation", isolation, task]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert other.poll() is None
        assert " waiting " in cli("runs", "--live").stdout
    found = done.stdout
    label = receipt()["usage_raw"]["backplane"]["enforcement"]["approvals"]
    assert "answer: 0" not in found
    assert "cancel: 0" not in found
    assert "web: 401" in found
    assert "others seen:" in found
    if isolation == "off":
        assert label == "unprotected"
        assert "policy_denied" in found
    else:
        assert label == "protected"
        assert "others seen: 0" in found
        assert "socket:" not in found


def test_a_door_works_where_the_state_folder_has_a_long_name_and_a_dead_one_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ("long" * 30)
    monkeypatch.setenv("BACKPLANE_HOME", str(home))
    with running(tmp_path, [{"sleep_s": 60}], policy=False) as child:
        (door,) = until(lambda: (home / "doors").is_dir() and list((home / "doors").iterdir()))
        child.kill()
        child.wait()
    with running(tmp_path, [{"sleep_s": 60}], policy=False) as child:
        until(lambda: [found for found in (home / "doors").iterdir() if found != door])
        assert cli("cancel", "last").returncode == 0
        child.communicate(timeout=WAIT_S)
    assert list((home / "doors").iterdir()) == []


def test_keys_in_watch_answer_and_a_slip_of_the_finger_denies_nothing(tmp_path: Path, backplane_home: Path) -> None:
    with running(tmp_path, [CALL, {"say": "bye"}], "--on-ask", "wait") as child:
        asked()
        watch = Window(["watch"])
        until(lambda: watch.shows("[?]: "))
        watch.type("yse\n")
        until(lambda: watch.shows("and calls like it, until the run ends"))
        assert child.poll() is None
        watch.type("y\n")
        assert child.wait(WAIT_S) == 0
        assert watch.ends() == 0
    assert watch.text.count("asks to run bash") == 1
    assert "bye" in watch.text
    assert "mock ends: complete" in watch.text


def test_a_terminal_that_does_not_control_watch_is_told_how_to_answer(tmp_path: Path, backplane_home: Path) -> None:
    with running(tmp_path, [CALL, {"say": "bye"}], "--on-ask", "wait") as child:
        id = asked()
        watch = Window(["watch"], controls=False)
        until(lambda: watch.shows(f" {id} allow"))
        assert cli("answer", "last", id, "allow").returncode == 0
        assert child.wait(WAIT_S) == 0
        assert watch.ends() == 0
    assert "mock ends: complete" in watch.text


def test_two_answers_pasted_into_watch_both_count(tmp_path: Path, backplane_home: Path) -> None:
    other = {"tool": {"name": "bash", "input": {"command": "echo ho > other.txt"}}}
    with running(tmp_path, [CALL, other, {"say": "bye"}], "--on-ask", "wait") as child:
        asked()
        watch = Window(["watch"])
        until(lambda: watch.shows("[?]: "))
        watch.type("y\nn not that\n")
        assert child.wait(WAIT_S) == 0
        assert watch.ends() == 0
    told = [event["ext"]["answer"] for event in receipt()["trace"] if "answer" in event.get("ext", {})]
    assert [(answer["decision"], answer["reason"].partition(" (from")[0]) for answer in told][-2:] == [
        ("allow", "a person said yes"),
        ("deny", "not that"),
    ]


def test_watch_of_a_run_that_has_ended_ends_with_its_code(tmp_path: Path, backplane_home: Path) -> None:
    assert cli("run", "--backend", "shell", "exit 3", cwd=tmp_path).returncode == 1
    told = cli("watch")
    assert told.returncode == 1
    assert "the command ended with exit code 3" in told.stdout
    assert told.stderr.startswith("execution_tool_failed: ")


# The desk -------------------------------------------------------------------------------------------------------------


def ask(id: str = "a1", **body: Any) -> Approval:
    return Approval(ts=TS, message="asks to run bash", ext={"ask": {"id": id, "kind": "tool", **body}})


@pytest.mark.anyio
async def test_the_first_answer_counts_whoever_gives_it() -> None:
    async def slow(_ask: Approval) -> Decision:
        await anyio.sleep_forever()
        raise AssertionError

    desk, found = Desk(slow), []

    async def wait() -> None:
        found.append(await desk.answer(ask()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        desk.decide(AnswerCommand(ask="a", decision="deny", reason="no"), "from process 1")
    assert found == [Decision("deny", "no (from process 1)")]
    with pytest.raises(ConfigError, match="no open question has the id 'a1'"):
        desk.decide(AnswerCommand(ask="a1", decision="deny"), "x")


@pytest.mark.anyio
async def test_a_question_in_words_wants_words() -> None:
    desk = Desk(None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.answer, ask("q1", kind="input"))
        tasks.start_soon(desk.answer, ask("q2"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ConfigError, match="in words"):
            desk.decide(AnswerCommand(ask="q1", decision="allow"), "x")
        with pytest.raises(ConfigError, match="several"):
            desk.decide(AnswerCommand(ask="q", decision="allow"), "x")
        desk.decide(AnswerCommand(ask="q1", decision="allow", text="blue"), "x")
        desk.decide(AnswerCommand(ask="q2", decision="allow"), "x")


@pytest.mark.anyio
async def test_a_callback_that_raises_is_heard_as_itself() -> None:
    async def broken(_ask: Approval) -> Decision:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Desk(broken).answer(ask())
