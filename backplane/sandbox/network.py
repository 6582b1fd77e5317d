"""Starts a child in a sandbox whose only way to other hosts is our proxy.

The guard listens inside the network namespace and sends the listening socket out, so the proxy itself runs outside.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Final

import anyio
import msgspec

from backplane.errors import BackendError
from backplane.process.aio import beside
from backplane.process.child import Child, Ready, open_child
from backplane.process.launch import StartCommand
from backplane.sandbox import landlock
from backplane.sandbox.http import listening
from backplane.sandbox.plan import Contained
from backplane.sandbox.proxy import ConnectionRules, Connections, serve

PORT: Final = 3128
"""Port of the proxy inside a namespace, where no other program listens; usual for HTTP proxies."""

DOOR_S_MAX: Final = 10.0
"""Seconds for the guard to send the listening socket, before it starts the host."""


@asynccontextmanager
async def open_contained(
    command: StartCommand, held: Contained, seen: Connections, *, ready: Ready | None = None
) -> AsyncIterator[Child]:
    """Start a child in its sandbox, and serve its proxy; both end with the block.

    Args:
        seen: records the connections through the proxy.
        ready: as for `open_child`.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    env = command.env | held.env
    assert held.policy is not None, "without one there is no door"
    judge = ConnectionRules(held.policy, held.endpoints)
    with ExitStack() as opened:
        port = PORT
        if held.cage.wrapper and "--unshare-net" in held.cage.wrapper:
            ours, theirs = (
                opened.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            cage = msgspec.structs.replace(held.cage, door=(theirs.fileno(), PORT))
        else:
            door = opened.enter_context(listening("127.0.0.1"))
            port = door.getsockname()[1]
            rules = landlock.rules(held.interface, list(held.writable), tcp_port=port)
            cage, ours = msgspec.structs.replace(held.cage, landlock=rules), None
        caged = msgspec.structs.replace(command, env=env | variables(port))
        async with open_child(caged, cage=cage, ready=ready) as child:
            if ours is not None:
                theirs.close()
                door = opened.enter_context(await _receive(ours))
            async with beside(functools.partial(serve, door, judge, seen)):
                yield child


def variables(port: int) -> dict[str, str]:
    """Return the environment variables that name the proxy, in all usual spellings: programs read different ones."""
    address = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    spelled = {spelling: address for name in names for spelling in (name, name.lower())}
    return spelled | {"NO_PROXY": "", "no_proxy": "", "NODE_USE_ENV_PROXY": "1"}


async def _receive(line: socket.socket) -> socket.socket:
    """Receive the listening socket from the guard."""
    line.setblocking(False)
    numbers: list[int] = []
    with anyio.move_on_after(DOOR_S_MAX):
        await anyio.wait_readable(line)
        _, numbers, _, _ = socket.recv_fds(line, 16, 1)
    if not numbers:
        raise BackendError("sidecar_spawn_failed", "the guard handed out no socket for the network")
    door = socket.socket(fileno=numbers[0])
    door.setblocking(False)
    return door
