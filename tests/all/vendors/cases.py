"""What every driven agent must show: one case a promise, shared by all of them, run for real against a scripted model.

An agent says how its model calls tools, and of which cases it can only be said that they are emulated, cut or refused,
and why. `table` prints all of them; `test_cases.py` holds the page `docs/guide/agents-tested.md` to it.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
import msgspec

from backplane.config import Limits
from backplane.contract.approval import Decision
from backplane.contract.events import (
    AgentEvent,
    Approval,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    FileChanged,
    RetryReported,
    ToolCall,
    ToolResult,
    TurnEnded,
    carried,
)
from backplane.contract.pictures import image_from
from backplane.contract.work import PolicyProfile
from backplane.testing import Failure, Fault, ScriptUsage, Turn
from tests.all.vendors.ground import WAIT_S_MAX, Agent, Ground, Seen, running, until
from tests.test_deltas import fold

SLEEPER = f"import time; open('began', 'w').close(); time.sleep(297.{os.getpid()})"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
USAGE = {"input": 130, "output": 7, "cache_read": 50, "cache_write": 30}

Check = Callable[[Ground], Awaitable[None]]
CASES: dict[str, Check] = {}
"""Name of a promise → what has to be seen."""


def case(name: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CASES[name] = check
        return check

    return keep


# Answers and tools ----------------------------------------------------------------------------------------------------


THOUGHT_ABOUT = Turn(text="done", fault=Fault(first_byte_ms=1000))
"""After a command whose end is looked at. Of a model that answers at once Codex ends its turn, on a busy machine, and
then tells no end of its command, which the model had been given."""


STORY = [ToolCall, Approval, FileChanged, ToolResult, ToolCall, Approval, CommandExecuted, ToolResult, AssistantMessage]
"""Kinds of events of a file, a command and an answer, in their order."""


def check_story(seen: Seen) -> None:
    """Check the events that every agent has of the same order."""
    assert (seen.receipt.outcome, seen.words, seen.run.error) == ("complete", "hello from the model", None)
    assert [type(event) for event in seen.events if type(event) in STORY] == STORY
    # An agent tells a turn's end when its model's answer is whole, or when its tools have run; `api` none at the end.
    assert len(seen.of(TurnEnded)) in (2, 3)
    assert [event.tool_name for event in seen.of(ToolCall)] == ["write_file", "bash"]
    assert [(event.exit_code, "seen" in event.output_preview) for event in seen.of(CommandExecuted)] == [(3, True)]
    assert [event.is_error for event in seen.of(ToolResult)] == [False, True]
    assert [event.path for event in seen.of(FileChanged)] == ["new.txt"]
    for name, line in (("a.txt", "+two"), ("new.txt", "+made")):
        assert line in seen.patch.partition(f"b/{name}")[2]
    used = seen.receipt.usage
    told = (used.input_tokens, used.output_tokens, used.cache_read_tokens)
    assert told == (3 * USAGE["input"], 3 * USAGE["output"], 3 * USAGE["cache_read"])


def story(agent: Agent) -> list[Turn]:
    """A file, a command and an answer, with their tokens."""
    turns = [agent.writes("new.txt", "made\n"), agent.runs("echo two >> a.txt; echo seen; exit 3")]
    words = Turn(text="hello from the model", fault=THOUGHT_ABOUT.fault)
    return [msgspec.structs.replace(turn, usage=ScriptUsage(**USAGE)) for turn in (*turns, words)]


async def _worked(ground: Ground) -> Seen:
    """Play a file, a command and an answer, with a picture and every message kept."""

    async def play() -> Seen:
        abp = {"mode": "passthrough", "images": [msgspec.to_builtins(image_from(PICTURE))]}
        seen = await ground.play(story(ground.agent), abp=abp, task="which colour?")
        assert (ground.root / "a.txt").read_text() == "one\n"
        return seen

    return await ground.once("work", play)


@case("plain answer")
async def _plain(ground: Ground) -> None:
    seen = await _worked(ground)
    assert (seen.receipt.outcome, seen.words) == ("complete", "hello from the model")
    assert "".join(event.text for event in seen.of(AssistantDelta)) == seen.words
    assert seen.server.unscripted == ()
    assert seen.end == {"reason": "complete"}


@case("passthrough keeps every message")
async def _raw(ground: Ground) -> None:
    seen = await _worked(ground)
    raws = [
        event.ext["raw_message"] for event in seen.events if isinstance(event.ext, dict) and "raw_message" in event.ext
    ]
    assert len(raws) > 5


@case("the same order is the same story")
async def _story(ground: Ground) -> None:
    check_story(await _worked(ground))


@case("tool turn, patch right")
async def _tools(ground: Ground) -> None:
    seen = await _worked(ground)
    assert seen.receipt.outcome == "complete"
    assert "+made" in seen.patch
    assert "+two" in seen.patch
    assert "new.txt" in [event.path for event in seen.of(FileChanged)]
    command = seen.of(CommandExecuted)[-1]
    assert command.exit_code == 3
    assert "seen" in command.output_preview
    calls = {event.tool_use_id for event in seen.of(ToolCall)}
    assert calls == {event.tool_use_id for event in seen.of(ToolResult)}
    assert len(calls) == 2


async def caged(ground: Ground) -> Seen:
    """Play two commands in a cage, with a key that stays outside and a model that nobody has a price of."""

    async def play() -> Seen:
        target = ground.root.parent / "outside.txt"
        # A value of the environment is a secret: it is told as stars, so the command compares it. Then every
        # environment in sight, the host's and its agent's too; the pattern does not fit itself.
        equal = 'test "$CASE_WORD" = given-word && echo equal > word.txt'
        looks = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -c 'scripted-key-[1]' > keys.txt"
        commands = (f"{equal}; echo in > inside.txt; echo out > {target}; {looks}", LARGE)
        turns = [*map(ground.agent.runs, commands), THOUGHT_ABOUT]
        turns = [msgspec.structs.replace(turn, usage=ScriptUsage(**USAGE)) for turn in turns]
        more: dict[str, Any] = {} if OWN_MODEL in ground.agent.labels else {"model": ground.agent.model(MODEL)}
        policy, env = PolicyProfile(deny_network=("*",)), {"CASE_WORD": "given-word"}
        seen = await ground.play(turns, isolation="best_effort", policy=policy, key_proxy=True, env=env, **more)
        assert not target.exists()
        return seen

    return await ground.once("cage", play)


LARGE = "python3 -c \"print('x' * 1000000); print('marmot\\n' * 20000)\""
"""A megabyte in one line, then many short lines."""
OWN_MODEL = "model and environment"


@case(OWN_MODEL)
async def _model(ground: Ground) -> None:
    seen = await caged(ground)
    assert "+equal" in seen.patch
    request = seen.server.requests[-1]
    assert request.body.get("model") == MODEL or f"/{MODEL}:" in request.path
    assert "scripted-key-1" in str(request.headers)


MODEL = "scripted-model-7"
"""In nobody's list: what it costs is not known to anyone."""


@case("usage as the model's service told it")
async def _used(ground: Ground) -> None:
    seen = await caged(ground)
    told = seen.receipt.usage
    assert (told.input_tokens, told.output_tokens) == (3 * USAGE["input"], 3 * USAGE["output"])
    assert told.cache_read_tokens == 3 * USAGE["cache_read"]
    assert told.estimated_cost_usd is None
    # The control plane has seen the service say the same as the agent.
    added = seen.receipt.usage_raw["backplane"]
    for name in ("input_tokens", "output_tokens", "cache_read_tokens"):
        assert added["usage"][name] == "seen"
        assert added["claimed"]["counts"][f"usage.{name}"] == {"true": 1}


@case("turns are told")
async def _told(ground: Ground) -> None:
    seen = await caged(ground)
    assert len(seen.of(TurnEnded)) == 3


@case("one megabyte of output")
async def _large(ground: Ground) -> None:
    seen = await caged(ground)
    assert seen.receipt.outcome == "complete"
    assert seen.of(CommandExecuted)[-1].exit_code == 0
    assert len(seen.of(ToolResult)[-1].output) > ground.agent.shown_chars_min


# Approvals and policy -------------------------------------------------------------------------------------------------


async def _answered(ground: Ground) -> Seen:
    """Play a write that is allowed, one that is denied, and a command that is changed."""

    async def play() -> Seen:
        other = Decision(decision="modify", input={"command": "echo the marmot"})
        answers = iter((Decision(decision="allow"), Decision(decision="deny", reason="said so"), other))

        async def answer(ask: Approval) -> Decision:
            return next(answers)

        writes = [ground.agent.writes(f"{name}.txt", "made\n") for name in ("allowed", "denied")]
        turns = [*writes, ground.agent.runs("echo first > first.txt"), THOUGHT_ABOUT]
        policy = PolicyProfile(require_approval_for=(ground.agent.write_tool, "bash"))
        return await ground.play(turns, policy=policy, on_ask=answer)

    return await ground.once("approval", play)


@case("approval allowed")
async def _allowed(ground: Ground) -> None:
    seen = await _answered(ground)
    assert len(seen.of(Approval)) == 3
    assert "+made" in seen.patch.partition("b/allowed.txt")[2]
    assert seen.layer("require_approval_for") == "host"


@case("approval denied")
async def _denied(ground: Ground) -> None:
    seen = await _answered(ground)
    assert (seen.receipt.outcome, "denied.txt" in seen.patch) == ("complete", False)
    assert [event.is_error for event in seen.of(ToolResult)][:2] == [False, True]
    assert [event.path for event in seen.of(FileChanged)] == ["allowed.txt"]


UNANSWERED = "approval unanswered"


@case(UNANSWERED)
async def _unanswered(ground: Ground) -> None:
    turns = [ground.agent.writes("new.txt", "made\n"), Turn(text="done")]
    seen = await ground.play(turns, policy=PolicyProfile(require_approval_for=(ground.agent.write_tool,)))
    assert (seen.receipt.outcome, seen.patch) == ("complete", "")
    assert seen.of(ToolResult)[0].is_error


CHANGED = "a hook changes the command, and the event names what ran"


@case(CHANGED)
async def _modified(ground: Ground) -> None:
    seen = await _answered(ground)
    assert "first.txt" not in seen.patch
    if CHANGED in ground.agent.labels:
        assert "takes no other input" in str(seen.of(ToolResult)[2].output)
        return
    assert "the marmot" in str(seen.of(ToolResult)[2].output)
    assert [event.command for event in seen.of(CommandExecuted)] == ["echo the marmot"]


async def _against_rules(ground: Ground, place: int) -> Seen:
    """Play a write outside and a forbidden command; each alone where a denial ends the turn, or nobody is asked."""
    alone = ground.agent.ends_at_denial or OUTSIDE in ground.agent.labels

    async def play() -> Seen:
        target = ground.root.parent / "outside.txt"
        turns = [ground.agent.writes(str(target), "made\n"), ground.agent.runs("touch forbidden.txt")]
        if alone:
            turns = [turns[place]]
        seen = await ground.play([*turns, Turn(text="done")], policy=PolicyProfile(disallowed_tools=("bash",)))
        assert not target.exists()
        return seen

    return await ground.once(f"rules {place}" if alone else "rules", play)


OUTSIDE = "policy stops a write outside"


@case(OUTSIDE)
async def _outside(ground: Ground) -> None:
    seen = await _against_rules(ground, 0)
    assert seen.of(ToolResult)[0].is_error
    assert seen.layer("workspace") == "host" or OUTSIDE in ground.agent.labels


@case("policy stops a forbidden command")
async def _forbidden(ground: Ground) -> None:
    seen = await _against_rules(ground, 1)
    assert seen.patch == ""
    assert [event.tool_name for event in seen.of(ToolCall)][-1] == "bash"
    assert all(event.is_error for event in seen.of(ToolResult))
    assert not seen.of(CommandExecuted)
    assert seen.layer("disallowed_tools") in ("host", None)


@case("commands held by the operating system")
async def _caged(ground: Ground) -> None:
    seen = await caged(ground)
    assert "+in" in seen.patch
    assert (seen.layer("workspace"), seen.layer("deny_network")) == ("os", "os")


KEY_HELD = "a key that no command can read"


@case(KEY_HELD)
async def _key_held(ground: Ground) -> None:
    seen = await caged(ground)
    use = seen.receipt.usage_raw["backplane"]["key_proxy"]
    assert use["with_key"] >= 3
    assert (use["without_key"], use["unanswered"], use["state"]) == (0, 0, "enforced")
    assert all("scripted-key-1" in str(request.headers) for request in seen.server.requests)
    # keys.txt, made in the run
    assert "\n+0\n" in seen.patch


# Ends -----------------------------------------------------------------------------------------------------------------


TEXT_STOPPED = "interrupt during text"


@case(TEXT_STOPPED)
async def _cut_text(ground: Ground) -> None:
    async def stop(seen: Seen, event: AgentEvent) -> None:
        if isinstance(event, AssistantDelta) and event.text:
            await seen.run.cancel()

    turn = Turn(text="an answer that never comes to its end", fault=Fault(stall_after_frames=5, stall_comment_ms=100))
    seen = await ground.play([turn], seen=stop)
    assert (seen.receipt.outcome, seen.end["reason"]) == ("partial", "cancelled")


@case("interrupt during a command, nothing left")
async def _cut_command(ground: Ground) -> None:
    began = ground.root / "began"
    turns = [ground.agent.runs(f'python3 -c "{SLEEPER}"'), Turn(text="done")]
    async with ground.begin(turns, mode="pass_through") as seen, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await until(began.exists)
            assert running(SLEEPER)
            await seen.run.cancel()

        tasks.start_soon(stop)
        async for event in seen.run:
            seen.events.append(carried(event))
    assert (seen.receipt.outcome, seen.end["reason"]) == ("partial", "cancelled")
    assert running(SLEEPER) == []


async def _interrupted(ground: Ground, **session: Any) -> Seen:
    """Stop a turn during its command, in a conversation that is kept."""
    began = ground.root / "began"
    turns = [ground.agent.runs(f'python3 -c "{SLEEPER}"')]
    run = ground.begin(turns, mode="pass_through", abp=_session(**session), task="now it is gnu")
    async with run as seen, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await until(began.exists)
            seen.run.interrupt()

        tasks.start_soon(stop)
        async for event in seen.run:
            seen.events.append(carried(event))
    assert running(SLEEPER) == []
    began.unlink()
    return seen


async def _said_more(ground: Ground, session: str) -> Seen:
    """Go on with a conversation, and say more while a command is running."""
    began = ground.root / "began"
    waiting = "import os, time; open('began', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"
    turns = [ground.agent.runs(f'python3 -c "{waiting}"'), Turn(text="heard", times=None)]
    run = ground.begin(turns, mode="pass_through", task="which word?", abp=_session(resume=session))
    async with run as seen, anyio.create_task_group() as tasks:

        async def say() -> None:
            await until(began.exists)
            seen.run.input("and mind the marmot")
            (ground.root / "go").touch()

        tasks.start_soon(say)
        async for event in seen.run:
            seen.events.append(carried(event))
    return seen


STOPPED, MORE = "the turn is stopped, the conversation goes on", "more words during the work"


@case(STOPPED)
async def _stopped(ground: Ground) -> None:
    stopped, more = (await _talked(ground))[-2:]
    assert (stopped.receipt.outcome, stopped.end["reason"]) == ("partial", "partial")
    assert "now it is gnu" in json.dumps(more.server.requests[0].body)
    assert "which word?" in json.dumps(more.server.requests[0].body)
    assert more.receipt.outcome == "complete"


@case(MORE)
async def _more(ground: Ground) -> None:
    *_, more = await _talked(ground)
    assert more.receipt.outcome == "complete"
    assert "and mind the marmot" in json.dumps(more.server.requests[-1].body)


@case("max turns")
async def _turns(ground: Ground) -> None:
    usage = ScriptUsage(input=100_000, output=10)
    again = msgspec.structs.replace(ground.agent.runs("echo again"), times=None, usage=usage)
    seen = await ground.play([again], max_turns=2)
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "max_turns", "policy_denied")
    assert len(seen.of(CommandExecuted)) <= 2
    # No request goes out after the last turn, and each is in the record.
    assert len(seen.server.requests) == requests_told(seen, usage.input) == 2


def requests_told(seen: Seen, input: int) -> int:
    """Requests that the receipt has: by their tokens, else by their turns where the agent tells no tokens."""
    tokens = seen.receipt.usage.input_tokens
    return tokens // input if tokens is not None else len(seen.of(TurnEnded))


LOOP = "a loop of tool calls without end"


@case(LOOP)
async def _loop(ground: Ground) -> None:
    thinks = Fault(first_byte_ms=400)  # As a model does: an agent that loops as fast as it can takes all of a core.
    again = msgspec.structs.replace(ground.agent.runs("echo again"), times=None, fault=thinks)
    ends_itself = LOOP in ground.agent.labels
    seen = await ground.play([again], limits=Limits(run_s=60.0 if ends_itself else 4.0))
    if ends_itself:
        assert (seen.receipt.outcome, seen.end["reason"]) == ("partial", "partial")
        return
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "deadline", "backend_timeout")
    assert len(seen.of(ToolCall)) >= 1


# Failures of the model ------------------------------------------------------------------------------------------------


AT_ONCE = {"retry-after": "0"}
"""Has an agent ask again without a wait of its own, where it heeds that."""


async def _fails(ground: Ground, fault: Fault, code: str, **more: Any) -> Seen:
    seen = await ground.play([Turn(text="never heard whole", times=None, fault=fault)], **more)
    assert seen.receipt.outcome == "failed"
    assert seen.codes[-1:] == [code]
    return seen


@case("model answers 401")
async def _auth(ground: Ground) -> None:
    await _fails(ground, Fault(status=401, message="no such key"), "backend_auth_failed")


@case("model answers 429")
async def _rate(ground: Ground) -> None:
    seen = await _fails(ground, Fault(status=429, message="slow down", headers=AT_ONCE), "backend_rate_limited")
    assert seen.receipt.usage.input_tokens is None


@case("model answers 500")
async def _down(ground: Ground) -> None:
    await _fails(ground, Fault(status=500, message="broken", headers=AT_ONCE), "backend_unavailable")


@case("connection refused")
async def _refused(ground: Ground) -> None:
    # Copilot CLI asks for longer than that.
    seen = await ground.play([], url="http://127.0.0.1:9", limits=Limits(run_s=10.0))
    assert seen.receipt.outcome in ("failed", "partial")
    assert {*seen.codes, seen.end.get("code")} & {"backend_unavailable", "backend_timeout"}


ALL_CUT = "every stream cut"


@case(ALL_CUT)
async def _cut(ground: Ground) -> None:
    await _fails(ground, Fault(reset=True), "backend_unavailable")


async def _broken(ground: Ground) -> Seen:
    """An answer that is cut in its middle, then a whole one: one run that two cases look at."""
    fault = Fault(cut_after_bytes=len(BROKEN) // 2, pause_ms=5)
    return await ground.once("broken", lambda: ground.play([Turn(text=BROKEN, fault=fault), Turn(text="whole")]))


BROKEN = " ".join(f"word-{number}" for number in range(900))
"""Longer than the frames around it, so that half of its bytes is a place within it in each protocol."""


@case("one stream cut, then whole")
async def _cut_once(ground: Ground) -> None:
    seen = await _broken(ground)
    assert (seen.receipt.outcome, seen.words) == ("complete", "whole")
    assert seen.of(RetryReported)


TAKEN_BACK = "an answer that broke after its words is taken back"


@case(TAKEN_BACK)
async def _taken_back(ground: Ground) -> None:
    failure = Fault(failure=Failure(code="overloaded_error", message="too many at once"))
    failed = await ground.play([Turn(text="an answer that breaks " * 40, fault=failure), Turn(text="whole")])
    for seen in (await _broken(ground), failed):
        if seen is failed and seen.receipt.outcome == "partial" and TAKEN_BACK in ground.agent.labels:
            continue
        assert seen.receipt.outcome == "complete"
        told = fold(seen.events)
        asked_again = len(seen.server.requests) > 1
        assert told[-1:] == ["whole"] if asked_again else len(told) == 1
        assert asked_again == bool(seen.of(RetryReported)) or told[0] != "whole"


FAILING = ("model answers 500", "connection refused", "one stream cut, then whole")
"""Failures of the service that one code of ours tells for all agents; Claude Code and Codex show them."""
ALIVE = "stream kept alive for ever"


@case(ALIVE)
async def _alive(ground: Ground) -> None:
    fault = Fault(stall_after_frames=4, stall_comment_ms=100)
    seen = await _fails(ground, fault, "backend_timeout", options={"silence_s": 2})
    assert seen.end["reason"] == "failed"


CLOCK = "our clock is shorter than the agent's retries"


@case(CLOCK)
async def _clock(ground: Ground) -> None:
    turn = Turn(times=None, fault=Fault(status=500, message="broken"))
    seen = await ground.play([turn], limits=Limits(run_s=3.0), **ground.agent.patient)
    assert seen.end["reason"] == "deadline"
    assert seen.end["code"] == "backend_timeout"


# Conversations and answers of a shape ---------------------------------------------------------------------------------


async def _begun(ground: Ground) -> Seen:
    noted = [Turn(text="it is noted", usage=ScriptUsage(input=11, output=7))]
    return await _in(ground, noted, task="the word is zebra", abp=_session(keep=True))


async def _resumed(ground: Ground, first: Seen) -> Seen:
    turns = [Turn(text="zebra", usage=ScriptUsage(input=13, output=5))]
    return await _in(ground, turns, task="which word?", abp=_session(resume=first.session))


async def _talked(ground: Ground) -> list[Seen]:
    """Play a conversation that is forked before it goes on; the fork is stopped in a turn, and goes on after that.

    An agent that forks none, or shows that by another's, has the turn stopped in a conversation of its own.

    Returns:
        The conversation gone on with, unless it is not forked; the stopped turn; what came after that.
    """

    async def play() -> list[Seen]:
        if not forks(ground.agent):
            stopped = await _interrupted(ground, keep=True)
            return [stopped, await _said_more(ground, stopped.session)]
        first = await _begun(ground)
        stopped = await _interrupted(ground, fork=first.session)
        assert stopped.session != first.session
        third = await _resumed(ground, first)
        assert third.session == first.session
        return [third, stopped, await _said_more(ground, stopped.session)]

    return await ground.once("conversation", play)


def forks(agent: Agent) -> bool:
    return FORK not in (*agent.labels, *agent.alike)


@case("resume, usage of this run alone")
async def _resume(ground: Ground) -> None:
    if forks(ground.agent):
        second, *_ = await _talked(ground)
    else:
        first = await _begun(ground)
        second = await _resumed(ground, first)
        assert second.session == first.session
    asked = json.dumps(second.server.requests[-1].body)
    assert "the word is zebra" in asked
    assert "it is noted" in asked
    assert (second.receipt.usage.input_tokens, second.receipt.usage.output_tokens) == (13, 5)


FORK = "fork leaves the first as it was"


@case(FORK)
async def _fork(ground: Ground) -> None:
    third, stopped, _ = await _talked(ground)
    asked = json.dumps(third.server.requests[-1].body)
    assert "the word is zebra" in asked
    assert "now it is gnu" not in asked
    assert "the word is zebra" in json.dumps(stopped.server.requests[0].body)


@case("resume of what is not kept")
async def _unknown(ground: Ground) -> None:
    seen = await _in(ground, [Turn(text="x")], abp=_session(resume="a956ba33-654c-4669-bc93-a76ba30d05c5"))
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "config_invalid")
    assert seen.server.requests == ()


SYSTEM = "a system prompt holds for its run alone"
IN_WORDS = {SYSTEM: "refused: a session says it in words"}
"""Of an agent that has none, or keeps that of a conversation's beginning."""


@case(SYSTEM)
async def _system(ground: Ground) -> None:
    seen = await _in(ground, [Turn(text="noted")], abp={**_session(keep=True), "system": "Mind the marmot."})
    if SYSTEM in ground.agent.labels:
        assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
        return
    assert "Mind the marmot." in json.dumps(seen.server.requests[-1].body)
    again = {**_session(resume=seen.session), "system": "Mind the badger."}
    asked = json.dumps((await _in(ground, [Turn(text="done")], abp=again)).server.requests[-1].body)
    assert "Mind the badger." in asked
    assert "marmot" not in asked


async def _in(ground: Ground, turns: Sequence[Turn], **more: Any) -> Seen:
    """A run where the agent's conversations can be."""
    return await ground.play(turns, mode=ground.agent.conversations_in, **more)


def _session(**body: Any) -> dict[str, Any]:
    return {"session": body}


RIGHT = "structured output right"


@case(RIGHT)
async def _right(ground: Ground) -> None:
    seen = await ground.play(ground.agent.structured({"n": 7}), abp={"output_schema": SCHEMA})
    assert seen.receipt.outcome == "complete"
    assert seen.receipt.usage_raw["structured_output"] == {"n": 7}


WRONG, ABSENT = "structured output wrong", "structured output absent"


@case(WRONG)
async def _wrong(ground: Ground) -> None:
    turns = [msgspec.structs.replace(ground.agent.structured({"n": "seven"})[0], times=None)]
    seen = await ground.play(turns, abp={"output_schema": SCHEMA})
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["validation_failed"])


@case(ABSENT)
async def _absent(ground: Ground) -> None:
    seen = await ground.play([Turn(text="words alone", times=None)], abp={"output_schema": SCHEMA})
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["validation_failed"])


@case("an absent program")
async def _missing(ground: Ground) -> None:
    began_s = time.monotonic()
    seen = await ground.play([], options={"program": "/nowhere/agent"})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "backend_unavailable")
    assert "install it: npm install" in str(seen.run.error)
    assert time.monotonic() - began_s < WAIT_S_MAX


@case("a picture beside the task")
async def _shown(ground: Ground) -> None:
    seen = await _worked(ground)
    asked = json.dumps(seen.server.requests[-1].body)
    assert "which colour?" in asked
    assert str(image_from(PICTURE).data) in asked
    # By an address it is not shown, and the order says so.
    far = await ground.play([Turn(text="red")], abp={"images": [{"url": "https://a.example/b.png"}]})
    assert (far.receipt.outcome, far.end["code"]) == ("failed", "capability_unsupported")


def _picture(side: int) -> bytes:
    """A red square as PNG."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    lines = (b"\0" + b"\xff\0\0" * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


PICTURE = _picture(16)

# The table ------------------------------------------------------------------------------------------------------------


def table(agents: Sequence[Agent], names: Iterable[str] = CASES) -> str:
    """Agent × case, as a page of Markdown."""
    head = ["case", *(agent.name for agent in agents)]
    rows = [[name, *(_cell(agent, name) for agent in agents)] for name in names]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cell(agent: Agent, name: str) -> str:
    return agent.labels.get(name) or ("alike" if name in agent.alike else "pass")


def of(kind: type[Agent], names: Iterable[str] = CASES) -> list[str]:
    """The cases that an agent shows itself."""
    return [name for name in names if name not in kind.alike]
