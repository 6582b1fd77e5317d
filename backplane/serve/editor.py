"""The JSON of the Agent Client Protocol, version 1: structs of an editor's requests, and updates for it to show.

Pure: events and messages go in, updates come out; `acp` has the connection.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.config import ServerSettings
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.conversation import AgentMessage, Image, Message, ToolResultMessage, UserMessage
from backplane.contract.events import AgentEvent, AssistantDelta, AssistantMessage, Reasoning, ToolCall, ToolResult
from backplane.policy.paths import SPELLINGS

IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Maximum bytes of an image in a prompt; vendors refuse larger ones."""
TEXT_CHARS_MAX: Final = 1024 * 1024
"""Maximum characters of an embedded file in a prompt; more would not fit into a model's context."""
TITLE_CHARS: Final = 80

Update = dict[str, Json]
"""The member `update` of a `session/update` notification."""

# Requests of an editor ------------------------------------------------------------------------------------------------


class NamedValue(msgspec.Struct, frozen=True):
    """A variable of an environment, or a header."""

    name: str
    value: str


class EditorServer(msgspec.Struct, frozen=True):
    """One MCP server that the editor is configured with."""

    name: str
    type: Literal["stdio", "http"] = "stdio"
    command: str | None = None
    args: tuple[str, ...] | None = None
    env: tuple[NamedValue, ...] | None = None
    url: str | None = None
    headers: tuple[NamedValue, ...] | None = None

    def settings(self) -> ServerSettings:
        """Return the server as a setting. Raises ValueError: both or neither of `command` and `url` are given."""
        command = None if self.command is None else (self.command, *(self.args or ()))
        env, headers = ({pair.name: pair.value for pair in pairs or ()} for pairs in (self.env, self.headers))
        return ServerSettings(command=command, env=env, url=self.url, headers=headers)


class EmbeddedText(msgspec.Struct, frozen=True):
    """A file whose text is in the prompt."""

    text: Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
    uri: str = ""


class PromptBlock(msgspec.Struct, frozen=True, rename="camel"):
    """One block of a prompt; its type says which of the other members it has."""

    type: Literal["text", "resource_link", "resource", "image"]
    text: str = ""
    uri: str | None = None
    name: str = "file"
    resource: EmbeddedText | None = None
    data: Annotated[bytes, msgspec.Meta(max_length=IMAGE_BYTES_MAX)] = b""
    mime_type: str | None = None


class EditorParams(msgspec.Struct, frozen=True, rename="camel"):
    """Parameters of all requests of an editor; each request has some of these members, and any other is ignored."""

    session_id: str = ""
    cwd: str | None = None
    mcp_servers: tuple[EditorServer, ...] | None = None
    cursor: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")] | None = None
    """Index of the first row to return from a list, as digits; None starts at the first."""
    mode_id: str = ""
    prompt: tuple[PromptBlock, ...] = ()


def message_of(blocks: tuple[PromptBlock, ...]) -> UserMessage | None:
    """Return a prompt's blocks as one message; None if they have no text and no image."""
    words: list[str] = []
    images: list[Image] = []
    for block in blocks:
        if block.type == "image" and block.data:
            images.append(Image(media_type=block.mime_type, data=base64.b64encode(block.data).decode()))
        elif block.type == "resource_link":
            words.append(f"[{block.name}]({block.uri or ''})")
        elif block.resource is not None:
            words.append(f'<file uri="{block.resource.uri}">\n{block.resource.text}\n</file>')
        elif block.text:
            words.append(block.text)
    text = "\n\n".join(words)
    return UserMessage(content=text, images=tuple(images)) if text.strip() or images else None


# A permission ---------------------------------------------------------------------------------------------------------

ALLOW, ALWAYS, REJECT = "allow", "allow_always", "reject"
OPTIONS: Final[list[Json]] = [
    {"optionId": ALLOW, "name": "Allow", "kind": "allow_once"},
    {"optionId": ALWAYS, "name": "Allow such calls in this reply", "kind": "allow_always"},
    {"optionId": REJECT, "name": "Reject", "kind": "reject_once"},
]


def decision_of(answer: Any) -> Decision:
    """Return the decision in an editor's answer; anything but a permission denies the call."""
    outcome = answer.get("outcome") if isinstance(answer, dict) else None
    chosen = outcome.get("optionId") if isinstance(outcome, dict) and outcome.get("outcome") == "selected" else None
    if chosen in (ALLOW, ALWAYS):
        return Decision("allow", remember="run" if chosen == ALWAYS else "once")
    if chosen == REJECT:
        return Decision("deny", "the user rejected it in the editor")
    return Decision("deny", "the editor gave no permission: it cancelled the question, or answered it otherwise")


# Updates for an editor ------------------------------------------------------------------------------------------------

KINDS: Final[Mapping[str, str]] = {
    "read_file": "read", "write_file": "edit", "edit_file": "edit", "bash": "execute", "glob": "search",
    "grep": "search", "list_files": "search", "web_fetch": "fetch", "web_search": "fetch",
}  # fmt: skip
"""Neutral name of a tool → its kind in the protocol; a tool that is not listed is `other`."""

PATH_MEMBERS: Final = ("path", "file_path", "filePath")
"""Members of a call's input that name a file."""


class TurnUpdates:
    """Makes the updates of a turn; a message that came in pieces is not shown again as a whole."""

    def __init__(self, root: str) -> None:
        self._root, self._in_pieces = root, False

    def updates(self, event: AgentEvent) -> list[Update]:
        """Return the updates that show an event."""
        if isinstance(event, Reasoning):
            return _words("agent_thought_chunk", event.reasoning)
        if isinstance(event, AssistantDelta):
            self._in_pieces = True
            return _words("agent_message_chunk", event.text)
        if isinstance(event, AssistantMessage):
            was_shown, self._in_pieces = self._in_pieces, False
            return [] if was_shown else _words("agent_message_chunk", event.text)
        if isinstance(event, ToolCall):
            call = call_of(str(event.tool_use_id), event.tool_name, event.input, self._root)
            return [{"sessionUpdate": "tool_call", **call, "status": "in_progress"}]
        if isinstance(event, ToolResult):
            return [_result(str(event.tool_use_id), event.output, is_error=event.is_error)]
        return []


def replayed(message: Message, root: str) -> list[Update]:
    """Return the updates that show a message of a stored session."""
    if isinstance(message, UserMessage):
        return _words("user_message_chunk", message.content)
    if isinstance(message, ToolResultMessage):
        return [_result(message.tool_call_id, message.content, is_error=message.is_error)]
    assert isinstance(message, AgentMessage)
    thoughts = [update for block in message.thinking for update in _words("agent_thought_chunk", block.text)]
    calls: list[Update] = [
        {"sessionUpdate": "tool_call", **call_of(call.id, call.name, call.arguments, root), "status": "completed"}
        for call in message.tool_calls
    ]
    return [*thoughts, *_words("agent_message_chunk", message.content), *calls]


def call_of(id: str, name: str, given: Json, root: str) -> Update:
    """Return the members that show a call: id, title, kind, input, and the paths of files in the input.

    Args:
        root: folder that relative paths count from.
    """
    found = given if isinstance(given, dict) else {}
    texts = {key: value for key, value in found.items() if isinstance(value, str)}
    shown = next((texts[key] for key in ("command", "cmd", *PATH_MEMBERS, "url", "pattern") if key in texts), "")
    neutral = SPELLINGS.get(name, name)
    kind = KINDS.get(neutral) or next((kind for tool, kind in KINDS.items() if tool in name.lower()), "other")
    return {
        "toolCallId": id, "title": f"{name} {shown}".strip().replace("\n", " ")[:TITLE_CHARS], "kind": kind,
        "rawInput": given, "_meta": {"toolName": name},
        "locations": [{"path": posixpath.join(root, texts[key])} for key in PATH_MEMBERS if key in texts],
    }  # fmt: skip


def _words(kind: str, text: str | None) -> list[Update]:
    return [{"sessionUpdate": kind, "content": {"type": "text", "text": text}}] if text else []


def _result(id: str, output: Json, *, is_error: bool) -> Update:
    text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
    content: list[Json] = [{"type": "content", "content": {"type": "text", "text": text}}] if text else []
    status = "failed" if is_error else "completed"
    return {"sessionUpdate": "tool_call_update", "toolCallId": id, "status": status, "content": content}
