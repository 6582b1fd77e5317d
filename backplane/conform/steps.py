"""The verbs of `contracts/conform.toml`, which explains them: what is sent to a host and what it has to answer.

Every wait is bounded by `Bounds`; a host that does not answer breaks its rule.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal as signals
import tarfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from backplane.conform.link import READ_BYTES_MAX, HostLine, Program, Wire, order
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json
from backplane.contract.receipt import read_receipt

CHUNK_BYTES: Final = 3000
"""Size of a tree's chunks: small, so that a small tree has several."""


class Bench(msgspec.Struct, frozen=True):
    """Values for the orders of every rule."""

    program: Program
    root: str
    task: str
    extensions: tuple[str, ...]
    """Extensions that the host announced in its plain run."""
    vendor: dict[str, Json]
    """Settings of every order for this host."""

    def place(self, name: str) -> Path:
        """Make a folder below the rule's own root."""
        folder = Path(self.root, name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def order(self) -> dict[str, Any]:
        return order(self.root, self.task, self.vendor)

    def data(self, text: Any, n: int = 0) -> bytes:
        """Return the bytes of a text in a rule, its marks filled."""
        if isinstance(text, list):
            return b"".join(self.data(part, n) for part in text)
        if isinstance(text, dict):
            return bytes.fromhex(text["hex"]) if "hex" in text else self.data(text["of"], n) * text["times"]
        marks = {"task": json.dumps(self.task)[1:-1], "root": json.dumps(self.root)[1:-1], "n": str(n)}
        marks["grace"] = str(int(self.program.bounds.grace_s * 1000))
        if "{order}" in text:
            marks["order"] = json.dumps(self.order())
        for name, value in marks.items():
            text = text.replace(f"{{{name}}}", value)
        return str(text).encode()


Names = int | Sequence[str]
"""Ids of runs; a number is r1, r2 and so on."""


def _names(names: Names) -> list[str]:
    return [f"r{number + 1}" for number in range(names)] if isinstance(names, int) else list(names)


# What is sent ---------------------------------------------------------------------------------------------------------


async def _send(link: Wire, bench: Bench, text: Any, *, times: int = 1, newline: bool = True) -> None:
    for n in range(times):
        await link.send(bench.data(text, n), newline=b"\n" * newline)


async def _run(
    link: Wire,
    bench: Bench,
    run_id: Any,
    *,
    extensions: Sequence[str] = (),
    set: Mapping[str, Any] = {},
    edit: Sequence[tuple[str, str]] = (),
    before: Any = "",
    after: Any = "",
    cut: int = 0,
    encoding: str = "utf-8",
    newline: bool = True,
    piece_bytes: int = READ_BYTES_MAX,
) -> None:
    link.run_id = bench.data(run_id).decode()
    message: dict[str, Any] = {"t": "run", "id": link.run_id, "work_order": bench.order()}
    if extensions:
        message["extensions"] = list(extensions)
    marks = {}
    for number, (pointer, text) in enumerate(set.items()):
        *parents, member = pointer.split("/")[1:]
        holder = message
        for parent in parents:
            holder = holder[parent]
        holder[member] = f"conform-mark-{number}."
        marks[json.dumps(holder[member]).encode()] = bench.data(text)
        if text == "":
            del holder[member]
    data = msgspec.json.encode(message)
    for old, new in edit:
        data = data.replace(old.encode(), new.encode())
    for mark, text in marks.items():
        data = data.replace(mark, text)
    data = bench.data(before) + data[: len(data) - cut] + bench.data(after)
    if encoding != "utf-8":
        data = data.decode().encode(encoding)
    await link.send(data, newline=b"\n" * newline, piece_bytes=piece_bytes)


async def _runs(link: Wire, bench: Bench, names: Names, *, extensions: Sequence[str] = (), each: Any = None) -> None:
    for n, name in enumerate(_names(names)):
        await _run(link, bench, name, extensions=extensions)
        if each is not None:
            await _send(link, bench, bench.data(each, n).decode())


async def _tree(
    link: Wire, bench: Bench, files: Sequence[tuple[str, int]], *, without: int = -1, sha256: Any = None
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, size in files:
            entry = tarfile.TarInfo(name)
            entry.size = size
            tar.addfile(entry, io.BytesIO(b"x" * size))
    data = archive.getvalue()
    extensions = ("cancel/1", "stage/1", "tree/1")
    await _run(link, bench, "r1", extensions=extensions, set={"/work_order/workspace/root": '"."'})
    for seq, at in enumerate(range(0, len(data), CHUNK_BYTES)):
        chunk: dict[str, Any] = {"t": "tree", "ref_id": "r1", "seq": seq}
        chunk["data"] = base64.b64encode(data[at : at + CHUNK_BYTES]).decode()
        if at + CHUNK_BYTES >= len(data):
            digest = hashlib.sha256(data).hexdigest() if sha256 is None else bench.data(sha256).decode()
            chunk["end"] = {"bytes": len(data), "sha256": digest}
        if seq != without:
            await link.send(chunk)


async def _close(link: Wire, bench: Bench, value: bool) -> None:
    link.child.close_stdin()


async def _deaf(link: Wire, bench: Bench, value: bool) -> None:
    link.child.close_stdout()
    link.ended = True


async def _signal(link: Wire, bench: Bench, name: str) -> None:
    if link.child.exit is None:
        os.kill(link.child.pid, signals.Signals[name])


async def _pause(link: Wire, bench: Bench, seconds: float) -> None:
    await anyio.sleep(seconds)


# What is expected of one run ------------------------------------------------------------------------------------------


async def _end_of(link: Wire, run_id: str, timeout_s: float) -> HostLine:
    """Wait for the end of a run, if it has not come already."""

    def is_its_end(line: HostLine) -> bool:
        return line.is_end and line.get("ref_id") in (run_id, None)

    line = link.seen(is_its_end) or await link.until(is_its_end, timeout_s)
    if line is None:
        # Its output ends a moment before its exit is known.
        exited = await link.child.wait(link.bounds.slack_s) if link.ended else link.child.exit
        ending = f"it ended with {exited.describe()}" if exited is not None else "it is silent"
        raise Unfit(f"no end of run {run_id!r:.60} came; {ending}", link.lines)
    return line


async def _end(
    link: Wire,
    bench: Bench,
    run_id: str | bool,
    *,
    t: str | None = None,
    code: str | None = None,
    explained: bool = False,
    named: bool = False,
    receipt: bool = False,
    within: str = "run",
    once: bool = False,
) -> str:
    bounds = link.bounds
    limit_s = bounds.run_s if within == "run" else bounds.grace_s + bounds.slack_s
    line = await _end_of(link, link.run_id if isinstance(run_id, bool) else run_id, limit_s)
    if t is not None and line.t != t:
        raise Unfit(f"it ended with {line.t}, not {t}: {line.get('error')!r:.200}", link.lines)
    if (named or line.t == "final") and line.get("ref_id") is None:
        raise Unfit("it ended with a message that names no run", link.lines)
    if code is not None and line.get("error_code") != code:
        raise Unfit(f"{line.t} {line.get('error_code')} came, not {code}", [line])
    if explained and not str(line.get("error") or "").strip():
        raise Unfit("its fatal does not explain what is wrong", [line])
    if receipt and line.t == "final":
        try:
            read_receipt(line.get("receipt"))
        except ValueError as error:
            raise Unfit(f"its receipt cannot be read: {error}", [line]) from error
    if once:
        await link.next(bounds.quiet_s)
        ends = [line for line in link.lines[link.mark :] if line.is_end]
        if len(ends) > 1:
            raise Unfit("more than one end came", ends)
    return f"{line.t} came"


async def _final(link: Wire, bench: Bench, run_id: str | bool) -> str:
    return await _end(link, bench, run_id, t="final")


async def _fatal(link: Wire, bench: Bench, run_id: str | bool, **options: Any) -> str:
    return await _end(link, bench, run_id, t="fatal", **options)


async def _exit(
    link: Wire,
    bench: Bench,
    why: str,
    *,
    code: int | None = None,
    clean: bool = False,
    mute: bool = False,
    within: str = "exit",
) -> str:
    bounds = link.bounds
    within_s = {"exit": 0.0, "grace": bounds.grace_s}.get(within, bounds.closed_s - bounds.exit_s) + bounds.exit_s
    await link.rest(within_s + bounds.slack_s)
    how = await link.child.wait(within_s + bounds.slack_s if within == "closed" else bounds.slack_s)
    if how is None:
        raise Unfit(f"still running {within_s:g} s after {why}", link.lines)
    if code is not None and how.code != code:
        raise Unfit(f"it ended with {how.describe()}", link.lines)
    if mute and link.lines[link.mark :]:
        raise Unfit("it spoke although nothing was asked", link.lines[link.mark :])
    if clean:
        await link.child.stop(grace_s=0)
        if link.child.swept:
            raise Unfit(f"{link.child.swept} of its processes were left running", link.lines)
    return how.describe()


async def _wait(link: Wire, bench: Bench, wanted: str) -> None:
    if wanted == "line":
        await link.next(link.bounds.quiet_s)
    else:
        await link.until(lambda line: line.is_end, link.bounds.run_s)


async def _silent(link: Wire, bench: Bench, fault: str) -> str:
    line = await link.next(link.bounds.quiet_s)
    if line is not None:
        raise Unfit(fault, [line])
    return "silence, as it should be"


async def _never(
    link: Wire,
    bench: Bench,
    fault: str,
    *,
    broken: bool = False,
    noise: bool = False,
    text: str | None = None,
    t: Sequence[str] = (),
    ref_id: str | None = None,
) -> str:
    def is_wrong(line: HostLine) -> bool:
        return (
            (broken and line.fault is not None)
            or (noise and line.t is None)
            or (text is not None and text.encode() in line.raw)
            or line.t in t
            or (ref_id is not None and line.t == "final" and line.get("ref_id") == ref_id)
        )

    wrong = [line for line in link.lines if is_wrong(line)]
    if wrong:
        raise Unfit(fault, wrong)
    return f"none of {len(link.lines)} lines is wrong"


async def _survives(link: Wire, bench: Bench, run_id: str) -> str:
    await _run(link, bench, run_id)

    def is_good(line: HostLine) -> bool:
        return line.is_end and line.get("ref_id") == run_id

    good = await link.until(is_good, link.bounds.run_s)
    lines = link.lines[link.mark :]
    ends = [line for line in lines if line.is_end]
    if any(line.t == "final" and line.get("ref_id") != run_id for line in ends):
        raise Unfit("it was taken for a run", lines)
    if any(line.t is None for line in lines):
        raise Unfit("it wrote something that is no message", [line for line in lines if line.t is None])
    if good is not None:
        return "answered by fatal, then worked" if len(ends) > 1 else "ignored, then worked"
    link.child.close_stdin()
    exited = await link.child.wait(link.bounds.exit_s)
    if ends and exited is not None:
        return "answered by fatal, then exited"
    how = f"it ended with {exited.describe()}" if exited is not None else "it hangs"
    raise Unfit(f"no fatal came, and the run after it was not done: {how}", lines)


# Pings and asks -------------------------------------------------------------------------------------------------------


async def _pongs(link: Wire, bench: Bench, wanted: int | Sequence[str]) -> str:
    numbers = list(range(wanted)) if isinstance(wanted, int) else [int(number) for number in wanted]

    def came() -> list[Json]:
        return [line.get("seq") for line in link.lines if line.t == "pong"]

    if len(came()) < len(numbers):
        await link.until(lambda _: len(came()) >= len(numbers), link.bounds.pong_s + link.bounds.slack_s)
    await link.next(link.bounds.quiet_s)
    if came() != numbers:
        raise Unfit(f"{len(came())} pongs for {len(numbers)} pings, or not in their order", link.lines)
    return f"{len(numbers)} pongs in order"


ASK_MEMBERS: Final = {
    "tool": ("name", "input"),
    "patch": ("diff", "files"),
    "input": ("question", "options"),
    "result": ("name", "input", "output", "is_error"),
    "spend": ("input",),
}
"""Members of an ask by the protocol; our own reader needs fewer."""


async def _asked(link: Wire, seen: Sequence[str] = ()) -> HostLine:
    """Wait for an ask in the right shape and with an id of its own, or for the end of the run."""
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
        raise Unfit("the id of an ask was used twice", [line])
    return line


async def _ask(link: Wire, bench: Bench, value: bool) -> None:
    await _asked(link)


async def _asks(
    link: Wire,
    bench: Bench,
    answer: Mapping[str, Json],
    *,
    times: int = 1,
    same_input: bool = False,
    may_fail: bool = False,
) -> str:
    seen: list[str] = []
    while (line := await _asked(link, seen)).t == "ask":
        seen.append(str(line.get("id")))
        given = {**answer, "input": line.get("input")} if same_input else answer
        for _ in range(times):
            await link.send({"t": "answer", "ref_id": "r1", "id": seen[-1], **given})
    if not may_fail:
        _own_final(line)
    return f"{len(seen)} asks, all in the right shape, then {line.t}" if seen else "no ask came up"


# Several runs ---------------------------------------------------------------------------------------------------------


def _own_final(line: HostLine) -> None:
    if line.t != "final":
        raise Unfit(f"run {line.get('ref_id')!r:.60} ended with fatal: {line.get('error')!r:.200}", [line])


async def _finals(link: Wire, bench: Bench, names: Names, *, others: Names = (), whole: bool = False) -> str:
    found: dict[str, HostLine] = {}
    finals = _names(names)
    wanted = [*finals, *_names(others)]
    while len(found) < len(wanted):
        line = await link.until(lambda line: line.is_end and line.get("ref_id") is not None, link.bounds.run_s)
        if line is None:
            missing = ", ".join(repr(name) for name in wanted if name not in found)
            raise Unfit(f"no end of {missing:.200} came", link.lines)
        name = line.get("ref_id")
        if name in found or name not in wanted:
            raise Unfit(f"an end too many, of {name!r:.60}", [line])
        found[name] = line
    for name in finals:
        _own_final(found[name])
        if whole and found[name].value["receipt"].get("outcome") == "partial":
            raise Unfit(f"{name} is partial, although another was cancelled", [found[name]])
    return f"{len(wanted)} runs, each with its own end"


async def _apart(link: Wire, bench: Bench, names: Names) -> None:
    wanted, over = _names(names), set[str]()
    for line in link.lines:
        name = line.get("ref_id")
        if line.t == "event" and (name not in wanted or name in over):
            raise Unfit(f"an event of {name!r:.60}, which is not open", [line])
        if line.is_end:
            over.add(name)
    events = Counter(line.get("ref_id") for line in link.lines if line.t == "event")
    if events and min(events[name] for name in wanted) == 0:
        raise Unfit("some of many like runs have no events", link.lines)


async def _again(link: Wire, bench: Bench, run_id: str) -> str:
    # In one write, so that the first is open when the second is read.
    run = {"t": "run", "id": run_id, "work_order": bench.order(), "extensions": ["cancel/1", "ping/1", "many/1"]}
    await link.send(b"\n".join([msgspec.json.encode(run)] * 2))
    line = await link.until(lambda line: line.is_end and line.get("ref_id") == run_id, link.bounds.run_s)
    if line is None:
        raise Unfit("no end of the run that was open came", link.lines)
    _own_final(line)
    if sum(line.is_end for line in link.lines) == 1:
        await link.until(lambda line: line.is_end, link.bounds.pong_s)
    await link.next(link.bounds.quiet_s)
    if sum(line.is_end and line.get("ref_id") == run_id for line in link.lines) == 2:
        return "the second came after the end"
    fatals = [line.get("ref_id") for line in link.lines if line.t == "fatal"]
    if fatals != [None]:
        raise Unfit("a run whose id is in use is answered by a fatal with ref_id null", link.lines)
    return "one final, and a fatal with ref_id null"


async def _row(link: Wire, bench: Bench, names: Sequence[str], *, may_fail: bool = False) -> str:
    for number, name in enumerate(names):
        line = None
        await _run(link, bench, name)
        if await link.child.wait(0) is None:
            line = await link.until(lambda line: line.is_end, link.bounds.run_s)
        if line is None and number:
            how = await link.child.wait(link.bounds.slack_s)
            if how is None or how.code != 0:
                raise Unfit("neither a second end nor an exit with code 0 came", link.lines)
            return "one run a process; it exits with code 0"
        if line is None or ((line.t != "final" or line.get("ref_id") != name) and not (may_fail and number)):
            raise Unfit(f"run {number + 1} of {len(names)} did not end with its own final", link.lines)
    return f"{len(names)} runs, one after the other"


VERBS: Final[dict[str, Callable[..., Awaitable[str | None]]]] = {
    "send": _send, "run": _run, "runs": _runs, "again": _again, "row": _row, "tree": _tree,
    "close": _close, "deaf": _deaf, "signal": _signal, "pause": _pause,
    "end": _end, "final": _final, "fatal": _fatal, "finals": _finals, "exit": _exit, "wait": _wait,
    "silent": _silent, "pongs": _pongs, "asks": _asks, "ask": _ask, "survives": _survives,
    "never": _never, "apart": _apart,
}  # fmt: skip
