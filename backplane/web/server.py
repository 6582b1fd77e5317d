"""The page's server: loopback alone, one token, until it is interrupted."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import anyio
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from backplane.config import Settings
from backplane.errors import ConfigError
from backplane.runtime.plane import ControlPlane
from backplane.web.app import POLICY, Pages
from backplane.web.guard import HEAD_BYTES_MAX, Guard

CONNECTIONS_MAX: Final = 200
GRACE_S: Final = 2

HEAD_S: Final = 10.0
"""For a request's head to come, and between two requests: pages of this machine take milliseconds."""


SILENT_MAX: Final = 64
"""Most connections without a request: a further one closes the oldest of them, so that the page finds room."""


class _Prompt(H11Protocol):
    """A connection that is closed if it brings no request in time, or if too many others bring none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_at = self.loop.time()
        self.loop.call_later(HEAD_S, self._close_unasked)
        silent = [one for one in self.connections if isinstance(one, _Prompt) and one.is_silent]
        if len(silent) > SILENT_MAX:
            min(silent, key=lambda one: one.made_at).transport.abort()

    @property
    def is_silent(self) -> bool:
        return self.cycle is None and not self.transport.is_closing()

    def _close_unasked(self) -> None:
        if self.is_silent:
            self.transport.close()


def serve(
    settings: Settings,
    home: Path,
    environ: Mapping[str, str],
    *,
    port: int,
    read_only: bool,
    ready: Callable[[str, str], None],
) -> tuple[str, ...]:
    """Serve until SIGINT or SIGTERM; the runs that were started here end in order then.

    Args:
        port: 0 takes any that is free.
        ready: is told the page's address with its token, and the one with a code that opens it once within
            `guard.CODE_S_MAX`, once somebody listens there.

    Returns:
        What was found of runs that were cut off, a line each.

    Raises:
        ConfigError: `config_invalid`, the port is taken.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        fact = f"port {port} of 127.0.0.1 cannot be had: {error.strerror}"
        raise ConfigError("config_invalid", fact, hint="--port 0 takes any") from error
    with listener:
        return anyio.run(_serve, listener, settings, home, environ, read_only, ready)


async def _serve(
    listener: socket.socket,
    settings: Settings,
    home: Path,
    environ: Mapping[str, str],
    read_only: bool,
    ready: Callable[[str, str], None],
) -> tuple[str, ...]:
    number, token = listener.getsockname()[1], secrets.token_urlsafe(32)
    async with ControlPlane(settings, home, dict(environ)) as plane, anyio.create_task_group() as tasks:
        pages = Pages(plane, tasks, environ, read_only=read_only)
        guard = Guard(pages.app(), port=number, token=token, policy=POLICY)
        config = uvicorn.Config(
            guard,
            http=_Prompt,
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_graceful_shutdown=GRACE_S,
        )
        address = f"http://127.0.0.1:{number}/"
        ready(f"{address}#token={token}", f"{address}#code={guard.new_code()}")
        await uvicorn.Server(config).serve(sockets=[listener])
        tasks.cancel_scope.cancel()
    return plane.state_folder.notes + plane.state_folder.problems
