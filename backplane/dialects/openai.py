"""Reads and writes OpenAI's Chat Completions, as its reference describes it (platform.openai.com, read November 2026).

`chat` has what the family shares; this file has what only OpenAI has.
"""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects.chat import Flavour, dialect_of

NAME: Final = "openai"

TOOL_NAMES: Final[dict[str, str]] = {}
"""Empty: this interface has no tools of its own, so a caller's names are not translated."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": EMULATED, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": EMULATED, "tool_grep": EMULATED,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}


FLAVOUR: Final = Flavour(name=NAME, stops_max=4)

DIALECT: Final = dialect_of(FLAVOUR, TOOL_NAMES, CAPABILITIES, DEFAULTS)
