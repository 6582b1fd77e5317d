"""The embedded default: the task is a shell command or a script, run in the workspace.

It needs no key and no network. The command's output streams as events while it runs, and its
exit code decides the outcome. It asks before it runs, like any host of the kit.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backplane.contract.capability import NATIVE
from backplane.host import PREVIEW_BYTES_MAX, Decision, Done, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.process.programs import Outcome

HOST = Host(id="shell", capabilities={"streaming": NATIVE, "tool_bash": NATIVE}, heeds=("max_turns", "max_budget_usd"))
"""Without a model there are no turns, and nothing is spent."""


async def work(run: HostRun) -> Done:
    """Ask, run the task, report."""
    command = run.order.task
    await run.tool_call("bash", {"command": command}, "bash-1")
    verdict = await run.may("bash", {"command": command}, id="bash-1", command=command, cwd=run.order.workspace.root)
    if verdict.decision == "modify":
        given = verdict.input.get("command") if isinstance(verdict.input, dict) else None
        if isinstance(given, str):
            command = given
        else:  # What was to be changed does not run as it was.
            verdict = Decision("deny", "the changed input has no `command`")
    if verdict.decision == "deny":
        await run.tool_result("bash", f"policy_denied: {verdict.reason}", is_error=True, id="bash-1")
        await run.error(f"the command was not run: {verdict.reason}", "policy_denied")
        return Done(outcome="failed", usage_raw={"denied": verdict.reason})
    done = await _execute(run, command)
    exit_, preview = done.exit, done.output.encode()[:PREVIEW_BYTES_MAX].decode(errors="ignore")
    await run.command_executed(command, exit_.code, preview)
    shown, is_error = await run.shown("bash", {"command": command}, preview, id="bash-1", is_error=exit_.code != 0)
    await run.tool_result("bash", shown, is_error=is_error, id="bash-1")
    if exit_.code != 0:
        await run.error(f"the command ended with {exit_.describe()}", "execution_tool_failed")
    return Done(outcome="complete" if exit_.code == 0 else "failed", usage_raw={"exit": exit_.describe()})


async def _execute(run: HostRun, command: str) -> Outcome:
    """Run the command to its end, however long it takes: that is the run's own limit. A "#!" line picks the program."""
    # Loaded now and not at the start: the hello need not wait for them.
    from backplane.config import child_environment
    from backplane.process.programs import run_program

    with _argv(command) as argv:
        return await run_program(
            argv,
            env=child_environment({}, run.order.config.env, os.environ),
            cwd=run.order.workspace.root,
            timeout_s=math.inf,
            hear=lambda text: _report(run, text),
            grace_s=lambda: run.grace_s,
        )


@contextmanager
def _argv(task: str) -> Iterator[tuple[str, ...]]:
    """Yield the command that runs a task; a script with a "#!" line is kept in a file until the command has ended."""
    first, newline, _ = task.partition("\n")
    interpreter = first[2:].split() if first.startswith("#!") and newline else []
    if not interpreter:
        yield ("/bin/sh", "-c", task)
        return
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="backplane-script-") as file:
        file.write(task.encode())
        file.flush()
        yield (*interpreter, file.name)


async def _report(run: HostRun, text: str) -> None:
    # An empty text only says that the command still runs; how long it may be silent is the run's own limit, too.
    if text:
        await run.carry("output", {"stream": "stdout", "text": text}, text.rstrip("\n").rpartition("\n")[2][:200])


if __name__ == "__main__":
    main(HOST, work)
