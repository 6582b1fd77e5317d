"""Serves the desk on loopback until it is interrupted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn

from backplane.errors import ConfigError
from backplane.web.app import POLICY, Routes
from backplane.web.guard import Guard

GRACE_S: Final = 2
"""Seconds that open streams get to end after an interrupt."""


def serve(home: Path, *, port: int, read_only: bool, ready: Callable[[str, str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes any free port.
        ready: called once the server listens, with two addresses: one with the token, and one with a code that is
            valid once, for `guard.CODE_S_MAX`.

    Raises:
        ConfigError: `config_invalid`, the port is taken.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        fact = f"cannot listen on port {port} of 127.0.0.1: {error.strerror}"
        raise ConfigError("config_invalid", fact, hint="choose another port, or --port 0 for any free port") from error
    with listener:
        number, token = listener.getsockname()[1], secrets.token_urlsafe(32)
        guard = Guard(Routes(home, read_only=read_only).app(), port=number, token=token, policy=POLICY)
        config = uvicorn.Config(
            guard,
            http="h11",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        address = f"http://127.0.0.1:{number}/"
        ready(f"{address}#token={token}", f"{address}#code={guard.new_code()}")
        uvicorn.Server(config).run(sockets=[listener])
