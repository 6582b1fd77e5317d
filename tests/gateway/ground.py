"""A gateway in a thread, in front of scripted model servers."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from backplane.config import BackendSettings, GatewaySettings, Settings
from backplane.gateway.agents import agent_targets
from backplane.gateway.journal import lines_of
from backplane.gateway.record import ExchangeBegin, ExchangeEnd, Line
from backplane.gateway.serving import open_gateway
from backplane.runtime.plane import ControlPlane
from backplane.testing import PROTOCOLS, ModelServer, ProtocolName

KEY = "dummy"
WAIT_S = 5.0
POLL_S = 0.01


class Gate:
    """Where a running gateway can be asked, with the names that a `ModelServer` has."""

    def __init__(self, port: int, home: Path) -> None:
        self.port, self.home = port, home
        self.url = f"http://127.0.0.1:{port}"

    def base_url(self, protocol: ProtocolName) -> str:
        return self.url + ("/v1beta" if protocol == "gemini_ai_studio" else "/v1")

    @property
    def lines(self) -> list[Line]:
        """The record, in order."""
        files = sorted((self.home / "gateway").glob("*.jsonl"))
        return [line for path in files for line in lines_of(path)]

    @property
    def ends(self) -> list[ExchangeEnd]:
        """The ends of all exchanges that have begun; a client may have its answer before the line is written."""
        deadline = time.monotonic() + WAIT_S
        while True:
            lines = self.lines
            ends = [line for line in lines if isinstance(line, ExchangeEnd)]
            if len(ends) == sum(isinstance(line, ExchangeBegin) for line in lines) or time.monotonic() > deadline:
                return ends
            time.sleep(POLL_S)


def backend(server: ModelServer, protocol: ProtocolName, **options: Any) -> BackendSettings:
    """A backend of host `api` that asks a scripted server."""
    found = {"protocol": protocol, "base_url": server.base_url(protocol), "timeout_s": 10, **options}
    return BackendSettings(host="api", options=found)


def all_of(server: ModelServer) -> dict[str, BackendSettings]:
    """A backend for each protocol, by its name."""
    return {protocol: backend(server, protocol) for protocol in PROTOCOLS}


@contextmanager
def gateway(
    backends: Mapping[str, BackendSettings], models: Mapping[str, Any], home: Path | None = None, *,
    key: str | None = KEY, **settings: Any,
) -> Iterator[Gate]:  # fmt: skip
    """Run a gateway until the block ends.

    Args:
        settings: further members of `[gateway]`.
    """
    with tempfile.TemporaryDirectory() as folder, start_blocking_portal() as portal:
        place = home or Path(folder)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        whole = Settings(backends=dict(backends), gateway=GatewaySettings(models=dict(models), **settings))
        with ExitStack() as opened:
            opened.enter_context(listener)
            agents = None
            if whole.gateway.agents:
                plane = opened.enter_context(portal.wrap_async_context_manager(ControlPlane(whole, place, os.environ)))
                agents = agent_targets(plane, whole.gateway.agents)
            serving = open_gateway(whole, {}, place, listener, only_key=key, agents=agents)
            opened.enter_context(portal.wrap_async_context_manager(serving))
            yield Gate(listener.getsockname()[1], place)
