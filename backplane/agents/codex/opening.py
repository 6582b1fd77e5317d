"""The first lines to such an agent, which need nothing of its answers: they can be on their way before our event loop.

`work` says them all the same; what is on its way already is not written again.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.protocol.jsonrpc import Peer

OFFER: Final[dict[str, Any]] = {
    "clientInfo": {"name": "backplane", "version": "0.1.0"},
    "capabilities": {"experimentalApi": True},
}
"""Who we are, and that we know the experimental parts of the protocol."""


def opening(method: str, params: dict[str, Json]) -> bytes:
    """Agree on the protocol, and open a thread by this call."""
    peer = Peer()
    return peer.call("initialize", OFFER)[1] + peer.notify("initialized", {}) + peer.call(method, params)[1]
