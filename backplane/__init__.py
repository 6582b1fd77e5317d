"""Run any coding agent through one contract: a work order in, events and one sealed receipt out.

A module is loaded when one of its names is first used, so that a short command starts fast.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""Defined here, because loading `typing` takes longer than everything else before the first line of a command."""

if TYPE_CHECKING:
    from typing import Any, Final

    from backplane.api import TaskRouter, run, start
    from backplane.config import BackendSettings, HookSettings, Limits, RoutingSettings, Settings
    from backplane.contract.approval import Decision
    from backplane.contract.events import (
        AgentEvent,
        Approval,
        ApprovalAnswered,
        AssistantDelta,
        AssistantMessage,
        CheckpointReported,
        CommandExecuted,
        Failed,
        FileChanged,
        LossReported,
        OutputReported,
        Reasoning,
        RetryReported,
        RunCompleted,
        RunStarted,
        SessionNamed,
        TaskReported,
        ToolCall,
        ToolResult,
        TurnEnded,
        Unread,
        UsageReported,
        Warned,
    )
    from backplane.contract.receipt import Receipt
    from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
    from backplane.errors import (
        BackendError,
        BackplaneError,
        CapabilityError,
        ConfigError,
        ContractError,
        PolicyError,
        ProtocolError,
        RunCancelledError,
        StoreError,
        WorkspaceError,
    )
    from backplane.runtime.backends import Backend
    from backplane.runtime.hook_calls import HookCall
    from backplane.runtime.hooks import Hook
    from backplane.runtime.plane import ControlPlane
    from backplane.runtime.run import Run
    from backplane.scale.queue import Queue

__version__: Final = "0.1.0"

__all__ = [
    "AgentEvent", "Approval", "ApprovalAnswered", "AssistantDelta", "AssistantMessage", "Backend", "BackendError",
    "BackendSettings", "BackplaneError", "CapabilityError", "CheckpointReported", "CommandExecuted", "ConfigError",
    "ContractError", "ControlPlane", "Decision", "Failed", "FileChanged", "Hook", "HookCall", "HookSettings",
    "Limits", "LossReported", "OutputReported", "PolicyError", "PolicyProfile", "ProtocolError", "Queue", "Reasoning",
    "Receipt", "RetryReported", "RoutingSettings", "Run", "RunCancelledError", "RunCompleted", "RunStarted",
    "RuntimeConfig", "SessionNamed", "Settings", "StoreError", "TaskReported", "TaskRouter", "ToolCall", "ToolResult",
    "TurnEnded", "Unread", "UsageReported", "Warned", "WorkOrder", "WorkspaceError", "WorkspaceSpec", "run", "start",
]  # fmt: skip

_NAMES: Final[dict[str, str]] = {
    "api": "TaskRouter run start",
    "config": "BackendSettings HookSettings Limits RoutingSettings Settings",
    "contract.approval": "Decision",
    "contract.receipt": "Receipt",
    "contract.work": "PolicyProfile RuntimeConfig WorkOrder WorkspaceSpec",
    "errors": "BackendError BackplaneError CapabilityError ConfigError ContractError PolicyError ProtocolError "
    "RunCancelledError StoreError WorkspaceError",
    "runtime.backends": "Backend",
    "runtime.hook_calls": "HookCall",
    "runtime.hooks": "Hook",
    "runtime.plane": "ControlPlane",
    "runtime.run": "Run",
    "scale.queue": "Queue",
}
"""Module → its public names; all other public names are events."""


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'backplane' has no attribute {name!r}")
    from importlib import import_module

    module = next((module for module, names in _NAMES.items() if name in names.split()), "contract.events")
    return getattr(import_module(f"backplane.{module}"), name)
