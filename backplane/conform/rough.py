"""More of what a robust host survives: wrong shapes, floods, repeated ends, a reader that takes its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from backplane.conform.bench import Bench, BenchRow, end, exits, final, terminated, unheard
from backplane.conform.hostile import gone_in_order, one_more, text, unreadable
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json
from backplane.protocol import LINE_BYTES_MAX

GARBAGE_LINES: Final = 500
RUNS_IN_A_ROW: Final = 5
PAUSE_S: Final = 0.3
"""How long nothing is read of a run: longer than a small one takes."""


def _shaped(**members: Json) -> Callable[[Bench], bytes]:
    """A run named `bad` with members of a wrong shape."""
    return lambda bench: msgspec.json.encode({**bench.run("bad"), **members})


def _replaced(old: bytes, new: bytes) -> Callable[[Bench], bytes]:
    return lambda bench: msgspec.json.encode(bench.run("bad", task="MARK")).replace(old, new)


def _utf16(bench: Bench) -> bytes:
    return msgspec.json.encode(bench.run("bad")).decode().encode("utf-16")


async def _missing_root(bench: Bench) -> str:
    async with bench.greeted() as link:
        run = bench.run()
        run["work_order"]["workspace"]["root"] = f"{bench.root}/there/is/no/such/folder"
        await link.send(run)
        line = await end(link)
        if line.get("ref_id") != "r1":
            raise Unfit("it ended with a fatal that names no run", [line])
        return f"{line.t} came"


async def _explains(bench: Bench) -> str:
    async with bench.greeted() as link:
        run = bench.run("bad")
        del run["work_order"]["task"]
        await link.send(run)
        line = await end(link, "bad")
        if not isinstance(line.get("error"), str) or not str(line.get("error")).strip():
            raise Unfit("its fatal has no words", [line])
        return f"{line.get('error')!r:.80}"


async def _in_a_row(bench: Bench) -> str:
    async with bench.greeted() as link:
        for number in range(RUNS_IN_A_ROW):
            line = await one_more(link, bench.run(f"r{number}"))
            if line is None and number:
                return await gone_in_order(link)
            if line is None or line.t != "final" or line.get("ref_id") != f"r{number}":
                raise Unfit(f"run {number + 1} of {RUNS_IN_A_ROW} did not end with its own final", link.lines)
        return f"{RUNS_IN_A_ROW} runs, one after the other"


async def _same_id(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("again"))
        await final(link, "again")
        line = await one_more(link, bench.run("again"))
        if line is None:
            return await gone_in_order(link)
        return f"{line.t} came for the second"


async def _listener_gone_in_a_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run())
        await link.next(link.bounds.run_s)
        # A host that has nothing more to say may notice when it is asked again.
        return await unheard(link, bench.run("r2"))


async def _slow_reader(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run())
        await anyio.sleep(PAUSE_S)
        line = await end(link)
        broken = [line for line in link.lines if line.fault is not None or line.t is None]
        if line.t != "final" or broken:
            raise Unfit("what came after a pause is not whole", broken or link.lines)
        return f"{len(link.lines)} lines after a pause"


async def _twice_terminated(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run())
        link.child.terminate()
        link.child.terminate()
        return await exits(link, link.bounds.exit_s, "two SIGTERMs")


async def _nothing_left_idle(bench: Bench) -> str:
    async with bench.greeted() as link:
        return await terminated(link)


ROUGH_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("survives an event sent to it", "robust", "S19", "sent an `event` and a good run",
     unreadable(text(b'{"t":"event","ref_id":"bad","event":{"type":"warning","message":"x"}}'))),
    ("survives a final sent to it", "robust", "S19", "sent a `final` and a good run",
     unreadable(text(b'{"t":"final","ref_id":"bad","receipt":{}}'))),
    ("survives a hello sent to it", "robust", "S19", "sent a `hello` and a good run",
     unreadable(text(b'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"x"},"capabilities":{}}'))),
    ("does not take an order that is null", "robust", "S18", "sent a run with `work_order: null` and a good one",
     unreadable(_shaped(work_order=None))),
    ("does not take an order that is an array", "robust", "S18", "sent a run with `work_order: []` and a good one",
     unreadable(_shaped(work_order=[]))),
    ("does not take a run without an id", "robust", "S19", "sent a run with `id: null` and a good one",
     unreadable(_shaped(id=None))),
    ("does not take a number for an id", "robust", "S19", "sent a run with `id: 7` and a good one",
     unreadable(_shaped(id=7), name="7")),
    ("does not take a number for a task", "robust", "S18", "sent a run with `task: 7` and a good one",
     unreadable(_replaced(b'"MARK"', b"7"))),
    ("survives a `t` that is no text", "robust", "S19", "sent `t: 5`, `t: null` and a good run",
     unreadable(text(b'{"t":5,"id":"bad"}\n{"t":null}\n{"t":["run"]}'))),
    ("survives an empty object", "robust", "S19", "sent `{}` and a good run", unreadable(text(b"{}"))),
    ("survives a single brace", "robust", "S19", "sent `{` and a good run", unreadable(text(b"{"))),
    ("survives NUL bytes", "robust", "S19", "sent 100 NUL bytes and a good run", unreadable(text(bytes(100)))),
    ("does not take NaN for a number", "robust", "S3", "sent a run with NaN and a good one",
     unreadable(_replaced(b'"MARK"', b"NaN"))),
    ("survives a number beyond all bounds", "robust", "S3", "sent a run with a number of 5,000 digits and a good one",
     unreadable(_replaced(b'"MARK"', b"9" * 5000))),
    ("does not take UTF-16 for a run", "robust", "S3", "sent a run in UTF-16 and a good one", unreadable(_utf16)),
    ("does not take two objects for one", "robust", "S1", "sent two objects on a line and a good run",
     unreadable(lambda bench: msgspec.json.encode(bench.run("bad")) + b'{"t":"ping"}')),
    ("survives many unreadable lines", "robust", "S19", f"sent {GARBAGE_LINES} lines of garbage and a good run",
     unreadable(text(b"\n".join([b"{garbage", b"garbage", b"]"] * (GARBAGE_LINES // 3))))),
    ("survives a long line of noise", "robust", "S4", "sent 17 MiB of letters and a good run",
     unreadable(lambda bench: b"x" * (LINE_BYTES_MAX + 1024 * 1024))),
    ("ends a run whose folder is missing", "robust", "S18", "sent a root that is not there", _missing_root),
    ("explains a fatal", "robust", "S28", "sent an order without a task", _explains),
    ("takes several runs in a row, or exits in order", "robust", "S17", f"{RUNS_IN_A_ROW} runs, each after an end",
     _in_a_row),
    ("takes an id again after its run's end", "robust", "S17", "sent one id twice, one after the other", _same_id),
    ("ends when its listener leaves in a run", "robust", "S37", "closed its stdout after the first event",
     _listener_gone_in_a_run),
    ("waits for a slow reader", "robust", "S25", f"read nothing for {PAUSE_S:g} s of a run", _slow_reader),
    ("ends at two SIGTERMs as at one", "robust", "S36", "sent a run and SIGTERM twice", _twice_terminated),
    ("leaves nothing when it is ended idle", "robust", "S38", "sent SIGTERM after the hello", _nothing_left_idle),
)  # fmt: skip
