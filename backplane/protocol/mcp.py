"""Builds the answers that all our servers of the Model Context Protocol give: to `initialize`, and a tool's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract.canonical import Json

VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol that our servers speak, newest first; they use only features that all versions share."""


def greeting(params: Mapping[str, Any], **info: str) -> Json:
    """Return the answer to `initialize` for a server of tools.

    Args:
        info: the server's name, version and other members that a client may show.
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
