"""Hooks: who is asked around a tool, what their answers do, and what the receipt says of it."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import backplane
from backplane import Decision, Hook, HookCall
from backplane.config import Settings, parse
from backplane.contract.capability import EMULATED, NATIVE, Requirement, Requirements
from backplane.contract.events import ApprovalAnswered, ToolResult
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder
from backplane.errors import BackplaneError, CapabilityError, ConfigError, PolicyError
from backplane.host import Done, Host, HostRun
from backplane.runtime import hooks
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend, from_command
from backplane.runtime.run import Run
from tests.runs import QUICK, backplane_of, check, ended, memory, order, plane, saying, script

pytestmark = pytest.mark.anyio


GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "guide" / "python.md").read_text("utf-8")
WRITE: dict[str, Any] = {"write": {"path": "b.txt", "content": "beta"}}
TOOL: dict[str, Any] = {"tool": {"name": "deploy", "input": {"to": "prod"}, "output": "done"}}


async def go(
    home: Path,
    work: WorkOrder,
    backend: Backend,
    *attached: Hook,
    on_ask: OnAsk | None = None,
    settings: Settings | None = None,
) -> tuple[Run, list[Any]]:
    """An order with hooks, to its end, with everything that holds of every run."""
    events: list[Any] = []
    async with plane(home) as control:
        if settings is not None:
            control.settings = msgspec.structs.replace(settings, limits=QUICK, isolation="off")
        async with control.start(work, backend, hooks=attached, on_ask=on_ask) as run:
            async for event in run:
                events.append(event)
    check(run, events)
    return run, events


def told(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = backplane_of(run)["hooks"]
    return found


def results(events: list[Any]) -> list[tuple[str, bool]]:
    return [(event.output, event.is_error) for event in events if isinstance(event, ToolResult)]


def program(folder: Path, body: str, name: str = "hook.py") -> tuple[str, ...]:
    """A hook of a few lines of Python; `call` is what it is told."""
    path = folder / name
    path.write_text("import json, os, sys, time\ncall = json.load(sys.stdin)\n" + body)
    return (sys.executable, "-I", "-S", str(path))


# Functions ------------------------------------------------------------------------------------------------------------


async def test_a_function_hook_is_told_of_the_tool_and_may_let_it_run(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[HookCall] = []

    def look(call: HookCall) -> None:
        seen.append(call)

    run, events = await go(backplane_home, order(root, WRITE), mock, Hook("pre_tool", look))
    assert run.end_error is None
    assert [(call.event, call.tool, call.input, call.root) for call in seen] == [
        ("pre_tool", "write_file", {"path": "b.txt", "content": "beta"}, str(root))
    ]
    assert seen[0].run == run.id
    assert (root / "b.txt").read_text() == "beta"
    assert told(run)["counts"] == {"look": {"allow": 1}}
    assert told(run)["attached"] == [{"name": "look", "event": "pre_tool", "kind": "function", "tools": ["*"]}]
    assert [event.body["by"] for event in events if isinstance(event, ApprovalAnswered)] == ["policy"]
    assert run.receipt.capabilities["hooks_pre_tool_use"] == "emulated"
    assert "hooks_post_tool_use" not in run.receipt.capabilities


async def test_an_async_function_hook_denies_and_the_agent_is_told_why(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async def never(call: HookCall) -> Decision:
        await anyio.lowlevel.checkpoint()
        return Decision(decision="deny", reason="not on a Sunday")

    run, events = await go(backplane_home, order(root, WRITE, {"say": "on"}), mock, Hook("pre_tool", never))
    assert run.end_error is None, "a denied tool ends nothing"
    assert not (root / "b.txt").exists()
    assert results(events) == [("policy_denied: hook 'never': not on a Sunday", True)]
    answer = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert (answer.body["by"], answer.body["decision"]) == ("hook", "deny")
    assert told(run)["decisions"] == [
        {"hook": "never", "ask": "ask-1", "tool": "write_file", "decision": "deny", "reason": "not on a Sunday"}
    ]


async def test_hooks_change_the_input_one_after_the_other(mock: Backend, backplane_home: Path, root: Path) -> None:
    def louder(call: HookCall) -> Decision:
        assert isinstance(call.input, dict)
        return Decision(decision="modify", input={**call.input, "content": call.input["content"] + "!"})

    async def twice(call: HookCall) -> Decision:
        return louder(call)

    run, events = await go(
        backplane_home, order(root, WRITE), mock, Hook("pre_tool", louder), Hook("pre_tool", twice, tools=("Write",))
    )
    assert run.end_error is None
    assert (root / "b.txt").read_text() == "beta!!", "the second name of a tool is as good as the first"
    answer = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert (answer.body["decision"], answer.body["by"]) == ("modify", "hook")
    assert told(run)["counts"] == {"louder": {"modify": 1}, "twice": {"modify": 1}}


async def test_a_hook_after_a_tool_changes_or_withholds_what_the_agent_sees(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    (root / "plain.txt").write_text("say nothing of 4711")
    (root / "secret.txt").write_text("private")

    def sieve(call: HookCall) -> Decision | None:
        assert call.is_error is False
        if "private" in str(call.output):
            return Decision(decision="deny", reason="private")
        return Decision(decision="modify", text=str(call.output).replace("4711", "…"))

    work = order(root, {"read": "plain.txt"}, {"read": "secret.txt"}, WRITE)
    run, events = await go(backplane_home, work, mock, Hook("post_tool", sieve, tools=("read_file",)))
    assert run.end_error is None
    assert results(events) == [
        ("say nothing of …", False),
        ("policy_denied: hook 'sieve': private", True),
        ("wrote 4 characters", False),
    ]
    assert told(run)["counts"] == {"sieve": {"deny": 1, "modify": 1}}
    assert run.receipt.capabilities["hooks_post_tool_use"] == "emulated"


async def _fails(call: HookCall) -> Decision:
    raise RuntimeError("a bug of the caller")


async def _no_input(call: HookCall) -> Decision:
    return Decision(decision="modify")


def _nested(levels: int) -> Any:
    value: Any = "the innermost"
    for _ in range(levels):
        value = [value]
    return value


async def _too_deep_for_a_host(call: HookCall) -> Decision:
    return Decision(decision="modify", input=_nested(128))


async def _hangs(call: HookCall) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_fails, "RuntimeError: a bug of the caller"),
        (_no_input, "gives no input"),
        (_too_deep_for_a_host, "nested deeper than 128 levels"),
        (_hangs, "no answer within 200 ms"),
    ],
)
@pytest.mark.parametrize("on_failure", ["deny", "allow"])
async def test_a_hook_that_fails_counts_as_was_said(
    function: Any, why: str, on_failure: Any, mock: Backend, backplane_home: Path, root: Path
) -> None:
    hook = Hook("pre_tool", function, name="it", on_failure=on_failure, timeout_ms=200)
    run, _ = await go(backplane_home, order(root, WRITE), mock, hook)
    assert run.end_error is None
    assert (root / "b.txt").exists() == (on_failure == "allow")
    assert told(run)["counts"] == {"it": {on_failure: 1, "failed": 1}}
    assert why in told(run)["decisions"][0]["reason"]


async def test_names_and_reasons_without_end_are_kept_in_part(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
for n in range(5):
    ask = {"t": "ask", "ref_id": run["id"], "id": str(n), "kind": "result", "name": str(n) + "y" * 100_000}
    put({**ask, "output": ""}); take()
put(event(run, type="tool_result", tool_name="z" * 100_000, output="", is_error=False))
put(final(run)); end()
"""

    def talks(call: HookCall) -> Decision:
        return Decision(decision="deny", reason="r" * 100_000)

    hook = Hook("post_tool", talks, name="it", on_failure="allow")
    run, _ = await go(backplane_home, order(root), script(tmp_path, body), hook)
    assert [(len(row["tool"]), len(row["reason"])) for row in told(run)["decisions"]] == [(257, 2000)] * 5
    assert told(run)["counts"] == {"it": {"deny": 5}}
    assert told(run)["missed"] == {"post_tool " + "z" * 257: 1}


# The policy first, and last -------------------------------------------------------------------------------------------


async def test_no_hook_is_asked_about_what_the_policy_denies(mock: Backend, backplane_home: Path, root: Path) -> None:
    def yes(call: HookCall) -> Decision:
        raise AssertionError("nobody is to be asked")

    work = order(root, WRITE, policy=PolicyProfile(disallowed_tools=("write*",)))
    run, events = await go(backplane_home, work, mock, Hook("pre_tool", yes))
    assert results(events)[0][1]
    assert told(run)["counts"] == {"yes": {}}


async def test_a_changed_input_is_decided_again_by_the_policy(mock: Backend, backplane_home: Path, root: Path) -> None:
    def elsewhere(call: HookCall) -> Decision:
        return Decision(decision="modify", input={"path": "../outside.txt", "content": "x"})

    run, events = await go(backplane_home, order(root, WRITE), mock, Hook("pre_tool", elsewhere))
    assert run.end_error is None
    assert not (root.parent / "outside.txt").exists()
    assert results(events)[0][1]
    answer = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert (answer.body["by"], answer.body["decision"]) == ("policy", "deny")


async def test_a_hook_that_allows_does_not_spare_the_question_to_a_person(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    def stage(call: HookCall) -> Decision:
        return Decision(decision="modify", input={"to": "stage"})

    seen: list[Any] = []

    async def on_ask(event: Any) -> Decision:
        seen.append(event.body["input"])
        return Decision(decision="allow" if len(seen) == 1 else "deny")

    work = order(root, TOOL, TOOL, policy=PolicyProfile(require_approval_for=("deploy",)))
    _, events = await go(backplane_home, work, mock, Hook("pre_tool", stage), on_ask=on_ask)
    assert seen == [{"to": "stage"}] * 2, "the person sees what would be done"
    assert [is_error for _, is_error in results(events)] == [False, True]
    decided = [(event.body["decision"], event.body["by"]) for event in events if isinstance(event, ApprovalAnswered)]
    assert decided == [("modify", "caller"), ("deny", "caller")]


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "written", "reason"),
    [
        ("pass", "beta", ""),
        ("print(json.dumps({'decision': 'allow', 'reason': 'fine'}))", "beta", "fine"),
        ("print(json.dumps({'decision': 'deny', 'reason': 'no ' + call['tool']}))", None, "no write_file"),
        ("print('not this', file=sys.stderr); sys.exit(2)", None, "not this"),
        (
            "new = {**call['input'], 'content':call['event']}; print(json.dumps({'decision': 'modify', 'input': new}))",
            "pre_tool",
            "",
        ),
        ("sys.exit(3)", None, "failed: exit code 3"),
        ("print('{')", None, "failed: its answer is not the JSON of a decision"),
        ("sys.stdout.write('x' * (2 << 20))", None, "failed: it answers more than"),
        ("os.kill(os.getpid(), 9)", None, "failed: signal 9"),
    ],
)
async def test_a_command_answers_by_json_or_by_its_exit_code(
    body: str, written: str | None, reason: str, mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    run, _ = await go(backplane_home, order(root, WRITE), mock, Hook("pre_tool", program(tmp_path, body)))
    assert run.end_error is None
    assert ((root / "b.txt").read_text() if (root / "b.txt").exists() else None) == written
    assert told(run)["decisions"][0].get("reason", "").startswith(reason)


async def test_a_command_that_hangs_is_killed_with_all_it_started(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0: os.setsid()
time.sleep(60)
"""
    began = time.monotonic()
    hook = Hook("pre_tool", program(tmp_path, body), timeout_ms=1500)
    run, _ = await go(backplane_home, order(root, WRITE), mock, hook)
    assert time.monotonic() - began < 30
    assert not (root / "b.txt").exists()
    assert "no answer within 1500 ms" in told(run)["decisions"][0]["reason"]


async def test_a_command_gets_nothing_of_our_environment_and_does_not_stand_in_the_workspace(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdef123456")
    body = "print(json.dumps({'decision': 'deny', 'reason': os.getcwd() + ' ' + ' '.join(sorted(os.environ))}))"
    work = order(root, WRITE, config=RuntimeConfig(env={"AGENT_KEY": "s3cr3t-value-of-it"}))
    run, _ = await go(backplane_home, work, mock, Hook("pre_tool", program(tmp_path, body)))
    cwd, *names = told(run)["decisions"][0]["reason"].split()
    assert cwd == "/"
    assert "PATH" in names
    assert not {"SOME_TOKEN", "AGENT_KEY", "BACKPLANE_HOME"} & set(names)


async def test_a_secret_in_a_hooks_words_stands_nowhere(mock: Backend, backplane_home: Path, root: Path) -> None:
    def careless(call: HookCall) -> Decision:
        return Decision(decision="deny", reason="because of s3cr3t-value-of-it")

    work = order(root, WRITE, config=RuntimeConfig(env={"AGENT_KEY": "s3cr3t-value-of-it"}))
    run, _ = await go(backplane_home, work, mock, Hook("pre_tool", careless))
    assert told(run)["decisions"][0]["reason"] == "because of [redacted]"
    assert b"s3cr3t" not in b"".join(run.receipt_chunks())


SECRET = "s3cr3t-value-of-it-and-more"


def clumsy(call: HookCall) -> Decision:
    raise ValueError("x" * 185 + SECRET)


@pytest.mark.parametrize(
    "says",
    [
        "sys.stderr.write({secret!r} + 'y' * 7980); sys.exit(2)",
        "sys.stderr.write({secret!r} + 'y' * 1990); sys.exit(3)",
        "print(json.dumps({{'decision': 'deny', 'reason': 'x' * 1985 + {secret!r}}}))",
        None,
    ],
)
async def test_no_part_of_a_secret_is_left_where_a_hooks_words_are_cut(
    says: str | None, mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    work = order(root, WRITE, config=RuntimeConfig(env={"AGENT_KEY": SECRET}))
    hook = program(tmp_path, says.format(secret=SECRET)) if says else clumsy
    run, _ = await go(backplane_home, work, mock, Hook("pre_tool", hook))
    said = told(run)["decisions"][0]["reason"]
    assert len(said) > 100
    parts = [SECRET[at : at + 8] for at in range(len(SECRET) - 7)]
    assert not [part for part in parts if part in said]


# Any host -------------------------------------------------------------------------------------------------------------


async def test_the_shell_host_has_hooks_by_the_configuration(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    hook = tmp_path / "check.sh"
    hook.write_text("#!/bin/sh\ngrep -q 'rm -rf' && { echo 'no rm -rf here' >&2; exit 2; }\nexit 0\n")
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    text = b"isolation = 'off'\n[[hooks]]\nevent = 'pre_tool'\ncommand = ['./check.sh']\ntools = ['bash']\n"
    settings = parse(text, source="it", folder=tmp_path)
    assert settings.hooks[0].command == (str(tmp_path / "check.sh"),)
    for task, outcome in (("echo fine", "complete"), ("rm -rf x", "failed")):
        async with backplane.start(task, backend="shell", root=root, settings=settings, home=backplane_home) as run:
            async for _ in run:
                pass
        assert run.receipt.outcome == outcome
        assert told(run)["attached"][0]["name"] == "check.sh"
    assert told(run)["decisions"][0]["reason"] == "no rm -rf here"


async def test_a_host_of_a_few_lines_on_the_kit_has_hooks_before_and_after(
    anyio_backend: str, backplane_home: Path, root: Path
) -> None:
    async def work(run: HostRun) -> Done:
        await run.tool_call("add", {"a": 1, "b": 2})
        verdict = await run.may("add", {"a": 1, "b": 2})
        numbers: Any = verdict.input
        output, is_error = await run.shown("add", numbers, sum(numbers.values()))
        await run.tool_result("add", output, is_error=is_error)
        return Done()

    def more(call: HookCall) -> Decision:
        return Decision(decision="modify", input={"a": 10, "b": 20})

    def words(call: HookCall) -> Decision:
        return Decision(decision="modify", text=f"it is {call.output}")

    backend = memory(work, Host(id="adder", capabilities={"streaming": NATIVE}))
    run, events = await go(backplane_home, order(root), backend, Hook("pre_tool", more), Hook("post_tool", words))
    assert run.end_error is None
    assert results(events) == [("it is 30", False)]
    assert run.receipt.capabilities == {
        "streaming": "native",
        "hooks_pre_tool_use": "emulated",
        "hooks_post_tool_use": "emulated",
    }


async def test_a_host_that_cannot_ask_is_refused_before_the_order_is_sent(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, "hello(); run = take(); put(final(run)); end()")

    async def on_ask(_: object) -> Decision:
        raise AssertionError

    run, _ = await go(backplane_home, order(root), backend, Hook("pre_tool", _hangs, name="guard"), on_ask=on_ask)
    assert ended(run) == ("refused", "capability_unsupported", "failed")
    assert "'guard'" in str(run.error)
    wanted = Requirements((Requirement("hooks_pre_tool_use", "emulated"),))
    run, _ = await go(backplane_home, order(root, requirements=wanted), backend)
    assert ended(run) == ("refused", "capability_unsupported", "failed")


async def test_an_order_that_requires_hooks_is_satisfied_by_a_host_that_asks(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    wanted = Requirements(
        (Requirement("hooks_pre_tool_use", "emulated"), Requirement("hooks_post_tool_use", "emulated"))
    )
    for _ in range(2):  # By the hello, then by the kept manifest.
        run, _ = await go(backplane_home, order(root, WRITE, requirements=wanted), mock)
        assert run.end_error is None
    strict = Requirements((Requirement("hooks_pre_tool_use", "native"),))
    run, _ = await go(backplane_home, order(root, WRITE, requirements=strict), mock)
    assert ended(run) == ("refused", "capability_unsupported", "failed")
    assert EMULATED.satisfies("emulated")


SILENT = """
hello(extensions=["ask/1"]); run = take()
put(event(run, type="tool_call", tool_name="read_file", input={}))
put(event(run, type="tool_result", tool_name="read_file", output="x", is_error=False))
put(event(run, type="tool_call", tool_name="bash", input={"command": "ls"}))
put(event(run, type="tool_result", tool_name="bash", output="x", is_error=False))
put(final(run)); end()
"""


@pytest.mark.parametrize("event", ["pre_tool", "post_tool"])
async def test_a_tool_that_was_used_past_its_hook_ends_the_run(
    event: Any, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    def ask(call: HookCall) -> None:
        raise AssertionError("nobody asked")

    hook = Hook(event, ask, tools=("bash",))
    run, _ = await go(backplane_home, order(root), script(tmp_path, SILENT), hook)
    assert ended(run)[1] == "policy_denied"
    assert "'bash' was used and hook 'ask' was not asked" in str(run.error)
    assert told(run)["missed"] == {f"{event} bash": 1}
    lenient = msgspec.structs.replace(hook, on_failure="allow")
    run, _ = await go(backplane_home, order(root), script(tmp_path, SILENT), lenient)
    assert run.end_error is None
    assert told(run)["missed"] == {f"{event} bash": 1}


async def test_a_patch_is_put_to_the_hooks_as_the_tool_that_makes_it(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put({"t": "ask", "ref_id": run["id"], "id": "p", "kind": "patch", "diff": "d", "files": ["a.py"]})
put(event(run, take()["decision"]), final(run)); end()
"""
    seen: list[Any] = []

    def rewrite(call: HookCall) -> Decision:
        seen.append((call.tool, call.input))
        return Decision(decision="modify", input={})

    hook = Hook("pre_tool", rewrite, tools=("apply_patch",))
    run, events = await go(backplane_home, order(root), script(tmp_path, body), hook)
    assert seen == [("apply_patch", {"diff": "d", "files": ("a.py",)})]
    assert [event.text for event in events if hasattr(event, "text")] == ["deny"], "a patch cannot be rewritten"
    assert told(run)["counts"] == {"rewrite": {"deny": 1, "failed": 1}}


async def test_the_hooks_of_an_outer_control_plane_hold_below_it(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    """Both planes run on this machine; the command of the hook never travels to the one below."""
    inner = tmp_path / "inner"
    env = {"BACKPLANE_HOME": str(inner), "BACKPLANE_ISOLATION": "off", "BACKPLANE_DEFAULT_BACKEND": "shell"}
    words = ["env", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-m", "backplane", "serve"]
    backend = from_command(tuple(words), cwd=Path.cwd(), limits=QUICK)
    body = "print(json.dumps({'decision': 'modify', 'input': {'command': 'echo changed > out.txt'}}))"
    secret = Hook("pre_tool", program(tmp_path, body, "of-the-outer.py"))

    def after(call: HookCall) -> Decision:
        return Decision(decision="modify", text="seen above")

    work = order(root, task="echo plain > out.txt")
    run, events = await go(backplane_home, work, backend, secret, Hook("post_tool", after))
    assert run.end_error is None
    assert (root / "out.txt").read_text() == "changed\n"
    assert results(events) == [("seen above", False)]
    kept = b"".join(path.read_bytes() for path in inner.rglob("*.jsonl"))
    assert b"out.txt" in kept
    assert b"of-the-outer.py" not in kept


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "kind", "fact"),
    [
        (lambda: Hook("before", _hangs), ConfigError, "'before' is none of 'post_tool'"),  # type: ignore[arg-type]
        (lambda: Hook("run_start", _hangs, tools=("bash",)), ConfigError, "names tools"),
        (lambda: Hook("run_end", None), ConfigError, "without a command"),
        (lambda: Hook("pre_tool", "./check.sh"), ConfigError, "depends on the current folder"),
        (lambda: Hook("pre_tool", ()), ConfigError, "names no program"),
        (lambda: Hook("pre_tool", _hangs, tools=()), ConfigError, "for no tools"),
        (lambda: Hook("pre_tool", _hangs, tools=("{",)), PolicyError, "{"),
        (lambda: Hook("pre_tool", _hangs, timeout_ms=0), ConfigError, "timeout_ms"),
        (lambda: Hook("pre_tool", _hangs, tools="bash"), ConfigError, "array"),  # type: ignore[arg-type]
        (lambda: Hook("pre_tool", _hangs, on_failure="denny"), ConfigError, "on_failure"),  # type: ignore[arg-type]
    ],
)
async def test_what_cannot_be_a_hook_is_said_when_it_is_made(made: Any, kind: type[BackplaneError], fact: str) -> None:
    with pytest.raises(kind, match=fact.replace("{", "[{]")):
        made()


def with_hooks(root: Path, rows: Any) -> WorkOrder:
    return order(root, WRITE, config=RuntimeConfig(vendor={"abp": {"hooks": rows}}))


@pytest.mark.parametrize(
    ("rows", "fact"),
    [
        ("check", "no list of objects"),
        ([{"event": "pre_tool"}], r"hooks\[0\]: Object missing required field `command`"),
        ([{"event": "pre_tool", "command": ["true"], "tool": "x"}], "unknown field `tool`"),
        ([{"event": "pre_tool", "command": ["./true"]}], "depends on the current folder"),
    ],
)
async def test_a_wrong_hook_in_an_order_is_named_by_its_place(rows: Any, fact: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=fact):
        hooks.taken(with_hooks(root, rows))


async def test_a_command_in_an_order_is_taken_at_our_own_door_only(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    command = list(program(tmp_path, "sys.exit(2)"))
    work = with_hooks(root, [{"event": "pre_tool", "command": command, "name": "own"}])
    settings = Settings(limits=QUICK, isolation="off")
    async with backplane.start(work, backend=mock, settings=settings, home=backplane_home) as run:
        async for _ in run:
            pass
    assert run.end_error is None
    assert told(run)["counts"] == {"own": {"deny": 1}}
    run, _ = await go(backplane_home, work, mock)
    assert ended(run) == ("refused", "config_invalid", "failed")
    assert "hooks[0]" in str(run.error)


async def test_hooks_that_lie_above_are_put_to_whoever_answers_and_refused_where_nobody_does(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    work = with_hooks(root, [{"event": "pre_tool", "tools": ["write_*"], "above": True}])
    run, _ = await go(backplane_home, work, mock, on_ask=saying(Decision(decision="deny", reason="no")))
    assert not (root / "b.txt").exists()
    assert told(run)["counts"] == {"above": {"deny": 1}}
    run, _ = await go(backplane_home, work, mock)
    assert ended(run) == ("refused", "capability_unsupported", "failed")
    assert isinstance(run.error, CapabilityError)


async def test_the_hook_of_the_guide_stops_a_push(mock: Backend, backplane_home: Path, root: Path) -> None:
    block = next(block for block in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.S | re.M) if "no_pushes" in block)
    names: dict[str, Any] = {}
    exec(compile(block, "python.md", "exec"), names)
    steps = [{"tool": {"name": "bash", "input": {"command": command}}} for command in ("git status", "git push")]
    _, events = await go(backplane_home, order(root, *steps), mock, names["hook"])
    assert [is_error for _, is_error in results(events)] == [False, True]


def test_what_a_host_is_told_of_hooks_names_no_program(root: Path) -> None:
    sent = hooks.below(order(root), [Hook("pre_tool", ("/bin/secret",), tools=("b", "a")), Hook("post_tool", _hangs)])
    assert sent.abp("hooks") == [
        {"event": "pre_tool", "tools": ["a", "b"], "above": True},
        {"event": "post_tool", "tools": ["*"], "above": True},
    ]
    assert "secret" not in json.dumps(msgspec.to_builtins(sent))
    assert hooks.below(order(root), []).abp("hooks") is None
    assert os.fspath(root) == sent.workspace.root
