"""Copies stdin to one of our unix sockets, and the socket to stdout.

It serves agents that start an MCP server as a command. It imports the standard library only, because it runs without
our packages.
"""

from __future__ import annotations

import os
import select
import socket
import sys

READ_BYTES = 65536


def bridge(address: str) -> None:
    """Copy stdin to the socket and the socket to stdout until the socket ends; the end of stdin ends its input."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
        there.connect(address)
        sources = [0, there.fileno()]
        while there.fileno() in sources:
            for ready in select.select(sources, (), ())[0]:
                data = os.read(ready, READ_BYTES)
                if not data:
                    sources.remove(ready)
                    if ready == 0:
                        there.shutdown(socket.SHUT_WR)
                elif ready == 0:
                    there.sendall(data)
                else:
                    _write_all(data)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    try:
        bridge(sys.argv[1])
    except (BrokenPipeError, ConnectionError, FileNotFoundError):
        sys.exit(1)
