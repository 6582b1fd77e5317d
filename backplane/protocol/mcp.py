"""Answers that all servers of the Model Context Protocol share: to `initialize`, and a tool's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract.canonical import Json

VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol that our servers speak, the newest first; they use only what is the same in all."""


def greeting(params: Mapping[str, Any], **info: str) -> Json:
    """Answer `initialize` for a server of tools.

    Args:
        info: name, version and other members that a client may show.
    """
    wanted = params.get("protocolVersion")
    return {
        "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": info,
    }


def text_result(text: str, *, is_error: bool = False) -> dict[str, Json]:
    """Return the result of a tool that gives one text."""
    return {"content": [{"type": "text", "text": text}], "isError": is_error}
