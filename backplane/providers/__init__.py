"""Conversations over every backend: providers, sessions and their streams. Each turn is an order with a receipt.

`as_messages` and `as_unified` show a stream under the names of two other interfaces.
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
from backplane.providers.failures import ProviderError
from backplane.providers.registry import Provider, ProviderRegistry
from backplane.providers.session import Session, TurnOptions, TurnOutcome
from backplane.providers.tools import HandlerResult, ToolDefinition
from backplane.providers.turns import SessionConfig
from backplane.providers.views import (
    ErrorEvent,
    MessageDoneEvent,
    StreamEvent,
    TextDeltaEvent,
    ToolResultEvent,
    ToolUseEndEvent,
    ToolUseInputEvent,
    ToolUseStartEvent,
    UnifiedEvent,
    as_messages,
    as_unified,
    prompt,
)

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
    "UnifiedEvent",
    "UserMessage",
    "as_messages",
    "as_unified",
    "image_from",
    "prompt",
]
