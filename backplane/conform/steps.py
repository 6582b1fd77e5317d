"""What the transcript of a rule is made of, played against a fresh child that has said its hello.

A step is a message to send (an object, or bytes as they are), the words for what was seen, or a function that sends,
waits and looks. Every wait is bounded by `Bounds`; a child that does not answer fails its rule and is gone when that is
over.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import anyio
import msgspec

from backplane.conform.link import READ_BYTES_MAX, HostLine, Program, Wire, linked, order
from backplane.conform.verdict import Result, RuleLevel, Unasked, Unfit, Verdict
from backplane.contract.canonical import Json
from backplane.contract.receipt import read_receipt


class Bench(msgspec.Struct, frozen=True):
    """What the orders of every rule need."""

    program: Program
    root: str
    task: str
    extensions: tuple[str, ...]
    """What the host announced in its plain run."""
    vendor: dict[str, Json]
    """What every order says to this host alone."""
    is_noisy: bool = False
    """True if the host wrote lines other than messages in its plain run."""

    def place(self, name: str) -> Path:
        """Make a folder of this rule's own, below its root."""
        folder = Path(self.root, name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, run_id: str = "r1", extensions: Sequence[str] = (), **changed: Json) -> dict[str, Any]:
        announced = {"extensions": list(extensions)} if extensions else {}
        asked = order(self.root, **{"task": self.task, "vendor": self.vendor, **changed})
        return {"t": "run", "id": run_id, "work_order": asked, **announced}


P = ParamSpec("P")
Play = Callable[[Wire, Bench], Awaitable[str | None]]
"""Says what was seen; raises `Unfit` where the rule is broken."""

Step = dict[str, Any] | bytes | str | Play
"""A message, a function, or words in which `{end}` is the last end's `t`, `{lines}` the number of lines so far."""

Make = Callable[[Bench], Json]
"""Makes a message: an object, or bytes as they are."""


class Case(msgspec.Struct, frozen=True):
    """One rule of a host with the transcript that tries it."""

    name: str
    level: RuleLevel
    number: str
    """In `contracts/sidecar.md`."""
    did: str
    steps: tuple[Step, ...]
    needs: tuple[str, ...] = ()
    """Extensions without which the rule does not apply."""
    folder: str | None = None
    """Folder of the rule's own in which the program is started; None for the caller's."""

    def result(self, verdict: Verdict, seen: str, lines: tuple[str, ...] = ()) -> Result:
        return Result(self.name, self.level, self.number, self.did, verdict, seen, lines)

    async def play(self, bench: Bench) -> str:
        """Play the transcript and return what was seen.

        Raises:
            Unfit: the host broke the rule.
            Unasked: the rule does not apply to this host.
            BackendError: `sidecar_spawn_failed`.
        """
        for extension in self.needs:
            if extension not in bench.extensions:
                raise Unasked(f"{extension} is not announced")
        program, seen = bench.program, ""
        if self.folder is not None:
            program = program.started_in(str(bench.place(self.folder)))
        async with linked(program) as link:
            try:
                if await link.until(lambda line: line.t == "hello", link.bounds.hello_s) is None:
                    raise Unfit("this time no hello came", link.lines)
                for step in self.steps:
                    if isinstance(step, str):
                        ends = [line.t for line in link.lines if line.is_end]
                        seen = step.format(end=ends[-1] if ends else None, lines=len(link.lines))
                    elif isinstance(step, dict | bytes):
                        await link.send(step)
                    else:
                        seen = await step(link, bench) or seen
            except Unfit as unfit:
                if link.ended:
                    await link.child.stop(grace_s=0)
                    unfit.stderr = bytes(link.child.stderr_tail)
                raise
        return seen


def step(play: Callable[Concatenate[Wire, Bench, P], Awaitable[str | None]]) -> Callable[P, Play]:
    """Make a function of a step: called with what follows link and bench, it gives what is played later."""

    def given(*args: P.args, **kwargs: P.kwargs) -> Play:
        return lambda link, bench: play(link, bench, *args, **kwargs)

    return given


# What is sent ---------------------------------------------------------------------------------------------------------


@step
async def sent(link: Wire, bench: Bench, make: Make, newline: bytes = b"\n") -> None:
    await link.send(make(bench), newline=newline)


def run(run_id: str = "r1", extensions: Sequence[str] = (), **changed: Json) -> Play:
    return sent(lambda bench: bench.run(run_id, extensions, **changed))


@step
async def close(link: Wire, bench: Bench) -> None:
    link.child.close_stdin()


@step
async def terminate(link: Wire, bench: Bench) -> None:
    link.child.terminate()


@step
async def kill(link: Wire, bench: Bench, number: signal.Signals) -> None:
    os.kill(link.child.pid, number)


# What is waited for ---------------------------------------------------------------------------------------------------


@step
async def pause(link: Wire, bench: Bench, seconds: float | None = None) -> None:
    """Read nothing for a while; None is the time that silence is listened to."""
    await anyio.sleep(link.bounds.quiet_s if seconds is None else seconds)


@step
async def wait(link: Wire, bench: Bench, wanted: Callable[[HostLine], bool], *, quiet: bool = False) -> None:
    """Read to a line that is wanted, or until the time for one is over."""
    await link.until(wanted, link.bounds.quiet_s if quiet else link.bounds.run_s)


async def end_of(link: Wire, run_id: str = "r1", timeout_s: float | None = None) -> HostLine:
    """Wait for the end of a run."""
    line = await link.until(
        lambda line: line.is_end and line.get("ref_id") in (run_id, None), timeout_s or link.bounds.run_s
    )
    if line is None:
        # Its output ends a moment before its exit is known.
        exited = await link.child.wait(link.bounds.slack_s) if link.ended else link.child.exit
        ending = f"it ended with {exited.describe()}" if exited is not None else "it is silent"
        raise Unfit(f"no end of run {run_id!r} came; {ending}", link.lines)
    return line


@step
async def end(link: Wire, bench: Bench, run_id: str = "r1") -> None:
    await end_of(link, run_id)


@step
async def final(link: Wire, bench: Bench, run_id: str = "r1") -> str:
    line = await end_of(link, run_id)
    if line.t != "final":
        raise Unfit(f"it ended with fatal: {line.get('error')!r:.200}", link.lines)
    return "final came"


@step
async def done(
    link: Wire,
    bench: Bench,
    make: Make = Bench.run,
    run_id: str = "r1",
    *,
    may_decline: bool = False,
    piece_bytes: int = READ_BYTES_MAX,
) -> str:
    """Send one order and want its final, or where it may decline, a fatal that names the run."""
    if not await link.send(make(bench), piece_bytes=piece_bytes):
        raise Unfit("it did not read the order", link.lines)
    line = await end_of(link, run_id)
    if line.t != "final" and not may_decline:
        raise Unfit(f"it ended with fatal: {line.get('error')!r:.200}", link.lines)
    if line.get("ref_id") != run_id:
        raise Unfit("it ended with a fatal that names no run", link.lines)
    return f"{line.t} came"


@step
async def refused(link: Wire, bench: Bench, run_id: str) -> str:
    """Want a fatal for an order that cannot be done."""
    line = await end_of(link, run_id)
    if line.t != "fatal":
        raise Unfit("an order without a task was done", link.lines)
    return f"fatal: {line.get('error')!r:.80}"


@step
async def explained(link: Wire, bench: Bench, run_id: str) -> str:
    """Want an end with words for what is wrong."""
    line = await end_of(link, run_id)
    if not isinstance(line.get("error"), str) or not str(line.get("error")).strip():
        raise Unfit("its fatal has no words", [line])
    return f"{line.get('error')!r:.80}"


@step
async def fatal(link: Wire, bench: Bench, code: str) -> str:
    """Want a fatal of `r1` with this code."""
    line = await end_of(link)
    if line.get("ref_id") != "r1":
        raise Unfit("it ended with a fatal that names no run", [line])
    if (line.t, line.get("error_code")) != ("fatal", code):
        raise Unfit(f"{line.t} {line.get('error_code')} came, not fatal {code}")
    return f"fatal: {code}"


@step
async def cancelled(link: Wire, bench: Bench) -> str:
    """Want one end of `r1` within the grace."""
    line = await end_of(link, "r1", link.bounds.grace_s + link.bounds.slack_s)
    await link.next(link.bounds.quiet_s)
    ends = [line for line in link.lines if line.is_end]
    if len(ends) > 1:
        raise Unfit("more than one end came", ends)
    receipt = line.get("receipt")
    return f"{line.t}, outcome {receipt.get('outcome')}" if isinstance(receipt, dict) else str(line.t)


@step
async def readable(link: Wire, bench: Bench) -> str:
    """Want a receipt in the end that came, unless that is a fatal."""
    line = next(line for line in link.lines if line.is_end)
    if line.t != "final":
        return "fatal came, which needs no receipt"
    try:
        return f"a receipt with outcome {read_receipt(line.get('receipt')).outcome}"
    except ValueError as error:
        raise Unfit(f"the receipt of a cancelled run cannot be read: {error}", [line]) from error


@step
async def silent(link: Wire, bench: Bench, fact: str) -> None:
    line = await link.next(link.bounds.quiet_s)
    if line is not None:
        raise Unfit(fact, [line])


@step
async def exits(link: Wire, bench: Bench, why: str, *, with_grace: bool = False) -> str:
    """Want an exit within its time."""
    return await _exited(link, why, link.bounds.exit_s + (link.bounds.grace_s if with_grace else 0))


async def _exited(link: Wire, why: str, within_s: float) -> str:
    await link.rest(within_s + link.bounds.slack_s)
    how = await link.child.wait(link.bounds.slack_s)
    if how is None:
        raise Unfit(f"still running {within_s:g} s after {why}", link.lines)
    return how.describe()


@step
async def terminated(link: Wire, bench: Bench) -> str:
    """Send SIGTERM and want an exit that leaves nothing of the host."""
    link.child.terminate()
    how = await _exited(link, "SIGTERM", link.bounds.exit_s)
    await link.child.stop(grace_s=0)
    if link.child.swept:
        raise Unfit(f"{link.child.swept} of its processes were left running", link.lines)
    return how


@step
async def unheard(link: Wire, bench: Bench, run_id: str) -> str:
    """Stop listening, send a run, and want an exit."""
    link.child.close_stdout()
    link.ended = True
    await link.send(bench.run(run_id))
    if await link.child.wait(link.bounds.closed_s + link.bounds.slack_s) is None:
        raise Unfit(f"still running {link.bounds.closed_s:g} s after its stdout was closed", link.lines)
    return "it ended"


@step
async def silent_to_the_end(link: Wire, bench: Bench, data: bytes) -> str:
    """Send what has no run in it, close stdin, and want an exit in order without an answer."""
    before = link.handed
    await link.send(data, newline=b"")
    link.child.close_stdin()
    how = await _exited(link, "stdin ended", link.bounds.exit_s)
    if how != "exit code 0":
        raise Unfit(f"it ended with {how}", link.lines)
    if link.lines[before:]:
        raise Unfit("it spoke although nothing was asked", link.lines[before:])
    return how


@step
async def never_said(link: Wire, bench: Bench, is_wrong: Callable[[HostLine], bool], fact: str) -> None:
    """Want no line of this kind among those that came; the first one is `{line}` in the fact."""
    wrong = [line for line in link.lines if is_wrong(line)]
    if wrong:
        raise Unfit(fact.format(line=wrong[0]), wrong)


@step
async def unreadable(link: Wire, bench: Bench, line: bytes | Make, name: str = "bad") -> str:
    """Send a line that is answered by a fatal or ignored, after which the host works or exits in order."""
    await link.send(line if isinstance(line, bytes) else line(bench))
    await link.send(bench.run("good"))
    link.child.close_stdin()
    await link.until(lambda line: line.is_end and line.get("ref_id") == "good", link.bounds.run_s)
    ends = [line for line in link.lines if line.is_end]
    if any(line.t == "final" and line.get("ref_id") == name for line in ends):
        raise Unfit("it was taken for a run", link.lines)
    if any(line.t is None for line in link.lines):
        raise Unfit("it wrote something that is no message", [line for line in link.lines if line.t is None])
    if any(line.get("ref_id") == "good" for line in ends):
        return "answered by fatal, then worked" if len(ends) > 1 else "ignored, then worked"
    exited = await link.child.wait(link.bounds.exit_s)
    if ends and exited is not None:
        return "answered by fatal, then exited"
    how = f"it ended with {exited.describe()}" if exited is not None else "it hangs"
    raise Unfit(f"no fatal came, and the run after it was not done: {how}", link.lines)


@step
async def in_a_row(link: Wire, bench: Bench, names: Sequence[str], words: str, *, may_fail: bool = False) -> str:
    """Send runs one after the other; a host that takes no more of them exits in order, and a later one may fail."""
    line: HostLine | None = None
    for number, name in enumerate(names):
        line = None
        if await link.send(bench.run(name)) and await link.child.wait(0) is None:
            line = await link.until(lambda line: line.is_end, link.bounds.run_s)
        if line is None and number:
            how = await link.child.wait(link.bounds.slack_s)
            if how is None or how.code != 0:
                raise Unfit("neither a second end nor an exit with code 0 came", link.lines)
            return "one run a process; it exits with code 0"
        if line is None or ((line.t != "final" or line.get("ref_id") != name) and not (may_fail and number)):
            raise Unfit(f"run {number + 1} of {len(names)} did not end with its own final", link.lines)
    return words.format(end=line.t if line is not None else None)


# Pings and asks -------------------------------------------------------------------------------------------------------


@step
async def pongs(link: Wire, bench: Bench, *wanted: int, fact: str = "no pong with seq {seq} came") -> str:
    """Want these pongs and nothing between them."""
    for seq in wanted:
        line = await link.next(link.bounds.pong_s + link.bounds.slack_s)
        if line is None or line.t != "pong" or line.get("seq") != seq:
            raise Unfit(fact.format(seq=seq), link.lines)
    return f"{len(wanted)} pongs in order"


@step
async def pong(link: Wire, bench: Bench, seq: int, when: str) -> str:
    """Want this pong among other lines."""
    within_s = link.bounds.pong_s + link.bounds.slack_s
    if await link.until(lambda line: line.t == "pong" and line.get("seq") == seq, within_s) is None:
        raise Unfit(f"no pong within {link.bounds.pong_s:g} s of a ping {when}", link.lines)
    return "a pong"


@step
async def counted(link: Wire, bench: Bench, count: int) -> str:
    """Want so many pongs, in their order, among other lines."""
    while sum(line.t == "pong" for line in link.lines) < count:
        if await link.next(link.bounds.pong_s + link.bounds.slack_s) is None:
            break
    await link.next(link.bounds.quiet_s)
    seen = [line.get("seq") for line in link.lines if line.t == "pong"]
    if seen != list(range(count)):
        raise Unfit(f"{len(seen)} pongs for {count} pings, or not in their order", link.lines)
    return f"{count} pongs in order"


ASK_MEMBERS: Final = {
    "tool": ("name", "input"),
    "patch": ("diff", "files"),
    "input": ("question", "options"),
    "result": ("name", "input", "output", "is_error"),
    "spend": ("input",),
}


async def asked(link: Wire, seen: Sequence[str] = ()) -> HostLine:
    """Wait for an ask of the right shape and with an id of its own, or for the end of the run."""
    line = await link.until(lambda line: line.t == "ask" or line.is_end, link.bounds.run_s)
    if line is None:
        raise Unfit(f"no end came after {len(seen)} answered asks", link.lines)
    if line.t != "ask":
        return line
    kind, ask_id = line.get("kind"), line.get("id")
    missing = [name for name in ASK_MEMBERS.get(str(kind), ("kind",)) if name not in line.value]
    if missing or line.get("ref_id") != "r1" or not isinstance(ask_id, str):
        raise Unfit(f"an ask of kind {kind!r:.40} lacks {', '.join(missing) or 'its ref_id or id'}", [line])
    if ask_id in seen:
        raise Unfit("an ask's id was used twice", [line])
    return line


@step
async def answered(
    link: Wire, bench: Bench, answer: dict[str, Any], *, times: int = 1, words: str = "", may_fail: bool = False
) -> str:
    """Answer every ask of `r1` to its end; a member that is None is taken from the ask's input."""
    seen: list[str] = []
    while (line := await asked(link, seen)).t == "ask":
        seen.append(str(line.get("id")))
        given = {name: line.get("input") if value is None else value for name, value in answer.items()}
        for _ in range(times):
            await link.send({"t": "answer", "ref_id": "r1", "id": seen[-1], **given})
    if not may_fail:
        own_final(line)
    return f"{len(seen)} asks, {words}" if seen else "no ask came up"


@step
async def left_alone(link: Wire, bench: Bench) -> str:
    """Close stdin while an ask of `r1` is open, and want its final."""
    if (await asked(link)).t != "ask":
        return "no ask came up"
    link.child.close_stdin()
    own_final(await end_of(link, "r1"))
    return "the default decided, and final came"


# Several runs at once -------------------------------------------------------------------------------------------------


def runs(names: Sequence[str], extensions: Sequence[str]) -> tuple[Play, ...]:
    return tuple(run(name, extensions) for name in names)


def own_final(line: HostLine) -> None:
    if line.t != "final":
        raise Unfit(f"run {line.get('ref_id')!r:.60} ended with fatal: {line.get('error')!r:.200}", [line])


@step
async def finals(link: Wire, bench: Bench, names: Sequence[str], others: Sequence[str] = ()) -> None:
    """Want the end of each of these runs, none twice and nobody else's; the others' may be a fatal."""
    found: dict[str, HostLine] = {}
    wanted = [*names, *others]
    while len(found) < len(wanted):
        line = await link.until(lambda line: line.is_end and line.get("ref_id") is not None, link.bounds.run_s)
        if line is None:
            missing = ", ".join(repr(name) for name in wanted if name not in found)
            raise Unfit(f"no end came of {missing:.200}", link.lines)
        name = line.get("ref_id")
        if name in found or name not in wanted:
            raise Unfit(f"an end too many, of {name!r:.60}", [line])
        found[name] = line
    for name in names:
        own_final(found[name])


@step
async def apart(link: Wire, bench: Bench, names: Sequence[str]) -> None:
    """Want events of these runs only while they are open, and of each as many as of another, or some."""
    over: set[str] = set()
    for line in link.lines:
        name = line.get("ref_id")
        if line.t == "event" and (name not in names or name in over):
            raise Unfit(f"an event of {name!r:.60}, which is not open", [line])
        if line.is_end:
            over.add(name)
    events = Counter(line.get("ref_id") for line in link.lines if line.t == "event")
    if len(set(events.values())) > 1 and min(events[name] for name in names) == 0:
        raise Unfit("some of many like runs have no events", link.lines)


@step
async def one_stopped(link: Wire, bench: Bench, name: str) -> str:
    """Want no partial receipt but that of the cancelled run."""
    ends = {line.get("ref_id"): line for line in link.lines if line.is_end}
    for other, line in ends.items():
        receipt = line.get("receipt")
        if other != name and isinstance(receipt, dict) and receipt.get("outcome") == "partial":
            raise Unfit(f"{other} is partial, although {name} was cancelled", [line])
    return f"{name} ended with {ends[name].t}, the others as they would"


@step
async def one_of_two(link: Wire, bench: Bench) -> str:
    """Want the final of the run that was open, and then one of the second, or a fatal that names no run."""
    # In one write, so that the first is open when the second is read.
    await link.send(b"\n".join([msgspec.json.encode(bench.run("r1", ("cancel/1", "ping/1", "many/1")))] * 2))
    line = await link.until(lambda line: line.is_end and line.get("ref_id") == "r1", link.bounds.run_s)
    if line is None:
        raise Unfit("no end came of the run that was open", link.lines)
    own_final(line)
    if sum(line.is_end for line in link.lines) == 1:
        await link.until(lambda line: line.is_end, link.bounds.pong_s)
    await link.next(link.bounds.quiet_s)
    if sum(line.is_end and line.get("ref_id") == "r1" for line in link.lines) == 2:
        return "the second came after the end"
    fatals = [line.get("ref_id") for line in link.lines if line.t == "fatal"]
    if fatals != [None]:
        raise Unfit("a run whose id is in use is answered by a fatal with ref_id null", link.lines)
    return "one final, and a fatal with ref_id null"
