"""The extensions that a host announced; what it did not announce is not asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backplane.conform.bench import Bench, BenchCheck, BenchRow, end, exits, final
from backplane.conform.link import HostLine
from backplane.conform.plain import ENDS
from backplane.conform.verdict import Unasked, Unfit
from backplane.contract.canonical import INT_MAX


async def _cancel_unknown(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send({"t": "cancel", "ref_id": "nobody", "reason": None})
        await link.send(bench.run("r1", ("cancel/1",)))
        await link.send({"t": "cancel", "ref_id": "nobody", "reason": "still nobody", "grace_ms": 2000})
        return await final(link)


async def _cancel_running(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        await link.send(
            {"t": "cancel", "ref_id": "r1", "reason": "a check", "grace_ms": int(link.bounds.grace_s * 1000)}
        )
        line = await end(link, "r1", link.bounds.grace_s + link.bounds.slack_s)
        await link.next(link.bounds.quiet_s)
        ends = [line for line in link.lines if line.t in ENDS]
        if len(ends) > 1:
            raise Unfit("more than one end came", ends)
        receipt = line.get("receipt")
        return f"{line.t}, outcome {receipt.get('outcome')}" if isinstance(receipt, dict) else str(line.t)


async def _cancel_late(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        await end(link)
        await link.send({"t": "cancel", "ref_id": "r1", "reason": None})
        line = await link.next(link.bounds.quiet_s)
        if line is not None:
            raise Unfit("it answered a cancel for a run that had ended", [line])
        return "no answer, as it should be"


async def _eof_cancels(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        link.child.close_stdin()
        return await exits(link, link.bounds.grace_s + link.bounds.exit_s, "its control plane was gone")


async def _ping_idle(bench: Bench) -> str:
    wanted = [0, 7, 2**53 + 1, INT_MAX]
    async with bench.greeted() as link:
        for seq in wanted:
            await link.send({"t": "ping", "seq": seq})
        for seq in wanted:
            line = await link.next(link.bounds.pong_s + link.bounds.slack_s)
            if line is None or line.t != "pong" or line.get("seq") != seq:
                raise Unfit(f"no pong with seq {seq} came", link.lines)
        return f"{len(wanted)} pongs in order"


async def _ping_running(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("ping/1",)))
        await link.send({"t": "ping", "seq": 1})
        if (
            await link.until(
                lambda line: line.t == "pong" and line.get("seq") == 1, link.bounds.pong_s + link.bounds.slack_s
            )
            is None
        ):
            raise Unfit(f"no pong within {link.bounds.pong_s:g} s of a ping during a run", link.lines)
        return "a pong"


ASK_MEMBERS: Final = {
    "tool": ("name", "input"),
    "patch": ("diff", "files"),
    "input": ("question", "options"),
    "result": ("name", "input", "output", "is_error"),
    "spend": ("input",),
}


async def _asks(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("ask/1",)))
        seen: list[str] = []
        while True:
            line = await link.until(lambda line: line.t == "ask" or line.t in ENDS, link.bounds.run_s)
            if line is None:
                raise Unfit(f"no end came after {len(seen)} denied asks", link.lines)
            if line.t != "ask":
                return f"{len(seen)} asks, all of the right shape" if seen else "no ask came up"
            seen.append(_ask_id(line, seen))
            await link.send({"t": "answer", "ref_id": "r1", "id": seen[-1], "decision": "deny", "reason": "a check"})


def _ask_id(line: HostLine, seen: Sequence[str]) -> str:
    kind, ask_id = line.get("kind"), line.get("id")
    missing = [name for name in ASK_MEMBERS.get(str(kind), ("kind",)) if name not in line.value]
    if missing or line.get("ref_id") != "r1" or not isinstance(ask_id, str):
        raise Unfit(f"an ask of kind {kind!r:.40} lacks {', '.join(missing) or 'its ref_id or id'}", [line])
    if ask_id in seen:
        raise Unfit("an ask's id was used twice", [line])
    return ask_id


async def _many(bench: Bench) -> str:
    async with bench.greeted() as link:
        names = [f"r{number}" for number in range(1, 5)]
        for name in names:
            await link.send(bench.run(name, ("many/1", "cancel/1")))
        missing = set(names)
        while missing:
            line = await link.until(lambda line: line.t in ENDS, link.bounds.run_s)
            if line is None or line.get("ref_id") not in missing:
                raise Unfit(f"no end came of {', '.join(sorted(missing))}, or one too many", link.lines)
            missing.discard(line.get("ref_id"))
        return f"{len(names)} runs ended, each once"


def announced(extension: str, check: BenchCheck) -> BenchCheck:
    """A check that is made only where the host announced this extension."""

    async def only_if_announced(bench: Bench) -> str:
        if extension not in bench.extensions:
            raise Unasked(f"{extension} is not announced")
        return await check(bench)

    return only_if_announced


EXTENDED_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("ignores a cancel for a run it does not know", "behaves", "S52", "cancelled `nobody`, then ran",
     announced("cancel/1", _cancel_unknown)),
    ("ends a cancelled run within the grace", "behaves", "S51", "sent a run and a cancel",
     announced("cancel/1", _cancel_running)),
    ("ignores a cancel that comes late", "behaves", "S52", "cancelled a run that had ended",
     announced("cancel/1", _cancel_late)),
    ("cancels when its control plane is gone", "behaves", "S34", "announced cancel/1, sent a run, closed stdin",
     announced("cancel/1", _eof_cancels)),
    ("answers pings before a run", "behaves", "S53", "sent four pings, the largest number too",
     announced("ping/1", _ping_idle)),
    ("answers a ping during a run", "behaves", "S54", "sent a run and a ping", announced("ping/1", _ping_running)),
    ("asks in the right shape and goes on when denied", "behaves", "S55", "announced ask/1, denied every ask",
     announced("ask/1", _asks)),
    ("runs several orders at once", "behaves", "S59", "sent four runs without waiting", announced("many/1", _many)),
)  # fmt: skip
