"""Asks a host for its hello without an order: its abilities, and which settings it heeds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import anyio

from backplane.config import Limits
from backplane.contract import envelope as wire
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError, ProtocolError
from backplane.process.aio import in_time
from backplane.process.launch import READ_BYTES_MAX
from backplane.protocol.control import ControlEnd
from backplane.protocol.messages import NOISE_SHOWN, Noise, describe_noise
from backplane.redact.secrets import Redactor
from backplane.runtime.backends import Backend
from backplane.runtime.events import now

WORDS_CHARS_MAX: Final = 400
"""Characters of the end of a host's stderr in an error."""


async def ask_hello(backend: Backend, environ: Mapping[str, str], limits: Limits) -> wire.Hello:
    """Start a host, take its hello, and stop it; no order is sent.

    Args:
        limits: `hello_s`, `line_bytes_max` and `cancel_grace_s` count.

    Raises:
        BackendError: `backend_unavailable`, `sidecar_spawn_failed`; `backend_crashed`, it ended first.
        ProtocolError: `protocol_handshake_failed`, no valid hello within `hello_s`.
    """
    line = ControlEnd(now=now, line_bytes_max=limits.line_bytes_max, redactor=Redactor(backend.secrets))
    count, first = 0, b""
    async with backend.open(WorkOrder("hello"), environ) as link:

        async def read() -> None:
            """Read until the hello is there, or the host's output ends."""
            nonlocal count, first
            while line.hello is None:
                await anyio.wait_readable(link.stdout)
                data = os.read(link.stdout, READ_BYTES_MAX)
                if not data:
                    return
                received = line.receive(data)
                if received and isinstance(received[-1], Exception):
                    raise received[-1]
                noise = [one.line[:NOISE_SHOWN] for one in received if isinstance(one, Noise)]
                count, first = count + len(noise), first or b"".join(noise[:1])

        came = await in_time(read, limits.hello_s)
        await link.stop(grace_s=limits.cancel_grace_s)
        words = link.stderr_tail.decode("utf-8", "replace")[-WORDS_CHARS_MAX:]
    if line.hello is not None:
        return line.hello
    wrote = describe_noise(count, first)
    if came:
        fact = f"{backend.id!r} ended before it said a valid hello{wrote}"
        raise BackendError("backend_crashed", fact, hint="backplane conform -- COMMAND", evidence=words or None)
    fact = f"{backend.id!r} said no hello within {limits.hello_s:g} s{wrote}"
    raise ProtocolError("protocol_handshake_failed", fact, hint="raise hello_s", evidence=words or None)
