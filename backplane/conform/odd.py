"""Odd input that the protocol allows: ids, members, blanks, text, sizes, and the ends of stdin."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.conform.bench import Bench, Check, Row, end, exits, final
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json

LONG_TASK_BYTES: Final = 1024 * 1024
"""A legal task of this size: instructions with a few files pasted in."""

PIECE_BYTES: Final = 7
"""Cuts a line so that characters of several bytes are cut as well."""


async def _eof_without_run(bench: Bench) -> str:
    async with bench.greeted() as link:
        before = link.handed
        link.child.close_stdin()
        how = await exits(link, link.bounds.exit_s, "stdin ended")
        if how != "exit code 0":
            raise Unfit(f"it ended with {how}", link.lines)
        if link.lines[before:]:
            raise Unfit("it spoke although nothing was asked", link.lines[before:])
        return how


def _one_run(message: Callable[[Bench], Json], run_id: str = "r1", *, may_decline: bool = False, **how: Any) -> Check:
    """A check that sends one message and wants its final, or where it may decline, a fatal that names the run."""

    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            if not await link.send(message(bench), **how):
                raise Unfit("it did not read the order", link.lines)
            if not may_decline:
                return await final(link, run_id)
            line = await end(link, run_id)
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
        return await final(link)


async def _terminated(bench: Bench) -> str:
    async with bench.greeted() as link:
        link.child.terminate()
        return await exits(link, link.bounds.exit_s, "SIGTERM")


ODD_ID: Final = '☃ run/1 "x"\\'

ODD_CHECKS: Final[tuple[Row, ...]] = (
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
)  # fmt: skip
