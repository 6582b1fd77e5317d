"""Sessions that last: their files, going on in another process and with another backend, and after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.contract.conversation import (
    AgentMessage,
    MessageToolCall,
    SessionFile,
    SessionTurn,
    ThinkingBlock,
    ToolResultMessage,
    UserMessage,
    unresolved,
)
from backplane.contract.events import AssistantDelta, carried, carry
from backplane.contract.work import Mode, PolicyProfile
from backplane.errors import ConfigError
from backplane.providers import ProviderRegistry, SessionConfig, store
from backplane.providers.reading import Transcript
from backplane.providers.turns import NOT_CARRIED, QUESTION, Abilities, Wanted, _changes, compose
from backplane.redact.secrets import Redactor
from backplane.runtime.backends import ProcessBackend
from backplane.testing import Call, ModelServer, Turn
from tests.all.doors.test_providers import Ground
from tests.api_agent import LIMITS
from tests.in_process import in_process
from tests.peers import PYTHON

pytestmark = pytest.mark.anyio

STEPS = 4
WORKER = """
import json, os, sys
from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, main

async def work(run):
    root, die = run.order.workspace.root, int(sys.argv[1])
    history, task = run.order.abp("history") or [], run.order.task
    seen = {m["tool_call_id"] for m in history if m["role"] == "tool"}
    asked = {c["id"] for m in history for c in m.get("tool_calls", ())}
    emitted = 0
    async def told():
        nonlocal emitted
        emitted += 1
        if emitted == die:
            os._exit(9)
    for step in range(4):
        id = f"step-{step}"
        if id in seen or id in asked:  # Done, or unknown: never repeated by itself.
            continue
        await run.tool_call("work", {"step": step}, id)
        await told()
        with open(os.path.join(root, "effects"), "a") as file:
            file.write(f"{step}\\n")
        await run.tool_result("work", "done", id=id)
        await told()
    await run.message("finished")
    return Done()

main(Host(id="worker", capabilities={"streaming": NATIVE}, heeds=("context", "history")), work)
"""


@pytest.fixture
def ground(backplane_home: Path, tmp_path: Path) -> Ground:
    return Ground(backplane_home, tmp_path)


def worker(ground: Ground, id: str, die: int) -> ProcessBackend:
    path = ground.folder / "worker.py"
    path.write_text(WORKER)
    return ProcessBackend(id=id, argv=(*PYTHON, str(path), str(die)), limits=LIMITS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    return folder


# Files ----------------------------------------------------------------------------------------------------------------

NAMES = st.text(max_size=8)
MESSAGES = st.one_of(
    st.builds(UserMessage, content=NAMES),
    st.builds(ToolResultMessage, tool_call_id=NAMES, content=NAMES, is_error=st.booleans()),
    st.builds(
        AgentMessage,
        content=NAMES,
        tool_calls=st.lists(st.builds(MessageToolCall, id=NAMES, name=NAMES, arguments=st.none() | NAMES)).map(tuple),
        thinking=st.lists(st.builds(ThinkingBlock, text=NAMES, signature=st.none() | NAMES)).map(tuple),
    ),
)
FILES = st.builds(
    SessionFile,
    format=st.just("backplane.session"), version=st.just(1), id=NAMES, created_at=NAMES, provider=NAMES,
    policy=st.none() | st.builds(PolicyProfile, deny_read=st.lists(NAMES).map(tuple)),
    cleared=st.integers(0, 5), losses=st.lists(NAMES).map(tuple),
    turns=st.lists(
        st.builds(SessionTurn, run_id=NAMES, provider=NAMES, messages=st.lists(MESSAGES, max_size=3).map(tuple))
    ).map(tuple),
)  # fmt: skip


@settings(max_examples=30)
@given(FILES)
def test_a_file_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, file: SessionFile) -> None:
    home = tmp_path_factory.mktemp("sessions")
    saved = store.create(home, "5f0c2f4e-6d1b-4c8e-9a57-0d9a3a1f7b11")
    saved.write(file)
    saved.close()
    assert store.read(saved.path) == file
    assert saved.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "is no session: Invalid enum value 2 - at `.*version"),
        ({"format": "other"}, "is no session"),
        ({"extra": 1}, "is no session"),
        ({"turns": [{"run_id": 1}]}, "is no session"),
    ],
)
def test_what_is_no_session_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    head = {"format": "backplane.session", "version": 1, "id": "x", "created_at": "", "provider": "p"}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**head, **change}))
    with pytest.raises(ConfigError, match=said):
        store.read(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is no session"):
        store.read(path)


def test_a_rule_of_a_policy_with_a_secret_in_it_is_refused_and_not_lost() -> None:
    secret = "hunter2-hunter2-hunter2"
    policy = PolicyProfile(deny_read=(f"**/{secret}",))
    file = SessionFile(format="backplane.session", version=1, id="x", created_at="", provider="p", policy=policy)
    with pytest.raises(ConfigError, match="a rule of the session's policy has a secret in it"):
        store.clean(file, Redactor([secret]))


def test_secrets_stay_out_and_a_signed_block_with_one_is_dropped_whole(tmp_path: Path) -> None:
    secret = "hunter2-hunter2-hunter2"
    thinking = (ThinkingBlock(text=f"it is {secret}", signature="c2ln"), ThinkingBlock(text="fine", signature="c2ln"))
    turn = SessionTurn(
        run_id="r",
        provider="p",
        messages=(UserMessage(content=f"my word is {secret}"), AgentMessage(content="ok", thinking=thinking)),
    )
    file = SessionFile(format="backplane.session", version=1, id="x", created_at="", provider="p", turns=(turn,))
    told = store.clean(file, Redactor([secret]))
    assert secret not in json.dumps(told)
    assert [part["text"] for part in told["turns"][0]["messages"][1]["thinking"]] == ["fine"]
    assert told["losses"] == [store.SIGNED]


async def test_a_second_writer_is_refused_and_fork_offered(ground: Ground) -> None:
    async with ground.registry() as registry:
        async with await registry.get("words").create_session() as session:
            await session.run("one")
            assert store.is_open(ground.home, session.id)
            with pytest.raises(ConfigError, match="is open in another process") as refused:
                await registry.get("words").resume(session.id)
            assert refused.value.hint == f"backplane sessions fork {session.id}"
        assert not store.is_open(ground.home, session.id)
        async with await registry.get("words").resume(session.id) as again:
            assert again.get_history()[0] == UserMessage(content="one")


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"), [("anthropic", "openai_compatible"), ("openai_compatible", "words"), ("anthropic", "keeps")]
)
async def test_a_session_goes_on_with_another_backend_and_lists_what_is_lost(
    ground: Ground, source: str, target: str
) -> None:
    call = Call(name="read_file", input={"path": "none.txt"})
    turns = [Turn(reasoning="I look.", text="Looking.", calls=(call,)), Turn(text="It is not there.")]
    with ModelServer([*turns, Turn(text="As I said.", times=None)]) as server:
        async with ground.registry(server) as registry:
            async with await registry.get(source).create_session() as session:
                await session.run("what is in none.txt?")
                before = session.get_history()
            async with await registry.get(target).resume(session.id) as session:
                turn = (await session.run("and now?")).check()
                assert session.get_history()[: len(before)] == before
                assert session.provider == target
        sent = msgspec.json.encode(server.requests[-1].body).decode()
    shown = sent if target in ("openai_compatible", "anthropic") else turn.text
    for words in ("what is in none.txt?", "Looking.", "none.txt", "It is not there.", "and now?"):
        assert words in shown, words
    thinks = any(isinstance(message, AgentMessage) and message.thinking for message in before)
    assert thinks
    if "I look." not in shown:
        assert any("thinking" in loss for loss in session.losses), session.losses


async def test_a_proof_goes_back_to_the_provider_and_model_that_made_it_and_to_no_other(ground: Ground) -> None:
    turns = [Turn(reasoning="I look.", signature="cHJvb2Y=", text="Yes."), Turn(text="x", times=None)]
    with ModelServer(turns) as server:
        async with ground.registry(server) as registry, await registry.get("anthropic").create_session() as session:
            await session.run("one")
            await session.run("two")
            assert "cHJvb2Y=" in msgspec.json.encode(server.requests[-1].body).decode()
            assert session.losses == ()
            await session.run("three", model="m-2")
            assert "cHJvb2Y=" not in msgspec.json.encode(server.requests[-1].body).decode()
            assert "signatures" in " ".join(session.losses)


async def test_a_fork_has_the_messages_up_to_a_point_and_leaves_the_original(ground: Ground) -> None:
    with ModelServer([Turn(text="a"), Turn(text="b"), Turn(text="c", times=None)]) as server:
        async with ground.registry(server) as registry:
            provider = registry.get("anthropic")
            async with await provider.create_session() as session:
                await session.run("1")
                await session.run("2")
            async with await provider.fork_session(session.id, at=2) as fork:
                assert [message.content for message in fork.get_history()] == ["1", "a"]
                await fork.run("3")
            texts = [message["content"] for message in server.requests[-1].body["messages"]]
    assert fork.file.parent == session.id
    assert len(texts) == 3
    assert len(store.read(store.path_of(ground.home, session.id)).turns) == 2


async def test_a_fork_of_a_kept_conversation_is_made_by_its_provider(ground: Ground) -> None:
    async with ground.registry() as registry:
        provider = registry.get("keeps")
        async with await provider.create_session() as session:
            await session.run("one")
        async with await provider.fork_session(session.id) as fork:
            said = msgspec.json.decode((await fork.run("two")).text)
        async with await provider.fork_session(session.id, at=1) as fork:
            again = msgspec.json.decode((await fork.run("two")).text)
    assert said["abp"]["session"] == {"fork": "native-1"}
    assert again["abp"]["session"] == {"keep": True}
    assert again["task"].startswith("What was said before")


# After a crash --------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, anyio
from backplane.config import Settings
from backplane.providers import ProviderRegistry, SessionConfig, ToolUseEndEvent
from backplane.runtime.backends import ProcessBackend

async def main():
    async with ProviderRegistry(Settings(isolation="off"), sys.argv[1]) as registry:
        provider = registry.register(ProcessBackend(id="words", argv=tuple(sys.argv[2:])))
        async with await provider.create_session() as session:
            print(session.id, flush=True)
            async for event in session.send_message("wait for me"):
                if "Delta" in type(event).__name__:
                    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def killed(program: str, *argv: str) -> str:
    """Return what a program printed that killed itself in the middle of a session's turn."""
    done = subprocess.run([*PYTHON, "-c", program, *argv], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return done.stdout.decode().strip()


async def test_a_session_whose_process_was_killed_has_what_its_receipt_says(ground: Ground) -> None:
    argv = ground.host("words", "context").argv
    id = killed(KILLED, str(ground.home), *argv)
    async with ground.registry() as registry, await registry.get("words").resume(id) as session:
        (turn,) = session.file.turns
        said = (UserMessage(content="wait for me"), AgentMessage(content="waiting"))
        assert (turn.stop_reason, turn.messages) == ("user_interrupt", said)
        assert turn.receipt_sha256
        said = msgspec.json.decode((await session.run("go on")).text)
    assert "User: wait for me" in said["task"]


CUT_OFF = """
import os, pathlib, signal, sys, anyio
from backplane.config import Settings
from backplane.providers import ProviderRegistry, SessionConfig

async def main():
    async with ProviderRegistry(Settings(isolation="best_effort"), sys.argv[1]) as registry:
        config = SessionConfig(root=sys.argv[2])
        async with await registry.get("shell").create_session(config) as session:
            for _ in range(int(sys.argv[3])):
                await session.run("true")
            print(session.id, flush=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(die)
                async for event in session.send_message("printf 'precious\\n' > made.txt; echo made; sleep 3"):
                    pass

async def die():
    while not list(pathlib.Path(sys.argv[1]).glob("stage/*/tree/made.txt")):
        await anyio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.parametrize("warm", [0, 2])
def test_the_work_of_a_turn_whose_program_was_killed_is_kept_and_told(
    ground: Ground, shell: Shell, root: Path, warm: int
) -> None:
    """A host that waited for its order works in a place with another name than its run's."""
    killed(CUT_OFF, str(ground.home), str(root), str(warm))
    said = shell("sessions", "resume", "last", "true")
    run_id = _turns(ground)[-2].run_id
    tree = ground.home / "stage" / str(run_id) / "tree"
    assert (tree / "made.txt").read_text() == "precious\n"
    assert f"not carried over: dropped: the changes of run {str(run_id)[:8]}" in said
    assert str(tree) in said
    refused = shell("apply", str(run_id), code=1)
    assert "is not known" in refused
    assert str(tree) in refused
    shell("prune", "--keep", "0")
    shell("run", "--backend", "shell", "true")
    assert not tree.exists(), "gone with its run"


KILLED_AT_WORK = """
import os, signal, sys, anyio
from backplane.config import Settings
from backplane.contract.events import ToolResult
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.runtime.backends import ProcessBackend

async def main():
    async with ProviderRegistry(Settings(isolation="off"), sys.argv[1]) as registry:
        provider = registry.register(ProcessBackend(id="first", argv=tuple(sys.argv[4:])))
        config = SessionConfig(root=sys.argv[2], lane=sys.argv[3])
        async with await provider.create_session(config) as session:
            done = 0
            async for event in session.send_message("do the work"):
                done += "Result" in type(event).__name__
                if done == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("lane", "heeds"), [("workspace_first", '"context", "history"'), ("patch_first", '"context"')])
async def test_a_successor_is_given_the_changes_that_a_killed_turn_did_not_leave(
    ground: Ground, root: Path, lane: str, heeds: str
) -> None:
    argv = worker(ground, "first", 0).argv
    killed(KILLED_AT_WORK, str(ground.home), str(root), lane, *argv)
    async with ground.registry() as registry:
        second = registry.register(ground.host("second", *json.loads(f"[{heeds}]")))
        async with await second.resume("last") as session:
            assert session.file.turns[-1].stop_reason == "user_interrupt"
            asked = msgspec.json.decode((await session.run("go on")).text)
            again = msgspec.json.decode((await session.run("and on")).text)
    assert not (root / "effects").exists()
    for order in (asked, again):
        assert NOT_CARRIED in order["task"]
        assert 'Call step-0: work {"step":0}' in order["task"].partition(NOT_CARRIED)[2]


def test_a_turn_that_only_read_leaves_nothing_to_carry() -> None:
    calls = [MessageToolCall(id=name, name=name, arguments={}) for name in ("Read", "grep", "bash", "write_file")]
    results = [ToolResultMessage(tool_call_id=call.id, content="x", is_error=False) for call in calls[:-1]]
    turn = SessionTurn(run_id="r", provider="p", messages=(AgentMessage(content="", tool_calls=tuple(calls)), *results))
    assert [call.name for call in _changes(turn)] == ["bash"], "what has no result is asked about"


CALL = AgentMessage(tool_calls=(MessageToolCall(id="call-1", name="charge", arguments={"usd": 5}),))


def cut(*messages: Any, stop: Any = "error") -> SessionTurn:
    return SessionTurn(run_id="r", provider="p", stop_reason=stop, messages=(UserMessage(content="go"), *messages))


def composed(heeds: str, *turns: SessionTurn) -> Any:
    file = store.new_file("p", turns=turns)
    can, message = Abilities(frozenset({"context", heeds})), UserMessage(content="on")
    return compose(Wanted(file=file, message=message, can=can))[0]


def test_a_call_without_a_result_is_asked_about_until_a_turn_comes_to_its_end() -> None:
    ended = cut(AgentMessage(content="I looked."), stop="end_turn")
    for turns, is_asked in (
        ((cut(CALL), cut()), True),
        ((cut(CALL), ended), False),
        ((cut(CALL), ended, cut()), False),
    ):
        assert (QUESTION in composed("history", *turns).task) is is_asked


def test_calls_of_two_turns_with_one_id_have_two_in_a_history() -> None:
    result = ToolResultMessage(tool_call_id="call-1", content="5")
    history = composed("history", cut(CALL, result), cut(CALL, result), cut(CALL)).abp("history")
    calls = [call["id"] for row in history for call in row.get("tool_calls", ())]
    assert calls == ["call-1", "call-1-turn-2", "call-1-turn-3"]
    assert [row["tool_call_id"] for row in history if row["role"] == "tool"] == calls[:2]
    task = composed("images", cut(CALL, result), cut(CALL)).task
    assert task.count("(no result was recorded)") == 1, "in words each turn has its own"


@pytest.mark.parametrize(
    ("decision", "is_cut_off", "calls"), [("allow", True, 1), ("allow", False, 0), ("deny", True, 0)]
)
def test_a_call_that_was_allowed_and_never_reported_may_have_run(decision: str, is_cut_off: bool, calls: int) -> None:
    ts, seen = "2026-11-28T00:00:00Z", Transcript()
    ask = {"kind": "tool", "name": "charge", "input": {"usd": 5}, "tool_use_id": "call-1"}
    seen.take(carried(carry("ask", {**ask, "id": "1"}, ts=ts, message="")))
    seen.take(carried(carry("answer", {"id": "1", "decision": decision}, ts=ts, message="")))
    seen.take(AssistantDelta(ts=ts, text="I char"))
    seen.end(is_cut_off=is_cut_off)
    (said,) = seen.messages()
    assert isinstance(said, AgentMessage)
    assert (said.content, len(said.tool_calls)) == ("I char", calls)
    assert not calls or said.tool_calls == CALL.tool_calls


def _turns(ground: Ground) -> tuple[SessionTurn, ...]:
    return store.read(store.path_of(ground.home, store.find(ground.home, "last"))).turns


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("die", "mode"), [(1, "staged"), (4, "pass_through"), (5, "pass_through"), (8, "staged")])
async def test_a_successor_repeats_nothing_and_finishes_what_is_known(
    ground: Ground, root: Path, die: int, mode: Mode
) -> None:
    async with ground.registry() as registry:
        first = registry.register(worker(ground, "first", die))
        second = registry.register(worker(ground, "second", 0))
        config = SessionConfig(root=str(root), mode=mode)
        async with await first.create_session(config) as session:
            turn = await session.run("do the work")
            assert turn.stop_reason == "error"
            cut = unresolved(session.file.turns[-1].messages)
        async with await second.resume(session.id) as session:
            (await session.run("go on")).check()
            order = ground.receipts()[-1]
            history = session.get_history()
    effects = (root / "effects").read_text().split() if (root / "effects").exists() else []
    assert len(effects) == len(set(effects)), effects
    assert len(cut) == die % 2
    if not cut:
        assert sorted(effects) == [str(step) for step in range(STEPS)]
    assert order.backplane["parent"]["session"] == session.id
    assert any(message == UserMessage(content="go on") for message in history)


# The commands ---------------------------------------------------------------------------------------------------------


class Shell:
    def __init__(self, ground: Ground, root: Path) -> None:
        self.root = root
        path = ground.folder / "worker.py"
        path.write_text(WORKER)
        rows = [
            f'[backends.{name}]\ncommand = ["{sys.executable}", "{path}", "{die}"]\n'
            for name, die in (("first", 3), ("second", 0))
        ]
        (root / "backplane.toml").write_text('isolation = "off"\n' + "\n".join(rows))

    def __call__(self, *words: str, code: int = 0, stdin: bytes = b"") -> str:
        done = in_process(*words, cwd=self.root, stdin=stdin)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture
def shell(ground: Ground, root: Path) -> Shell:
    return Shell(ground, root)


def test_a_session_is_handed_over_by_command(shell: Shell, root: Path) -> None:
    said = shell("chat", "--backend", "first", stdin=b"do the work\n", code=1)
    assert "tool: work" in said
    assert "backend_crashed" in said
    listed = shell("sessions", "list")
    assert "1 turn " in listed
    assert "do the work" in listed
    assert "tool: work" in shell("sessions", "show")
    said = shell("sessions", "handover", "last", "--to", "second")
    assert "finished" in said
    assert sorted((root / "effects").read_text().split()) == ["0", "2", "3"], "what is unknown is not repeated"
    copy = shell("sessions", "fork", "last", "--at", "1").strip()
    assert [len(file.turns) for file in map(store.read, [store.path_of(_home(), copy)])] == [1]
    (root / "out.json").write_text(shell("sessions", "show", "last", "--json"))
    fresh = shell("sessions", "import", "out.json", "--backend", "second").split()[0]
    assert "finished" in shell("sessions", "resume", fresh, "again")
    rows = [json.loads(line) for line in shell("sessions", "list", "--json").splitlines()]
    assert len(rows) == 3
    assert "no session" in shell("sessions", "show", "zzz", code=2)
    assert shell("validate", "out.json").count("session")


def test_a_session_stays_where_it_is_if_the_next_agent_is_missing(shell: Shell, root: Path) -> None:
    shell("chat", "--backend", "shell", stdin=b"echo hello\n")
    settings = '[backends.away]\nhost = "codex"\noptions = { program = "no-such-agent" }\n'
    with (root / "backplane.toml").open("a") as file:
        file.write(settings)
    said = shell("sessions", "handover", "last", "--to", "away", code=1)
    assert "backend_unavailable" in said
    assert json.loads(shell("sessions", "list", "--json"))["provider"] == "shell"


def _home() -> Path:
    return Path(os.environ["BACKPLANE_HOME"])


def policy_file(tmp_path: Path, rules: dict[str, list[str]]) -> str:
    """The name of a file with a policy."""
    path = tmp_path / f"policy-{len(list(tmp_path.glob('policy-*')))}.json"
    path.write_text(json.dumps(rules))
    return str(path)


def test_a_sessions_policy_holds_whoever_goes_on_with_it(shell: Shell, root: Path, tmp_path: Path) -> None:
    held = policy_file(tmp_path, {"require_approval_for": ["bash"]})
    shell("chat", "--backend", "shell", "--policy", held, stdin=b"touch gone-0\n", code=1)
    lax = policy_file(tmp_path, {"deny_read": ["none"]})
    shell("sessions", "resume", "last", "touch gone-1", "--policy", lax, code=1)
    shell("sessions", "handover", "last", "touch gone-2", "--to", "shell", code=1)
    shell("chat", "--resume", "last", stdin=b"touch gone-3\n", code=1)
    shell("sessions", "fork", "last")
    shell("sessions", "resume", "last", "touch gone-4", code=1)
    wider = policy_file(tmp_path, {"allowed_tools": ["bash"]})
    narrower = policy_file(tmp_path, {"allowed_tools": ["read_file"]})
    shell("sessions", "resume", "last", "touch gone-6", "--policy", narrower, code=1)
    said = shell("sessions", "resume", "last", "touch gone-7", "--policy", wider, code=2)
    assert "the session's has not" in said
    assert not list(root.glob("gone-*"))


def test_a_policy_that_is_given_later_holds_from_then_on(shell: Shell, root: Path, tmp_path: Path) -> None:
    shell("chat", "--backend", "shell", stdin=b"touch made-0\n")
    no_shell = policy_file(tmp_path, {"disallowed_tools": ["bash"]})
    shell("chat", "--resume", "last", "--policy", no_shell, stdin=b"touch gone-1\n", code=1)
    shell("sessions", "resume", "last", "touch gone-2", code=1)
    assert (root / "made-0").exists()
    assert not list(root.glob("gone-*"))
    (root / "out.json").write_text(shell("sessions", "show", "last", "--json"))
    shell("sessions", "import", "out.json")
    shell("sessions", "resume", "last", "touch made-3")
    assert (root / "made-3").exists(), "an imported policy counts for nothing"


def test_the_configured_policy_holds_beside_the_sessions(shell: Shell, root: Path, tmp_path: Path) -> None:
    config = root / "backplane.toml"
    before = config.read_text()
    shell("chat", "--backend", "shell", stdin=b"touch made-0\n")
    config.write_text(before + '[policy]\ndisallowed_tools = ["bash"]\n')
    shell("sessions", "resume", "last", "touch gone-1", code=1)
    config.write_text(before)
    shell("chat", "--backend", "shell", "--policy", policy_file(tmp_path, {"allowed_tools": ["bash"]}), stdin=b"true\n")
    config.write_text(before + '[policy]\nallowed_tools = ["read_file"]\n')
    said = shell("sessions", "resume", "last", "touch gone-2", code=2)
    assert "in allowed_tools, and the session's has not" in said
    config.write_text(before + '[policy]\nallowed_tools = ["read_file", "bash"]\n')
    shell("sessions", "resume", "last", "touch made-3")
    assert not list(root.glob("gone-*"))
    assert (root / "made-3").exists()


def test_a_mode_that_is_given_when_a_session_goes_on_holds_from_then_on(shell: Shell, root: Path) -> None:
    shell("chat", "--backend", "shell", "--in-place", stdin=b"true\n")
    shell("chat", "--resume", "last", stdin=b"touch in-place; exit 1\n", code=1)
    assert (root / "in-place").exists(), "the session's own, where none is given"
    shell("chat", "--backend", "shell", stdin=b"touch gone-1; exit 1\n", code=1)
    assert not (root / "gone-1").exists(), "what failed in a copy stays there"
    shell("chat", "--resume", "last", "--in-place", stdin=b"test -e gone-1\n")
    assert (root / "gone-1").exists(), "what was cut off is carried by the mode that it was done in"


@pytest.mark.parametrize("given", ["ci", PolicyProfile(deny_write=(".git/**",))])
async def test_a_turn_whose_findings_keep_its_changes_out_of_the_folder_says_so(
    ground: Ground, root: Path, given: str | PolicyProfile
) -> None:
    calls = tuple(
        Call(name="write_file", input={"path": name, "content": "new\n"}, id=name) for name in ("b.txt", ".git/config")
    )
    turns = [Turn(calls=calls), Turn(text="done"), Turn(text="well")]
    with ModelServer(turns) as server:
        async with ground.registry(server) as registry:
            config = SessionConfig(root=str(root), policy=given)
            async with await registry.get().create_session(config) as session:
                first = await session.run("write two files")
                assert session.receipt is not None
                denied, run_id = session.receipt.findings.denied, session.receipt.meta.run_id
                await session.run("and now?")
                losses = session.losses
        sent = msgspec.json.encode(server.requests[-1].body).decode()
    assert (first.stop_reason, denied) == ("end_turn", 1)
    is_written = given != "ci"
    assert (root / "b.txt").exists() == is_written
    lost = [loss for loss in losses if run_id[:8] in loss]
    assert ("their changes were not carried over to this folder" in sent) == bool(lost) == (not is_written)
    if lost:
        assert "denied" in lost[0]
        async with ground.registry() as registry:
            await registry.plane.apply(run_id)
        assert (root / "b.txt").exists()


async def test_what_is_given_when_a_session_goes_on_is_kept(ground: Ground) -> None:
    async with ground.registry() as registry:
        provider = registry.get("keeps")
        async with await provider.create_session(
            SessionConfig(system_prompt="Be brief.", lane="patch_first")
        ) as session:
            await session.run("one")
        given = SessionConfig(system_prompt="Be kind.", model="m-2", lane="workspace_first")
        async with await provider.resume(session.id, given) as session:
            told = msgspec.json.decode((await session.run("two")).text)
        async with await provider.resume(session.id) as session:
            again = msgspec.json.decode((await session.run("three")).text)
            assert session.model == "m-2"
        file = store.read(store.path_of(ground.home, session.id))
    assert "Be kind." in told["task"], "the conversation that it keeps has the instructions of before"
    assert "Be kind." not in again["task"]
    assert (file.system_prompt, file.model, file.lane) == ("Be kind.", "m-2", "workspace_first")


async def test_a_conversation_that_its_new_mode_cannot_keep_is_told_in_words(ground: Ground) -> None:
    path = ground.folder / "host.py"
    words = path.read_text().replace('"session_fork": NATIVE', '"session_resume": restricted("in its folder")')
    path.write_text(words.replace("import NATIVE", "import NATIVE, restricted"))
    async with ground.registry() as registry:
        provider = registry.get("keeps")
        config = SessionConfig(root=str(ground.folder), mode="pass_through")
        async with await provider.create_session(config) as session:
            await session.run("one")
        async with await provider.resume(session.id, SessionConfig(mode="staged")) as session:
            told = msgspec.json.decode((await session.run("two")).text)
            assert "dropped: the provider's own state of the conversation" in session.losses
    assert "User: one" in told["task"]


async def test_a_first_message_that_cannot_be_sent_leaves_no_file(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        with pytest.raises(ConfigError, match="no policy"):
            await session.run("x", policy="no-such.json")
        assert list(store.listed(ground.home)) == []
        await session.run("one")
        with pytest.raises(ConfigError, match="no policy"):
            await session.run("x", policy="no-such.json")
        (file,) = store.listed(ground.home)
    assert isinstance(file, SessionFile)
    assert (file.first_words, len(file.turns)) == ("one", 1)


async def test_a_registry_without_a_saved_session_writes_no_file(ground: Ground) -> None:
    async with ground.registry() as registry:
        async with await registry.get("words").create_session(SessionConfig(save=False)) as session:
            await session.run("x")
        assert list(store.listed(ground.home)) == []
        assert isinstance(registry, ProviderRegistry)
