"""What every check with a fresh child needs: a greeted child, an order, and waits for its ends.

Every wait is bounded by `Bounds`; a child that does not answer fails its check and is gone when
the check is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from backplane.conform.link import HostLine, Program, Wire, linked, order
from backplane.conform.plain import ENDS
from backplane.conform.verdict import RuleLevel, Unfit
from backplane.contract.canonical import Json


class Bench(msgspec.Struct, frozen=True):
    """What every check of this file needs."""

    program: Program
    root: str
    task: str
    extensions: tuple[str, ...]
    """What the host announced in its plain run."""
    vendor: dict[str, Json]
    """What every order says to this host alone."""

    def place(self, name: str) -> Path:
        """A folder of this check's own, below its root."""
        folder = Path(self.root, name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @asynccontextmanager
    async def greeted(self) -> AsyncIterator[Wire]:
        """A fresh child that has said its hello."""
        async with linked(self.program) as link:
            if await link.until(lambda line: line.t == "hello", link.bounds.hello_s) is None:
                raise Unfit("this time no hello came", link.lines)
            yield link

    def run(self, run_id: str = "r1", extensions: Sequence[str] = (), **changed: Json) -> dict[str, Any]:
        announced = {"extensions": list(extensions)} if extensions else {}
        asked = order(self.root, **{"task": self.task, "vendor": self.vendor, **changed})
        return {"t": "run", "id": run_id, "work_order": asked, **announced}


async def end(link: Wire, run_id: str = "r1", timeout_s: float | None = None) -> HostLine:
    """The end of a run, and that it is one."""
    line = await link.until(
        lambda line: line.t in ENDS and line.get("ref_id") in (run_id, None), timeout_s or link.bounds.run_s
    )
    if line is None:
        # Its output ends a moment before its exit is known.
        exited = await link.child.wait(link.bounds.slack_s) if link.ended else link.child.exit
        ending = f"it ended with {exited.describe()}" if exited is not None else "it is silent"
        raise Unfit(f"no end of run {run_id!r} came; {ending}", link.lines)
    return line


async def final(link: Wire, run_id: str = "r1") -> str:
    line = await end(link, run_id)
    if line.t != "final":
        raise Unfit(f"it ended with fatal: {line.get('error')!r:.200}", link.lines)
    return "final came"


async def exits(link: Wire, within_s: float, why: str) -> str:
    await link.rest(within_s + link.bounds.slack_s)
    how = await link.child.wait(link.bounds.slack_s)
    if how is None:
        raise Unfit(f"still running {within_s:g} s after {why}", link.lines)
    return how.describe()


async def terminated(link: Wire) -> str:
    """How it ends at SIGTERM, and that nothing of it is left."""
    link.child.terminate()
    how = await exits(link, link.bounds.exit_s, "SIGTERM")
    await link.child.stop(grace_s=0)
    if link.child.swept:
        raise Unfit(f"{link.child.swept} of its processes were left running", link.lines)
    return how


async def unheard(link: Wire, run: Json) -> str:
    """That it ends when nobody reads what it says, asked once more."""
    link.child.close_stdout()
    link.ended = True
    await link.send(run)
    if await link.child.wait(link.bounds.closed_s + link.bounds.slack_s) is None:
        raise Unfit(f"still running {link.bounds.closed_s:g} s after its stdout was closed", link.lines)
    return "it ended"


BenchCheck = Callable[[Bench], Awaitable[str]]
"""Says what was seen; raises `Unfit` where a rule is broken, `Unasked` where it does not apply."""

BenchRow = tuple[str, RuleLevel, str, str, BenchCheck]
"""Name, level, rule, what is done, and the check."""
