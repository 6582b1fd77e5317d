"""What a robust host survives: unreadable lines, wrong orders, signals, a listener that goes away."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import msgspec

from backplane.conform.bench import Bench, BenchCheck, BenchRow, end, final, terminated, unheard
from backplane.conform.link import HostLine, Wire
from backplane.conform.plain import ENDS
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json
from backplane.protocol import LINE_BYTES_MAX

DEEP: Final = 100_000
"""Levels that make a recursive reader fail."""


async def _terminated_in_a_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run())
        await link.next(link.bounds.quiet_s)
        return await terminated(link)


async def _second_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1"))
        await final(link, "r1")
        line = await one_more(link, bench.run("r2"))
        if line is None:
            return await gone_in_order(link)
        if line.t != "final" or line.get("ref_id") != "r2":
            raise Unfit("the second run did not end with its own final", link.lines)
        return "both runs ended with final"


async def one_more(link: Wire, run: Json) -> HostLine | None:
    """The end of a run after another's; None when the host takes no more, as it may."""
    if not await link.send(run) or await link.child.wait(0) is not None:
        return None
    return await link.until(lambda line: line.t in ENDS, link.bounds.run_s)


async def gone_in_order(link: Wire) -> str:
    how = await link.child.wait(link.bounds.slack_s)
    if how is None or how.code != 0:
        raise Unfit("neither a second end nor an exit with code 0 came", link.lines)
    return "one run a process; it exits with code 0"


async def _listener_gone(bench: Bench) -> str:
    async with bench.greeted() as link:
        return await unheard(link, bench.run())


def unreadable(line: Callable[[Bench], bytes], name: str = "bad") -> BenchCheck:
    """A check that a line is answered by a fatal or ignored, and that the host then works or exits in order."""

    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            await link.send(line(bench))
            await link.send(bench.run("good"))
            link.child.close_stdin()
            await link.until(lambda line: line.t in ENDS and line.get("ref_id") == "good", link.bounds.run_s)
            ends = [line for line in link.lines if line.t in ENDS]
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

    return check


def _wrong_order(bench: Bench) -> bytes:
    run = bench.run("bad")
    del run["work_order"]["task"]
    return msgspec.json.encode(run)


async def _wrong_order_is_fatal(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(_wrong_order(bench))
        line = await end(link, "bad")
        if line.t != "fatal":
            raise Unfit("an order without a task was done", link.lines)
        return f"fatal: {line.get('error')!r:.80}"


async def _half_a_character(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(json.dumps(bench.run(task="half: \ud800")).encode())
        link.child.close_stdin()
        await link.until(lambda line: line.t in ENDS, link.bounds.run_s)
        broken = [line for line in link.lines if line.fault is not None]
        if broken:
            raise Unfit(f"it wrote what is not strict JSON: {broken[0].fault}", broken)
        return "nothing broken came back"


def text(data: bytes) -> Callable[[Bench], bytes]:
    return lambda bench: data


def _run_with(old: bytes, new: bytes) -> Callable[[Bench], bytes]:
    """A run named `bad` whose task is put into the text as raw bytes."""
    return lambda bench: msgspec.json.encode(bench.run("bad", task="MARK")).replace(old, new)


HOSTILE_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("survives a line that is no JSON", "robust", "S19", "sent `{\"t\":\"run\",` and a good run",
     unreadable(text(b'{"t":"run",'))),
    ("survives a line that is no object", "robust", "S19", "sent an array and a good run",
     unreadable(text(b'["run",{"t":"run","id":"bad"}]'))),
    ("survives plain words", "robust", "S19", "sent words and a good run", unreadable(text(b"hello? anybody there"))),
    ("survives a control byte", "robust", "S19", "sent bytes that are no text and a good run",
     unreadable(text(bytes(byte for byte in range(1, 32) if byte != 10) + b"\xfe\xff"))),
    ("does not take half a line for a run", "robust", "S19", "sent a run cut in the middle and a good one",
     unreadable(lambda bench: msgspec.json.encode(bench.run("bad"))[:-40])),
    ("does not take invalid UTF-8 for a run", "robust", "S3", "sent a run with a broken character and a good one",
     unreadable(_run_with(b"MARK", b"\xc3\x28 \xff"))),
    ("survives deep nesting", "robust", "S3", f"sent a run {DEEP} levels deep and a good one",
     unreadable(_run_with(b'"MARK"', b"[" * DEEP + b"]" * DEEP))),
    ("survives a line over the limit", "robust", "S4", "sent a run of 17 MiB and a good one",
     unreadable(_run_with(b"MARK", b"x" * (LINE_BYTES_MAX + 1024 * 1024)))),
    ("does not give back half a character", "robust", "S3", "sent a task with a lone surrogate", _half_a_character),
    ("answers a wrong order with fatal", "robust", "S18", "sent an order without a task", _wrong_order_is_fatal),
    ("goes on after a wrong order", "robust", "S19", "sent an order without a task and a good run",
     unreadable(_wrong_order)),
    ("takes a second run, or exits in order", "robust", "S17", "sent a run after the end of another", _second_run),
    ("ends at SIGTERM in a run, and leaves nothing", "robust", "S36", "sent a run and SIGTERM", _terminated_in_a_run),
    ("ends when nobody listens", "robust", "S37", "closed its stdout and sent a run", _listener_gone),
)  # fmt: skip
