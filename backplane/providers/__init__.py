"""Conversations over every backend: providers, sessions, and what they tell.

Every turn is an order with a receipt. The unified agent's events and inputs are in `unified`.
"""

from backplane.contract.conversation import (
    AssistantMessage,
    Image,
    Message,
    SessionFile,
    SessionTurn,
    Thinking,
    TokenUsage,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from backplane.contract.pictures import image_from
from backplane.providers import unified
from backplane.providers.events import (
    ErrorEvent,
    MessageDoneEvent,
    StreamEvent,
    TextDeltaEvent,
    ToolResultEvent,
    ToolUseEndEvent,
    ToolUseInputEvent,
    ToolUseStartEvent,
)
from backplane.providers.failures import ProviderError
from backplane.providers.orders import SessionConfig
from backplane.providers.registry import Provider, ProviderRegistry
from backplane.providers.session import Session, Turn
from backplane.providers.tools import ToolDefinition, ToolResult

__all__ = [
    "AssistantMessage",
    "ErrorEvent",
    "Image",
    "Message",
    "MessageDoneEvent",
    "Provider",
    "ProviderError",
    "ProviderRegistry",
    "Session",
    "SessionConfig",
    "SessionFile",
    "SessionTurn",
    "StreamEvent",
    "TextDeltaEvent",
    "Thinking",
    "TokenUsage",
    "ToolCall",
    "ToolDefinition",
    "ToolResult",
    "ToolResultEvent",
    "ToolResultMessage",
    "ToolUseEndEvent",
    "ToolUseInputEvent",
    "ToolUseStartEvent",
    "Turn",
    "UserMessage",
    "image_from",
    "unified",
]
