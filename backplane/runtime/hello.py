"""Gets a host's hello without an order; the hello says what the host can do and which settings it heeds."""

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
"""Limit of characters that an error shows from the end of a host's stderr."""


async def ask_hello(backend: Backend, environ: Mapping[str, str], limits: Limits) -> wire.Hello:
    """Start a host, read its hello, stop it without an order, and return the hello.

    Args:
        limits: only `hello_s`, `line_bytes_max` and `cancel_grace_s` are used.

    Raises:
        BackendError: `backend_unavailable` or `sidecar_spawn_failed`, the host cannot be started; `backend_crashed`,
            the host ended before its hello.
        ProtocolError: `protocol_handshake_failed`, no valid hello came within `hello_s`.
    """
    line = ControlEnd(now=now, line_bytes_max=limits.line_bytes_max, redactor=Redactor(backend.secrets))
    count, first = 0, b""
    async with backend.open(WorkOrder("hello"), environ) as link:

        async def read() -> None:
            nonlocal count, first
            while line.hello is None:
                await anyio.wait_readable(link.stdout)
                if not (data := os.read(link.stdout, READ_BYTES_MAX)):
                    return
                for one in line.receive(data):
                    if isinstance(one, Exception):
                        raise one
                    if isinstance(one, Noise):
                        count, first = count + 1, first or one.line[:NOISE_SHOWN]

        has_ended = await in_time(read, limits.hello_s)
        await link.stop(grace_s=limits.cancel_grace_s)
        words = link.stderr_tail.decode("utf-8", "replace")[-WORDS_CHARS_MAX:] or None
    if line.hello is not None:
        return line.hello
    wrote = describe_noise(count, first)
    if has_ended:
        fact = f"{backend.id!r} ended before it sent a valid hello{wrote}"
        raise BackendError("backend_crashed", fact, hint="backplane conform -- COMMAND", evidence=words)
    fact = f"{backend.id!r} sent no hello within {limits.hello_s:g} s{wrote}"
    raise ProtocolError("protocol_handshake_failed", fact, hint="raise hello_s", evidence=words)
