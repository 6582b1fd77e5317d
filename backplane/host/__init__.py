"""The kit for writing a host: it sends the hello, starts runs, streams events, and ends each run exactly once.

A host consists of a `Host` with its name and capabilities, and of a coroutine `work` that emits the events of one run.
The kit owns stdin and stdout; stray prints go to stderr. The coroutine calls a vendor's program or a model.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
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
    Work,
    Written,
)

__all__ = [
    "EXTENSIONS",
    "PREVIEW_BYTES_MAX",
    "Decision",
    "Deferred",
    "Done",
    "Given",
    "Host",
    "HostRun",
    "Work",
    "Written",
    "main",
    "speak",
]


class Deferred:
    """A `work` whose modules are loaded after the hello, so that the hello does not wait for them.

    Args:
        name: `module:function`; the function is called with the run and `given`.
        without: optional modules whose import must fail in this process, so that libraries do not load them.
        early: further modules that the first order will need; they are loaded in advance while no order waits.
    """

    def __init__(self, name: str, *given: Any, without: tuple[str, ...] = (), early: tuple[str, ...] = ()) -> None:
        self._module, _, self._function = name.partition(":")
        self._given, self._without, self._early = given, without, early

    def load(self) -> None:
        """Load the modules one by one; stop as soon as stdin has something to read."""
        for optional in self._without:
            sys.modules.setdefault(optional, None)  # type: ignore[arg-type]  # then its import fails
        for name in (self._module, *self._early):
            if select.select([0], [], [], 0)[0]:
                return
            importlib.import_module(name)

    async def __call__(self, run: HostRun) -> Done | Written:
        done: Done | Written = await getattr(importlib.import_module(self._module), self._function)(run, *self._given)
        return done


def main(host: Host, work: Work, *, line_bytes_max: int | None = None) -> None:
    """Speak the protocol as a host on this process's stdin and stdout until the end of stdin.

    Args:
        line_bytes_max: maximum length of a line, read or written; None takes the protocol's limit.
    """
    try:
        speak(host, work, line_bytes_max=line_bytes_max)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)
    gc.freeze()  # Otherwise Python searches all objects for garbage at its exit.


def speak(host: Host, work: Work, *, line_bytes_max: int | None = None) -> int | None:
    """Speak the protocol like `main`; return the terminating signal, or None at the end of stdin.

    The hello is written before the event loop is loaded, so that the control plane does not wait for the loop.

    Raises:
        BrokenPipeError: the reader of stdout closed it before the hello.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    line = msgspec.json.encode(host.hello()) + b"\n"
    mode = os.fstat(stdout).st_mode
    while line:
        line = line[os.write(stdout, line) :]
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        # A terminal must stay blocking, because the shell shares it.
        os.set_blocking(stdout, False)
    from backplane.host import link

    if isinstance(work, Deferred):
        work.load()
    return link.take_runs(host, work, stdout, line_bytes_max)
