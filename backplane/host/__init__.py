"""The child's whole kit: say hello, take runs, stream events, end each run once.

A host is a `Host` (who it is, what it can) and a `work` coroutine that is given one run at a
time to emit events on. The kit owns stdin and stdout: stray prints go to stderr. What a vendor
says and how a model is reached are the host's own affair.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from backplane.protocol import HostEnd

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
    "main",
    "serve",
    "speak",
]


async def serve(host: Host, work: Work, stdin: int, stdout: int, *, line_bytes_max: int | None = None) -> None:
    """Speak the protocol as `host` over two descriptors of this process; they stay the caller's to close."""
    from backplane.host.link import HostLink

    link = HostLink(host, work, stdin, stdout, _end(line_bytes_max), owns_process=False)
    await link.send(host.hello())
    await link.serve()


def main(host: Host, work: Work, *, line_bytes_max: int | None = None) -> None:
    """Be a host: speak the protocol on this process's stdin and stdout until the end of stdin.

    Args:
        line_bytes_max: longest line, both ways; None for the protocol's own.
    """
    try:
        speak(host, work, line_bytes_max=line_bytes_max)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)


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
    end = _end(line_bytes_max)
    end.send(host.hello())
    import anyio

    from backplane.host.link import HostLink

    link = HostLink(host, work, 0, stdout, end, owns_process=True)
    anyio.run(link.serve)
    return link.signal


def _end(line_bytes_max: int | None) -> HostEnd:
    from backplane.protocol import LINE_BYTES_MAX, HostEnd

    return HostEnd(line_bytes_max=LINE_BYTES_MAX if line_bytes_max is None else line_bytes_max)
