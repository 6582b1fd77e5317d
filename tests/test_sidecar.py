"""The kit under hosts of a few lines: runs, ends, asks, cancels and peers that go away, on both event loops."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane import host
from backplane.contract.capability import NATIVE
from backplane.contract.events import CommandExecuted, read_event
from backplane.contract.receipt import Usage, read_receipt
from backplane.errors import BackendError
from backplane.host import Done, Host, HostRun
from tests.peers import OURS, PLAIN, PYTHON, WAIT_S, Child, run, talk

HOST = Host(id="tiny", version="1.2", capabilities={"streaming": NATIVE})

pytestmark = pytest.mark.anyio


async def hello_world(host_run: HostRun) -> Done:
    await host_run.message(host_run.order.task)
    return Done(usage=Usage(input_tokens=3), usage_raw={"vendor": 1})


async def forever(host_run: HostRun) -> Done:
    await anyio.sleep_forever()
    raise AssertionError


def types(messages: list[Any]) -> list[str]:
    return [message["event"]["type"] if message["t"] == "event" else message["t"] for message in messages]


# Runs and ends --------------------------------------------------------------------------------------------------------


async def test_a_host_greets_first_and_unasked() -> None:
    async with talk(HOST, hello_world, greeted=False) as line:
        assert await line.read() == {
            "t": "hello",
            "contract_version": "abp/v0.1",
            "backend": {"id": "tiny", "backend_version": "1.2", "adapter_version": None},
            "capabilities": {"streaming": "native"},
            "mode": "mapped",
            "extensions": ["cancel/1", "ping/1", "ask/1"],
            "heeds": ["model", "max_turns", "max_budget_usd", "context"],
        }


async def test_a_run_is_its_events_and_one_final() -> None:
    async with talk(HOST, hello_world) as line:
        line.send(run("r1", "do it"), run("r2", "again"))
        told = [*await line.until("final"), *await line.until("final")]
    for ref_id, task in (("r1", "do it"), ("r2", "again")):
        mine = [message for message in told if message["ref_id"] == ref_id]
        assert types(mine) == ["run_started", "assistant_message", "run_completed", "final"]
        assert mine[1]["event"]["text"] == task


async def test_a_final_has_a_receipt_that_a_closed_peer_can_read() -> None:
    for run_id in ("6f1c1f0e-5d0a-4c6e-9b8e-0d3a2f4b5c6d", "seven"):
        message = run(run_id)
        async with talk(HOST, hello_world) as line:
            line.send(message)
            receipt = read_receipt((await line.until("final"))[-1]["receipt"])
        assert (receipt.meta.run_id == run_id) == (run_id != "seven")
        assert receipt.meta.work_order_id == message["work_order"]["id"]
        assert receipt.meta.started_at <= receipt.meta.finished_at
        assert list(receipt.trace) == []
        assert receipt.usage.input_tokens == 3
        assert receipt.usage_raw == {"vendor": 1}


async def test_every_event_a_host_can_say_is_one_of_the_contract() -> None:
    async def work(host_run: HostRun) -> Done:
        await host_run.delta("d")
        await host_run.message("m")
        await host_run.tool_call("bash", {"a": 1}, "c1", "p")
        await host_run.tool_result("bash", None, is_error=True, id="c1")
        await host_run.file_changed("a.txt", "written")
        await host_run.command_executed("ls", None, "é" * 10_000)
        await host_run.warn("w")
        await host_run.error("e", "internal")
        await host_run.error("e")
        await host_run.carry("turn", {"stop_reason": "end"}, "the turn is over")
        return Done()

    async with talk(HOST, work) as line:
        line.send(run())
        told = await line.until("final")
    events = [read_event(message["event"], now=lambda: "2026-01-15T12:00:00Z") for message in told[:-1]]
    assert [msgspec.to_builtins(event) for event in events] == [message["event"] for message in told[:-1]]
    assert len({type(event) for event in events}) == 10
    command = next(event for event in events if isinstance(event, CommandExecuted))
    assert command.output_preview == "é" * (host.PREVIEW_BYTES_MAX // 2)


def _raise(error: BaseException) -> None:
    raise error


CANNOT_BE_SAID = object()


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        (lambda r: _raise(BackendError("backend_rate_limited", "slow down")), "backend_rate_limited", "slow down"),
        (lambda r: _raise(KeyError("x")), "internal", "KeyError"),
        (lambda r: _raise(ValueError("x" * 20_000_000)), "internal", "xxx"),
        (lambda r: r.message("\ud800"), "internal", "Unicode"),
        (lambda r: Done(usage_raw=CANNOT_BE_SAID), "internal", "object"),
        (lambda r: Done(usage_raw={"x": "x" * 17_000_000}), "protocol_invalid_envelope", "line_bytes_max"),
        (lambda r: Done(outcome="splendid"), "internal", "splendid"),  # type: ignore[arg-type]
        (lambda r: r.message("x" * 17_000_000), "protocol_invalid_envelope", "line_bytes_max"),
        (lambda r: None, "internal", ""),
    ],
)
async def test_whatever_a_hosts_own_code_does_each_run_has_one_end(
    work: Callable[[HostRun], Any], code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wrapped(host_run: HostRun) -> Done:
        if host_run.id == "good":
            return Done()
        result: Any = work(host_run)
        return await result if hasattr(result, "__await__") else result  # type: ignore[no-any-return]

    async with talk(HOST, wrapped) as line:
        line.send(run("bad"))
        ends = [message for message in await line.until("fatal") if message["t"] != "event"]
        line.send(run("good"))
        after = await line.until("final")
    assert len(ends) == 1
    assert ends[0]["error_code"] == code
    assert words in ends[0]["error"]
    assert len(ends[0]["error"]) < 20_000
    assert {message["ref_id"] for message in after} == {"good"}


@pytest.mark.parametrize(
    ("message", "hint", "told"),
    [
        ("no key", "export KEY=…", "no key; export KEY=…"),
        ("x" * 9000, "try another", "x" * 8192 + "; try another"),
    ],
)
async def test_the_next_step_reaches_whoever_gave_the_order(message: str, hint: str | None, told: str) -> None:
    async def work(host_run: HostRun) -> Done:
        raise BackendError("backend_auth_failed", message, hint=hint)

    async with talk(HOST, work) as line:
        line.send(run())
        assert (await line.until("fatal"))[-1]["error"] == told


async def test_a_run_that_cannot_be_taken_up_is_one_fatal() -> None:
    async with talk(HOST, hello_world) as line:
        line.send(run("r1", policy={"deny_read": ["{" * 40]}))
        told = await line.until("fatal")
        assert types(told) == ["fatal"]
        assert (told[0]["ref_id"], told[0]["error_code"]) == ("r1", "policy_invalid")
        line.send(run("r1"))
        assert types(await line.until("final"))[-1] == "final"


async def test_a_bad_line_is_one_error_and_open_runs_go_on() -> None:
    go_on = anyio.Event()

    async def work(host_run: HostRun) -> Done:
        await go_on.wait()
        return Done()

    async with talk(HOST, work) as line:
        line.send(run(), b"{not json\n", b'{"t":"run","id":"r2"}\n', run(), {"t": "hello"}, b"hello?\n", {"t": "news"})
        told = [message for _ in range(5) for message in (await line.until("fatal"))]
        fatals = [message for message in told if message["t"] == "fatal"]
        assert [fatal["ref_id"] for fatal in fatals] == [None, "r2", None, None, None]
        assert [fatal["error_code"] for fatal in fatals] == [
            "protocol_invalid_envelope",
            "contract_schema_violation",
            "protocol_unexpected_message",
            "protocol_unexpected_message",
            "protocol_invalid_envelope",
        ]
        go_on.set()
        assert types(await line.until("final"))[-2:] == ["run_completed", "final"]


async def test_many_events_from_many_tasks_come_whole_and_in_order_to_a_slow_reader() -> None:
    async def say(host_run: HostRun, number: int) -> None:
        for count in range(200):
            await host_run.delta(f"{number}:{count}:" + "x" * 1_000)

    async def work(host_run: HostRun) -> Done:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(say, host_run, number)
        return Done()

    async with talk(HOST, work) as line:
        line.send(run())
        await anyio.wait_readable(line.stdout)
        await anyio.wait_all_tasks_blocked()
        told = await line.until("final")
    seen: dict[str, list[int]] = {}
    for message in told:
        if message["t"] == "event" and message["event"]["type"] == "assistant_delta":
            number, count, _ = message["event"]["text"].split(":")
            seen.setdefault(number, []).append(int(count))
    assert seen == {str(number): list(range(200)) for number in range(8)}


# Cancel and ping ------------------------------------------------------------------------------------------------------


async def test_a_cancelled_run_ends_with_a_partial_final() -> None:
    ended: list[Any] = []

    async def work(host_run: HostRun) -> Done:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append((host_run.cancelled_because, host_run.grace_s))
        raise AssertionError

    async with talk(HOST, work) as line:
        line.send(run())
        await line.until("event")
        line.send(
            {"t": "cancel", "ref_id": "r1", "reason": "enough", "grace_ms": 1_300}, {"t": "cancel", "ref_id": "r1"}
        )
        final = (await line.until("final"))[-1]
        line.send({"t": "cancel", "ref_id": "r1"}, {"t": "cancel", "ref_id": "nobody", "reason": None}, run("r2"))
        line.send({"t": "cancel", "ref_id": "r2", "grace_ms": -5})
        assert (await line.until("final"))[-1]["ref_id"] == "r2"
    assert final["receipt"]["outcome"] == "partial"
    assert final["receipt"]["usage_raw"] == {"cancelled": "enough"}
    assert ended == [("enough", pytest.approx(1.0)), ("cancelled by the control plane", pytest.approx(0.3))]


async def test_a_host_may_end_a_cancelled_run_in_its_own_words() -> None:
    async def work(host_run: HostRun) -> Done:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await host_run.message("I had just begun")
            raise
        raise AssertionError

    async with talk(HOST, work) as line:
        line.send(run())
        await line.until("event")
        line.send({"t": "cancel", "ref_id": "r1"})
        assert types(await line.until("final")) == ["assistant_message", "final"]


async def test_an_error_while_cleaning_up_does_not_hide_the_cancel() -> None:
    async def work(host_run: HostRun) -> Done:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("the agent is gone")

    async with talk(HOST, work) as line:
        line.send(run())
        await line.until("event")
        line.send({"t": "cancel", "ref_id": "r1"})
        assert types(await line.until("final")) == ["final"]


@pytest.mark.parametrize("how", ["cancel", "input", "interrupt"])
async def test_a_callback_that_raises_ends_its_own_run_and_no_other(how: str) -> None:
    async def work(host_run: HostRun) -> Done:
        async def callback(*_words: str) -> None:
            raise RuntimeError("a bug of the host")

        host_run.on_cancel = host_run.on_input = host_run.on_interrupt = callback
        await anyio.sleep_forever()
        raise AssertionError

    async with talk(msgspec.structs.replace(HOST, extensions=("many/1",)), work) as line:
        line.send(run("bad"), run("good"))
        await line.until("event")
        await line.until("event")
        line.send({"t": how, "ref_id": "bad", **({"text": "more"} if how == "input" else {})})
        end = await line.read()
        assert (end["t"], end["ref_id"]) == ("final" if how == "cancel" else "fatal", "bad")
        line.send({"t": "cancel", "ref_id": "good"})
        assert (await line.until("final"))[-1]["ref_id"] == "good"


# Asks -----------------------------------------------------------------------------------------------------------------


NO_INPUT = "it answers modify and gives no input"


async def asking(host_run: HostRun) -> Done:
    verdict = await host_run.may("bash", {"command": "ls"}, command="ls", cwd="/w")
    answer = "-" if verdict.input is msgspec.UNSET else verdict.input
    await host_run.message(f"{verdict.decision}|{verdict.reason}|{answer}|{verdict.text}")
    return Done()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"decision": "allow"}, "allow||-|None"),
        ({"decision": "deny", "reason": "no"}, "deny|no|-|None"),
        ({"decision": "modify", "input": {"command": "id"}}, "modify||{'command': 'id'}|None"),
        (
            {"decision": "modify", "text": "t"},
            "deny|the answer does not fit: it answers modify and gives no input|-|None",
        ),
    ],
)
async def test_an_ask_waits_for_its_own_answer(answer: dict[str, Any], words: str) -> None:
    async with talk(HOST, asking) as line:
        line.send(run())
        ask = (await line.until("ask"))[-1]
        assert (ask["kind"], ask["name"], ask["input"]) == ("tool", "bash", {"command": "ls"})
        assert (ask["command"], ask["cwd"], ask["default"]) == ("ls", "/w", "deny")
        own = {"t": "answer", "ref_id": "r1", "id": ask["id"], **answer}
        line.send({**own, "id": "another", "decision": "deny"}, {**own, "ref_id": "r9", "decision": "deny"})
        line.send(own, {**own, "decision": "deny", "reason": "second"})
        told = await line.until("final")
        line.send(own)
    assert told[0]["event"]["text"] == words


@pytest.mark.parametrize(
    ("policy", "words"),
    [({}, "allow"), ({"disallowed_tools": ["bash"]}, "deny"), ({"require_approval_for": ["bash"]}, "deny")],
)
async def test_where_nobody_can_be_asked_the_policy_or_the_default_decides_at_once(
    policy: dict[str, Any], words: str
) -> None:
    async with talk(HOST, asking) as line:
        line.send(run(extensions=PLAIN, policy=policy))
        told = await line.until("final")
    assert types(told) == ["run_started", "assistant_message", "run_completed", "final"]
    assert told[1]["event"]["text"].startswith(words)


async def test_what_the_policy_denies_is_asked_for_the_record_and_stays_denied_whatever_is_answered() -> None:
    async with talk(HOST, asking) as line:
        line.send(run(extensions=("ask/1",), policy={"disallowed_tools": ["bash"]}))
        ask = (await line.until("ask"))[-1]
        line.send({"t": "answer", "ref_id": "r1", "id": ask["id"], "decision": "allow"})
        assert (await line.until("final"))[0]["event"]["text"].startswith("deny")


async def test_an_open_ask_ends_with_its_default_when_stdin_ends() -> None:
    async with talk(HOST, asking) as line:
        line.send(run(extensions=("ask/1",)))
        await line.until("ask")
        line.close_stdin()
        assert (await line.until("final"))[0]["event"]["text"].startswith("deny")


async def test_a_question_that_nobody_answers_has_its_own_default() -> None:
    async def work(host_run: HostRun) -> Done:
        verdict = await host_run.ask_user("which?", options=("a", "b"), default="a")
        await host_run.message(f"{verdict.decision} {verdict.text}")
        return Done()

    for extensions in (PLAIN, OURS):
        async with talk(HOST, work) as line:
            line.send(run(extensions=extensions))
            if extensions:
                ask = (await line.until("ask"))[-1]
                assert (ask["kind"], ask["question"], ask["options"]) == ("input", "which?", ["a", "b"])
                line.send({"t": "answer", "ref_id": "r1", "id": ask["id"], "decision": "deny"})
            told = await line.until("final")
        assert "deny a" in [message["event"]["text"] for message in told if "text" in message.get("event", {})]


async def test_a_cancel_ends_a_run_that_waits_for_an_answer() -> None:
    async with talk(HOST, asking) as line:
        line.send(run())
        await line.until("ask")
        line.send({"t": "cancel", "ref_id": "r1"})
        assert types(await line.until("final")) == ["final"]


# Peers that go away ---------------------------------------------------------------------------------------------------


async def test_a_run_of_a_plain_peer_goes_on_after_the_end_of_stdin() -> None:
    go_on = anyio.Event()

    async def work(host_run: HostRun) -> Done:
        await go_on.wait()
        return Done()

    async with talk(HOST, work) as line:
        line.send(run(extensions=PLAIN))
        line.close_stdin()
        await line.until("event")
        await anyio.wait_all_tasks_blocked()
        go_on.set()
        assert (await line.until("final"))[-1]["receipt"]["outcome"] == "complete"
        assert await line.read() is None


async def test_a_run_of_a_peer_that_could_cancel_is_cancelled_at_the_end_of_stdin() -> None:
    async with talk(HOST, forever) as line:
        line.send(run())
        await line.until("event")
        line.close_stdin()
        final = (await line.until("final"))[-1]
    assert final["receipt"]["usage_raw"] == {"cancelled": "the control plane went away"}


async def test_a_last_line_without_its_newline_is_a_run() -> None:
    async with talk(HOST, hello_world) as line:
        line.send(msgspec.json.encode(run(extensions=PLAIN)))
        line.close_stdin()
        assert types(await line.until("final"))[-1] == "final"


@pytest.mark.parametrize("talking", [True, False])
async def test_a_host_ends_when_nobody_reads_any_more(talking: bool) -> None:
    cancelled = anyio.Event()

    async def work(host_run: HostRun) -> Done:
        try:
            while talking:
                await host_run.delta("bla")
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with talk(HOST, work) as line:
        line.send(run(extensions=PLAIN))
        await line.until("event")
        line.close_stdout()
        line.send({"t": "ping", "seq": 1})
        with anyio.fail_after(WAIT_S):
            await cancelled.wait()


# Processes ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time, anyio
from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, main
async def work(run):
    print("stray print")
    os.write(1, b"stray write\\n")
    if run.order.task == "deaf":
        with anyio.CancelScope(shield=True):
            await run.message("deaf")
            await anyio.sleep_forever()
    if run.order.task == "wait":
        await run.message("waiting")
        await anyio.sleep_forever()
    return Done()
main(Host(id="program", capabilities={"streaming": NATIVE}), work)
"""


def program(folder: Path) -> tuple[str, ...]:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return (*PYTHON, str(path))


def test_stray_prints_go_to_stderr_and_the_end_of_stdin_ends_the_program(tmp_path: Path) -> None:
    with Child(program(tmp_path)) as child:
        child.send(run(extensions=PLAIN))
        assert types(child.until("final")) == ["hello", "run_started", "run_completed", "final"]
        child.close_stdin()
        assert child.wait(5.0) == 0
        assert child.read() is None
        assert child.stderr() == "stray print\nstray write\n"


def test_stdin_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(msgspec.json.encode(run(extensions=PLAIN)))
    with path.open("rb") as stdin, Child(program(tmp_path), stdin=stdin) as child:
        assert child.wait() == 0
        assert "Traceback" not in child.stderr()
        expected = ["hello", "run_started", "run_completed", "final"]
        assert types([child.read() for _ in expected]) == expected
        assert child.read() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_runs_and_ends_the_program(tmp_path: Path, number: signal.Signals) -> None:
    with Child(program(tmp_path)) as child:
        child.send(run(task="wait"))
        child.until("hello")
        child.until("event")
        child.until("event")
        began = time.monotonic()
        child.process.send_signal(number)
        final = child.until("final")[-1]
        assert final["receipt"]["outcome"] == "partial"
        assert number.name in final["receipt"]["usage_raw"]["cancelled"]
        assert child.wait(5.0) == 0
        assert time.monotonic() - began < 4.0
        assert "Traceback" not in child.stderr()


def test_a_signal_ends_an_idle_program(tmp_path: Path) -> None:
    with Child(program(tmp_path)) as child:
        child.until("hello")
        # The handlers stand once a first message was answered.
        child.send({"t": "ping", "seq": 1})
        child.until("pong")
        child.process.send_signal(signal.SIGTERM)
        assert child.wait(5.0) == 0


def test_work_that_is_deaf_to_a_cancel_does_not_outlive_the_grace(tmp_path: Path) -> None:
    with Child(program(tmp_path)) as child:
        child.send(run(task="deaf"))
        child.until("hello")
        child.until("event")
        child.until("event")
        began = time.monotonic()
        child.process.send_signal(signal.SIGTERM)
        child.wait()
        assert time.monotonic() - began < 4.5


async def none_at_all(given: HostRun) -> Any:
    await given.message("said")


async def broken(given: HostRun) -> Any:
    raise KeyError("a bug of the host")


MISTAKES = {
    none_at_all: "`work` returned NoneType: end it with `return Done()`",
    broken: "KeyError: 'a bug of the host'",
}


@pytest.mark.parametrize("work", MISTAKES, ids=lambda work: work.__name__)
async def test_a_mistake_in_a_hosts_work_is_said_in_a_sentence_with_its_traceback(
    work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with talk(Host(id="mine", capabilities={}), work) as line:
        line.send(run("r1"))
        fatal = (await line.until("fatal"))[-1]
    assert (fatal["ref_id"], fatal["error_code"]) == ("r1", "internal")
    assert MISTAKES[work] in fatal["error"]
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):\n")
    assert told.rstrip().endswith(MISTAKES[work])


def test_a_capability_that_the_contract_does_not_have_is_refused_when_the_host_is_made() -> None:
    with pytest.raises(ValueError, match=r"'tool_bsh' is no capability of the contract: tool_bash\?"):
        Host(id="mine", capabilities={"streaming": NATIVE, "tool_bsh": NATIVE})
