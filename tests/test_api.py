"""The Python door: what a program sees of `backplane`, its arguments, its callbacks and its answers."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, TypedDict

import anyio
import anyio.lowlevel
import msgspec
import pytest

import backplane
from backplane.api import StartOptions, TaskRouter
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.events import CARRIED
from backplane.errors import CODES
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.receipts.store import Store
from backplane.runtime.hooks import Hook
from backplane.runtime.orders import answer_of, make_order, schema_of
from backplane.testing import Call, ModelServer, Turn
from tests.peers import WAIT_S
from tests.receipt_writer import receipt_of
from tests.runs import script

ASKING = """
hello(extensions=["ask/1"])
run = take()
put({"t": "ask", "ref_id": run["id"], "id": "a", "kind": "tool", "name": "deploy", "input": {"to": "prod"}})
given = take()
words = json.dumps({name: given.get(name) for name in ("decision", "reason", "input")})
put(event(run, words, type="assistant_message"))
put(final(run)); end()
"""


class Review(msgspec.Struct):
    ok: bool
    remarks: list[str] = []


class Nested(msgspec.Struct):
    reviews: list[Review]


class Tree(msgspec.Struct):
    name: str
    leaves: list["Tree"] = []  # noqa: UP037


@dataclasses.dataclass
class Point:
    x: int


class Named(TypedDict):
    name: str


def served_by(server: ModelServer) -> Settings:
    """Return settings with one backend, a model behind this server."""
    model: dict[str, Any] = {
        "protocol": "anthropic",
        "base_url": server.base_url("anthropic"),
        "model": "m",
        "key_env": "KEY",
    }
    model |= {"prices": {"input": 1, "output": 1}}
    return Settings(backends={"one": BackendSettings(host="api", options=model, env={"KEY": "k"})})


def price(of: str) -> int:
    """Look up a price."""
    return len(of)


def asking(tmp_path: Path) -> tuple[Any, backplane.WorkOrder]:
    policy = backplane.PolicyProfile(require_approval_for=("deploy",))
    return script(tmp_path, ASKING), backplane.WorkOrder("go", policy=policy)


def test_dir_lists_the_names_and_each_is_there() -> None:
    program = "import backplane; print({n for n in dir(backplane) if n[0] != '_'} == {*backplane.__all__})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    for name in backplane.__all__:
        assert getattr(backplane, name).__doc__, name


def test_a_run_shows_how_it_ended(backplane_home: Path, tmp_path: Path) -> None:
    run = backplane.run("echo hi", backend="shell", root=tmp_path, home=str(backplane_home))
    assert repr(run) == f"<Run {run.id} on 'shell': complete>"
    assert run.check() is run
    assert run.value is None


def test_a_notebook_shows_an_ended_run_as_a_table(backplane_home: Path, tmp_path: Path) -> None:
    ended = backplane.run("echo x > '<b>.txt'; exit 3", backend="shell", root=tmp_path)
    shown = str(ended._repr_html_())
    assert f">{ended.id}<" in shown
    assert ">failed<" in shown
    assert "exit code 3" in shown
    assert str(ended.patch) in shown


def test_a_receipt_before_the_end_says_what_to_do(backplane_home: Path, tmp_path: Path) -> None:
    async def main() -> backplane.Run:
        async with backplane.start("sleep 0.1", backend="shell", root=tmp_path, home=backplane_home) as run:
            assert repr(run).endswith("running>")
            with pytest.raises(
                RuntimeError, match=r"has not ended: iterate over it to its end, or `await run.wait\(\)`"
            ):
                _ = run.receipt
            assert (await run.wait()).outcome == "complete"
            assert (await run.wait()).outcome == "complete"
        return run

    assert anyio.run(main).is_sealed


def test_check_raises_why_a_run_failed(backplane_home: Path, tmp_path: Path) -> None:
    run = backplane.run("exit 3", backend="shell", root=tmp_path, home=backplane_home)
    with pytest.raises(backplane.BackplaneError) as caught:
        run.check()
    assert caught.value.code in CODES
    assert run.receipt.outcome == "failed"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lane": "patch"}, r"`lane` is 'patch' \(did you mean 'patch_first'"),
        ({"lane": "sideways"}, r"`lane` is 'sideways' \(it is 'patch_first' or 'workspace_first'"),
        ({"max_budget_usd": -1}, r"max_budget_usd"),
        (
            {"policy": "stict"},
            r"no policy 'stict': No such file or directory \(did you mean strict\? a shipped profile \(default, strict",
        ),
        ({"max_budget_usd": float("nan")}, r"`config.max_budget_usd` is no finite number \(leave it out"),
        ({"policy": {"deny_write": []}}, r"the policy is a value of the type dict \(give a PolicyProfile"),
        ({"output": object()}, r"no JSON Schema can be made of the output type"),
        ({"backend": "shel"}, r"backend_not_found"),
        ({"backend": 3}, r"the backend is a value of the type int \(give a name"),
        ({"settings": Settings(isolation="require")}, r"`isolation`: 'require' is none of"),  # type: ignore[arg-type]
        ({"policy": backplane.PolicyProfile(deny_read="x")}, r"the policy cannot be read: .*deny_read"),  # type: ignore[arg-type]
        ({"on_ask": "allow"}, r"`on_ask` is a value of the type str"),
        ({"order": 7}, r"the order is a value of the type int \(give the task as a str"),
        ({"order": backplane.WorkOrder("x", config={"a": 1})}, r"`config` of the order .* \(a RuntimeConfig"),  # type: ignore[arg-type]
        ({"order": "  "}, r"the task is empty"),
        ({"order": backplane.WorkOrder("x", workspace=backplane.WorkspaceSpec(mode="stage"))}, r"mean 'staged'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_with_its_choices(given: Any, words: str, backplane_home: Path) -> None:
    order = given.pop("order", "echo hi")
    with pytest.raises(backplane.BackplaneError) as caught:
        backplane.run(order, **{"backend": "shell", "home": backplane_home, **given})
    told = f"{caught.value.code}: {caught.value.message} ({caught.value.hint}"
    assert re.search(words, told), told


def test_a_list_denies_as_a_tuple_does(backplane_home: Path, tmp_path: Path) -> None:
    policy = backplane.PolicyProfile(disallowed_tools=["bash"])  # type: ignore[arg-type]
    run = backplane.run("true", backend="shell", root=tmp_path, home=backplane_home, policy=policy)
    with pytest.raises(backplane.BackplaneError, match="forbidden by 'bash'"):
        run.check()


@pytest.mark.parametrize("home", ["./a/../state", "~/state", Path("state")])
def test_the_state_folder_may_be_a_relative_path(home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = backplane.run("echo hi > made", backend="shell", root=tmp_path / "work", home=home).check()
    assert run.folder is not None
    assert run.folder.is_relative_to(tmp_path)
    assert (tmp_path / "state" / "runs").is_dir()
    assert run.patch is not None


@pytest.mark.anyio
@pytest.mark.parametrize("limits", [Limits(run_s=-1), Limits(idle_s=float("nan")), Limits(run_s="1")])  # type: ignore[arg-type]
async def test_wrong_limits_of_a_start_are_refused(limits: Any, backplane_home: Path, tmp_path: Path) -> None:
    async with backplane.ControlPlane(Settings(), backplane_home) as plane:
        order = backplane.WorkOrder("true", workspace=backplane.WorkspaceSpec(root=str(tmp_path)))
        with pytest.raises(backplane.ConfigError, match="limits"):
            async with plane.start(order, "shell", limits=limits):
                pass


def test_a_run_has_a_time_limit_of_its_own(backplane_home: Path, tmp_path: Path) -> None:
    ended = backplane.run("sleep 60", backend="shell", root=tmp_path, timeout=0.5)
    assert ended.end is not None
    assert (ended.end.reason, ended.end.code) == ("deadline", "backend_timeout")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"timeout": -1}, "run_s"),
        ({"timeout": "5"}, "timeout"),
        ({"hooks": Hook("pre_tool", ["true"])}, "hooks"),
        ({"tools": len}, "tools"),
        ({"on_event": 3}, "on_event"),
    ],
)
def test_an_argument_of_another_kind_is_our_error(given: Any, words: str, backplane_home: Path, tmp_path: Path) -> None:
    with pytest.raises(backplane.ConfigError, match=words) as caught:
        backplane.run("true", backend="shell", root=tmp_path, **given)
    assert caught.value.code == "config_invalid"


def test_a_decision_is_one_of_three_words() -> None:
    with pytest.raises(backplane.ConfigError, match=r"'yes'.*'allow', 'deny', 'modify'"):
        backplane.Decision("yes")  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_control_plane_and_the_router_take_the_same_options(backplane_home: Path, tmp_path: Path) -> None:
    options: Any = {"root": tmp_path, "lane": "workspace_first", "max_turns": 3, "timeout": 20, "tools": [price]}
    with ModelServer([Turn(text="Hello.", times=None)]) as server:
        async with backplane.ControlPlane(served_by(server), backplane_home) as plane:
            async with plane.start("hello", "one", **options) as run:
                await run.wait()
            routed = await TaskRouter(plane).run("hello", type="simple_query", **options)
    for one in (run, routed):
        assert one.order.lane == "workspace_first"
        assert one.order.config.max_turns == 3
        assert [row["name"] for row in one.order.abp("mcp_servers")] == ["functions"]
        assert one.check().text == "Hello."


def test_a_receipt_is_written_as_it_is_stored(backplane_home: Path, tmp_path: Path) -> None:
    ended = backplane.run("true", backend="shell", root=tmp_path)
    assert ended.receipt.to_json() == b"".join(ended.receipt_chunks())
    assert json.loads(msgspec.json.encode(ended.receipt)) == json.loads(ended.receipt.to_json())
    assert (
        msgspec.to_builtins(ended.receipt, builtin_types=(float,))["trace"]
        == json.loads(ended.receipt.to_json())["trace"]
    )
    assert ended.receipt is ended.receipt


def test_the_trace_of_a_receipt_keeps_the_kinds_of_events(backplane_home: Path, tmp_path: Path) -> None:
    seen: list[type] = []
    ended = backplane.run("echo a", backend="shell", root=tmp_path, on_event=lambda event: seen.append(type(event)))
    assert [type(event) for event in ended.receipt.trace] == seen
    assert backplane.OutputReported in seen


def test_no_question_of_an_agent_is_a_warning() -> None:
    for kind in set(CARRIED.values()):
        assert not issubclass(kind, backplane.Warned)
        assert getattr(backplane, kind.__name__) is kind


def test_an_error_has_the_next_step_of_a_program_in_its_notes(backplane_home: Path) -> None:
    with pytest.raises(backplane.BackendError) as caught:
        backplane.run("true", backend="nope")
    assert any("backend='NAME'" in note for note in caught.value.__notes__)
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == caught.value.__notes__


def test_what_has_no_effect_in_an_order_is_logged(
    backplane_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = backplane.PolicyProfile(disallowed_tools=("Bsah",))
    hook = Hook("pre_tool", ["true"], tools=("Wriet",))
    with caplog.at_level(logging.WARNING, "backplane"):
        backplane.run("true", backend="shell", root=tmp_path, policy=rules, hooks=[hook])
    assert "Bsah (bash?)" in caplog.text
    assert "Wriet" in caplog.text


def test_a_selection_without_files_is_warned_of(backplane_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    space = backplane.WorkspaceSpec(root=str(tmp_path), include=("nosuch/**",))
    ended = backplane.run(backplane.WorkOrder("true", workspace=space), backend="shell")
    told = [event.ext for event in ended.receipt.trace if isinstance(event, backplane.Warned)]
    assert {"empty_workspace": ["nosuch/**"]} in told
    kept = backplane.WorkOrder("true", workspace=msgspec.structs.replace(space, include=("a",)))
    assert not [
        event for event in backplane.run(kept, backend="shell").receipt.trace if type(event) is backplane.Warned
    ]


@pytest.mark.parametrize(("given", "word"), [({"output": Review}, "`output`"), ({"tools": [price]}, "`tools`")])
def test_a_backend_that_cannot_names_the_argument(given: Any, word: str, backplane_home: Path, tmp_path: Path) -> None:
    ended = backplane.run("true", backend="shell", root=tmp_path, **given)
    assert ended.error is not None
    assert ended.error.code == "capability_unsupported"
    assert word in ended.error.message


@pytest.mark.anyio
async def test_a_turn_takes_the_options_of_a_run(backplane_home: Path, tmp_path: Path) -> None:
    seen: list[backplane.AgentEvent] = []
    call = Call(name="mcp__functions__price", input={"of": "pump"})
    with ModelServer([Turn(calls=(call,)), Turn(text="Four."), Turn(text="No tool.")]) as server:
        async with (
            ProviderRegistry(served_by(server), backplane_home) as providers,
            providers.get("one").create_session(SessionConfig(root=str(tmp_path))) as session,
        ):
            limits: Any = {"max_turns": 7, "max_budget_usd": 2.0, "timeout": 20, "priority": "high"}
            first = await session.run("How much?", tools=[price], on_event=seen.append, **limits)
            second = await session.run("And now?")
            with pytest.raises(TypeError, match="max_budget"):
                await session.run("x", max_budget=1)  # type: ignore[call-overload]
    assert (first.check().text, second.check().text) == ("Four.", "No tool.")
    assert first.receipt is not None
    assert list(map(type, seen)) == list(map(type, first.receipt.trace))
    assert [event.output for event in seen if isinstance(event, backplane.ToolResult)] == ["4"]


@pytest.mark.anyio
async def test_the_router_hands_events_on_and_every_door_takes_its_wishes(backplane_home: Path, tmp_path: Path) -> None:
    seen: list[backplane.AgentEvent] = []
    with ModelServer([Turn(text="Hello.", times=None)]) as server:
        settings = served_by(server)
        async with backplane.ControlPlane(settings, backplane_home) as plane:
            routed = await TaskRouter(plane).run("hello", root=tmp_path, on_event=seen.append, preference="speed")
            async with plane.start("hello", "one", root=tmp_path, type="simple_query") as started:
                await started.wait()
        async with backplane.start("hello", root=tmp_path, preference="speed", settings=settings) as chosen:
            await chosen.wait()
    assert list(map(type, seen)) == list(map(type, routed.receipt.trace))
    assert [run.order.abp("route") for run in (routed, started, chosen)] == [
        {"preference": "speed"}, {"type": "simple_query"}, {"preference": "speed"},
    ]  # fmt: skip


@pytest.mark.anyio
async def test_an_async_strategy_is_refused_before_it_is_called(backplane_home: Path) -> None:
    async def first(task: object, options: object) -> int:
        raise AssertionError

    async with backplane.ControlPlane(home=backplane_home) as plane:
        with pytest.raises(backplane.ConfigError, match="first is an async function"):
            TaskRouter(plane, first)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_session_is_begun_by_async_with(backplane_home: Path, tmp_path: Path) -> None:
    async with ProviderRegistry() as providers:
        async with providers.get("shell").create_session(SessionConfig(root=str(tmp_path))) as session:
            assert (await session.run("true")).stop_reason == "end_turn"
        with pytest.raises(backplane.ConfigError, match="closed"):
            await session.run("true")


@pytest.mark.anyio
async def test_a_session_refuses_a_missing_folder_and_half_a_character(backplane_home: Path) -> None:
    async with ProviderRegistry() as providers:
        provider = providers.get("shell")
        with pytest.raises(backplane.ConfigError, match="/no/such"):
            await provider.create_session(SessionConfig(root="/no/such"))
        async with await provider.create_session() as session:
            with pytest.raises(backplane.ConfigError, match="surrogates"):
                await session.run("echo \ud800")


@pytest.mark.anyio
async def test_a_run_id_that_is_no_uuid_is_refused_before_anything_starts(backplane_home: Path, tmp_path: Path) -> None:
    async with backplane.ControlPlane(home=backplane_home) as plane:
        with pytest.raises(backplane.ConfigError, match="run_id is 'nonsense'") as caught:
            async with plane.start(backplane.WorkOrder("true"), "shell", run_id="nonsense"):
                raise AssertionError
    assert caught.value.code == "config_invalid"


def test_a_child_has_the_users_name_and_shell(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("USER", "LOGNAME", "SHELL"):
        monkeypatch.setenv(name, f"the-{name}")
    ended = backplane.run("echo $USER $LOGNAME $SHELL > names", backend="shell", root=tmp_path)
    assert ended.patch is not None
    assert "\n+the-USER the-LOGNAME the-SHELL\n" in ended.patch.read_text()


def test_a_misspelt_argument_is_pythons_own_error(backplane_home: Path) -> None:
    with pytest.raises(TypeError, match="max_budget"):
        backplane.run("echo hi", max_budget=1, home=backplane_home)  # type: ignore[call-overload]


def test_the_configured_policy_holds_for_an_order_that_brings_none(backplane_home: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"disallowed_tools": ["bash"]}')
    settings = Settings(default_backend="shell", policy=str(tmp_path / "policy.json"))
    run = backplane.run("echo hi", root=tmp_path, settings=settings, home=backplane_home)
    assert run.receipt.outcome == "failed"
    with pytest.raises(backplane.BackplaneError, match="forbidden by 'bash'"):
        run.check()
    own = backplane.PolicyProfile(deny_write=("*.key",))
    assert backplane.run("echo hi", root=tmp_path, settings=settings, policy=own, home=backplane_home).check()


@pytest.mark.parametrize("kind", ["async", "plain", "object"])
def test_an_approval_is_answered_by_a_function_of_any_kind(backplane_home: Path, tmp_path: Path, kind: str) -> None:
    backend, order = asking(tmp_path)
    threads: list[threading.Thread] = []

    def plain(approval: backplane.Approval) -> backplane.Decision:
        threads.append(threading.current_thread())
        assert (approval.kind, approval.tool, approval.input) == ("tool", "deploy", {"to": "prod"})
        return approval.modify({"to": "test"}, "not there")

    async def waiting(approval: backplane.Approval) -> backplane.Decision:
        return plain(approval)

    class Asked:
        async def __call__(self, approval: backplane.Approval) -> backplane.Decision:
            return plain(approval)

    function: Any = {"async": waiting, "plain": plain, "object": Asked()}[kind]
    run = backplane.run(order, backend=backend, root=tmp_path, home=backplane_home, on_ask=function)
    assert json.loads(run.text) == {"decision": "modify", "reason": "not there", "input": {"to": "test"}}
    assert (threads[0] is threading.main_thread()) is (kind != "plain")


@pytest.mark.parametrize("role", ["on_ask", "hook"])
def test_a_function_that_raises_denies_and_its_line_is_logged(
    backplane_home: Path, tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend, order = asking(tmp_path)

    def broken(_: Any) -> backplane.Decision:
        raise KeyError("the line to find")

    given: Any = {"on_ask": broken} if role == "on_ask" else {"hooks": [backplane.Hook("pre_tool", broken)]}
    with caplog.at_level(logging.ERROR, "backplane"):
        run = backplane.run(order, backend=backend, root=tmp_path, home=backplane_home, **given)
    answer = json.loads(run.text)
    assert answer["decision"] == "deny"
    assert "KeyError: 'the line to find'" in answer["reason"]
    assert 'raise KeyError("the line to find")' in caplog.text
    assert "broken raised KeyError" in caplog.text


INSIDE = """
import asyncio, backplane
async def main():
    def tell(event):
        print(type(event).__name__, flush=True)
    backplane.run("echo begun; sleep 600", backend="shell", root=".", on_event=tell)
asyncio.new_event_loop().run_until_complete(main())  # As a notebook does: `asyncio.run` would catch the first Ctrl-C.
"""


def test_ctrl_c_ends_a_run_inside_a_running_loop(backplane_home: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", INSIDE]
    with subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        while "ToolCall" not in program.stdout.readline():
            pass
        program.send_signal(signal.SIGINT)
        assert program.wait(WAIT_S) == -signal.SIGINT
    with Store.open(backplane_home, readonly=True) as store:
        (row,) = store.rows()
        assert store.load(row.run_id).backplane["end"]["reason"] == "cancelled"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_events_go_to_a_function_of_any_kind(backplane_home: Path, tmp_path: Path, kind: str) -> None:
    seen: list[backplane.AgentEvent] = []

    async def waiting(event: backplane.AgentEvent) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(event)

    on_event = waiting if kind == "async" else seen.append
    run = backplane.run("echo hi", backend="shell", root=tmp_path, home=backplane_home, on_event=on_event)
    assert len(seen) == len(run.receipt.trace)


def test_a_run_in_a_running_loop_has_a_thread_of_its_own(backplane_home: Path, tmp_path: Path) -> None:
    async def cell() -> backplane.Run:
        return backplane.run(
            "echo hi > made.txt", backend="shell", root=tmp_path, home=backplane_home, lane="workspace_first"
        )

    assert asyncio.run(cell()).check().receipt.outcome == "complete"
    assert (tmp_path / "made.txt").read_text() == "hi\n"


def test_a_control_plane_needs_no_arguments(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_HOME", str(backplane_home))
    monkeypatch.chdir(tmp_path)

    async def main() -> list[str]:
        async with backplane.ControlPlane() as plane:
            assert plane.home == backplane_home
            async with plane.start("echo one", "shell") as run, plane.start("echo two", "shell") as other:
                return [(await run.wait()).outcome, (await other.wait()).outcome]

    assert anyio.run(main) == ["complete", "complete"]


@pytest.mark.parametrize(
    ("output", "given", "value"),
    [
        (Review, {"ok": True, "remarks": ["a"]}, Review(True, ["a"])),
        (Nested, {"reviews": [{"ok": False}]}, Nested([Review(False)])),
        (Tree, {"name": "a", "leaves": [{"name": "b"}]}, Tree("a", [Tree("b")])),
        (Point, {"x": 1}, Point(1)),
        (Named, {"name": "n"}, {"name": "n"}),
        ({"type": "object"}, {"any": 1}, {"any": 1}),
        (list[int], [1, 2], [1, 2]),
    ],
)
def test_an_output_type_is_a_schema_and_its_value(output: Any, given: Any, value: Any) -> None:
    import jsonschema

    schema = schema_of(output)
    assert isinstance(schema, dict)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(given, schema)
    assert "$ref" not in schema
    receipt = receipt_of([], usage_raw={"structured_output": given})
    assert answer_of(receipt, output) == value
    order = make_order("x", output=output)
    assert order.abp("output_schema") == schema


def test_a_structured_answer_is_the_type_that_was_asked_for(backplane_home: Path, tmp_path: Path) -> None:
    with ModelServer([{"text": '{"ok": true, "remarks": ["fine"]}'}]) as server:
        options = {"protocol": "openai_compatible", "base_url": server.base_url("openai_compatible"), "model": "m"}
        settings = Settings(backends={"mine": BackendSettings(host="api", options=options)})
        run = backplane.run(
            "Review.", backend="mine", root=tmp_path, output=Review, settings=settings, home=backplane_home
        )
    assert run.check().value == Review(True, ["fine"])


@pytest.mark.parametrize(
    "name",
    ["BackendSettings", "Decision", "Hook", "HookCall", "HookSettings", "Limits", "PolicyProfile", "Receipt",
     "RoutingSettings", "RuntimeConfig", "Settings", "ToolCall", "ToolResult", "WorkOrder", "WorkspaceSpec"],
)  # fmt: skip
def test_the_docstring_of_a_struct_lists_its_members(name: str) -> None:
    kind = getattr(backplane, name)
    listed = re.findall(r"^    (\w+): ", (inspect.getdoc(kind) or "").partition("Attributes:\n")[2], re.M)
    assert set(listed) >= set(kind.__struct_fields__) - {"ts", "ext"}


def test_the_docstrings_of_run_and_start_list_their_arguments() -> None:
    for name in (*StartOptions.__annotations__, "output"):
        for function in (backplane.run, backplane.start):
            assert re.search(rf"\b{name}\b", function.__doc__ or ""), (function, name)
