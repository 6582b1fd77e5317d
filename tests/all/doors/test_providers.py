"""Sessions over each kind of backend: it keeps conversations, takes a history, or has words alone."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import anyio
import msgspec
import pytest

from backplane.config import BackendSettings, Settings
from backplane.contract.approval import Decision
from backplane.contract.conversation import StopReason, TokenUsage, usage_together
from backplane.contract.events import Approval, AssistantDelta, AssistantMessage, CommandExecuted
from backplane.contract.work import Mode, PolicyProfile
from backplane.errors import (
    CODES,
    BackendError,
    BackplaneError,
    ConfigError,
    ProtocolError,
    from_code,
    provider_code,
)
from backplane.providers import (
    AgentMessage,
    ErrorEvent,
    MessageDoneEvent,
    ProviderError,
    ProviderRegistry,
    SessionConfig,
    StreamEvent,
    TextDeltaEvent,
    ToolDefinition,
    ToolResultEvent,
    ToolResultMessage,
    ToolUseEndEvent,
    UnifiedEvent,
    UserMessage,
    as_messages,
    as_unified,
    prompt,
    store,
    turns,
    views,
)
from backplane.providers.failures import ErrorType
from backplane.providers.session import OWN_STATE
from backplane.receipts.store import Store
from backplane.routing import TaskDescriptor
from backplane.runtime.backends import ProcessBackend
from backplane.testing import Call, Fault, ModelServer, ScriptUsage, Turn
from tests.api_agent import KEY, LIMITS, PRICES
from tests.peers import PYTHON, ROOT

pytestmark = pytest.mark.anyio

HOST = """
import json, sys
from backplane.contract.capability import NATIVE
from backplane.host import EXTENSIONS, Done, Host, main
from backplane.contract.receipt import Usage

async def work(run):
    task = run.order.task
    if task.startswith("ask"):
        decision = await run.may("deploy", {"to": "prod"}, command="deploy prod")
        await run.message(json.dumps([decision.decision, decision.reason]))
    elif task.startswith("wait"):
        import anyio
        await run.delta("waiting")
        await anyio.sleep_forever()
    elif task.startswith("die"):
        import os
        await run.tool_call("charge", {"usd": 5}, "c-1")
        os._exit(9)
    else:
        await run.message(json.dumps({"task": task, "abp": run.order.config.vendor.get("abp")}))
    if "session" in HEEDS:
        await run.carry("session", {"id": "native-1"}, "session")
    return Done(usage=Usage(input_tokens=3, output_tokens=2))

HEEDS = tuple(sys.argv[1:])
more = ("session/1",) if "session" in HEEDS else ()
levels = {"streaming": NATIVE, "session_fork": NATIVE}
main(Host(id="keeps", capabilities=levels, extensions=(*EXTENSIONS, *more), heeds=HEEDS), work)
"""


class Ground:
    """A registry over a scripted model and scripted hosts."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.folder = home, folder
        (folder / "host.py").write_text(HOST)

    def host(self, id: str, *heeds: str) -> ProcessBackend:
        return ProcessBackend(id=id, argv=(*PYTHON, str(self.folder / "host.py"), *heeds), limits=LIMITS)

    @asynccontextmanager
    async def registry(self, server: ModelServer | None = None, **options: Any) -> AsyncIterator[ProviderRegistry]:
        rows = {}
        if server is not None:
            for name in ("openai_compatible", "anthropic"):
                given = {"protocol": name, "base_url": server.base_url(name), "key_env": "SCRIPTED_KEY", "model": "m-1",
                         "prices": PRICES, **options}  # fmt: skip
                rows[name] = BackendSettings(host="api", options=given)
        settings = Settings(backends=rows, limits=LIMITS, isolation="off", default_backend="anthropic")
        environ = {**os.environ, "SCRIPTED_KEY": KEY}
        async with ProviderRegistry(settings, self.home, environ) as registry:
            registry.register(self.host("keeps", "session", "context"))
            registry.register(self.host("words", "context"))
            yield registry

    def receipts(self) -> list[Any]:
        with Store.open(self.home, readonly=True) as store:
            return [store.load(row.run_id) for row in reversed(list(store.rows()))]


@pytest.fixture
def ground(backplane_home: Path, tmp_path: Path) -> Ground:
    return Ground(backplane_home, tmp_path)


async def told(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


def words(events: list[StreamEvent]) -> str:
    return "".join(event.delta for event in events if isinstance(event, TextDeltaEvent))


def price(article: str) -> str:
    """Look up a price."""
    return {"pump": "129"}[article]


USED = ScriptUsage(input=100, output=10)


# Registry -------------------------------------------------------------------------------------------------------------


async def test_a_provider_that_is_not_there_is_refused_with_the_names_there_are(ground: Ground) -> None:
    async with ground.registry() as registry:
        with pytest.raises(BackendError, match="no backend 'clode'") as refused:
            registry.get("clode")
        assert {"keeps", "words", "shell"} <= set(registry.list())
    assert "claude" in (refused.value.hint or "")


async def test_validate_says_whether_a_host_answers(ground: Ground) -> None:
    async with ground.registry() as registry:
        registry.register(ProcessBackend(id="absent", argv=("/nonexistent/program",)))
        registry.register(ProcessBackend(id="mute", argv=(sys.executable, "-c", "pass")))
        assert await registry.get("keeps").validate()
        assert not await registry.get("absent").validate()
        assert not await registry.get("mute").validate()


async def test_what_a_manifest_does_not_say_is_unknown(ground: Ground) -> None:
    async with ground.registry() as registry:
        provider = registry.get("keeps")
        assert provider.capabilities().supports_streaming is None
        await provider.prepare()
        found = provider.capabilities()
    assert (found.supports_streaming, found.supports_web_search, found.supports_tools) == (True, None, False)


async def test_a_provider_says_what_drives_it_and_which_tasks_it_can_take(ground: Ground) -> None:
    review, words = TaskDescriptor(type="code_review"), TaskDescriptor(type="custom")
    async with ground.registry() as registry:
        provider = registry.get("shell")
        assert (provider.provider_type, provider.can_handle_task(words)) == (None, None)
        await provider.prepare()
        assert provider.provider_type == "shell"
        assert (provider.can_handle_task(words), provider.can_handle_task(review)) == (True, False)


# Turns ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openai_compatible", "anthropic"])
async def test_a_session_over_an_api_knows_what_was_said(ground: Ground, name: str) -> None:
    with ModelServer([Turn(text="Hello.", usage=USED), Turn(text="You said hi.", usage=USED)]) as server:
        async with ground.registry(server) as registry:
            config = SessionConfig(system_prompt="Be brief.", max_tokens=77, temperature=0.5)
            async with await registry.get(name).create_session(config) as session:
                events = await told(as_messages(session, "hi"))
                assert words(events) == "Hello."
                done = events[-1]
                assert isinstance(done, MessageDoneEvent)
                assert (done.message.content, done.stop_reason) == ("Hello.", "end_turn")
                assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (100, 10, 110)
                turn = (await session.run("what did I say?")).check()
                assert (turn.text, session.get_usage().input_tokens, session.turns_completed) == (
                    "You said hi.",
                    200,
                    2,
                )
                assert session.get_history() == (
                    UserMessage(content="hi"), AgentMessage(content="Hello."),
                    UserMessage(content="what did I say?"), AgentMessage(content="You said hi."),
                )  # fmt: skip
                assert session.losses == ()
        bodies = [request.body for request in server.requests]
    text = msgspec.json.encode(bodies[1]).decode()
    assert [text.index(word) for word in ('"hi"', "Hello.", "what did I say?")] == sorted(
        text.index(word) for word in ('"hi"', "Hello.", "what did I say?")
    )
    assert "Be brief." in text
    assert bodies[1]["temperature"] == 0.5
    assert 77 in (bodies[1].get("max_tokens"), bodies[1].get("max_completion_tokens"))


async def test_each_turn_is_an_order_whose_receipt_names_the_one_before(ground: Ground) -> None:
    with ModelServer([Turn(text="one"), Turn(text="two")]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            await session.run("1")
            await session.run("2")
    first, second = ground.receipts()
    assert first.backplane["parent"] == {"session": session.id}
    assert second.backplane["parent"] == {
        "session": session.id, "run_id": first.meta.run_id, "receipt_sha256": first.receipt_sha256
    }  # fmt: skip


async def test_a_provider_that_keeps_conversations_goes_on_with_its_own(ground: Ground) -> None:
    config = SessionConfig(system_prompt="Be brief.")
    async with ground.registry() as registry:
        session = await registry.get("keeps").create_session(config)
        async with session:
            first = msgspec.json.decode((await session.run("one")).text)
            second = msgspec.json.decode((await session.run("two")).text)
            session.clear_history()
            third = msgspec.json.decode((await session.run("three")).text)
            assert session.get_history()[0] == UserMessage(content="three")
    assert first["abp"]["session"] == {"keep": True}
    assert second["abp"]["session"] == {"resume": "native-1"}
    assert "history" not in second["abp"]
    assert third["abp"]["session"] == {"keep": True}
    assert first["task"] == "Instructions for this whole conversation:\nBe brief.\n\none"
    assert second["task"] == "two"
    assert session.losses == ("emulated: system_prompt, it is said in the user's words",)


@pytest.mark.parametrize("given", [{"policy": "stict"}, {"root": "/nowhere/at/all"}])
async def test_a_refused_first_turn_keeps_the_initial_prompt(ground: Ground, given: Any, tmp_path: Path) -> None:
    config = SessionConfig(initial_prompt="Speak like a sailor.")
    with ModelServer([Turn(text="Aye.", usage=USED)]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session(config) as session:
            with suppress(ConfigError):
                assert (await session.run("hi", **given)).error is not None
            assert (await session.run("ahoy", root=tmp_path)).check().text == "Aye."
        sent = msgspec.json.encode(server.requests[0].body).decode()
    assert "Speak like a sailor." in sent
    assert "ahoy" in sent


async def test_a_turns_policy_is_a_name_a_file_or_a_profile_and_its_root_a_path(ground: Ground, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"disallowed_tools": ["bash"]}')
    async with ground.registry() as registry, await registry.get("shell").create_session() as session:
        turns = [await session.run("pwd", root=tmp_path, policy=policy) for policy in ("default", "strict", None)]
        assert [turn.stop_reason for turn in turns] == ["end_turn"] * 3
        for policy in (str(file), PolicyProfile(disallowed_tools=["bash"])):  # type: ignore[arg-type]
            denied = await session.run("pwd", root=tmp_path, policy=policy)
            assert denied.error is not None
            assert "forbidden by 'bash'" in denied.error.message


async def test_a_turns_policy_leaves_the_default_rules_in_force(ground: Ground, tmp_path: Path) -> None:
    calls = (Call(name="write_file", input={"path": ".git/config", "content": "new\n"}, id="a"),)
    with ModelServer([Turn(calls=calls), Turn(text="done")]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            (await session.run("write", policy=PolicyProfile(disallowed_tools=("bash",)))).check()
            assert session.receipt is not None
            assert session.receipt.findings.denied == 1


async def test_a_turn_without_usage_leaves_what_the_others_used_known(ground: Ground) -> None:
    turns = [Turn(text="one", usage=USED), Turn(fault=Fault(status=401), times=None)]
    with ModelServer(turns) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            assert session.get_usage().total_tokens == 0
            (await session.run("hi")).check()
            before = session.get_usage()
            assert (before.total_tokens, before.is_at_least) == (110, False)
            assert (await session.run("hi")).error is not None
            after = session.get_usage()
    assert (after.input_tokens, after.output_tokens, after.is_at_least) == (100, 10, True)


@pytest.mark.parametrize(
    ("counts", "total", "at_least"),
    [([], 0, False), ([1, 2], 3, False), ([1, None], 1, True), ([None, None], None, False), ([None, 0], 0, True)],
)
def test_usage_of_turns_together(counts: list[int | None], total: int | None, at_least: bool) -> None:
    together = usage_together([TokenUsage(input_tokens=count) for count in counts])
    assert (together.input_tokens, together.is_at_least) == (total, at_least)


class Price(msgspec.Struct):
    usd: int


async def test_a_turns_answer_has_the_shape_that_was_asked_for(ground: Ground) -> None:
    with ModelServer([Turn(text='{"usd": 129}'), Turn(text="words"), Turn(text='{"usd": 1}')]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            assert (await session.run("a pump?", output=Price)).check().value == Price(usd=129)
            assert (await session.run("and in words?")).check().value is None
            assert (await session.run("and a screw?", output={"type": "object"})).value == {"usd": 1}
            with pytest.raises(TypeError, match="'modell'"):
                await session.run("x", modell="m")  # type: ignore[call-overload]


async def test_what_a_turn_costs_is_bounded(ground: Ground) -> None:
    config = SessionConfig(max_budget_usd=0.000001)
    with ModelServer([Turn(text="dear", usage=USED, times=None)]) as server:
        async with ground.registry(server) as registry:
            async with await registry.get().create_session(config) as session:
                turn = await session.run("hi")
                assert (turn.stop_reason, session.file.max_budget_usd) == ("error", 0.000001)
                assert turn.error is not None
                assert "max_budget_usd" in turn.error.message
            async with await registry.get("words").create_session(config) as session:
                refused = await session.run("hi")
    assert refused.error is not None
    assert refused.error.cause.code == "capability_unsupported"


async def test_a_session_says_what_it_is_and_is_found_by_the_beginning_of_its_id(ground: Ground) -> None:
    async with ground.registry() as registry:
        provider = registry.get("words")
        async with await provider.create_session() as session:
            assert repr(session) == f"<Session {session.id} with 'words', turns: 0, at rest>"
            (await session.run("one")).check()
        assert repr(session) == f"<Session {session.id} with 'words', turns: 1, closed>"
        for name in (session.id[:8], session.id.upper(), "last"):
            async with await provider.resume(name) as again:
                assert again.id == session.id
        async with await provider.fork_session(session.id[:8]) as fork:
            assert fork.file.parent == session.id
        with pytest.raises(ConfigError, match="no sessions begin with 'zz'"):
            await provider.resume("zz")


async def test_a_changed_system_prompt_begins_another_conversation_with_the_history(ground: Ground) -> None:
    async with ground.registry() as registry:
        async with await registry.get("keeps").create_session(SessionConfig(system_prompt="Be brief.")) as session:
            tasks = []
            for prompt in ("Be brief.", "Be long.", "Be long.", None, None):
                session.set_system_prompt(prompt)
                tasks.append(msgspec.json.decode((await session.run("go")).check().text)["task"].removesuffix("go"))
                assert (OWN_STATE in session.losses) is (prompt != "Be brief.")
            id = session.id
        async with await registry.get("keeps").resume(id, SessionConfig(system_prompt="Rhyme.")) as session:
            tasks.append(msgspec.json.decode((await session.run("go")).check().text)["task"].removesuffix("go"))
    record, begin = (
        "What was said before in this conversation, as a record:\n",
        "Instructions for this whole conversation:\n",
    )
    parts = [(task.partition(record)[0], record in task) for task in tasks]
    assert parts == [
        (f"{begin}Be brief.\n\n", False),
        (f"{begin}Be long.\n\n", True),
        ("", False),
        ("", True),
        ("", False),
        (f"{begin}Rhyme.\n\n", True),
    ]


@pytest.mark.parametrize("lane", ["patch_first", "workspace_first"])
async def test_what_a_turn_does_not_see_of_the_turns_before_is_told(ground: Ground, lane: Any, tmp_path: Path) -> None:
    config = SessionConfig(root=str(tmp_path), lane=lane)
    async with ground.registry() as registry, await registry.get("shell").create_session(config) as session:
        (await session.run("touch made")).check()
        assert turns.UNSEEN not in session.losses
        sees = (await session.run("test -e made")).stop_reason == "end_turn"
        assert (sees, turns.UNSEEN in session.losses) == (lane == "workspace_first", lane == "patch_first")


async def test_a_provider_without_memory_is_told_the_history_in_words_and_labelled(ground: Ground) -> None:
    config = SessionConfig(model="m-9", max_tokens=5, temperature=0.1, max_turns=3)
    async with ground.registry() as registry, await registry.get("words").create_session(config) as session:
        await session.run("one")
        said = msgspec.json.decode((await session.run("two")).text)
        assert not session.keeps_conversations
    assert said["task"].startswith("What was said before in this conversation, as a record:\nUser: one\nAssistant: ")
    assert said["task"].endswith("\n\ntwo")
    assert set(session.losses) == {
        "emulated: history, it is said in the user's words",
        *(f"dropped: {name}, the provider has no such setting" for name in
          ("model", "max_tokens", "temperature", "max_turns")),
    }  # fmt: skip


async def test_a_provider_that_takes_a_task_for_a_command_is_told_the_task_alone(ground: Ground) -> None:
    config = SessionConfig(system_prompt="touch made")
    async with ground.registry() as registry, await registry.get("shell").create_session(config) as session:
        assert (await session.run("echo 'touch made'")).stop_reason == "end_turn"
        assert "made" not in (await session.run("ls")).text
        assert (await session.run("test ! -e made")).stop_reason == "end_turn"
    assert [loss.partition(",")[0] for loss in session.losses] == ["dropped: system_prompt", "dropped: history"]


async def test_a_failed_turn_is_an_error_event_with_its_cause(ground: Ground) -> None:
    with ModelServer([{"fault": {"status": 401}, "times": None}]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            events = await told(as_messages(session, "hi"))
    done = events[-1]
    assert isinstance(done, MessageDoneEvent)
    assert done.stop_reason == "error"
    error = [event.error for event in events if isinstance(event, ErrorEvent)][-1]
    assert (error.code, error.error_type, error.recoverable) == ("authentication_failed", "authentication", False)
    assert (error.provider, error.cause.code) == ("anthropic", "backend_auth_failed")
    assert session.turns_completed == 0


async def test_a_host_that_dies_ends_the_turn_and_not_the_session(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        turn = await session.run("die")
        assert turn.error is not None
        with pytest.raises(BackplaneError) as raised:
            turn.check()
        assert raised.value is turn.error
        assert (turn.error.code, turn.error.facts.exit_code) == ("unknown", CODES["backend_crashed"].exit_code)
        assert str(turn.error) == f"unknown: {turn.error.cause.message}; {turn.error.cause.hint}"
        said = msgspec.json.decode((await session.run("go on")).text)
        again = msgspec.json.decode((await session.run("and on")).text)
    assert said["task"].startswith("First, a question about what went before: no result was recorded")
    assert 'Call c-1: charge {"usd":5}' in said["task"]
    assert again["task"].startswith("What was said before")
    assert 'Call c-1: charge {"usd":5} (no result was recorded)' in again["task"]


def test_every_code_has_one_of_the_seven_and_a_type() -> None:
    for code, facts in CODES.items():
        error = ProviderError("p", from_code(code, "x"))
        assert error.code == provider_code(code)
        assert isinstance(error.cause, BackplaneError)
        assert error.recoverable == facts.retryable
    told = ProviderError("p", from_code("backend_rate_limited", "the monthly limit is reached", hint="wait"))
    again = pickle.loads(pickle.dumps(told))
    assert (again.code, again.hint, again.provider, again.error_type) == (
        "rate_limited", "wait", "p", "usage_limit_reached"
    )  # fmt: skip
    assert ProviderError("p", from_code("backend_rate_limited", "Overloaded")).error_type == "model_overloaded"
    assert ProviderError("p", from_code("config_invalid", "no such quota exceeded")).error_type == "invalid_request"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fault", "kind", "recoverable"),
    [
        (Fault(status=529), "model_overloaded", True),
        (Fault(status=429, raw=b'{"error": {"type": "insufficient_quota", "message": "You exceeded your quota"}}'),
         "usage_limit_reached", False),
        (Fault(status=503), "network_error", True),
    ],
)  # fmt: skip
async def test_a_service_that_is_busy_or_used_up_has_its_type(
    fault: Fault, kind: str, recoverable: bool, backplane_home: Path, tmp_path: Path
) -> None:
    with ModelServer([Turn(times=None, fault=fault)]) as server:
        options = {"protocol": "anthropic", "base_url": server.base_url("anthropic"), "model": "m", "key_env": "KEY"}
        rows = {"one": BackendSettings(host="api", options=options, env={"KEY": "k"})}
        async with ProviderRegistry(Settings(backends=rows), backplane_home, dict(os.environ)) as providers:
            config = SessionConfig(root=str(tmp_path))
            async with await providers.get("one").create_session(config) as session:
                turn = await session.run("hello")
    assert turn.error is not None
    assert (turn.error.error_type, turn.error.recoverable) == (kind, recoverable)
    assert "address can be reached" not in (turn.error.cause.hint or "")


# Tools ----------------------------------------------------------------------------------------------------------------

CALLS = [
    Turn(calls=(Call(name="mcp__functions__price", input={"article": "pump"}),)),
    Turn(text="It costs 129."),
]


@pytest.mark.parametrize("kind", ["function", "definition"])
async def test_functions_are_tools_and_their_calls_are_in_the_history(ground: Ground, kind: str) -> None:
    schema = {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]}
    definition = ToolDefinition(
        name="price", description="A price.", parameters=schema, handler=lambda input: price(**input)
    )
    with ModelServer([*CALLS, Turn(text="As I said.")]) as server:
        async with ground.registry(server) as registry:
            config = SessionConfig(tools=[price if kind == "function" else definition])
            async with await registry.get().create_session(config) as session:
                events = await told(as_messages(session, "what is a pump?"))
                await session.run("again")
                history = session.get_history()
    call = next(event for event in events if isinstance(event, ToolUseEndEvent))
    assert (call.name, call.input) == ("price", {"article": "pump"})
    assert ToolResultEvent(id=call.id, output="129", is_error=False) in events
    assert [type(message).__name__ for message in history[:4]] == [
        "UserMessage", "AgentMessage", "ToolResultMessage", "AgentMessage"
    ]  # fmt: skip
    sent = server.requests[-1].body
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert sent["messages"][1]["content"][-1]["name"] == "mcp__functions__price"


async def test_a_tool_without_a_handler_is_run_by_the_caller(ground: Ground) -> None:
    definition = ToolDefinition(name="price", description="A price.", parameters={"type": "object"})
    with ModelServer(CALLS) as server:
        async with ground.registry(server) as registry:
            session = await registry.get().create_session(SessionConfig(tools=[definition]))
            async with session:
                first = await session.run("what is a pump?")
                assert (first.stop_reason, first.receipt) == ("tool_use", None)
                (call,) = first.message.tool_calls
                with pytest.raises(ConfigError, match="no call 'other' waits"):
                    await session.run(ToolResultMessage(tool_call_id="other", content="1"))
                second = await session.run(ToolResultMessage(tool_call_id=call.id, content="129"))
    assert (second.stop_reason, second.text) == ("end_turn", "It costs 129.")
    assert "129" in msgspec.json.encode(server.requests[-1].body).decode()
    assert len(ground.receipts()) == 1


async def test_a_policy_holds_for_a_programs_functions(ground: Ground) -> None:
    with ModelServer([*CALLS]) as server:
        async with ground.registry(server) as registry:
            config = SessionConfig(tools=[price], policy=PolicyProfile(disallowed_tools=("mcp__functions__price",)))
            async with await registry.get().create_session(config) as session:
                events = await told(as_messages(session, "what is a pump?"))
    (result,) = [event for event in events if isinstance(event, ToolResultEvent)]
    assert result.is_error
    assert "policy_denied" in result.output


async def test_tools_are_refused_where_a_provider_takes_none(ground: Ground) -> None:
    async with ground.registry() as registry:
        with pytest.raises(BackendError, match="takes no tools") as refused:
            await registry.get("words").create_session(SessionConfig(tools=[price]))
    assert refused.value.code == "capability_unsupported"


async def test_a_turns_policy_only_tightens(ground: Ground) -> None:
    async with ground.registry() as registry:
        config = SessionConfig(policy=PolicyProfile(allowed_tools=("read",)))
        async with await registry.get("words").create_session(config) as session:
            with pytest.raises(ConfigError, match="'bash' in allowed_tools"):
                await session.run("x", policy=PolicyProfile(allowed_tools=("bash",)))
            assert session.get_history() == ()
            await session.run("x", policy=PolicyProfile(deny_write=("**",)))


# The second interface -------------------------------------------------------------------------------------------------


async def test_a_stream_is_seen_under_the_names_of_the_unified_agent(ground: Ground) -> None:
    with ModelServer([Turn(reasoning="hm", text="4", usage=USED)]) as server:
        async with (
            ground.registry(server) as registry,
            await registry.get("anthropic").create_session(SessionConfig(initial_prompt="Hello!")) as session,
        ):
            message = prompt("What is 2+2?", files={"a.py": "x = 1"}, diff="-a", environment={"OS": "x"})
            events = [event async for event in as_unified(session, message)]
        sent = msgspec.json.encode(server.requests[0].body).decode()
    names = [event.name for event in events]
    assert names[0] == "SessionStarted"
    assert {"ThinkingDelta", "ThinkingComplete", "TextDelta", "TextComplete", "UsageUpdate"} <= set(names)
    assert events[-1] == UnifiedEvent("TurnComplete", {"stop_reason": "end_turn"})
    assert all(word in sent for word in ("Hello!", "File a.py", "x = 1", "Diff:", "OS=x", "What is 2+2?"))


ASKS = SessionConfig(policy=PolicyProfile(require_approval_for=("deploy",)), on_ask="stream")


@pytest.mark.parametrize(("approved", "said"), [(True, ["allow", ""]), (False, ["deny", "not today"])])
async def test_an_approval_waits_for_its_answer(ground: Ground, approved: bool, said: list[str]) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session(ASKS) as session:
        text = ""
        async for event in session.send_message("ask"):
            if isinstance(event, Approval):
                assert event.body["command"] == "deploy prod"
                id = event.body["id"]
                assert session.awaits_answer(id)
                with pytest.raises(ConfigError, match="modify"):
                    session.answer(id, Decision("modify"))
                session.answer(id, Decision("allow") if approved else Decision("deny", "not today"))
                assert not session.awaits_answer(id)
            if isinstance(event, AssistantMessage):
                text = event.text
        with pytest.raises(ConfigError, match="no approval"):
            session.answer(id, Decision("allow"))
    assert msgspec.json.decode(text) == said


async def test_an_interrupt_denies_an_approval_that_waits(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session(ASKS) as session:
        with anyio.fail_after(30):
            async for event in session.send_message("ask"):
                if isinstance(event, Approval):
                    id = event.body["id"]
                    await session.interrupt()
                    assert not session.awaits_answer(id)
        assert session.file.turns[-1].stop_reason == "user_interrupt"


async def test_an_approval_has_its_unified_name_while_it_waits(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session(ASKS) as session:
        async for event in as_unified(session, "ask"):
            if event.name == "ExecApprovalRequest":
                assert (event.data["command"], event.data["parsed_command"]) == ("deploy prod", ("deploy", "prod"))
                session.answer(event.data["request_id"], Decision("deny"))
                break
        else:
            raise AssertionError("no request was seen")


async def test_nothing_waits_for_an_answer_unless_the_session_says_so(ground: Ground) -> None:
    config = msgspec.structs.replace(ASKS, on_ask=None)
    async with ground.registry() as registry, await registry.get("words").create_session(config) as session:
        with anyio.fail_after(30):
            decision, _ = msgspec.json.decode((await session.run("ask")).check().text)
            names = [event.name async for event in as_unified(session, "ask")]
    assert decision == "deny"
    assert "ExecApprovalRequest" not in names


async def test_a_turns_own_function_answers_in_place_of_the_stream(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session(ASKS) as session:
        with anyio.fail_after(30):
            turn = await session.run("ask", on_ask=lambda asked: asked.deny("by the turn"))
            names = [event.name async for event in as_unified(session, "ask", on_ask=lambda asked: asked.allow())]
    assert msgspec.json.decode(turn.check().text) == ["deny", "by the turn"]
    assert "ExecApprovalRequest" not in names


NUMBERS_NOTHING = """
from backplane.host import Done, Host, main

async def work(run):
    for word in ("one", "two"):
        await run.tool_call("look", {"at": word})
        await run.tool_result("look", word)
    await run.message("seen")
    return Done()

main(Host(id="plain", capabilities={}), work)
"""


async def test_a_call_without_an_id_has_one_id_in_stream_and_history(ground: Ground) -> None:
    (ground.folder / "plain.py").write_text(NUMBERS_NOTHING)
    async with ground.registry() as registry:
        host = registry.register(ProcessBackend(id="plain", argv=(*PYTHON, str(ground.folder / "plain.py"))))
        async with await host.create_session() as session:
            events = await told(as_messages(session, "go"))
            history = session.get_history()
    calls = [event.id for event in events if isinstance(event, ToolUseEndEvent)]
    assert calls == [event.id for event in events if isinstance(event, ToolResultEvent)] == ["look-1", "look-2"]
    assert calls == [call.id for one in history if isinstance(one, AgentMessage) for call in one.tool_calls]
    assert calls == [one.tool_call_id for one in history if isinstance(one, ToolResultMessage)]


async def test_an_interrupt_stops_the_turn_and_not_the_session(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        with pytest.raises(ConfigError, match="no turn is under way"):
            session.send_input("more")
        events = []
        with anyio.fail_after(30):
            async for event in as_unified(session, "wait"):
                events.append(event)
                if event.name == "TextDelta":
                    with pytest.raises(ProtocolError, match="input was not announced"):
                        session.send_input("more")
                    await session.interrupt()
        assert events[-1] == UnifiedEvent("TurnComplete", {"stop_reason": "user_interrupt"})
        assert (await session.run("on")).stop_reason == "end_turn"


STOPPED = """
import anyio
from backplane.host import EXTENSIONS, Done, Host, main

async def work(run):
    stopped = anyio.Event()
    async def stop():
        stopped.set()
    run.on_interrupt = stop
    await run.delta("I wait")
    await stopped.wait()
    return Done(outcome="partial")

main(Host(id="stopped", capabilities={}, extensions=(*EXTENSIONS, "interrupt/1")), work)
"""


async def test_a_turn_that_its_host_stops_is_interrupted_and_no_error(ground: Ground) -> None:
    (ground.folder / "stopped.py").write_text(STOPPED)
    async with ground.registry() as registry:
        host = registry.register(ProcessBackend(id="stopped", argv=(*PYTHON, str(ground.folder / "stopped.py"))))
        async with await host.create_session() as session:
            with anyio.fail_after(30):
                async for event in session.send_message("wait"):
                    if isinstance(event, AssistantDelta):
                        await session.interrupt()
            assert session.file.turns[-1].stop_reason == "user_interrupt"
    assert [receipt.outcome for receipt in ground.receipts()] == ["partial"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Trio warns of the stream left here.
async def test_a_stream_that_is_left_early_is_ended_by_the_next_call(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        async for event in as_messages(session, "wait"):
            assert isinstance(event, TextDeltaEvent)
            break
        with anyio.fail_after(30):
            assert (await session.run("on")).stop_reason == "end_turn"
    assert [receipt.backplane["end"]["reason"] for receipt in ground.receipts()] == ["cancelled", "complete"]


async def test_two_tasks_are_not_inside_one_session_at_once(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        refused: list[str] = []

        async def refuse(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(ConfigError, match="a turn of this session is under way"):
                await call()
            refused.append("")

        provider = registry.get("keeps")
        calls = (lambda: session.run("b"), lambda: session.handover(provider))
        events, waits = list[StreamEvent](), anyio.Event()

        async def while_it_is_read() -> None:
            await waits.wait()
            for call in calls:
                await refuse(call)
            await session.interrupt()

        async with anyio.create_task_group() as tasks:
            for call in calls:  # While the turn begins.
                tasks.start_soon(refuse, call)
            tasks.start_soon(while_it_is_read)
            async for event in as_messages(session, "wait"):
                events.append(event)
                waits.set()
        assert len(refused) == 4
        assert isinstance(events[-1], MessageDoneEvent)
        assert events[-1].stop_reason == "user_interrupt"
        assert session.get_history()[0] == UserMessage(content="wait")
        assert len([one for one in session.get_history() if isinstance(one, UserMessage)]) == 1


async def test_a_stream_tells_of_its_own_turn_alone(ground: Ground) -> None:
    async with ground.registry() as registry, await registry.get("words").create_session() as session:
        first, second = as_messages(session, "wait"), as_messages(session, "two")
        await anext(first)
        assert isinstance(await anext(second), TextDeltaEvent)
        (end,) = await told(first)
        assert isinstance(end, MessageDoneEvent)
        assert end.stop_reason == "user_interrupt"
        assert isinstance((await told(second))[-1], MessageDoneEvent)
        assert await told(second) == []


async def test_a_session_is_closed_from_another_task_and_its_reader_gets_the_end(ground: Ground) -> None:
    async with ground.registry() as registry:
        session = await registry.get("words").create_session()
        ends: list[StreamEvent] = []
        async with anyio.create_task_group() as tasks:
            begun, closed = anyio.Event(), anyio.Event()

            async def read() -> None:
                async for event in as_messages(session, "wait"):
                    ends.append(event)
                    begun.set()
                    await closed.wait()

            tasks.start_soon(read)
            with anyio.fail_after(30):
                await begun.wait()
                await session.close()
                closed.set()
        assert isinstance(ends[-1], MessageDoneEvent)
        assert ends[-1].stop_reason == "user_interrupt"
    assert [receipt.backplane["end"]["reason"] for receipt in ground.receipts()] == ["cancelled"]


async def test_a_turn_that_is_cancelled_from_outside_leaves_nothing_running(ground: Ground) -> None:
    async with ground.registry() as registry:
        with anyio.CancelScope() as scope:
            async with await registry.get("words").create_session() as session:
                await session.run(
                    "wait", on_event=lambda event: scope.cancel() if isinstance(event, AssistantDelta) else None
                )
        assert scope.cancelled_caught
        async with await registry.get("words").resume(session.id) as again:
            assert again.file.turns[-1].stop_reason == "user_interrupt"
            assert (await again.run("on")).stop_reason == "end_turn"


async def test_a_session_tries_nothing_again_by_itself(ground: Ground) -> None:
    with ModelServer([{"fault": {"status": 401}, "times": None}]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            turn = await session.run("hi")
            first = len(server.requests)
            assert turn.stop_reason == "error"
            await session.run("hi again")
            assert len(server.requests) == 2 * first
    assert len(ground.receipts()) == 2


async def test_other_tools_count_from_the_next_turn_on(ground: Ground) -> None:
    definition = ToolDefinition(name="price", description="A price.", parameters={"type": "object"})
    with ModelServer([*CALLS, Turn(text="none")]) as server:
        async with ground.registry(server) as registry, await registry.get().create_session() as session:
            session.set_tools([definition])
            first = await session.run("what is a pump?")
            session.set_tools([])
            call = first.message.tool_calls[0]
            assert (await session.run(ToolResultMessage(tool_call_id=call.id, content="129"))).text == "It costs 129."
            await session.run("and now?")
        offered = [[tool["name"] for tool in request.body["tools"]] for request in server.requests]
    assert ["mcp__functions__price" in names for names in offered] == [True, True, False]


async def test_a_closed_session_says_so(ground: Ground) -> None:
    async with ground.registry() as registry:
        session = await registry.get("words").create_session()
        await session.close()
        await session.close()
        for call in (session.run("x"), session.save(), session.handover(registry.get("keeps"))):
            with pytest.raises(ConfigError, match="the session is closed"):
                await call


@pytest.fixture
def own_folders(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many sessions have a folder of their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(ground.folder))
    return lambda: len(list(ground.folder.glob("backplane-session-*")))


async def test_a_registry_closes_the_sessions_that_are_open_at_its_end(
    ground: Ground, own_folders: Callable[[], int]
) -> None:
    async with ground.registry() as registry:
        provider = registry.get("words")
        session = await provider.create_session()
        stream = as_messages(session, "wait")
        assert isinstance(await anext(stream), TextDeltaEvent)
        assert own_folders() == 1
    assert own_folders() == 0
    assert isinstance((await told(stream))[-1], MessageDoneEvent)
    (receipt,) = ground.receipts()
    assert receipt.backplane["end"]["reason"] == "cancelled"
    assert not store.is_open(ground.home, session.id)
    for call in (session.run("x"), provider.create_session(), provider.resume(session.id)):
        with pytest.raises(ConfigError, match="is closed"):
            await call


async def test_a_session_that_is_dropped_is_closed_by_the_collector(
    ground: Ground, own_folders: Callable[[], int]
) -> None:
    async with ground.registry() as registry:
        session = await registry.get("words").create_session()
        (await session.run("one")).check()
        id = session.id
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del session
            gc.collect()
        assert {one.category for one in warned} == {ResourceWarning}
        assert own_folders() == 0
        async with await registry.get("words").resume(id) as again:
            (await again.run("two")).check()


# The page -------------------------------------------------------------------------------------------------------------


def test_the_page_has_every_event_reason_and_type() -> None:
    page = (ROOT / "contracts" / "sessions.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    unified_names = {word.strip(" `") for row in rows for word in row[1:2]}
    assert set(get_args(views.UnifiedName)) <= unified_names
    assert len(get_args(views.UnifiedName)) == 14
    first = {word.strip(" `") for row in rows for word in row[0].split(",")}
    assert {kind.__struct_defaults__[-1] for kind in get_args(StreamEvent)} <= first
    assert len(get_args(StreamEvent)) == 7
    assert set(get_args(StopReason)) <= first
    assert set(get_args(ErrorType)) <= first
    assert (len(get_args(StopReason)), len(get_args(ErrorType))) == (6, 7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_tokens": "5"}, "SessionConfig.max_tokens: Expected `integer | null`"),
        ({"max_tokens": 0}, "SessionConfig.max_tokens: Expected `integer` >= 1"),
        ({"temperature": -1}, "SessionConfig.temperature: Expected `number` >= 0.0"),
        ({"system_prompt": 5}, "SessionConfig.system_prompt: Expected `string"),
        ({"root": 5}, "SessionConfig.root: Expected `string"),
        ({"tools": ["read"]}, "'read' is no function"),
        ({"tools": price}, "`tools` is a value of the type function"),
        ({"hooks": [price]}, "one of `hooks` is a value of the type function"),
        ({"on_ask": "deny"}, "`on_ask` is a value of the type str"),
    ],
)
def test_a_wrong_member_of_a_session_is_refused_when_it_is_given(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SessionConfig(**given)
    assert (refused.value.code, said in refused.value.message) == ("config_invalid", True)


def test_a_misspelt_member_is_refused_and_a_path_is_a_root(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="modle"):
        SessionConfig(modle="m")  # type: ignore[call-arg]
    assert SessionConfig(root=tmp_path).root == str(tmp_path)


@pytest.mark.parametrize("said", [5, b"x", UserMessage(content="x", images=("a",))])  # type: ignore[arg-type]
async def test_what_is_no_message_is_refused(said: Any, ground: Ground) -> None:
    async with ground.registry() as providers, await providers.get("words").create_session() as session:
        with pytest.raises(ConfigError, match="the message: Expected"):
            await session.run(said)
        assert session.get_history() == ()


async def test_a_fork_is_at_a_message_there_is(ground: Ground) -> None:
    async with ground.registry() as providers:
        async with await providers.get("words").create_session() as session:
            (await session.run("one")).check()
            id = session.id
        for at in (-1, 3, "1", True):
            with pytest.raises(ConfigError, match="to fork at") as refused:
                await providers.get("words").fork_session(id, at=at)  # type: ignore[arg-type]
            assert refused.value.hint == "a number from 0 to 2"


async def test_a_conversation_that_stays_with_its_folder_is_not_kept_in_a_copy(ground: Ground) -> None:
    words = HOST.replace('"session_fork": NATIVE', '"session_resume": restricted("in its folder")')
    (ground.folder / "host.py").write_text(words.replace("import NATIVE", "import NATIVE, restricted"))
    async with ground.registry() as providers:
        modes: tuple[tuple[Mode, bool], ...] = (("staged", False), ("pass_through", True))
        for mode, keeps in modes:
            config = SessionConfig(root=str(ground.folder), mode=mode)
            async with await providers.get("keeps").create_session(config) as session:
                assert session.keeps_conversations is keeps
                asked = json.loads((await session.run("one")).check().text)
                assert asked["abp"]["session"] == {"keep": True} if keeps else "session" not in asked["abp"]
                again = json.loads((await session.run("two")).check().text)
                assert ("one" in again["task"]) is not keeps
                assert bool(session.losses) is not keeps


@pytest.mark.parametrize(("code", "words"), [(None, "no exit code is known"), (0, "exit code 0"), (-9, "exit code -9")])
def test_a_command_says_how_it_ended_with_or_without_a_code(code: int | None, words: str) -> None:
    event = CommandExecuted(ts="2026-11-27T00:00:00Z", command="make", exit_code=code)
    unified = views._unified(None, event)  # type: ignore[arg-type]
    assert unified is not None
    assert (event.ending, unified[1]["message"]) == (words, f"make: {words}")
