"""The child's whole kit: say hello, take runs, stream events, end each run once.

A host is a `Host` (who it is, what it can) and a `work` coroutine that is given one run at a
time to emit events on. The kit owns stdin and stdout: stray prints go to stderr. What a vendor
says and how a model is reached are the host's own affair.
"""

from __future__ import annotations

import functools
import os
import stat
import sys

import anyio
import msgspec

from backplane.sidecar.run import EXTENSIONS, PREVIEW_BYTES_MAX, Done, Host, HostRun, Told, Verdict, Work

__all__ = [
    "EXTENSIONS",
    "PREVIEW_BYTES_MAX",
    "Done",
    "Host",
    "HostRun",
    "Told",
    "Verdict",
    "Work",
    "main",
    "serve",
    "speak",
]


async def serve(host: Host, work: Work, stdin: int, stdout: int, *, line_bytes_max: int | None = None) -> None:
    """Speak the protocol as `host` over two descriptors of this process; they stay the caller's to close."""
    from backplane.sidecar.link import Link

    link = Link(host, work, stdin, stdout, owns_process=False, line_bytes_max=line_bytes_max)
    await link.serve(said_hello=False)


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
    from backplane.sidecar.link import Link

    link = Link(host, work, 0, stdout, owns_process=True, line_bytes_max=line_bytes_max)
    anyio.run(functools.partial(link.serve, said_hello=True))
    return link.signal
