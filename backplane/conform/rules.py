"""The rules that are tried with a fresh child each, as data: what is sent, what is waited for, what may be seen.

They stand in the order of their levels: odd input that the protocol allows, announced extensions, workspaces that
travel (`behaves`); unreadable lines, wrong orders, signals, a listener that goes away (`robust`); cancel, ping, ask and
many runs at once (`complete`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import signal
import tarfile
from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.conform.steps import (
    Bench,
    Case,
    Make,
    Play,
    answered,
    apart,
    cancelled,
    close,
    counted,
    done,
    end,
    exits,
    explained,
    fatal,
    final,
    finals,
    in_a_row,
    kill,
    left_alone,
    never_said,
    one_of_two,
    one_stopped,
    pause,
    pong,
    pongs,
    readable,
    refused,
    run,
    runs,
    sent,
    silent,
    silent_to_the_end,
    terminate,
    terminated,
    unheard,
    unreadable,
    wait,
)
from backplane.contract.canonical import INT_MAX, Json
from backplane.protocol import LINE_BYTES_MAX

# Odd input -----------------------------------------------------------------------------------------------------------

LONG_TASK_BYTES: Final = 1024 * 1024
"""A legal task of this size: instructions with a few files pasted in."""

PIECE_BYTES: Final = 7
"""Cuts a line so that characters of several bytes are cut as well."""

SECRET: Final = "conform-7f3a9c51d2e84b60"
"""A value of `config.env` that must not be seen again."""

DEEP_BUT_WITHIN: Final = 100
"""Levels that S3 allows, those around included."""

BLANK_LINES: Final = 10_000
ODD_UUID: Final = "9F1B3C5D-7E8A-4B0C-9D1E-2F3A4B5C6D7E"
ODD_ID: Final = '☃ run/1 "x"\\'
ESCAPED_ID: Final = "a\n\tb\0\u2028c"
LONG_ID: Final = "x" * 4096


def _named(run_id: str) -> Play:
    return done(lambda bench: bench.run(run_id), run_id)


def _odd_members(bench: Bench) -> Json:
    run = bench.run(priority="high", notes=[{"x": None}])
    run["work_order"]["config"]["vendor"] |= {"nobody": {"deep": [1, {"t": "final", "task": "another"}]}}
    return {**run, "urgent": True, "event": {"task": "no"}}


def _t_last(bench: Bench) -> bytes:
    run = bench.run()
    moved = {"work_order": dict(reversed(run["work_order"].items())), "id": run["id"], "t": "run"}
    return json.dumps(moved, separators=(" ,\t", " : ")).encode()


def _after(before: bytes, behind: bytes = b"", **changed: Json) -> Make:
    """A run between other bytes."""
    return lambda bench: before + msgspec.json.encode(bench.run(**changed)) + behind


def _unicode_task(bench: Bench) -> Json:
    return bench.run(task=bench.task + ' é 漢 😀 \u2028\u2029\u0085 \u200b "quoted" \\n \t back\\slash')


def _escaped_task(bench: Bench) -> bytes:
    # Every character as \uXXXX, keys too.
    text = json.dumps(bench.run(task=bench.task + " é 😀"), ensure_ascii=True)
    return text.replace('"task"', '"\\u0074\\u0061sk"').replace("/", "\\/").encode()


def _everything(bench: Bench) -> Json:
    run = bench.run(
        lane="workspace_first", context={"files": [], "snippets": [{"name": "note", "content": "be brief"}]}
    )
    asked = run["work_order"]
    asked["workspace"] |= {"mode": "pass_through", "include": ["**"], "exclude": ["**/*.log"]}
    asked["policy"] |= {"deny_write": ["**/.git/config"], "deny_read": ["**/.env*"]}
    asked["config"] |= {"env": {"BACKPLANE_CONFORM": "1"}, "max_turns": 1000, "max_budget_usd": 1000}
    return run


def _changed(**members: Callable[[Bench], Json]) -> Make:
    """A run with members of its order's `workspace` or `config` changed, as `workspace_root`, `config_env`."""

    def make(bench: Bench) -> Json:
        run = bench.run()
        for name, value in members.items():
            part, _, member = name.partition("_")
            run["work_order"][part][member] = value(bench)
        return run

    return make


def _numbers(bench: Bench) -> bytes:
    odd = b"[0, -0, 1e2, 1.0, 1E+2, 2.5e-3, -0.0, 9007199254740993, 18446744073709551615, 1e300, 0.1e-300]"
    run = _changed(config_vendor=lambda bench: {**bench.vendor, "nobody": "MARK"})(bench)
    return msgspec.json.encode(run).replace(b'"max_budget_usd":null', b'"max_budget_usd":1e3').replace(b'"MARK"', odd)


def _deep(bench: Bench) -> Json:
    deep: Json = 1
    for _ in range(DEEP_BUT_WITHIN // 2):
        deep = {"a": [deep]}
    return {**bench.vendor, "nobody": deep}


def _long_context(bench: Bench) -> Json:
    snippets = [{"name": f"note {number}", "content": "x" * 1024} for number in range(LONG_TASK_BYTES // 1024)]
    return bench.run(context={"files": [], "snippets": snippets})


def _in_a_place(name: str) -> Play:
    return done(_changed(workspace_root=lambda bench: str(bench.place(name))))


ODD: Final = (
    Case("exits when stdin ends before any run", "behaves", "S35", "closed stdin after the hello",
         (silent_to_the_end(b""),)),
    Case("takes any string as a run's id", "behaves", "S14", f"sent a run with the id {ODD_ID!r}", (_named(ODD_ID),)),
    Case("ignores members it does not know", "behaves", "S16", "sent a run with strange members at every level",
         (done(_odd_members),)),
    Case("reads members in any order, and blanks", "behaves", "S5", "sent a run with `t` at its end", (done(_t_last),)),
    Case("skips blank lines and takes CR LF", "behaves", "S7", "sent blank lines, then a run that ends in CR LF",
         (done(_after(b"\n\r\n  \t\n  ", b" \r")),)),
    Case("ignores a message it does not know", "behaves", "S6", "sent a `weather` message, then a run",
         (done(_after(b'{"t":"weather","sky":["clear"],"id":"r1"}\n')),)),
    Case("takes text of all languages", "behaves", "S1",
         "sent a task with U+2028, U+0085 and characters beyond 16 bits", (done(_unicode_task),)),
    Case("reads escapes", "behaves", "S1", "sent a run with escaped characters, in keys too", (done(_escaped_task),)),
    Case("reads a line in small pieces", "behaves", "S15", f"sent a run {PIECE_BYTES} bytes a write",
         (done(_unicode_task, piece_bytes=PIECE_BYTES),)),
    Case("takes a task of 1 MiB", "behaves", "S15", "sent a run of that size",
         (done(lambda bench: bench.run(task=bench.task + "\n" + "x" * LONG_TASK_BYTES), may_decline=True),)),
    Case("takes an order with everything in it", "behaves", "S13", "sent an order with policy, snippets, limits",
         (done(_everything, may_decline=True),)),
    Case("takes a last line without its newline", "behaves", "S35", "sent a run without newline, closed stdin",
         (sent(Bench.run, newline=b""), close(), final())),
    Case("takes an empty id", "behaves", "S14", "sent a run whose id is an empty string", (_named(""),)),
    Case("repeats a UUID as it was written", "behaves", "S14", "sent a run whose id is a UUID in upper case",
         (_named(ODD_UUID),)),
    Case("takes a long id", "behaves", "S14", "sent a run with an id of 4 KiB", (_named(LONG_ID),)),
    Case("takes an id with escapes", "behaves", "S14", "sent a run with line ends, tabs and NUL in its id",
         (_named(ESCAPED_ID),)),
    Case("keeps the values of config.env to itself", "behaves", "S20", "sent a run with a secret variable",
         (sent(_changed(config_env=lambda _: {"CONFORM_SECRET": SECRET})), end(),
          never_said(lambda line: SECRET.encode() in line.raw, "it repeats a value of config.env"),
          "{end}, and the value is in none of {lines} lines")),
    Case("works in a folder with a name of several words", "behaves", "S20", "sent a root with blanks and quotes",
         (_in_a_place("a folder's \"name\" $HOME"),)),
    Case("works in a folder with a name of any language", "behaves", "S20", "sent a root with é, 漢 and 😀",
         (_in_a_place("dossié 漢字 😀"),)),
    Case("works in the folder it was started in", "behaves", "S20", "sent the root `.`",
         (done(_changed(workspace_root=lambda _: ".")),), folder="start"),
    Case("works in a folder below the one it was started in", "behaves", "S20", "sent a relative root",
         (done(_changed(workspace_root=lambda bench: bench.place("start/within").name)),), folder="start"),
    Case("takes an empty list of extensions", "behaves", "S13", "sent a run with `extensions: []`",
         (done(lambda bench: {**bench.run(), "extensions": []}),)),
    Case("ignores extensions it does not know", "behaves", "S50", "sent a run that announces `tomorrow/9`",
         (done(lambda bench: bench.run("r1", ("tomorrow/9", "cancel/99"))),)),
    Case("reads `t` by its meaning", "behaves", "S5", "sent a run whose `t` is written in escapes",
         (done(lambda bench: msgspec.json.encode(bench.run()).replace(b'"t":"run"', b'"\\u0074":"r\\u0075n"')),)),
    Case("reads numbers in every form", "behaves", "S16",
         "sent exponents, fractions and 64-bit numbers in strange members", (done(_numbers),)),
    Case("reads what is nested deep but allowed", "behaves", "S3", f"sent a run {DEEP_BUT_WITHIN} levels deep",
         (done(_changed(config_vendor=_deep)),)),
    Case("takes a long context", "behaves", "S15", "sent a run with 1,024 snippets of 1 KiB",
         (done(_long_context, may_decline=True),)),
    Case("skips thousands of blank lines", "behaves", "S7", f"sent {BLANK_LINES} blank lines and a run",
         (done(_after(b"\n \r\n" * (BLANK_LINES // 2))),)),
    Case("exits when nothing but blank lines came", "behaves", "S35", "sent blank lines, closed stdin",
         (silent_to_the_end(b"\n \r\n\n"),)),
    Case("exits when only unknown messages came", "behaves", "S6", "sent a `weather` message, closed stdin",
         (silent_to_the_end(b'{"t":"weather","ref_id":"r1"}\n'),)),
    Case("ends at SIGINT", "behaves", "S36", "sent SIGINT after the hello", (kill(signal.SIGINT), exits("SIGINT"))),
    Case("ends at SIGHUP", "behaves", "S36", "sent SIGHUP after the hello", (kill(signal.SIGHUP), exits("SIGHUP"))),
    Case("ends at SIGTERM", "behaves", "S36", "sent SIGTERM after the hello", (terminate(), exits("SIGTERM"))),
)  # fmt: skip

# Announced extensions ------------------------------------------------------------------------------------------------

STOPPED_MS: Final = 1500
"""The grace of a cancel in most of these rules; the rule's own has the usual one."""
PINGED: Final = (0, 7, 2**53 + 1, INT_MAX)
FOUR: Final = ("r1", "r2", "r3", "r4")


def _cancel(ref_id: str = "r1", **members: Any) -> dict[str, Any]:
    return {"t": "cancel", "ref_id": ref_id, "reason": "a check", "grace_ms": STOPPED_MS, **members}


def _ping(seq: int) -> dict[str, Any]:
    return {"t": "ping", "seq": seq}


def _cancel_in_time(bench: Bench) -> Json:
    return _cancel(grace_ms=int(bench.program.bounds.grace_s * 1000))


EXTENDED: Final = (
    Case("ignores a cancel for a run it does not know", "behaves", "S52", "cancelled `nobody`, then ran",
         ({"t": "cancel", "ref_id": "nobody", "reason": None}, run("r1", ("cancel/1",)),
          _cancel("nobody", reason="still nobody", grace_ms=2000), final()), ("cancel/1",)),
    Case("ends a cancelled run within the grace", "behaves", "S51", "sent a run and a cancel",
         (run("r1", ("cancel/1",)), sent(_cancel_in_time), cancelled()), ("cancel/1",)),
    Case("ignores a cancel that comes late", "behaves", "S52", "cancelled a run that had ended",
         (run("r1", ("cancel/1",)), end(), {"t": "cancel", "ref_id": "r1", "reason": None},
          silent("it answered a cancel for a run that had ended"), "no answer, as it should be"), ("cancel/1",)),
    Case("cancels when its control plane is gone", "behaves", "S34", "announced cancel/1, sent a run, closed stdin",
         (run("r1", ("cancel/1",)), close(), exits("its control plane was gone", with_grace=True)), ("cancel/1",)),
    Case("answers pings before a run", "behaves", "S53", "sent four pings, the largest number too",
         (*map(_ping, PINGED), pongs(*PINGED)), ("ping/1",)),
    Case("answers a ping during a run", "behaves", "S54", "sent a run and a ping",
         (run("r1", ("ping/1",)), _ping(1), pong(1, "during a run")), ("ping/1",)),
    Case("asks in the right shape and goes on when denied", "behaves", "S55", "announced ask/1, denied every ask",
         (run("r1", ("ask/1",)), answered({"decision": "deny", "reason": "a check"}, words="all of the right shape",
                                          may_fail=True)), ("ask/1",)),
    Case("runs several orders at once", "behaves", "S59", "sent four runs without waiting",
         (*runs(FOUR, ("many/1", "cancel/1")), finals((), FOUR), "4 runs ended, each once"), ("many/1",)),
)  # fmt: skip

# Workspaces that travel ----------------------------------------------------------------------------------------------

CHUNK_BYTES: Final = 3000
AWAY: Final = run("r1", ("cancel/1", "stage/1", "tree/1"),
                  workspace={"root": ".", "mode": "staged", "include": [], "exclude": []})  # fmt: skip


def _chunks(*files: tuple[str, bytes]) -> list[dict[str, Any]]:
    """The chunks of an archive of these files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    data = archive.getvalue()
    made: list[dict[str, Any]] = [
        {"t": "tree", "ref_id": "r1", "seq": seq, "data": base64.b64encode(data[at : at + CHUNK_BYTES]).decode()}
        for seq, at in enumerate(range(0, len(data), CHUNK_BYTES))
    ]
    made[-1]["end"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return made


_GOOD: Final = _chunks(("a.txt", b"x" * 9000))
_OTHER_HASH: Final = {**_GOOD[-1], "end": {**_GOOD[-1]["end"], "sha256": "0" * 64}}

TRAVEL: Final = (
    Case("takes a workspace that travels", "behaves", "S66", "sent a run and a tree in chunks",
         (AWAY, *_chunks(("./a.txt", b"x\n"), ("b/c.txt", b"y" * 10_000)), final()), ("tree/1",)),
    Case("refuses a tree with a piece missing", "behaves", "S66", "sent a tree without its second chunk",
         (AWAY, _GOOD[0], *_GOOD[2:], fatal("contract_schema_violation")), ("tree/1",)),
    Case("refuses a tree that is not what was sent", "behaves", "S66", "sent a tree with another hash",
         (AWAY, *_GOOD[:-1], _OTHER_HASH, fatal("contract_schema_violation")), ("tree/1",)),
    Case("refuses a tree that leaves its folder", "behaves", "S67", "sent a tree with `../x` in it",
         (AWAY, *_chunks(("../x", b"")), fatal("workspace_staging_failed")), ("tree/1",)),
    Case("refuses a tree with a repository's hook", "behaves", "S67", "sent a tree with `.git/hooks/x` in it",
         (AWAY, *_chunks((".git/hooks/x", b"")), fatal("workspace_staging_failed")), ("tree/1",)),
)  # fmt: skip

# Hostile input -------------------------------------------------------------------------------------------------------

DEEP: Final = 100_000
"""Levels that make a recursive reader fail."""
OVER: Final = b"x" * (LINE_BYTES_MAX + 1024 * 1024)
GARBAGE_LINES: Final = 500
RUNS_IN_A_ROW: Final = 5
PAUSE_S: Final = 0.3
"""How long nothing is read of a run: longer than a small one takes."""


def _run_with(old: bytes, new: bytes) -> Make:
    """A run named `bad` whose task is put into the text as raw bytes."""
    return lambda bench: msgspec.json.encode(bench.run("bad", task="MARK")).replace(old, new)


def _shaped(**members: Json) -> Make:
    """A run named `bad` with members of a wrong shape."""
    return lambda bench: msgspec.json.encode({**bench.run("bad"), **members})


def _wrong_order(bench: Bench, name: str = "bad") -> bytes:
    run = bench.run(name)
    del run["work_order"]["task"]
    return msgspec.json.encode(run)


def _missing_root(bench: Bench) -> Json:
    return f"{bench.root}/there/is/no/such/folder"


HOSTILE: Final = (
    Case("survives a line that is no JSON", "robust", "S19", "sent `{\"t\":\"run\",` and a good run",
         (unreadable(b'{"t":"run",'),)),
    Case("survives a line that is no object", "robust", "S19", "sent an array and a good run",
         (unreadable(b'["run",{"t":"run","id":"bad"}]'),)),
    Case("survives plain words", "robust", "S19", "sent words and a good run", (unreadable(b"hello? anybody there"),)),
    Case("survives a control byte", "robust", "S19", "sent bytes that are no text and a good run",
         (unreadable(bytes(byte for byte in range(1, 32) if byte != 10) + b"\xfe\xff"),)),
    Case("does not take half a line for a run", "robust", "S19", "sent a run cut in the middle and a good one",
         (unreadable(lambda bench: msgspec.json.encode(bench.run("bad"))[:-40]),)),
    Case("does not take invalid UTF-8 for a run", "robust", "S3", "sent a run with a broken character and a good one",
         (unreadable(_run_with(b"MARK", b"\xc3\x28 \xff")),)),
    Case("survives deep nesting", "robust", "S3", f"sent a run {DEEP} levels deep and a good one",
         (unreadable(_run_with(b'"MARK"', b"[" * DEEP + b"]" * DEEP)),)),
    Case("survives a line over the limit", "robust", "S4", "sent a run of 17 MiB and a good one",
         (unreadable(_run_with(b"MARK", OVER)),)),
    Case("does not give back half a character", "robust", "S3", "sent a task with a lone surrogate",
         (sent(lambda bench: json.dumps(bench.run(task="half: \ud800")).encode()), close(),
          wait(lambda line: line.is_end),
          never_said(lambda line: line.fault is not None, "it wrote what is not strict JSON: {line.fault}"),
          "nothing broken came back")),
    Case("answers a wrong order with fatal", "robust", "S18", "sent an order without a task",
         (sent(_wrong_order), refused("bad"))),
    Case("goes on after a wrong order", "robust", "S19", "sent an order without a task and a good run",
         (unreadable(_wrong_order),)),
    Case("takes a second run, or exits in order", "robust", "S17", "sent a run after the end of another",
         (in_a_row(("r1", "r2"), "both runs ended with final"),)),
    Case("ends at SIGTERM in a run, and leaves nothing", "robust", "S36", "sent a run and SIGTERM",
         (run(), wait(lambda line: True, quiet=True), terminated())),
    Case("ends when nobody listens", "robust", "S37", "closed its stdout and sent a run", (unheard("r1"),)),
    Case("survives an event sent to it", "robust", "S19", "sent an `event` and a good run",
         (unreadable(b'{"t":"event","ref_id":"bad","event":{"type":"warning","message":"x"}}'),)),
    Case("survives a final sent to it", "robust", "S19", "sent a `final` and a good run",
         (unreadable(b'{"t":"final","ref_id":"bad","receipt":{}}'),)),
    Case("survives a hello sent to it", "robust", "S19", "sent a `hello` and a good run",
         (unreadable(b'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"x"},"capabilities":{}}'),)),
    Case("does not take an order that is null", "robust", "S18", "sent a run with `work_order: null` and a good one",
         (unreadable(_shaped(work_order=None)),)),
    Case("does not take an order that is an array", "robust", "S18", "sent a run with `work_order: []` and a good one",
         (unreadable(_shaped(work_order=[])),)),
    Case("does not take a run without an id", "robust", "S19", "sent a run with `id: null` and a good one",
         (unreadable(_shaped(id=None)),)),
    Case("does not take a number for an id", "robust", "S19", "sent a run with `id: 7` and a good one",
         (unreadable(_shaped(id=7), name="7"),)),
    Case("does not take a number for a task", "robust", "S18", "sent a run with `task: 7` and a good one",
         (unreadable(_run_with(b'"MARK"', b"7")),)),
    Case("survives a `t` that is no text", "robust", "S19", "sent `t: 5`, `t: null` and a good run",
         (unreadable(b'{"t":5,"id":"bad"}\n{"t":null}\n{"t":["run"]}'),)),
    Case("survives an empty object", "robust", "S19", "sent `{}` and a good run", (unreadable(b"{}"),)),
    Case("survives a single brace", "robust", "S19", "sent `{` and a good run", (unreadable(b"{"),)),
    Case("survives NUL bytes", "robust", "S19", "sent 100 NUL bytes and a good run", (unreadable(bytes(100)),)),
    Case("does not take NaN for a number", "robust", "S3", "sent a run with NaN and a good one",
         (unreadable(_run_with(b'"MARK"', b"NaN")),)),
    Case("survives a number beyond all bounds", "robust", "S3",
         "sent a run with a number of 5,000 digits and a good one", (unreadable(_run_with(b'"MARK"', b"9" * 5000)),)),
    Case("does not take UTF-16 for a run", "robust", "S3", "sent a run in UTF-16 and a good one",
         (unreadable(lambda bench: msgspec.json.encode(bench.run("bad")).decode().encode("utf-16")),)),
    Case("does not take two objects for one", "robust", "S1", "sent two objects on a line and a good run",
         (unreadable(_after(b"", b'{"t":"ping"}', run_id="bad")),)),
    Case("survives many unreadable lines", "robust", "S19", f"sent {GARBAGE_LINES} lines of garbage and a good run",
         (unreadable(b"\n".join([b"{garbage", b"garbage", b"]"] * (GARBAGE_LINES // 3))),)),
    Case("survives a long line of noise", "robust", "S4", "sent 17 MiB of letters and a good run", (unreadable(OVER),)),
    Case("ends a run whose folder is missing", "robust", "S18", "sent a root that is not there",
         (done(_changed(workspace_root=_missing_root), may_decline=True),)),
    Case("explains a fatal", "robust", "S28", "sent an order without a task", (sent(_wrong_order), explained("bad"))),
    Case("takes several runs in a row, or exits in order", "robust", "S17", f"{RUNS_IN_A_ROW} runs, each after an end",
         (in_a_row([f"r{number}" for number in range(RUNS_IN_A_ROW)], f"{RUNS_IN_A_ROW} runs, one after the other"),)),
    Case("takes an id again after its run's end", "robust", "S17", "sent one id twice, one after the other",
         (in_a_row(("again", "again"), "{end} came for the second", may_fail=True),)),
    Case("ends when its listener leaves in a run", "robust", "S37", "closed its stdout after the first event",
         # A host that has nothing more to say may notice when it is asked again.
         (run(), wait(lambda line: True), unheard("r2"))),
    Case("waits for a slow reader", "robust", "S25", f"read nothing for {PAUSE_S:g} s of a run",
         (run(), pause(PAUSE_S), final(),
          never_said(lambda line: line.fault is not None or line.t is None, "what came after a pause is not whole"),
          "{lines} lines after a pause")),
    Case("ends at two SIGTERMs as at one", "robust", "S36", "sent a run and SIGTERM twice",
         (run(), terminate(), terminate(), exits("two SIGTERMs"))),
    Case("leaves nothing when it is ended idle", "robust", "S38", "sent SIGTERM after the hello", (terminated(),)),
)  # fmt: skip

# Everything together -------------------------------------------------------------------------------------------------

NEEDED: Final = ("cancel/1", "ping/1", "many/1")
"""What a host announces that is complete; `ask/1` too where its agent has tools."""
PINGS: Final = 50
RUNS_AT_ONCE: Final = 12
MANY: Final = tuple(f"r{number}" for number in range(RUNS_AT_ONCE))
NUMBERED: Final = tuple(f"run {number}" for number in range(RUNS_AT_ONCE))
THREE: Final = ("r1", "r2", "r3")
ALIKE: Final = ("", "a", "A", "☃", "a ", "1", '"')
_ASKED: Final = run("r1", ("ask/1",))
_RUN: Final = run("r1", NEEDED)
_MANY: Final = runs(MANY, NEEDED)


def _answered(answer: dict[str, Any], times: int = 1) -> tuple[Play, Play]:
    return _ASKED, answered(answer, times=times, words="then final")


def _between(*steps: Any) -> tuple[Any, ...]:
    """Three runs with these after each."""
    return tuple(step for one in runs(THREE, NEEDED) for step in (one, *steps))


COMPLETE: Final = (
    Case("takes a cancel without reason and grace", "complete", "S51", "sent a run and a bare cancel",
         (_RUN, {"t": "cancel", "ref_id": "r1"}, cancelled(), "{end} came"), ("cancel/1",)),
    Case("ends a run whose cancel gives it no time", "complete", "S51", "sent a run and a cancel with 50 ms",
         (_RUN, _cancel(grace_ms=50), cancelled(), "{end} came"), ("cancel/1",)),
    Case("ends a run once, however often it is cancelled", "complete", "S52", "sent a run and three cancels",
         (_RUN, _cancel(), _cancel(reason=None), _cancel(), cancelled(), "one {end} came"), ("cancel/1",)),
    Case("gives a readable receipt of a cancelled run", "complete", "S30", "sent a run and a cancel",
         (_RUN, _cancel(), cancelled(), readable()), ("cancel/1",)),
    Case("works on after a cancel", "complete", "S17", "cancelled a run and sent another",
         (_RUN, _cancel(), end("r1"), run("r2", NEEDED), final("r2"), "the next run is done"), ("cancel/1", "many/1")),
    Case("answers every ping of many, in order", "complete", "S53", f"sent a run and {PINGS} pings",
         (_RUN, *map(_ping, range(PINGS)), end("r1"), counted(PINGS)), ("ping/1",)),
    Case("answers a number that comes twice", "complete", "S53", "sent two pings of one number",
         (_ping(3), _ping(3), pongs(3, 3, fact="not two pongs for two pings of one number"), "two pongs"),
         ("ping/1",)),
    Case("answers a ping after a run", "complete", "S53", "sent a run, and a ping after its end",
         (_RUN, end("r1"), _ping(9), pong(9, "after a run's end")), ("ping/1", "many/1")),
    Case("ignores answers to nobody and late ones", "complete", "S57", "answered asks that were not made",
         (_ASKED, {"t": "answer", "ref_id": "r1", "id": "nothing", "decision": "deny"},
          {"t": "answer", "ref_id": "nobody", "id": "a1", "decision": "deny"},
          answered({"decision": "deny"}, may_fail=True),
          {"t": "answer", "ref_id": "r1", "id": "late", "decision": "allow"},
          silent("it said something about an answer that came late"), "{end} came, and silence"), ("ask/1",)),
    Case("goes on when allowed", "complete", "S56", "allowed every ask", _answered({"decision": "allow"}), ("ask/1",)),
    Case("goes on when allowed for the whole run", "complete", "S56", "allowed every ask, for the run",
         _answered({"decision": "allow", "remember": "run"}), ("ask/1",)),
    Case("takes another input", "complete", "S56", "answered every ask with its own input as a change",
         _answered({"decision": "modify", "input": None}), ("ask/1",)),
    Case("ignores a second answer", "complete", "S57", "answered asks twice",
         _answered({"decision": "deny"}, times=2), ("ask/1",)),
    Case("decides by default when nobody is left to ask", "complete", "S57", "closed stdin while an ask was open",
         (_ASKED, left_alone()), ("ask/1",)),
    Case("says nothing that was not announced", "complete", "S50", "announced cancel/1 alone",
         (run("r1", ("cancel/1",)), end("r1"),
          never_said(lambda line: line.t in ("ask", "pong", "patch"),
                     "{line.t} to a peer that announced cancel/1 alone"),
          "nothing that was not announced")),
    Case("keeps many runs apart", "complete", "S59", f"sent {RUNS_AT_ONCE} runs at once",
         (*runs(NUMBERED, NEEDED), finals(NUMBERED), apart(NUMBERED),
          f"{RUNS_AT_ONCE} runs, each with its own events and end"), ("many/1",)),
    Case("tells odd ids apart", "complete", "S59", "sent runs at once whose ids differ by little",
         (*runs(ALIKE, NEEDED), finals(ALIKE), f"{len(ALIKE)} ids told apart"), ("many/1",)),
    Case("cancels one of many", "complete", "S59", "sent four runs, cancelled one",
         (*runs(FOUR, NEEDED), _cancel("r2"), finals(("r1", "r3", "r4"), ("r2",)), one_stopped("r2")),
         ("cancel/1", "many/1")),
    Case("ends no run for a bad line", "complete", "S59", "sent bad lines between three runs",
         (*_between(b"{this is no message"), finals(THREE), "three bad lines ended nothing"),
         ("many/1",)),
    Case("ends no run for another's wrong order", "complete", "S18", "sent a wrong order between two good ones",
         (_RUN, sent(lambda bench: _wrong_order(bench, "wrong")), run("r2", NEEDED),
          finals(("r1", "r2"), ("wrong",)),
          never_said(lambda line: line.t == "final" and line.get("ref_id") == "wrong",
                     "an order without a task was done"),
          "one fatal by name, two finals"), ("many/1",)),
    Case("refuses an id that is in use", "complete", "S59", "sent two runs of one id at once",
         (one_of_two(),), ("many/1",)),
    Case("finishes many runs after stdin ended", "complete", "S34", "sent three runs, closed stdin",
         (*runs(THREE, ("many/1",)), close(), finals(THREE), exits("the last run")),
         ("many/1",)),
    Case("finishes a plain run where another's peer is gone", "complete", "S34",
         "closed stdin under a run with cancel/1 and one without",
         (run("plain", ("many/1",)), run("other", NEEDED), close(), finals(("plain",), ("other",)),
          exits("the last run", with_grace=True)), ("many/1",)),
    Case("ends at SIGTERM under many runs, and leaves nothing", "complete", "S36",
         f"sent {RUNS_AT_ONCE} runs and SIGTERM", (*_MANY, terminated()), ("many/1",)),
    Case("loses nothing of many runs to a slow reader", "complete", "S25", f"sent {RUNS_AT_ONCE} runs and made a pause",
         (*_MANY, pause(), finals(MANY), apart(MANY), "nothing was lost in a pause"), ("many/1",)),
    Case("answers pings between many runs", "complete", "S54", f"sent {RUNS_AT_ONCE} runs with a ping after each",
         (*(step for seq, one in enumerate(_MANY) for step in (one, _ping(seq))), finals((), MANY),
          counted(RUNS_AT_ONCE), f"{RUNS_AT_ONCE} pongs between {RUNS_AT_ONCE} runs"), ("ping/1", "many/1")),
)  # fmt: skip

RULES: Final = (*ODD, *EXTENDED, *TRAVEL, *HOSTILE, *COMPLETE)
