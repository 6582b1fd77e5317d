"""Reads and writes Moonshot's Kimi dialect, as its reference describes it (platform.moonshot.ai, read November 2026).

`chat` has what the family shares; this file has what only Kimi has. The members `refs`, `use_search` and `search_plus`
and the model `k1` are used by its web client and by gateways to that client.
"""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects.chat import Flavour, dialect_of

NAME: Final = "kimi"

TOOL_NAMES: Final[dict[str, str]] = {
    "Read": "read_file", "ReadFile": "read_file", "Write": "write_file", "WriteFile": "write_file",
    "Edit": "edit_file", "StrReplaceFile": "edit_file", "Bash": "bash", "Shell": "bash", "Glob": "glob",
    "Grep": "grep", "FetchURL": "web_fetch", "SearchWeb": "web_search", "$web_search": "web_search",
}  # fmt: skip
"""Tool names of the vendor's agent → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": EMULATED, "tool_edit": UNSUPPORTED, "tool_bash": UNSUPPORTED,
    "tool_web_search": NATIVE,
    "structured_output_json_schema": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "kimi-k3", "max_tokens": 4096}


FLAVOUR: Final = Flavour(
    name=NAME, roles=frozenset({"system", "user", "assistant", "tool"}), thinking_request="reasoning_content",
    thinking_is_on_or_off=True, cached_tokens_on_top=True, media={"image/data": None, "video/data": None},
    can_force_tools=False, stops_max=5, bounds={"temperature": (0, 1), "n": (1, 5)},
    unknown_options=frozenset({"seed", "logprobs", "top_logprobs", "user", "verbosity", "service_tier", "metadata"}),
)  # fmt: skip
"""The vendor's variant of the chat interface: its options, bounds and contents, and no `required` for `tool_choice`
(platform.kimi.ai, docs/api/chat and docs/guide/migrating-from-openai-to-kimi, read 2026-11)."""

DIALECT: Final = dialect_of(FLAVOUR, TOOL_NAMES, CAPABILITIES, DEFAULTS)
