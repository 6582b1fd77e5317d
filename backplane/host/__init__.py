"""The child's whole kit: say hello, take runs, stream events, end each run once.

A host is a `Host` (who it is, what it can) and a `work` coroutine that is given one run at a
time to emit events on. The kit owns stdin and stdout: stray prints go to stderr. What a vendor
says and how a model is reached are the host's own affair.
"""

from __future__ import annotations

import gc
import importlib
import os
import stat
import sys
from typing import Any

import msgspec

from backplane.contract.approval import Decision
from backplane.host.run import (
    EXTENSIONS,
    PREVIEW_BYTES_MAX,
    Done,
    Given,
    Host,
    HostRun,
    Told,
    Work,
)

__all__ = [
    "EXTENSIONS",
    "PREVIEW_BYTES_MAX",
    "Decision",
    "Done",
    "Given",
    "Host",
    "HostRun",
    "Told",
    "Work",
    "deferred",
    "main",
    "speak",
]


def deferred(name: str, *given: Any, without: tuple[str, ...] = ()) -> Work:
    """Make a `work` that is loaded with the first order, so that no hello waits for it.

    Args:
        name: `module:function`; it is called with the run and what is given here.
        without: modules that this process is not to load though they be installed: what libraries use where they can.
    """

    async def work(run: HostRun) -> Done | Told:
        for optional in without:
            sys.modules.setdefault(optional, None)  # type: ignore[arg-type]  # then to import it fails
        module, _, function = name.partition(":")
        done: Done | Told = await getattr(importlib.import_module(module), function)(run, *given)
        return done

    return work


def main(host: Host, work: Work, *, line_bytes_max: int | None = None) -> None:
    """Be a host: speak the protocol on this process's stdin and stdout until the end of stdin.

    Args:
        line_bytes_max: longest line, both ways; None for the protocol's own.
    """
    try:
        speak(host, work, line_bytes_max=line_bytes_max)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)
    gc.freeze()  # Or Python, as it ends, looks for garbage among all there is.


def speak(host: Host, work: Work, *, line_bytes_max: int | None = None) -> int | None:
    """The same for a program that goes on afterwards: gives the signal that was the end, None for that of stdin.

    The hello goes out before the event loop is loaded: a control plane that waits for it saves that time.

    Raises:
        BrokenPipeError: nobody reads the hello.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    line = msgspec.json.encode(host.hello()) + b"\n"
    mode = os.fstat(stdout).st_mode
    while line:
        line = line[os.write(stdout, line) :]
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        # Only then is the description ours alone; a terminal's is shared with the shell.
        os.set_blocking(stdout, False)
    from backplane.host import link

    return link.take_runs(host, work, stdout, line_bytes_max)
