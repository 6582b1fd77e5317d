"""A scripted agent for `test_handovers`: it knows only what its order, or its own store, tells of the conversation.

Its work is numbered steps. Each step has an effect outside of the workspace, a line of the file `effects`, and one
inside, a file `made-STEP`. A step whose result it knows is done; one whose result is unknown is looked up in `effects`,
but only if the order says that it is unknown; any other step it does. So a call that was not carried is repeated.

Arguments: the form of the host and the folder of the conversation. The file `cut` there names an event and how often
it has to occur before the host stops there, and how: `die`, `fail`, or `hang`, until somebody ends the turn.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import anyio

from backplane.contract.capability import NATIVE, restricted
from backplane.contract.events import AssistantDelta
from backplane.contract.receipt import Usage
from backplane.host import EXTENSIONS, Done, Host, HostRun, main

FORM, FOLDER = (sys.argv[1], Path(sys.argv[2])) if __name__ == "__main__" else ("", Path())
STEPS: Final = 4
"""Steps of a conversation."""

FORMS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "keeps": (("session", "system", "context"), {"session_fork": NATIVE}),
    "keeps-in-folder": (("session", "context"), {"session_resume": restricted("in its folder")}),
    "history": (("history", "context", "system", "sampling"), {}),
    "proofs": (("history", "context", "system"), {}),
    "words": (("context",), {}),
    "no-ids": (("context",), {}),
}
"""Form of a host → the settings that it heeds, and abilities."""

CALL: Final = re.compile(r'Call (\S+): work (\{"step":\d+\})( \(no result was recorded\))?')
RESULT: Final = re.compile(r"Result of (\S+): done (\d+)")
ASKED: Final = "so whether they ran is unknown"


class Stopped(Exception):
    """The user has interrupted the turn, or denied a step."""


class Agent:
    """The agent in one turn."""

    def __init__(self, run: HostRun) -> None:
        self.run, self.order = run, run.order
        self.events, self.stopped = dict[str, int](), anyio.Event()
        run.on_interrupt = self.stop
        cut = FOLDER / "cut"
        self.cut = json.loads(cut.read_text()) if cut.exists() else {}
        self.keeps = "session" in FORMS[FORM][0]
        asked = self.order.abp("session") or {}
        self.id = str(asked.get("resume") or asked.get("fork") or f"{FORM}-{run.id[:8]}")
        stored = FOLDER / f"{self.id}.store"
        self.stored: list[Any] = json.loads(stored.read_text()) if stored.exists() and "keep" not in asked else []
        if "fork" in asked:
            self.id = f"{FORM}-{run.id[:8]}"

    async def stop(self) -> None:
        self.stopped.set()

    async def happened(self, event: str, *stored: Any) -> None:
        """Count an event, keep it in the agent's own store, and stop here if it is the one to stop at."""
        self.stored += stored
        if self.keeps:
            (FOLDER / f"{self.id}.store").write_text(json.dumps(self.stored))
        self.events[event] = self.events.get(event, 0) + 1
        if self.stopped.is_set():
            raise Stopped
        if self.cut.get("event") != event or self.cut["count"] != self.events[event]:
            return
        (FOLDER / "cut").unlink()
        if self.cut["way"] == "die":
            os._exit(9)
        if self.cut["way"] == "fail":
            raise RuntimeError("the agent gave up")
        (FOLDER / "hangs").touch()
        await self.stopped.wait()
        raise Stopped

    def known(self) -> tuple[set[int], set[int]]:
        """Return the steps whose result is known, and those that the order says to look for."""
        done, unknown = set[int](), set[int]()
        history = self.order.abp("history") or ()
        calls = {call["id"]: call["arguments"]["step"] for one in history for call in one.get("tool_calls", ())}
        done |= {calls[one["tool_call_id"]] for one in history if one["role"] == "tool"}
        done |= {row["done"] for row in self.stored if "done" in row}
        words = "\n\n".join([*(row["user"] for row in self.stored if "user" in row), self.order.task])
        done |= {int(step) for _, step in RESULT.findall(words)}
        unknown |= {json.loads(found[2])["step"] for found in CALL.finditer(words) if found[3]}
        for part in words.split("\n\n"):
            if ASKED in part:
                unknown |= {json.loads(found[2])["step"] for found in CALL.finditer(part)}
        return done, unknown

    async def work(self) -> Done:
        run, folder = self.run, Path(self.order.workspace.root)
        done, unknown = self.known()
        seen = {
            "run": run.id, "task": self.order.task, "history": self.order.abp("history"), "stored": self.stored,
            "files": [name for name in sorted(os.listdir(folder)) if name.startswith("made-")], "done": sorted(done),
        }  # fmt: skip
        with (FOLDER / "orders").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        mark = f"{FORM} {run.id[:8]}"
        await self.happened("start", {"user": self.order.task})
        if self.keeps:
            await run.carry("session", {"id": self.id}, "session")
            await self.happened("session")
        thought = {"text": f"thought of {mark}", **({"signature": f"proof of {mark}"} if FORM == "proofs" else {})}
        await run.emit(AssistantDelta(ts=run.now(), text="", ext={"reasoning": thought}))
        await self.happened("reasoning", thought)
        for piece, whole in (("said by ", "said by "), (mark, f"said by {mark}")):
            await run.delta(piece)
            await self.happened("delta", {"said": whole})
        await run.message(f"said by {mark}")
        await self.happened("message", {"said": f"said by {mark}"})
        effects = (FOLDER / "effects").read_text().split() if (FOLDER / "effects").exists() else []
        for step in range(STEPS):
            if step not in done:
                await self.step(step, folder, f"{mark} {step}", is_done=step in unknown and str(step) in effects)
        await run.message(f"finished by {mark}")
        await self.happened("end", {"said": f"finished by {mark}"})
        return Done(usage=Usage(input_tokens=3, output_tokens=2))

    async def step(self, step: int, folder: Path, mark: str, *, is_done: bool) -> None:
        run, id = self.run, None if FORM == "no-ids" else f"call-{step}"
        if (await run.may("work", {"step": step}, id=id)).decision == "deny":
            raise Stopped
        await self.happened("ask")
        await run.tool_call("work", {"step": step}, id)
        await self.happened("call", {"called": step})
        if not is_done:
            with (FOLDER / "effects").open("a") as file:
                file.write(f"{step}\n")
        (folder / f"made-{step}").touch()
        await self.happened("effect")
        await run.command_executed(f"make {step}", 0, "")
        await self.happened("command")
        await run.file_changed(f"made-{step}", f"made by {mark}")
        await self.happened("file")
        await run.tool_result("work", f"done {step}", id=id)
        await self.happened("result", {"done": step})
        await run.warn(f"warned by {mark}")
        await self.happened("warning")


async def work(run: HostRun) -> Done:
    try:
        return await Agent(run).work()
    except Stopped:
        return Done(outcome="partial")


if __name__ == "__main__":
    heeds, levels = FORMS[FORM]
    more = ("session/1",) if "session" in heeds else ()
    levels = {"streaming": NATIVE, **levels}
    main(Host(id=FORM, capabilities=levels, extensions=(*EXTENSIONS, "interrupt/1", *more), heeds=heeds), work)
