"""The verbs of `contracts/conform.toml`, which explains them: what is sent to a host and what it must answer.

Every wait is bounded by `Bounds`; a host that does not answer breaks its rule.
"""

from __future__ import annotations

import functools
import json
import os
import signal as signals
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

ASK_MEMBERS: Final = {
    "tool": ("name", "input"),
    "patch": ("diff", "files"),
    "input": ("question", "options"),
    "result": ("name", "input", "output", "is_error"),
}
"""Members of an ask by the protocol; our own reader needs fewer."""

Names = int | Sequence[str]
"""Ids of runs; a number n means r1 to rn."""


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
        """Return the bytes of a text in a rule, its placeholders filled."""
        if isinstance(text, list):
            return b"".join(self.data(part, n) for part in text)
        if isinstance(text, dict) and "encoding" in text:
            return self.data(text["text"], n).decode().encode(text["encoding"])
        if isinstance(text, dict):
            return bytes.fromhex(text["hex"]) if "hex" in text else self.data(text["of"], n) * text["times"]
        marks = {"task": json.dumps(self.task)[1:-1], "root": json.dumps(self.root)[1:-1], "n": str(n)}
        marks["grace"] = str(int(self.program.bounds.grace_s * 1000))
        if "{order}" in text:
            marks["order"] = json.dumps(self.order())
        for name, value in marks.items():
            text = text.replace(f"{{{name}}}", value)
        return str(text).encode()


class Play:
    """The steps of one rule against one fresh host; `VERBS` names the methods that are steps."""

    def __init__(self, link: Wire, bench: Bench) -> None:
        self.link, self.bench, self.bounds = link, bench, link.bounds
        self.run_id = ""
        """Id of the run that was sent last."""
        self.mark = 0
        """Number of lines before the first step."""

    async def send(self, text: Any, *, times: int = 1, newline: bool = True) -> None:
        for n in range(times):
            await self.link.send(self.bench.data(text, n), newline=b"\n" * newline)

    async def run(
        self,
        run_id: Any,
        *,
        extensions: Sequence[str] = (),
        set: Mapping[str, Any] = {},
        edit: Sequence[tuple[str, str]] = (),
        times: int = 1,
        newline: bool = True,
        piece_bytes: int = READ_BYTES_MAX,
    ) -> None:
        self.run_id = self.bench.data(run_id).decode()
        message: dict[str, Any] = {"t": "run", "id": self.run_id, "work_order": self.bench.order()}
        if extensions:
            message["extensions"] = extensions
        marks = {}
        for number, (pointer, text) in enumerate(set.items()):
            *parents, member = pointer.split("/")[1:]
            holder = message
            for parent in parents:
                holder = holder[parent]
            holder[member] = f"conform-mark-{number}."
            marks[json.dumps(holder[member]).encode()] = self.bench.data(text)
            if text == "":
                del holder[member]
        data = msgspec.json.encode(message)
        for old, new in edit:
            data = data.replace(old.encode(), new.encode())
        for mark, text in marks.items():
            data = data.replace(mark, text)
        data = b"\n".join([data] * times)  # In one write, so that the first is open when the host reads the second.
        await self.link.send(data, newline=b"\n" * newline, piece_bytes=piece_bytes)

    async def runs(self, names: Names, *, extensions: Sequence[str] = (), each: Any = "") -> None:
        for n, name in enumerate(_names(names)):
            await self.run(name, extensions=extensions)
            await self.link.send(self.bench.data(each, n), newline=b"\n" if each else b"")

    async def close(self, value: bool) -> None:
        self.link.child.close_stdin()

    async def deaf(self, value: bool) -> None:
        self.link.child.close_stdout()
        self.link.ended = True

    async def signal(self, name: str) -> None:
        if self.link.child.exit is None:
            os.kill(self.link.child.pid, signals.Signals[name])

    async def pause(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def end(self, run_id: str | bool, *, within: str = "run", once: bool = False, **must: Any) -> str:
        wanted = self.run_id if isinstance(run_id, bool) else run_id
        line = await self._end_of(wanted, self.bounds.grace_s + self.bounds.slack_s if within == "grace" else None)
        for name, value in {"named": line.t == "final", **must}.items():
            if value and (fault := ENDS[name](line, value)):
                raise Unfit(fault, [line])
        if once:
            await self.link.next(self.bounds.quiet_s)
            ends = [line for line in self.link.lines[self.mark :] if line.is_end]
            if len(ends) > 1:
                raise Unfit("the run ended more than once", ends)
        return f"{line.t} came"

    async def _end_of(self, run_id: str, timeout_s: float | None = None) -> HostLine:
        """Wait for the end of a run, if it has not come already."""

        def is_its_end(line: HostLine) -> bool:
            return line.is_end and line.get("ref_id") in (run_id, None)

        link = self.link
        came = next(filter(is_its_end, link.lines[self.mark : link.handed]), None)
        line = came or await link.until(is_its_end, self.bounds.run_s if timeout_s is None else timeout_s)
        if line is None:
            # Its output ends a moment before its exit is known.
            exited = await link.child.wait(self.bounds.slack_s) if link.ended else link.child.exit
            ending = f"the host ended with {exited.describe()}" if exited is not None else "the host sends nothing"
            raise Unfit(f"run {run_id!r:.60} did not end; {ending}", link.lines)
        return line

    final = functools.partialmethod(end, t="final")
    fatal = functools.partialmethod(end, t="fatal")

    async def exit(
        self, why: str, *, code: int | None = None, clean: bool = False, mute: bool = False, within: str = "exit"
    ) -> str:
        link, bounds = self.link, self.bounds
        limits = {"exit": bounds.exit_s, "grace": bounds.grace_s + bounds.exit_s, "closed": bounds.closed_s}
        how = await link.exit(limits[within])
        if how is None:
            raise Unfit(f"the host is still running {limits[within]:g} s after {why}", link.lines)
        if code is not None and how.code != code:
            raise Unfit(f"the host ended with {how.describe()}", link.lines)
        if mute and link.lines[self.mark :]:
            raise Unfit("the host wrote although it got no run", link.lines[self.mark :])
        if clean:
            await link.child.stop(grace_s=0)
            if link.child.swept:
                raise Unfit(f"the host left {link.child.swept} of its processes running", link.lines)
        return how.describe()

    async def wait(self, wanted: str) -> None:
        await {"line": self._next, "end": self._next_end, "ask": self._asked}[wanted]()

    async def _next(self) -> HostLine | None:
        return await self.link.next(self.bounds.quiet_s)

    async def _next_end(self) -> HostLine | None:
        return await self.link.until(lambda line: line.is_end, self.bounds.run_s)

    async def silent(self, fault: str) -> str:
        if (line := await self._next()) is not None:
            raise Unfit(fault, [line])
        return "the host sent nothing, as expected"

    async def never(self, fault: str, **faults: Any) -> str:
        wrong = [line for line in self.link.lines if any(FAULTS[name](line, value) for name, value in faults.items())]
        if wrong:
            raise Unfit(fault, wrong)
        return f"{len(self.link.lines)} lines, none of them wrong"

    async def survives(self, run_id: str) -> str:
        await self.run(run_id)
        link = self.link
        good = await link.until(lambda line: line.is_end and line.get("ref_id") == run_id, self.bounds.run_s)
        lines = link.lines[self.mark :]
        ends = [line for line in lines if line.is_end]
        noise = [line for line in lines if line.t is None]
        if any(line.t == "final" and line.get("ref_id") != run_id for line in ends):
            raise Unfit("the host took another line for a run", lines)
        if noise:
            raise Unfit("the host wrote a line that is not a message", noise)
        if good is not None:
            return "the host sent a fatal, then did the run" if len(ends) > 1 else "no answer, then the run was done"
        link.child.close_stdin()
        exited = await link.child.wait(self.bounds.exit_s)
        if ends and exited is not None:
            return "the host sent a fatal, then exited"
        how = f"the host ended with {exited.describe()}" if exited is not None else "the host hangs"
        raise Unfit(f"no fatal came, and the next run was not done: {how}", lines)

    async def pongs(self, wanted: int | Sequence[str]) -> str:
        numbers = list(range(wanted)) if isinstance(wanted, int) else [int(number) for number in wanted]

        def came() -> list[Json]:
            return [line.get("seq") for line in self.link.lines if line.t == "pong"]

        if len(came()) < len(numbers):
            await self.link.until(lambda _: len(came()) >= len(numbers), self.bounds.pong_s + self.bounds.slack_s)
        await self.link.next(self.bounds.quiet_s)
        if came() != numbers:
            raise Unfit(f"{len(came())} pongs came for {len(numbers)} pings, or came in another order", self.link.lines)
        return f"{len(numbers)} pongs in order"

    async def _asked(self, seen: Sequence[str] = ()) -> HostLine:
        """Wait for an ask in the right shape and with an id of its own, or for the end of the run."""
        line = await self.link.until(lambda line: line.t == "ask" or line.is_end, self.bounds.run_s)
        if line is None:
            raise Unfit(f"the run did not end after {len(seen)} answered asks", self.link.lines)
        if line.t != "ask":
            return line
        kind, ask_id = line.get("kind"), line.get("id")
        missing = [name for name in ASK_MEMBERS.get(str(kind), ("kind",)) if name not in line.value]
        if missing or line.get("ref_id") != "r1" or not isinstance(ask_id, str):
            raise Unfit(f"an ask of kind {kind!r:.40} lacks {', '.join(missing) or 'its ref_id or id'}", [line])
        if ask_id in seen:
            raise Unfit("the id of an ask was used twice", [line])
        return line

    async def asks(
        self, answer: Mapping[str, Json], *, times: int = 1, same_input: bool = False, may_fail: bool = False
    ) -> str:
        seen: list[str] = []
        while (line := await self._asked(seen)).t == "ask":
            seen.append(line.get("id"))
            given = {**answer, "input": line.get("input")} if same_input else answer
            for _ in range(times):
                await self.link.send({"t": "answer", "ref_id": "r1", "id": seen[-1], **given})
        if not may_fail:
            _require_final(line)
        return f"{len(seen)} valid asks, then {line.t}" if seen else "the host sent no ask"

    async def finals(self, names: Names, *, others: Names = (), whole: bool = False) -> str:
        finals, found = _names(names), dict[str, HostLine]()
        wanted = [*finals, *_names(others)]
        while len(found) < len(wanted):
            line = await self.link.until(lambda line: line.is_end and line.get("ref_id") is not None, self.bounds.run_s)
            if line is None:
                missing = ", ".join(repr(name) for name in wanted if name not in found)
                raise Unfit(f"these runs did not end: {missing:.200}", self.link.lines)
            name = line.get("ref_id")
            if name in found or name not in wanted:
                raise Unfit(f"run {name!r:.60} ended twice, or was never sent", [line])
            found[name] = line
        for name in finals:
            _require_final(found[name])
            if whole and found[name].value["receipt"].get("outcome") == "partial":
                raise Unfit(f"run {name} is partial, although only another run was cancelled", [found[name]])
        return f"{len(wanted)} runs, each with its own end"

    async def apart(self, names: Names) -> None:
        wanted, over, events = _names(names), set[str](), Counter[str]()
        for line in self.link.lines:
            name = line.get("ref_id")
            if line.t == "event":
                events[name] += 1
                if name not in wanted or name in over:
                    raise Unfit(f"an event of run {name!r:.60}, which is not open", [line])
            elif line.is_end:
                over.add(name)
        if events and min(events[name] for name in wanted) == 0:
            raise Unfit("some of the runs have no events", self.link.lines)

    async def again(self, run_id: str) -> str:
        if await self._next_end() is not None:
            await self._next_end()
        await self._next()
        ends = [line for line in self.link.lines if line.is_end]
        found = Counter((line.t, line.get("ref_id")) for line in ends)
        if found == {("final", run_id): 2}:
            return "the host did the second run after the first"
        if found != {("final", run_id): 1, ("fatal", None): 1}:
            raise Unfit("a run whose id is in use must be answered with a fatal, ref_id null", ends or self.link.lines)
        return "one final, and a fatal with ref_id null"

    async def row(self, names: Sequence[str], *, may_fail: bool = False) -> str:
        link = self.link
        for number, name in enumerate(names):
            await self.run(name)
            line = await self._next_end() if await link.child.wait(0) is None else None
            if line is None and number:
                how = await link.child.wait(self.bounds.slack_s)
                if how is None or how.code != 0:
                    raise Unfit("the second run did not end, and the host did not exit with code 0", link.lines)
                return "the host does one run per process, then exits with code 0"
            if line is None or ((line.t != "final" or line.get("ref_id") != name) and not (may_fail and number)):
                raise Unfit(f"run {number + 1} of {len(names)} did not end with its own final", link.lines)
        return f"{len(names)} runs, one after the other"


def _names(names: Names) -> list[str]:
    return [f"r{number + 1}" for number in range(names)] if isinstance(names, int) else list(names)


def _require_final(line: HostLine) -> None:
    if fault := _not(line, "final"):
        raise Unfit(fault, [line])


def _not(line: HostLine, t: str) -> str | None:
    whose = f"run {line.get('ref_id')!r:.60} ended with {line.t}, not {t}"
    return f"{whose}: {line.get('error')!r:.200}" if line.t != t else None


def _unreadable(line: HostLine) -> str | None:
    try:
        read_receipt(line.get("receipt"))
    except ValueError as error:
        return f"the receipt cannot be read: {error}"
    return None


ENDS: Final[dict[str, Callable[[HostLine, Any], str | None]]] = {
    "t": _not,
    "named": lambda line, _: "the end names no run" if line.get("ref_id") is None else None,
    "code": lambda line, code: f"{line.get('error_code')} came, not {code}" if line.get("error_code") != code else None,
    "explained": lambda line, _: None if str(line.get("error") or "").strip() else "the fatal explains nothing",
    "receipt": lambda line, _: _unreadable(line) if line.t == "final" else None,
}
"""Demand on an end → its fault, if any."""

FAULTS: Final[dict[str, Callable[[HostLine, Any], bool]]] = {
    "broken": lambda line, _: line.fault is not None,
    "noise": lambda line, _: line.t is None,
    "text": lambda line, text: text.encode() in line.raw,
    "t": lambda line, names: line.t in names,
    "ref_id": lambda line, id: line.t == "final" and line.get("ref_id") == id,
}
"""Fault that `never` names → does a line have it?"""

VERBS: Final[dict[str, Callable[..., Awaitable[str | None]]]] = {
    name: getattr(Play, name) for name in vars(Play) if not name.startswith("_")
}
