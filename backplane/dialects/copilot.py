"""Reads and writes Copilot's Chat Completions, with the protocol of its extensions (docs.github.com, read 2026-11).

`chat` has what the family shares; this file has what only Copilot has: references and confirmations on messages, and
named events in streams.
"""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import chat, framing
from backplane.dialects.chat import Flavour, dialect_of
from backplane.dialects.ir import Noted, StreamEvent

NAME: Final = "copilot"

TOOL_NAMES: Final[dict[str, str]] = {
    "view": "read_file", "create": "write_file", "edit": "edit_file", "str_replace_editor": "edit_file",
    "bash": "bash", "powershell": "bash", "glob": "glob", "grep": "grep", "rg": "grep", "web_fetch": "web_fetch",
    "web_search": "web_search", "apply_patch": "apply_patch",
}  # fmt: skip
"""Tool names of the vendor's agent → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": EMULATED, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": UNSUPPORTED, "tool_grep": UNSUPPORTED, "tool_web_search": NATIVE,
    "structured_output_json_schema": EMULATED,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}
"""The model is one of those at docs.github.com/en/copilot/reference/ai-models/supported-models, 2026-11."""


FLAVOUR: Final = Flavour(
    name=NAME, max_tokens="max_tokens", thinking_fields=("reasoning_text", "reasoning_content", "reasoning"),
    thinking_request="reasoning_text", thinking_answer="reasoning_text", signature_field="reasoning_opaque",
)  # fmt: skip


class StreamReader(chat.StreamReader):
    """Reads the family's chunks, and the named events that Copilot's extensions add to them."""

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Read one chunk or one named event; an extension's errors are notes for the user and do not end the answer."""
        name, body = framing.name_and_data(chunk)
        if name is None:
            return super().read(chunk)
        # References are a list, a confirmation is an object; events of the same name are joined.
        return [Noted(name, body if type(body) is list else [body], 0, joins=True, at_message=True)]


DIALECT: Final = dialect_of(FLAVOUR, TOOL_NAMES, CAPABILITIES, DEFAULTS, StreamReader)
