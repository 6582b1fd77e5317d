"""The last level: cancel, ping, ask and many runs at once, under everything that can come together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import anyio
import msgspec

from backplane.conform.bench import Bench, BenchRow, end, exits, terminated
from backplane.conform.extended import announced
from backplane.conform.link import HostLine, Wire
from backplane.conform.plain import ENDS
from backplane.conform.verdict import Unfit
from backplane.contract.receipt import read_receipt

COMPLETE: Final = ("cancel/1", "ping/1", "many/1")
"""What a host announces that is complete; `ask/1` too where its agent has tools."""

RUNS_AT_ONCE: Final = 12
PINGS: Final = 50
SPOKEN: Final = ("cancel/1", "ping/1", "many/1")
STOPPED_MS: Final = 1500
"""The grace of a cancel in these checks; the rule's own check has the usual one."""


async def _ends(link: Wire, names: Sequence[str]) -> dict[str, HostLine]:
    """The end of each of these runs; none twice, and nobody else's."""
    found: dict[str, HostLine] = {}
    while len(found) < len(names):
        line = await link.until(lambda line: line.t in ENDS and line.get("ref_id") is not None, link.bounds.run_s)
        if line is None:
            missing = ", ".join(repr(name) for name in names if name not in found)
            raise Unfit(f"no end came of {missing:.200}", link.lines)
        name = line.get("ref_id")
        if name in found or name not in names:
            raise Unfit(f"an end too many, of {name!r:.60}", [line])
        found[name] = line
    return found


def _final(line: HostLine) -> None:
    if line.t != "final":
        raise Unfit(f"run {line.get('ref_id')!r:.60} ended with fatal: {line.get('error')!r:.200}", [line])


def _cancel(name: str, **members: Any) -> dict[str, Any]:
    return {"t": "cancel", "ref_id": name, "reason": "a check", "grace_ms": STOPPED_MS, **members}


async def _cancelled(bench: Bench, *cancels: dict[str, Any]) -> tuple[Wire, HostLine]:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", SPOKEN))
        for cancel in cancels:
            await link.send(cancel)
        line = await end(link, "r1", link.bounds.grace_s + link.bounds.slack_s)
        await link.next(link.bounds.quiet_s)
        again = [line for line in link.lines if line.t in ENDS]
        if len(again) > 1:
            raise Unfit("more than one end came", again)
        return link, line


async def _cancel_bare(bench: Bench) -> str:
    _, line = await _cancelled(bench, {"t": "cancel", "ref_id": "r1"})
    return f"{line.t} came"


async def _cancel_short(bench: Bench) -> str:
    _, line = await _cancelled(bench, _cancel("r1", grace_ms=50))
    return f"{line.t} came"


async def _cancel_twice(bench: Bench) -> str:
    _, line = await _cancelled(bench, _cancel("r1"), _cancel("r1", reason=None), _cancel("r1"))
    return f"one {line.t} came"


async def _cancel_receipt(bench: Bench) -> str:
    _, line = await _cancelled(bench, _cancel("r1"))
    if line.t != "final":
        return "fatal came, which needs no receipt"
    try:
        outcome = read_receipt(line.get("receipt")).outcome
    except ValueError as error:
        raise Unfit(f"the receipt of a cancelled run cannot be read: {error}", [line]) from error
    return f"a receipt with outcome {outcome}"


async def _run_after_cancel(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", SPOKEN))
        await link.send(_cancel("r1"))
        await end(link, "r1")
        await link.send(bench.run("r2", SPOKEN))
        _final(await end(link, "r2"))
        return "the next run is done"


async def _many_pings(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", SPOKEN))
        for seq in range(PINGS):
            await link.send({"t": "ping", "seq": seq})
        await end(link, "r1")
        while sum(line.t == "pong" for line in link.lines) < PINGS:
            if await link.next(link.bounds.pong_s + link.bounds.slack_s) is None:
                break
        seen = [line.get("seq") for line in link.lines if line.t == "pong"]
        if seen != list(range(PINGS)):
            raise Unfit(f"{len(seen)} pongs for {PINGS} pings, or not in their order", link.lines)
        return f"{PINGS} pongs in order"


async def _same_ping_twice(bench: Bench) -> str:
    async with bench.greeted() as link:
        for _ in range(2):
            await link.send({"t": "ping", "seq": 3})
        for _ in range(2):
            line = await link.next(link.bounds.pong_s + link.bounds.slack_s)
            if line is None or line.t != "pong" or line.get("seq") != 3:
                raise Unfit("not two pongs for two pings of one number", link.lines)
        return "two pongs"


async def _ping_after_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", SPOKEN))
        await end(link, "r1")
        await link.send({"t": "ping", "seq": 9})
        if await link.until(lambda line: line.t == "pong", link.bounds.pong_s + link.bounds.slack_s) is None:
            raise Unfit("no pong after a run's end", link.lines)
        return "a pong"


async def _answers_to_nobody(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("ask/1",)))
        for ref_id, ask_id in (("r1", "nothing"), ("nobody", "a1")):
            await link.send({"t": "answer", "ref_id": ref_id, "id": ask_id, "decision": "deny"})
        line = await _answering(link, {"decision": "deny"})
        await link.send({"t": "answer", "ref_id": "r1", "id": "late", "decision": "allow"})
        after = await link.next(link.bounds.quiet_s)
        if after is not None:
            raise Unfit("it said something about an answer that came late", [after])
        return f"{line.t} came, and silence"


async def _answering(link: Wire, answer: dict[str, Any], *, times: int = 1) -> HostLine:
    """Answer every ask of a run, until its end."""
    while True:
        line = await link.until(lambda line: line.t == "ask" or line.t in ENDS, link.bounds.run_s)
        if line is None:
            raise Unfit("no end came after answered asks", link.lines)
        if line.t != "ask":
            return line
        given = {key: line.get("input") if value is None else value for key, value in answer.items()}
        for _ in range(times):
            await link.send({"t": "answer", "ref_id": line.get("ref_id"), "id": line.get("id"), **given})


def _answered(answer: dict[str, Any], times: int = 1) -> Any:
    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            await link.send(bench.run("r1", ("ask/1",)))
            line = await _answering(link, answer, times=times)
            _final(line)
            asks = sum(line.t == "ask" for line in link.lines)
            return f"{asks} asks, then final" if asks else "no ask came up"

    return announced("ask/1", check)


async def _asked_and_left(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("ask/1",)))
        line = await link.until(lambda line: line.t == "ask" or line.t in ENDS, link.bounds.run_s)
        if line is None or line.t != "ask":
            return "no ask came up"
        link.child.close_stdin()
        _final(await end(link, "r1"))
        return "the default decided, and final came"


async def _unannounced(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        await end(link, "r1")
        strange = [line for line in link.lines if line.t in ("ask", "pong", "patch")]
        if strange:
            raise Unfit(f"{strange[0].t} to a peer that announced cancel/1 alone", strange)
        return "nothing that was not announced"


async def _many_apart(bench: Bench) -> str:
    names = [f"run {number}" for number in range(RUNS_AT_ONCE)]
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, SPOKEN))
        for line in (await _ends(link, names)).values():
            _final(line)
        _each_apart(link, names)
        return f"{len(names)} runs, each with its own events and end"


def _each_apart(link: Wire, names: Sequence[str]) -> None:
    over: set[str] = set()
    for line in link.lines:
        name = line.get("ref_id")
        if line.t == "event" and (name not in names or name in over):
            raise Unfit(f"an event of {name!r:.60}, which is not open", [line])
        if line.t in ENDS:
            over.add(name)
    events = Counter(line.get("ref_id") for line in link.lines if line.t == "event")
    if len(set(events.values())) > 1 and min(events[name] for name in names) == 0:
        raise Unfit("some of many like runs have no events", link.lines)


async def _odd_ids_at_once(bench: Bench) -> str:
    names = ["", "a", "A", "☃", "a ", "1", '"']
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, SPOKEN))
        for line in (await _ends(link, names)).values():
            _final(line)
        return f"{len(names)} ids told apart"


async def _cancel_one(bench: Bench) -> str:
    names = ["r1", "r2", "r3", "r4"]
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, SPOKEN))
        await link.send(_cancel("r2"))
        found = await _ends(link, names)
        for name in ("r1", "r3", "r4"):
            _final(found[name])
            receipt = found[name].get("receipt")
            if isinstance(receipt, dict) and receipt.get("outcome") == "partial":
                raise Unfit(f"{name} is partial, although r2 was cancelled", [found[name]])
        return f"r2 ended with {found['r2'].t}, the others as they would"


async def _bad_among_many(bench: Bench) -> str:
    names = ["r1", "r2", "r3"]
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, SPOKEN))
            await link.send(b"{this is no message")
        for line in (await _ends(link, names)).values():
            _final(line)
        return "three bad lines ended nothing"


async def _wrong_among_many(bench: Bench) -> str:
    wrong = bench.run("wrong", SPOKEN)
    del wrong["work_order"]["task"]
    async with bench.greeted() as link:
        for message in (bench.run("r1", SPOKEN), wrong, bench.run("r2", SPOKEN)):
            await link.send(message)
        found = await _ends(link, ["r1", "wrong", "r2"])
        if found["wrong"].t != "fatal":
            raise Unfit("an order without a task was done", [found["wrong"]])
        for name in ("r1", "r2"):
            _final(found[name])
        return "one fatal by name, two finals"


async def _id_in_use(bench: Bench) -> str:
    async with bench.greeted() as link:
        # In one write, so that the first is open when the second is read.
        await link.send(b"\n".join(map(_line, (bench.run("r1", SPOKEN), bench.run("r1", SPOKEN)))))
        line = await link.until(lambda line: line.t in ENDS and line.get("ref_id") == "r1", link.bounds.run_s)
        if line is None:
            raise Unfit("no end came of the run that was open", link.lines)
        _final(line)
        if sum(line.t in ENDS for line in link.lines) == 1:
            await link.until(lambda line: line.t in ENDS, link.bounds.pong_s)
        await link.next(link.bounds.quiet_s)
        answers = [line for line in link.lines if line.t == "fatal"]
        twice = sum(line.t in ENDS and line.get("ref_id") == "r1" for line in link.lines) == 2
        if not twice and not (len(answers) == 1 and answers[0].get("ref_id") is None):
            raise Unfit("a run whose id is in use is answered by a fatal with ref_id null", link.lines)
        return "the second came after the end" if twice else "one final, and a fatal with ref_id null"


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message)


async def _eof_with_many(bench: Bench) -> str:
    names = ["r1", "r2", "r3"]
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, ("many/1",)))
        link.child.close_stdin()
        for line in (await _ends(link, names)).values():
            _final(line)
        return await exits(link, link.bounds.exit_s, "the last run")


async def _eof_with_both(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("plain", ("many/1",)))
        await link.send(bench.run("other", SPOKEN))
        link.child.close_stdin()
        found = await _ends(link, ["plain", "other"])
        _final(found["plain"])
        return await exits(link, link.bounds.grace_s + link.bounds.exit_s, "the last run")


async def _terminated_with_many(bench: Bench) -> str:
    async with bench.greeted() as link:
        for number in range(RUNS_AT_ONCE):
            await link.send(bench.run(f"r{number}", SPOKEN))
        return await terminated(link)


async def _slow_reader_of_many(bench: Bench) -> str:
    names = [f"r{number}" for number in range(RUNS_AT_ONCE)]
    async with bench.greeted() as link:
        for name in names:
            await link.send(bench.run(name, SPOKEN))
        await anyio.sleep(link.bounds.quiet_s)
        for line in (await _ends(link, names)).values():
            _final(line)
        _each_apart(link, names)
        return "nothing was lost in a pause"


async def _ping_among_many(bench: Bench) -> str:
    names = [f"r{number}" for number in range(RUNS_AT_ONCE)]
    async with bench.greeted() as link:
        for seq, name in enumerate(names):
            await link.send(bench.run(name, SPOKEN))
            await link.send({"t": "ping", "seq": seq})
        await _ends(link, names)
        await link.next(link.bounds.quiet_s)
        seen = [line.get("seq") for line in link.lines if line.t == "pong"]
        if seen != list(range(len(names))):
            raise Unfit(f"{len(seen)} pongs for {len(names)} pings", link.lines)
        return f"{len(seen)} pongs between {len(names)} runs"


COMPLETE_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("takes a cancel without reason and grace", "complete", "S51", "sent a run and a bare cancel",
     announced("cancel/1", _cancel_bare)),
    ("ends a run whose cancel gives it no time", "complete", "S51", "sent a run and a cancel with 50 ms",
     announced("cancel/1", _cancel_short)),
    ("ends a run once, however often it is cancelled", "complete", "S52", "sent a run and three cancels",
     announced("cancel/1", _cancel_twice)),
    ("gives a readable receipt of a cancelled run", "complete", "S30", "sent a run and a cancel",
     announced("cancel/1", _cancel_receipt)),
    ("works on after a cancel", "complete", "S17", "cancelled a run and sent another",
     announced("cancel/1", announced("many/1", _run_after_cancel))),
    ("answers every ping of many, in order", "complete", "S53", f"sent a run and {PINGS} pings",
     announced("ping/1", _many_pings)),
    ("answers a number that comes twice", "complete", "S53", "sent two pings of one number",
     announced("ping/1", _same_ping_twice)),
    ("answers a ping after a run", "complete", "S53", "sent a run, and a ping after its end",
     announced("ping/1", announced("many/1", _ping_after_run))),
    ("ignores answers to nobody and late ones", "complete", "S57", "answered asks that were not made",
     announced("ask/1", _answers_to_nobody)),
    ("goes on when allowed", "complete", "S56", "allowed every ask", _answered({"decision": "allow"})),
    ("goes on when allowed for the whole run", "complete", "S56", "allowed every ask, for the run",
     _answered({"decision": "allow", "remember": "run"})),
    ("takes another input", "complete", "S56", "answered every ask with its own input as a change",
     _answered({"decision": "modify", "input": None})),
    ("ignores a second answer", "complete", "S57", "answered asks twice", _answered({"decision": "deny"}, times=2)),
    ("decides by default when nobody is left to ask", "complete", "S57", "closed stdin while an ask was open",
     announced("ask/1", _asked_and_left)),
    ("says nothing that was not announced", "complete", "S50", "announced cancel/1 alone", _unannounced),
    ("keeps many runs apart", "complete", "S59", f"sent {RUNS_AT_ONCE} runs at once", announced("many/1", _many_apart)),
    ("tells odd ids apart", "complete", "S59", "sent runs at once whose ids differ by little",
     announced("many/1", _odd_ids_at_once)),
    ("cancels one of many", "complete", "S59", "sent four runs, cancelled one",
     announced("cancel/1", announced("many/1", _cancel_one))),
    ("ends no run for a bad line", "complete", "S59", "sent bad lines between three runs",
     announced("many/1", _bad_among_many)),
    ("ends no run for another's wrong order", "complete", "S18", "sent a wrong order between two good ones",
     announced("many/1", _wrong_among_many)),
    ("refuses an id that is in use", "complete", "S59", "sent two runs of one id at once",
     announced("many/1", _id_in_use)),
    ("finishes many runs after stdin ended", "complete", "S34", "sent three runs, closed stdin",
     announced("many/1", _eof_with_many)),
    ("finishes a plain run where another's peer is gone", "complete", "S34",
     "closed stdin under a run with cancel/1 and one without", announced("many/1", _eof_with_both)),
    ("ends at SIGTERM under many runs, and leaves nothing", "complete", "S36", f"sent {RUNS_AT_ONCE} runs and SIGTERM",
     announced("many/1", _terminated_with_many)),
    ("loses nothing of many runs to a slow reader", "complete", "S25", f"sent {RUNS_AT_ONCE} runs and made a pause",
     announced("many/1", _slow_reader_of_many)),
    ("answers pings between many runs", "complete", "S54", f"sent {RUNS_AT_ONCE} runs with a ping after each",
     announced("ping/1", announced("many/1", _ping_among_many))),
)  # fmt: skip
