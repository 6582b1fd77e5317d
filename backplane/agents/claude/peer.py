"""Frames Claude Code's lines as JSON-RPC: control requests both ways, and messages with a type as notifications.

The notification `WITHDRAWAL` withdraws a request. `reader` interprets the messages.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.agents.events import mapping
from backplane.contract.canonical import Json
from backplane.protocol.jsonrpc import (
    INVALID_REQUEST,
    Id,
    Malformed,
    Notification,
    Peer,
    Received,
    Request,
    Response,
    RpcError,
)
from backplane.protocol.lines import EVIDENCE_BYTES

WITHDRAWAL: Final = "control_cancel_request"


class ControlPeer(Peer):
    """One end of the conversation, without any I/O."""

    def call(self, method: str, params: Json) -> tuple[Id, bytes]:
        self._next += 1
        id = f"backplane-{self._next}"
        return id, _line("control_request", request_id=id, request={"subtype": method, **mapping(params)})

    def notify(self, method: str, params: Json) -> bytes:
        return _line(method, **mapping(params))

    def answer(self, id: Id, result: Json) -> bytes:
        return _line("control_response", response={"subtype": "success", "request_id": id, "response": result})

    def refuse(self, id: Id, code: int, message: str) -> bytes:
        return _line("control_response", response={"subtype": "error", "request_id": id, "error": message})

    def message(self, value: dict[str, Any], line: bytes) -> Received:
        kind = value.get("type")
        if kind == "control_request" and isinstance(value.get("request"), dict):
            request = value["request"]
            return Request(str(value.get("request_id")), str(request.get("subtype")), request)
        if kind == "control_response":
            response = mapping(value.get("response"))
            fault = RpcError(0, str(response.get("error"))) if response.get("subtype") == "error" else None
            return Response(str(response.get("request_id")), response.get("response"), fault)
        if isinstance(kind, str):
            return Notification(kind, value)
        return Malformed("an object that is no message", line[:EVIDENCE_BYTES], INVALID_REQUEST)


def _line(kind: str, **members: Json) -> bytes:
    return msgspec.json.encode({"type": kind, **members}) + b"\n"
