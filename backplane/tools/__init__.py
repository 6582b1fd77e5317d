"""Tools for a model that brings none: files, commands, searches, pages and questions.

A call comes in, a `CallResult` for the model comes out; a wrong call does not raise. Each tool stays inside the
workspace and under the policy. The host asks before a tool runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.errors import BackplaneError
from backplane.policy.rules import Policy
from backplane.process.programs import GRACE_S, Hear, run_program
from backplane.tools import fetch, files, search
from backplane.tools.places import ToolRefused, Tree
from backplane.tools.results import CallResult, ChangedFile, Ran, shortened
from backplane.tools.specs import SPECS, TIMEOUT_S, fault_in

__all__ = ["SPECS", "CallResult", "ChangedFile", "Ran", "Toolbox", "Tree", "fault_in"]

LIVE_CHARS_MAX: Final = 256 * 1024
"""Most characters of a command's output that are reported while it runs; the rest is read, but not reported live."""

AskUser = Callable[[str, tuple[str, ...]], Awaitable[str]]
"""Callback that takes a question and its options, and returns the answer."""


class Toolbox:
    """The tools over one workspace.

    Args:
        root: the folder to work in.
        env: the complete environment of commands, without the host's keys.
        hear: takes a command's output while it runs.
        ask_user: answers questions.
        grace_s: returns the seconds that a stopped command may take to end.
    """

    def __init__(
        self,
        root: str,
        policy: Policy,
        *,
        env: Mapping[str, str],
        hear: Hear,
        ask_user: AskUser,
        grace_s: Callable[[], float] = lambda: GRACE_S,
    ) -> None:
        self.tree = Tree(root, policy)
        self._env, self._hear, self._ask_user, self._grace_s = env, hear, ask_user, grace_s

    async def run(self, name: str, input: Json) -> CallResult:
        """Run one call; a fault becomes a result for the model."""
        fault = fault_in(name, input)
        if fault is not None:
            return CallResult(fault, is_error=True)
        try:
            done = _RUN[name](self, input)
            return await done if inspect.isawaitable(done) else done
        except ToolRefused as refused:
            return CallResult(str(refused), is_error=True)
        except (BackplaneError, OSError) as error:
            return CallResult(f"{name} failed: {getattr(error, 'message', error)}", is_error=True)

    async def _bash(self, input: dict[str, Any]) -> CallResult:
        command, timeout_s = input["command"], float(input.get("timeout_s", TIMEOUT_S))
        left = LIVE_CHARS_MAX

        async def hear(text: str) -> None:
            nonlocal left
            if left > 0:
                left -= len(text)
                await self._hear(text)

        argv = ("/bin/sh", "-c", command)
        done = await run_program(
            argv, env=self._env, cwd=self.tree.root, timeout_s=timeout_s, hear=hear, grace_s=self._grace_s
        )
        how = f"stopped after {timeout_s:g} s" if done.timed_out else done.exit.describe()
        code = None if done.timed_out else done.exit.code
        output = shortened(done.output)
        text = f"{output}{'' if output.endswith(chr(10)) or not output else chr(10)}[{how}]"
        return CallResult(text, is_error=code != 0, ran=Ran(command, code, done.output))

    async def _ask(self, input: dict[str, Any]) -> CallResult:
        return CallResult(shortened(await self._ask_user(input["question"], tuple(input.get("options", ())))))


_RUN: Final[dict[str, Callable[[Toolbox, Any], CallResult | Awaitable[CallResult]]]] = {
    "read_file": lambda box, input: files.read_file(box.tree, input),
    "write_file": lambda box, input: files.write_file(box.tree, input),
    "edit_file": lambda box, input: files.edit_file(box.tree, input),
    "bash": Toolbox._bash,
    "glob": lambda box, input: search.glob(box.tree, input),
    "grep": lambda box, input: search.grep(box.tree, input, box._env),
    "web_fetch": lambda box, input: fetch.web_fetch(box.tree.policy, input),
    "ask_user": Toolbox._ask,
}
