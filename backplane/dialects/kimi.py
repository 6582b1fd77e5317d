"""Moonshot's Kimi, as its reference describes it (platform.moonshot.ai, read November 2026).

The family's shapes are in `chat`; here is what this vendor has and its sisters have not. The members `refs`,
`use_search` and `search_plus` and the model `k1` belong to its web client and gateways around it.
"""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects.chat import Chat
from backplane.dialects.codec import OptionDraft, RequestOption

NAME: Final = "kimi"

TOOL_NAMES: Final[dict[str, str]] = {
    "Read": "read_file", "ReadFile": "read_file", "Write": "write_file", "WriteFile": "write_file",
    "Edit": "edit_file", "StrReplaceFile": "edit_file", "Bash": "bash", "Shell": "bash", "Glob": "glob",
    "Grep": "grep", "FetchURL": "web_fetch", "SearchWeb": "web_search", "$web_search": "web_search",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": EMULATED, "tool_edit": UNSUPPORTED, "tool_bash": UNSUPPORTED,
    "tool_web_search": NATIVE,
    "structured_output_json_schema": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "kimi-k3", "max_tokens": 4096}


def _write_budget(value: Json, draft: OptionDraft) -> None:
    """Thinking is on or off here."""
    if value > 0:
        draft.degrade("thinking is on or off here", value)
    draft.put("thinking", {"type": "enabled" if value else "disabled"})


def _write_effort(value: Json, draft: OptionDraft) -> None:
    if draft.is_home:
        draft.put("reasoning_effort", value)
        return
    draft.degrade("thinking is on or off here", value)
    draft.out.setdefault("thinking", {"type": "disabled" if value == "none" else "enabled"})


class KimiChat(Chat):
    """What sets this vendor apart from its sisters."""

    name = NAME
    roles = frozenset({"system", "user", "assistant", "tool"})
    thinking_request = "reasoning_content"
    cached_tokens_on_top = True
    has_files = False
    has_image_urls = False
    special = (
        RequestOption("", "reasoning_budget", write=_write_budget),
        RequestOption("reasoning_effort", "reasoning_effort", write=_write_effort),
    )
    unknown_options = frozenset({"verbosity", "service_tier", "metadata"})


DIALECT: Final = KimiChat().dialect(TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS)
