"""Conversations over every backend: providers, sessions, and what they tell.

Every turn is an order with a receipt. The unified agent's events and inputs are in `unified`.
"""

from backplane.contract.conversation import (
    AgentMessage,
    Image,
    Message,
    MessageToolCall,
    SessionFile,
    SessionTurn,
    ThinkingBlock,
    TokenUsage,
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
from backplane.providers.session import Session, TurnOptions, TurnOutcome
from backplane.providers.tools import HandlerResult, ToolDefinition

__all__ = [
    "AgentMessage",
    "ErrorEvent",
    "HandlerResult",
    "Image",
    "Message",
    "MessageDoneEvent",
    "MessageToolCall",
    "Provider",
    "ProviderError",
    "ProviderRegistry",
    "Session",
    "SessionConfig",
    "SessionFile",
    "SessionTurn",
    "StreamEvent",
    "TextDeltaEvent",
    "ThinkingBlock",
    "TokenUsage",
    "ToolDefinition",
    "ToolResultEvent",
    "ToolResultMessage",
    "ToolUseEndEvent",
    "ToolUseInputEvent",
    "ToolUseStartEvent",
    "TurnOptions",
    "TurnOutcome",
    "UserMessage",
    "image_from",
    "unified",
]
