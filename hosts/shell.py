"""The embedded default: the task is a shell command or a script, run in the workspace.

It needs no key and no network. The command's output streams as events while it runs, and its
exit code decides the outcome. It asks before it runs, like any host of the kit.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio

from backplane.contract.capability import NATIVE
from backplane.sidecar import PREVIEW_BYTES_MAX, Done, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.process import Child, Exit

HOST = Host(id="shell", capabilities={"streaming": NATIVE, "tool_bash": NATIVE})

READ_BYTES_MAX = 64 * 1024
LOOK_S = 0.25
"""How often a silent command is looked at for its end."""
LOOK_EXIT_S = 60.0
"""How long one wait for its end lasts; the end itself wakes it."""
LADDER_S = 0.5
"""What the stop ladder takes beside its grace."""


async def work(run: HostRun) -> Done:
    """Ask, run the task, report."""
    command = run.order.task
    await run.tool_call("bash", {"command": command}, "bash-1")
    verdict = await run.may("bash", {"command": command}, command=command, cwd=run.order.workspace.root)
    if verdict.decision == "deny":
        await run.tool_result("bash", f"policy_denied: {verdict.reason}", is_error=True, id="bash-1")
        await run.error(f"the command was not run: {verdict.reason}", "policy_denied")
        return Done(outcome="failed", usage_raw={"denied": verdict.reason})
    if isinstance(verdict.input, dict) and isinstance(verdict.input.get("command"), str):
        command = verdict.input["command"]
    exit_, preview = await _execute(run, command)
    await run.command_executed(command, exit_.code, preview)
    shown, is_error = await run.shown("bash", {"command": command}, preview, is_error=exit_.code != 0)
    await run.tool_result("bash", shown, is_error=is_error, id="bash-1")
    if exit_.code != 0:
        await run.error(f"the command ended with {exit_.describe()}", "execution_tool_failed")
    return Done(outcome="complete" if exit_.code == 0 else "failed", usage_raw={"exit": exit_.describe()})


async def _execute(run: HostRun, command: str) -> tuple[Exit, str]:
    """Run the command to its end; its output so far is kept when it is cancelled."""
    # Loaded now and not at the start: the hello need not wait for them.
    from backplane.config import child_environment
    from backplane.process import Command, Exit, open_child

    # The outer shell joins both streams in the order they are written; a "#!" line picks the interpreter.
    argv = ("/bin/sh", "-c", 'exec "$@" 2>&1 </dev/null', "sh", *_interpreter(command))
    env = child_environment({}, run.order.config.env, os.environ)
    async with open_child(Command(argv=argv, env=env, cwd=run.order.workspace.root)) as child:
        try:
            preview = await _stream(run, child)
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=max(run.grace_s - LADDER_S, 0.1))
        return child.exit or Exit(), preview.decode("utf-8", "replace")


def _interpreter(task: str) -> tuple[str, ...]:
    first, newline, _ = task.partition("\n")
    if first.startswith("#!") and newline:
        return (*first[2:].split(), "-c", task)
    return ("/bin/sh", "-c", task)


async def _stream(run: HostRun, child: Child) -> bytes:
    """Pass the output on as it comes, cut at characters; give back its beginning."""
    preview, rest = b"", b""
    while True:
        # What the command left running may hold the output open for ever: the command's own end counts.
        ended = child.exit is not None
        with anyio.move_on_after(LOOK_S):
            await anyio.wait_readable(child.stdout)
        try:
            data = os.read(child.stdout, READ_BYTES_MAX)
        except BlockingIOError:
            if ended:
                break
            continue
        if not data:
            break
        preview += data[: PREVIEW_BYTES_MAX - len(preview)]
        whole = rest + data
        cut = _whole_characters(whole)
        rest = whole[cut:]
        await _report(run, whole[:cut])
    await _report(run, rest)
    # A command may close its output long before it ends; how long it takes is the run's own limit.
    while await child.wait(LOOK_EXIT_S) is None:
        pass
    return preview


async def _report(run: HostRun, data: bytes) -> None:
    if data:
        text = data.decode("utf-8", "replace")
        await run.carry("output", {"stream": "stdout", "text": text}, text.rstrip("\n").rpartition("\n")[2][:200])


def _whole_characters(data: bytes) -> int:
    """How many bytes end in a whole UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= width else len(data) - back
    return len(data)


if __name__ == "__main__":
    main(HOST, work)
