"""Odd input that the protocol allows: ids, members, blanks, text, sizes, and the ends of stdin."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.conform.bench import Bench, BenchCheck, BenchRow, end, exits, final
from backplane.conform.link import Program
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json

LONG_TASK_BYTES: Final = 1024 * 1024
"""A legal task of this size: instructions with a few files pasted in."""

PIECE_BYTES: Final = 7
"""Cuts a line so that characters of several bytes are cut as well."""


def _one_run(
    message: Callable[[Bench], Json], run_id: str = "r1", *, may_decline: bool = False, **how: Any
) -> BenchCheck:
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
    run["work_order"]["config"]["vendor"] |= {"nobody": {"deep": [1, {"t": "final", "task": "another"}]}}
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


def _in_a_place(name: str) -> BenchCheck:
    """A check of a run whose root has an odd name."""

    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            run = bench.run()
            run["work_order"]["workspace"]["root"] = str(bench.place(name))
            await link.send(run)
            return await final(link)

    return check


def _in_a_relative_place(name: str) -> BenchCheck:
    """A check of a run whose root counts from the folder that the host was started in."""

    async def check(bench: Bench) -> str:
        start = bench.place("start")
        bench.place("start/within")
        program = msgspec.structs.replace(bench.program, command=_from_anywhere(bench.program), cwd=str(start))
        async with msgspec.structs.replace(bench, program=program).greeted() as link:
            run = bench.run()
            run["work_order"]["workspace"]["root"] = name
            await link.send(run)
            return await final(link)

    return check


def _from_anywhere(program: Program) -> tuple[str, ...]:
    """The command with the files that it names made absolute, so that it starts in any folder."""
    first, *rest = program.command
    found = [os.path.join(program.cwd or os.getcwd(), word) for word in program.command]
    program_file = found[0] if os.sep in first else first  # A bare name is looked up in PATH.
    return (program_file, *(path if os.path.isfile(path) else word for word, path in zip(rest, found[1:], strict=True)))


SECRET: Final = "conform-7f3a9c51d2e84b60"
"""A value of `config.env` that must not be seen again."""


async def _secret(bench: Bench) -> str:
    async with bench.greeted() as link:
        run = bench.run()
        run["work_order"]["config"]["env"] = {"CONFORM_SECRET": SECRET}
        await link.send(run)
        line = await end(link)
        told = [line for line in link.lines if SECRET.encode() in line.raw]
        if told:
            raise Unfit("it repeats a value of config.env", told)
        return f"{line.t}, and the value is in none of {len(link.lines)} lines"


def _numbers(bench: Bench) -> bytes:
    run = bench.run()
    run["work_order"]["config"]["vendor"] = {**bench.vendor, "nobody": "MARK"}
    odd = b"[0, -0, 1e2, 1.0, 1E+2, 2.5e-3, -0.0, 9007199254740993, 18446744073709551615, 1e300, 0.1e-300]"
    return msgspec.json.encode(run).replace(b'"max_budget_usd":null', b'"max_budget_usd":1e3').replace(b'"MARK"', odd)


def _deep(bench: Bench) -> Json:
    deep: Json = 1
    for _ in range(DEEP_BUT_WITHIN // 2):
        deep = {"a": [deep]}
    run = bench.run()
    run["work_order"]["config"]["vendor"] = {**bench.vendor, "nobody": deep}
    return run


DEEP_BUT_WITHIN: Final = 100
"""Levels that S3 allows, those around included."""

BLANK_LINES: Final = 10_000


def _blank_flood(bench: Bench) -> bytes:
    return b"\n \r\n" * (BLANK_LINES // 2) + msgspec.json.encode(bench.run())


def _escaped_t(bench: Bench) -> bytes:
    return msgspec.json.encode(bench.run()).replace(b'"t":"run"', b'"\\u0074":"r\\u0075n"')


def _long_context(bench: Bench) -> Json:
    snippets = [{"name": f"note {number}", "content": "x" * 1024} for number in range(LONG_TASK_BYTES // 1024)]
    return bench.run(context={"files": [], "snippets": snippets})


def _signalled(number: signal.Signals) -> BenchCheck:
    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            os.kill(link.child.pid, number)
            return await exits(link, link.bounds.exit_s, number.name)

    return check


def _silent_until_the_end(data: bytes) -> BenchCheck:
    """A check that something without a run in it has no answer, and that the host exits in order."""

    async def check(bench: Bench) -> str:
        async with bench.greeted() as link:
            before = link.handed
            await link.send(data, newline=b"")
            link.child.close_stdin()
            how = await exits(link, link.bounds.exit_s, "stdin ended")
            if how != "exit code 0":
                raise Unfit(f"it ended with {how}", link.lines)
            if link.lines[before:]:
                raise Unfit("it spoke although nothing was asked", link.lines[before:])
            return how

    return check


ODD_UUID: Final = "9F1B3C5D-7E8A-4B0C-9D1E-2F3A4B5C6D7E"
ODD_ID: Final = '☃ run/1 "x"\\'

ODD_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("exits when stdin ends before any run", "behaves", "S35", "closed stdin after the hello",
     _silent_until_the_end(b"")),
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
    ("takes an empty id", "behaves", "S14", "sent a run whose id is an empty string",
     _one_run(lambda bench: bench.run(""), "")),
    ("repeats a UUID as it was written", "behaves", "S14", "sent a run whose id is a UUID in upper case",
     _one_run(lambda bench: bench.run(ODD_UUID), ODD_UUID)),
    ("takes a long id", "behaves", "S14", "sent a run with an id of 4 KiB",
     _one_run(lambda bench: bench.run("x" * 4096), "x" * 4096)),
    ("takes an id with escapes", "behaves", "S14", "sent a run with line ends, tabs and NUL in its id",
     _one_run(lambda bench: bench.run("a\n\tb\0\u2028c"), "a\n\tb\0\u2028c")),
    ("keeps the values of config.env to itself", "behaves", "S20", "sent a run with a secret variable", _secret),
    ("works in a folder with a name of several words", "behaves", "S20", "sent a root with blanks and quotes",
     _in_a_place("a folder's \"name\" $HOME")),
    ("works in a folder with a name of any language", "behaves", "S20", "sent a root with é, 漢 and 😀",
     _in_a_place("dossié 漢字 😀")),
    ("works in the folder it was started in", "behaves", "S20", "sent the root `.`", _in_a_relative_place(".")),
    ("works in a folder below the one it was started in", "behaves", "S20", "sent a relative root",
     _in_a_relative_place("within")),
    ("takes an empty list of extensions", "behaves", "S13", "sent a run with `extensions: []`",
     _one_run(lambda bench: {**bench.run(), "extensions": []})),
    ("ignores extensions it does not know", "behaves", "S50", "sent a run that announces `tomorrow/9`",
     _one_run(lambda bench: bench.run("r1", ("tomorrow/9", "cancel/99")))),
    ("reads `t` by its meaning", "behaves", "S5", "sent a run whose `t` is written in escapes", _one_run(_escaped_t)),
    ("reads numbers in every form", "behaves", "S16", "sent exponents, fractions and 64-bit numbers in strange members",
     _one_run(_numbers)),
    ("reads what is nested deep but allowed", "behaves", "S3", f"sent a run {DEEP_BUT_WITHIN} levels deep",
     _one_run(_deep)),
    ("takes a long context", "behaves", "S15", "sent a run with 1,024 snippets of 1 KiB",
     _one_run(_long_context, may_decline=True)),
    ("skips thousands of blank lines", "behaves", "S7", f"sent {BLANK_LINES} blank lines and a run",
     _one_run(_blank_flood)),
    ("exits when nothing but blank lines came", "behaves", "S35", "sent blank lines, closed stdin",
     _silent_until_the_end(b"\n \r\n\n")),
    ("exits when only unknown messages came", "behaves", "S6", "sent a `weather` message, closed stdin",
     _silent_until_the_end(b'{"t":"weather","ref_id":"r1"}\n')),
    ("ends at SIGINT", "behaves", "S36", "sent SIGINT after the hello", _signalled(signal.SIGINT)),
    ("ends at SIGHUP", "behaves", "S36", "sent SIGHUP after the hello", _signalled(signal.SIGHUP)),
    ("ends at SIGTERM", "behaves", "S36", "sent SIGTERM after the hello", _terminated),
)  # fmt: skip
