"""Checks that start a fresh child each: odd input, extensions, hostile lines, signals.

Every wait is bounded by `Bounds`; a child that does not answer fails its check and is gone when
the check is over.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from backplane.conform.link import Line, Link, Place, linked, order
from backplane.conform.plain import ENDS
from backplane.conform.verdict import Level, Unasked, Unfit
from backplane.contract.canonical import INT_MAX, Json
from backplane.protocol import LINE_BYTES_MAX

LONG_TASK_BYTES: Final = 1024 * 1024
"""A legal task of this size: instructions with a few files pasted in."""

PIECE_BYTES: Final = 7
"""Cuts a line so that characters of several bytes are cut as well."""

DEEP: Final = 100_000
"""Levels that make a recursive reader fail."""


class Bench(msgspec.Struct, frozen=True):
    """What every check of this file needs."""

    place: Place
    root: str
    task: str
    extensions: tuple[str, ...]
    """What the host announced in its plain run."""

    @asynccontextmanager
    async def greeted(self) -> AsyncIterator[Link]:
        """A fresh child that has said its hello."""
        async with linked(self.place) as link:
            if await link.until(lambda line: line.t == "hello", link.bounds.hello_s) is None:
                raise Unfit("this time no hello came", link.lines)
            yield link

    def run(self, run_id: str = "r1", extensions: Sequence[str] = (), **changed: Json) -> dict[str, Any]:
        announced = {"extensions": list(extensions)} if extensions else {}
        return {"t": "run", "id": run_id, "work_order": order(self.root, **{"task": self.task, **changed}), **announced}


async def _end(link: Link, run_id: str = "r1", timeout_s: float | None = None) -> Line:
    """The end of a run, and that it is one."""
    line = await link.until(
        lambda line: line.t in ENDS and line.get("ref_id") in (run_id, None), timeout_s or link.bounds.run_s
    )
    if line is None:
        ending = f"it ended with {link.child.exit.describe()}" if link.child.exit else "it is silent"
        raise Unfit(f"no end of run {run_id!r} came; {ending}", link.lines)
    return line


async def _final(link: Link, run_id: str = "r1") -> str:
    line = await _end(link, run_id)
    if line.t != "final":
        raise Unfit(f"it ended with fatal: {line.get('error')!r:.200}", link.lines)
    return "final came"


async def _exits(link: Link, within_s: float, why: str) -> str:
    await link.rest(within_s + link.bounds.slack_s)
    how = await link.child.wait(link.bounds.slack_s)
    if how is None:
        raise Unfit(f"still running {within_s:g} s after {why}", link.lines)
    return how.describe()


async def _eof_without_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        before = link.handed
        link.child.close_stdin()
        how = await _exits(link, link.bounds.exit_s, "stdin ended")
        if how != "exit code 0":
            raise Unfit(f"it ended with {how}", link.lines)
        if link.lines[before:]:
            raise Unfit("it spoke although nothing was asked", link.lines[before:])
        return how


def _one_run(
    message: Callable[[Bench], Json], run_id: str = "r1", *, may_decline: bool = False, **how: Any
) -> Callable[[Bench], Awaitable[str]]:
    """A check that sends one message and wants its final, or where it may decline, a fatal that names the run."""

    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            if not await link.send(message(bench), **how):
                raise Unfit("it did not read the order", link.lines)
            if not may_decline:
                return await _final(link, run_id)
            line = await _end(link, run_id)
            if line.get("ref_id") != run_id:
                raise Unfit("it ended with a fatal that names no run", link.lines)
            return f"{line.t} came"

    return check


def _odd_members(bench: Bench) -> Json:
    run = bench.run(priority="high", notes=[{"x": None}])
    run["work_order"]["config"]["vendor"] = {"nobody": {"deep": [1, {"t": "final", "task": "another"}]}}
    return {**run, "urgent": True, "event": {"task": "no"}}


def _t_last(bench: Bench) -> bytes:
    run = bench.run()
    moved = {"work_order": dict(reversed(run["work_order"].items())), "id": run["id"], "t": "run"}
    return json.dumps(moved, separators=(" ,\t", " : ")).encode()


def _blanks_around(bench: Bench) -> bytes:
    return b"\n\r\n  \t\n  " + msgspec.json.encode(bench.run()) + b" \r"


def _unknown_first(bench: Bench) -> bytes:
    return b'{"t":"weather","sky":["clear"],"id":"r1"}\n' + msgspec.json.encode(bench.run())


def _unicode_task(bench: Bench) -> Json:
    return bench.run(task=bench.task + ' é 漢 😀 \u2028\u2029\u0085 \u200b "quoted" \\n \t back\\slash')


def _escaped_task(bench: Bench) -> bytes:
    # Every character as \uXXXX, keys too.
    text = json.dumps(bench.run(task=bench.task + " é 😀"), ensure_ascii=True)
    return text.replace('"task"', '"\\u0074\\u0061sk"').replace("/", "\\/").encode()


def _long_task(bench: Bench) -> Json:
    return bench.run(task=bench.task + "\n" + "x" * LONG_TASK_BYTES)


def _everything(bench: Bench) -> Json:
    run = bench.run(
        lane="workspace_first", context={"files": [], "snippets": [{"name": "note", "content": "be brief"}]}
    )
    asked = run["work_order"]
    asked["workspace"] |= {"mode": "pass_through", "include": ["**"], "exclude": ["**/*.log"]}
    asked["policy"] |= {"deny_write": ["**/.git/config"], "deny_read": ["**/.env*"]}
    asked["config"] |= {"env": {"BACKPLANE_CONFORM": "1"}, "max_turns": 1000, "max_budget_usd": 1000}
    return run


async def _last_line(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run(), newline=b"")
        link.child.close_stdin()
        return await _final(link)


async def _terminated(bench: Bench) -> str:
    async with bench.greeted() as link:
        link.child.terminate()
        return await _exits(link, link.bounds.exit_s, "SIGTERM")


async def _terminated_in_a_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run())
        await link.next(link.bounds.quiet_s)
        link.child.terminate()
        how = await _exits(link, link.bounds.exit_s, "SIGTERM")
        await link.child.stop(grace_s=0)
        if link.child.swept:
            raise Unfit(f"{link.child.swept} of its processes were left running", link.lines)
        return how


async def _second_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1"))
        await _final(link, "r1")
        if not await link.send(bench.run("r2")) or await link.child.wait(0) is not None:
            return await _gone_in_order(link)
        line = await link.until(lambda line: line.t in ENDS, link.bounds.run_s)
        if line is None:
            return await _gone_in_order(link)
        if line.t != "final" or line.get("ref_id") != "r2":
            raise Unfit("the second run did not end with its own final", link.lines)
        return "both runs ended with final"


async def _gone_in_order(link: Link) -> str:
    how = await link.child.wait(link.bounds.slack_s)
    if how is None or how.code != 0:
        raise Unfit("neither a second end nor an exit with code 0 came", link.lines)
    return "one run a process; it exits with code 0"


async def _listener_gone(bench: Bench) -> str:
    async with bench.greeted() as link:
        link.child.close_stdout()
        link.ended = True
        await link.send(bench.run())
        if await link.child.wait(link.bounds.closed_s + link.bounds.slack_s) is None:
            raise Unfit(f"still running {link.bounds.closed_s:g} s after its stdout was closed", link.lines)
        return "it ended"


def _unreadable(line: Callable[[Bench], bytes], name: str = "bad") -> Callable[[Bench], Awaitable[str]]:
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
            if ends and await link.child.wait(link.bounds.exit_s) is not None:
                return "answered by fatal, then exited"
            how = link.child.exit.describe() if link.child.exit else "it hangs"
            raise Unfit(f"no fatal came, and the run after it was not done: {how}", link.lines)

    return check


def _wrong_order(bench: Bench) -> bytes:
    run = bench.run("bad")
    del run["work_order"]["task"]
    return msgspec.json.encode(run)


async def _wrong_order_is_fatal(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(_wrong_order(bench))
        line = await _end(link, "bad")
        if line.t != "fatal":
            raise Unfit("an order without a task was done", link.lines)
        return f"fatal: {line.get('error')!r:.80}"


async def _half_a_character(bench: Bench) -> str:
    async with bench.greeted() as link:
        text = json.dumps(bench.run(task="half: \ud800"))
        await link.send(text.encode())
        link.child.close_stdin()
        await link.until(lambda line: line.t in ENDS, link.bounds.run_s)
        broken = [line for line in link.lines if line.fault is not None]
        if broken:
            raise Unfit(f"it wrote what is not strict JSON: {broken[0].fault}", broken)
        return "nothing broken came back"


async def _cancel_unknown(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send({"t": "cancel", "ref_id": "nobody", "reason": None})
        await link.send(bench.run("r1", ("cancel/1",)))
        await link.send({"t": "cancel", "ref_id": "nobody", "reason": "still nobody", "grace_ms": 2000})
        return await _final(link)


async def _cancel_running(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        await link.send(
            {"t": "cancel", "ref_id": "r1", "reason": "a check", "grace_ms": int(link.bounds.grace_s * 1000)}
        )
        line = await _end(link, "r1", link.bounds.grace_s + link.bounds.slack_s)
        await link.next(link.bounds.quiet_s)
        ends = [line for line in link.lines if line.t in ENDS]
        if len(ends) > 1:
            raise Unfit("more than one end came", ends)
        receipt = line.get("receipt")
        return f"{line.t}, outcome {receipt.get('outcome')}" if isinstance(receipt, dict) else str(line.t)


async def _cancel_late(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        await _end(link)
        await link.send({"t": "cancel", "ref_id": "r1", "reason": None})
        line = await link.next(link.bounds.quiet_s)
        if line is not None:
            raise Unfit("it answered a cancel for a run that had ended", [line])
        return "no answer, as it should be"


async def _eof_cancels(bench: Bench) -> str:
    async with bench.greeted() as link:
        await link.send(bench.run("r1", ("cancel/1",)))
        link.child.close_stdin()
        return await _exits(link, link.bounds.grace_s + link.bounds.exit_s, "its control plane was gone")


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


def _ask_id(line: Line, seen: Sequence[str]) -> str:
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


def _announced(extension: str, check: Callable[[Bench], Awaitable[str]]) -> Callable[[Bench], Awaitable[str]]:
    async def only_if_announced(bench: Bench) -> str:
        if extension not in bench.extensions:
            raise Unasked(f"{extension} is not announced")
        return await check(bench)

    return only_if_announced


def _text(text: bytes) -> Callable[[Bench], bytes]:
    return lambda bench: text


def _run_with(old: bytes, new: bytes) -> Callable[[Bench], bytes]:
    """A run named `bad` whose task is put into the text as raw bytes."""
    return lambda bench: msgspec.json.encode(bench.run("bad", task="MARK")).replace(old, new)


ODD_ID: Final = '☃ run/1 "x"\\'

ALIVE_CHECKS: Final[tuple[tuple[str, Level, str, str, Callable[[Bench], Awaitable[str]]], ...]] = (
    ("exits when stdin ends before any run", "behaves", "S35", "closed stdin after the hello", _eof_without_run),
    ("takes any string as a run's id", "behaves", "S14", f"sent a run with the id {ODD_ID!r}",
     _one_run(lambda bench: bench.run(ODD_ID), ODD_ID)),
    ("ignores members it does not know", "behaves", "S16", "sent a run with strange members at every level",
     _one_run(_odd_members)),
    ("reads members in any order, and blanks", "behaves", "S5", "sent a run with `t` at its end", _one_run(_t_last)),
    ("skips blank lines and takes CR LF", "behaves", "S7", "sent blank lines, then a run that ends in CR LF",
     _one_run(_blanks_around)),
    ("ignores a message it does not know", "behaves", "S6", "sent a `weather` message, then a run",
     _one_run(_unknown_first)),
    ("takes text of all languages", "behaves", "S1", "sent a task with U+2028, U+0085 and characters beyond 16 bits",
     _one_run(_unicode_task)),
    ("reads escapes", "behaves", "S1", "sent a run with escaped characters, in keys too", _one_run(_escaped_task)),
    ("reads a line in small pieces", "behaves", "S15", f"sent a run {PIECE_BYTES} bytes a write",
     _one_run(_unicode_task, piece_bytes=PIECE_BYTES)),
    ("takes a task of 1 MiB", "behaves", "S15", "sent a run of that size", _one_run(_long_task, may_decline=True)),
    ("takes an order with everything in it", "behaves", "S13", "sent an order with policy, snippets, limits",
     _one_run(_everything, may_decline=True)),
    ("takes a last line without its newline", "behaves", "S35", "sent a run without newline, closed stdin", _last_line),
    ("ends at SIGTERM", "behaves", "S36", "sent SIGTERM after the hello", _terminated),
    ("ignores a cancel for a run it does not know", "behaves", "S52", "cancelled `nobody`, then ran",
     _announced("cancel/1", _cancel_unknown)),
    ("ends a cancelled run within the grace", "behaves", "S51", "sent a run and a cancel",
     _announced("cancel/1", _cancel_running)),
    ("ignores a cancel that comes late", "behaves", "S52", "cancelled a run that had ended",
     _announced("cancel/1", _cancel_late)),
    ("cancels when its control plane is gone", "behaves", "S34", "announced cancel/1, sent a run, closed stdin",
     _announced("cancel/1", _eof_cancels)),
    ("answers pings before a run", "behaves", "S53", "sent four pings, the largest number too",
     _announced("ping/1", _ping_idle)),
    ("answers a ping during a run", "behaves", "S54", "sent a run and a ping", _announced("ping/1", _ping_running)),
    ("asks in the right shape and goes on when denied", "behaves", "S55", "announced ask/1, denied every ask",
     _announced("ask/1", _asks)),
    ("runs several orders at once", "behaves", "S59", "sent four runs without waiting", _announced("many/1", _many)),
    ("survives a line that is no JSON", "robust", "S19", "sent `{\"t\":\"run\",` and a good run",
     _unreadable(_text(b'{"t":"run",'))),
    ("survives a line that is no object", "robust", "S19", "sent an array and a good run",
     _unreadable(_text(b'["run",{"t":"run","id":"bad"}]'))),
    ("survives plain words", "robust", "S19", "sent words and a good run", _unreadable(_text(b"hello? anybody there"))),
    ("survives a control byte", "robust", "S19", "sent bytes that are no text and a good run",
     _unreadable(_text(bytes(byte for byte in range(1, 32) if byte != 10) + b"\xfe\xff"))),
    ("does not take half a line for a run", "robust", "S19", "sent a run cut in the middle and a good one",
     _unreadable(lambda bench: msgspec.json.encode(bench.run("bad"))[:-40])),
    ("does not take invalid UTF-8 for a run", "robust", "S3", "sent a run with a broken character and a good one",
     _unreadable(_run_with(b"MARK", b"\xc3\x28 \xff"))),
    ("survives deep nesting", "robust", "S3", f"sent a run {DEEP} levels deep and a good one",
     _unreadable(_run_with(b'"MARK"', b"[" * DEEP + b"]" * DEEP))),
    ("survives a line over the limit", "robust", "S4", "sent a run of 17 MiB and a good one",
     _unreadable(_run_with(b"MARK", b"x" * (LINE_BYTES_MAX + 1024 * 1024)))),
    ("does not give back half a character", "robust", "S3", "sent a task with a lone surrogate", _half_a_character),
    ("answers a wrong order with fatal", "robust", "S18", "sent an order without a task", _wrong_order_is_fatal),
    ("goes on after a wrong order", "robust", "S19", "sent an order without a task and a good run",
     _unreadable(_wrong_order)),
    ("takes a second run, or exits in order", "robust", "S17", "sent a run after the end of another", _second_run),
    ("ends at SIGTERM in a run, and leaves nothing", "robust", "S36", "sent a run and SIGTERM", _terminated_in_a_run),
    ("ends when nobody listens", "robust", "S37", "closed its stdout and sent a run", _listener_gone),
)  # fmt: skip
