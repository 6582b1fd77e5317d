"""A scripted agent: a scenario says which messages, edits, asks, delays and failures it makes.

The scenario is a JSON list of steps: the argument `SCENARIO` (a file), or the order's
`config.vendor.mock.scenario` (a list, or a file). Without one it answers the task in one
message. Each step is an object with one key, a row of `STEPS`.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from backplane.contract.capability import EMULATED, NATIVE, Level, read_manifest
from backplane.contract.events import Reasoning
from backplane.contract.receipt import Usage
from backplane.errors import BackplaneError, from_code
from backplane.host import EXTENSIONS, Done, Host, HostRun, main

CAPABILITIES: dict[str, Level] = {
    **dict.fromkeys(("streaming", "tool_read", "tool_write", "tool_bash", "tool_ask_user"), NATIVE),
    "tool_edit": EMULATED,
}

HEEDS = ("model", "max_turns", "max_budget_usd", "context")
"""A scenario says what the agent does, whatever model, limits and context it was given."""

ScenarioStep = Callable[["Scenario", Any], Awaitable[None]]


class Scenario:
    """One run of a scenario."""

    def __init__(self, run: HostRun) -> None:
        self.run = run
        self.done = Done()
        self._calls = 0

    async def play(self, steps: list[Any]) -> None:
        for step in steps:
            if not isinstance(step, dict) or len(step) != 1 or next(iter(step)) not in STEPS:
                raise BackplaneError("config_invalid", f"no such step in a scenario: {str(step)[:100]}")
            name, value = next(iter(step.items()))
            await STEPS[name](self, value)

    async def _tool(self, name: str, tool_input: Any, do: Callable[[Any], str]) -> Any:
        """Run a tool as a real agent does: call, ask, do, result; return the input it ran with, None if it did not."""
        self._calls += 1
        call_id = f"call-{self._calls}"
        await self.run.tool_call(name, tool_input, call_id)
        verdict = await self.run.may(name, tool_input, id=call_id, cwd=self.run.order.workspace.root)
        if verdict.decision == "deny":
            await self.run.tool_result(name, f"policy_denied: {verdict.reason}", is_error=True, id=call_id)
            return None
        if verdict.input is not msgspec.UNSET:
            tool_input = verdict.input
        try:
            output, failed = do(tool_input), False
        except OSError as error:
            output, failed = str(error), True
        shown, is_error = await self.run.shown(name, tool_input, output, id=call_id, is_error=failed)
        await self.run.tool_result(name, shown, is_error=is_error, id=call_id)
        return None if failed else tool_input

    async def say(self, text: str) -> None:
        await self.run.message(text)

    async def delta(self, text: str) -> None:
        await self.run.delta(text)

    async def think(self, text: str) -> None:
        await self.run.emit(Reasoning(ts=self.run.now(), text="", ext={"reasoning": {"text": text}}))

    def _path(self, path: str) -> Path:
        return Path(self.run.order.workspace.root, path)

    async def write(self, value: dict[str, str]) -> None:
        def write(value: dict[str, str]) -> str:
            path = self._path(value["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value["content"])
            return f"wrote {len(value['content'])} characters"

        written = await self._tool("write_file", value, write)
        if written is not None:
            await self.run.file_changed(written["path"], "written")

    async def delete(self, path: str) -> None:
        def delete(_: Any) -> str:
            self._path(path).unlink()
            return "deleted"

        if await self._tool("write_file", {"path": path, "content": None}, delete) is not None:
            await self.run.file_changed(path, "deleted")

    async def read(self, path: str) -> None:
        await self._tool("read_file", {"path": path}, lambda value: self._path(value["path"]).read_text())

    async def tool(self, value: dict[str, Any]) -> None:
        """A tool of any name that does nothing: `{name, input, output}`."""
        await self._tool(value["name"], value.get("input"), lambda _: value.get("output", ""))

    async def ask(self, value: dict[str, Any]) -> None:
        """Ask the user and say what was answered: `{question, options, default}`."""
        verdict = await self.run.ask_user(
            value["question"], options=tuple(value.get("options", ())), default=value.get("default", "")
        )
        await self.run.message(f"answer: {verdict.decision} {verdict.text or ''}".rstrip())

    async def sleep_s(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def repeat(self, value: dict[str, Any]) -> None:
        """`{times, steps}`; `{n}` in a text is the count."""
        template = msgspec.json.encode(value["steps"])
        for number in range(int(value["times"])):
            await self.play(msgspec.json.decode(template.replace(b"{n}", str(number).encode())))

    async def usage(self, counters: dict[str, Any]) -> None:
        self.done = msgspec.structs.replace(self.done, usage=msgspec.convert(counters, Usage))

    async def outcome(self, value: str) -> None:
        self.done = msgspec.structs.replace(self.done, outcome=value)

    async def error(self, value: dict[str, str]) -> None:
        await self.run.error(value["message"], value.get("code"))

    async def fail(self, value: dict[str, str]) -> None:
        raise from_code(value.get("code", "internal"), value["message"])

    async def stderr(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    async def raw(self, text: str) -> None:
        """Bytes straight to the control plane, right or wrong."""
        await self.run.write_raw(text.encode())

    async def exit(self, code: int) -> None:
        os._exit(code)

    async def kill(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    async def hang(self, _: Any) -> None:
        """Never end; deaf to SIGTERM too."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()


STEPS: dict[str, ScenarioStep] = {
    name: step for name, step in vars(Scenario).items() if not name.startswith("_") and name != "play"
}


def _scenario(run: HostRun, path: str | None) -> list[Any]:
    own = run.order.config.vendor.get("mock")
    named: Any = own.get("scenario") if isinstance(own, dict) else None
    named = steps = path if named is None else named
    if named is None:
        return [{"say": f"I was asked: {run.order.task}"}]
    if isinstance(named, str):
        try:
            steps = msgspec.json.decode(Path(named).read_bytes())
        except (OSError, ValueError) as error:
            raise BackplaneError("config_invalid", f"the scenario {named} cannot be read: {error}") from error
    if not isinstance(steps, list):
        raise BackplaneError("config_invalid", f"the scenario {named} is not a list of steps")
    return steps


def work_of(path: str | None = None) -> Callable[[HostRun], Awaitable[Done]]:
    """The work of a mock that plays one scenario; None takes the order's."""

    async def work(run: HostRun) -> Done:
        script = Scenario(run)
        await script.play(_scenario(run, path))
        return script.done

    return work


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", help="JSON file with a list of steps")
    parser.add_argument("--capabilities", default=None, help="JSON manifest to announce in place of the usual one")
    arguments = parser.parse_args()
    levels = CAPABILITIES
    if arguments.capabilities is not None:
        levels = read_manifest(msgspec.json.decode(arguments.capabilities)).levels
    host = Host(id="mock", capabilities=levels, extensions=(*EXTENSIONS, "many/1"), heeds=HEEDS)
    main(host, work_of(arguments.scenario))
