"""The unified agent's words: fourteen events, what a user may say, and what a provider can."""

from __future__ import annotations

from typing import Literal

import msgspec

from backplane.contract.approval import Remember
from backplane.contract.canonical import Json
from backplane.contract.conversation import StopReason
from backplane.providers.failures import ErrorType


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    pass


# Events ---------------------------------------------------------------------------------------------------------------


class TextDelta(_Value, frozen=True, gc=False):
    text: str


class TextComplete(_Value, frozen=True, gc=False):
    text: str


class ThinkingDelta(_Value, frozen=True, gc=False):
    content: str


class ThinkingComplete(_Value, frozen=True, gc=False):
    """A block of thinking is over."""


class ToolUseStarted(_Value, frozen=True, gc=False):
    tool_name: str
    tool_id: str
    input: Json


class ToolUseComplete(_Value, frozen=True, gc=False):
    tool_id: str
    output: str
    is_error: bool


class PermissionRequest(_Value, frozen=True):
    """The agent asks before a tool, or asks a question (`tool_name` is then `ask_user`); answer with `ToolApproval`."""

    request_id: str
    tool_name: str
    input: Json
    suggestions: tuple[str, ...] = ()
    """Answers that can be given, of `allow`, `allow_run`, `modify`, `deny`; or the question's options."""


class ExecApprovalRequest(_Value, frozen=True):
    """The agent asks before a command; answer with `ToolApproval`."""

    request_id: str
    command: str
    cwd: str | None = None
    parsed_command: tuple[str, ...] | None = None
    """The command's words; None where its quotes do not close."""


class PatchApprovalRequest(_Value, frozen=True):
    """The agent asks before it changes files; answer with `PatchApproval`."""

    request_id: str
    patch_content: str
    files_affected: tuple[str, ...]


class UsageUpdate(_Value, frozen=True):
    """Counters of the turn so far; None is unknown."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd_micros: int | None = None


class SessionStarted(_Value, frozen=True):
    session_id: str
    provider: str


class TurnComplete(_Value, frozen=True):
    stop_reason: StopReason


class BackgroundTask(_Value, frozen=True):
    """A task beside the turn, or a notice that no other event has a word for."""

    task_type: str
    message: str


class Error(_Value, frozen=True):
    message: str
    error_type: ErrorType
    recoverable: bool


UnifiedEvent = (
    TextDelta | TextComplete | ThinkingDelta | ThinkingComplete | ToolUseStarted | ToolUseComplete | PermissionRequest
    | ExecApprovalRequest | PatchApprovalRequest | UsageUpdate | SessionStarted | TurnComplete | BackgroundTask | Error
)  # fmt: skip


# Input ----------------------------------------------------------------------------------------------------------------


class File(_Value, frozen=True):
    """A file's content, shown to the agent."""

    path: str
    content: str
    language: str | None = None


class GitDiff(_Value, frozen=True):
    content: str


class Environment(_Value, frozen=True):
    """A fact about the environment, shown to the agent; its variables stay as they are."""

    key: str
    value: str


class UserInstructions(_Value, frozen=True):
    text: str


ContextItem = File | GitDiff | Environment | UserInstructions


class Prompt(_Value, frozen=True):
    """Words of the user, with what belongs to them."""

    text: str
    context: tuple[ContextItem, ...] = ()

    def words(self) -> str:
        """The items and the text as one."""
        return "\n\n".join([*map(_shown, self.context), self.text])


def _shown(item: ContextItem) -> str:
    if isinstance(item, File):
        return f"File {item.path}:\n```{item.language or ''}\n{item.content}\n```"
    if isinstance(item, GitDiff):
        return f"Diff:\n```diff\n{item.content}\n```"
    if isinstance(item, Environment):
        return f"Environment: {item.key}={item.value}"
    return f"Instructions: {item.text}"


class Review(_Value, frozen=True):
    """Ask for a review of the changes in the folder. Emulated: it is asked for in words."""

    text: str = ""


class ToolApproval(_Value, frozen=True):
    """The answer to a `PermissionRequest` or an `ExecApprovalRequest`."""

    request_id: str
    approved: bool
    modified_input: Json | msgspec.UnsetType = msgspec.UNSET
    reason: str = ""
    text: str | None = None
    """The answer to a question in words."""
    remember: Remember = "once"


class PatchApproval(_Value, frozen=True):
    """The answer to a `PatchApprovalRequest`; a patch cannot be modified by any host today, so that is refused."""

    request_id: str
    decision: Literal["accept", "reject", "modify"]
    changes: str | None = None
    reason: str = ""


UserInput = Prompt | Review | ToolApproval | PatchApproval


# Providers ------------------------------------------------------------------------------------------------------------


class ProviderCapabilities(_Value, frozen=True):
    """What the manifest says; None is unknown."""

    supports_tools: bool | None = None
    supports_mcp: bool | None = None
    supports_hooks: bool | None = None
    supports_interrupts: bool | None = None
    supports_streaming: bool | None = None
    supports_file_editing: bool | None = None
    supports_shell_exec: bool | None = None
    supports_web_search: bool | None = None
    supports_code_review: bool | None = None
    supports_reasoning: bool | None = None
    available_models: tuple[str, ...] | None = None
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    rate_limit: int | None = None


class SessionMetadata(_Value, frozen=True):
    session_id: str
    provider: str
    created_at: str
    """RFC 3339, UTC."""
    model: str | None
    capabilities: ProviderCapabilities
    turns_completed: int
    keeps_conversations: bool
    """The provider keeps the conversation itself; else its history is carried in each order (emulated)."""
