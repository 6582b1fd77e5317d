"""Run any coding agent through one contract: a work order in, events and one sealed receipt out.

A module is loaded when one of its names is first used, so that a short command starts fast.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""Defined here, because loading `typing` takes longer than everything else before the first line of a command."""

if TYPE_CHECKING:
    from typing import Any, Final

    from backplane.api import TaskRouter as TaskRouter
    from backplane.api import run as run
    from backplane.api import start as start
    from backplane.config import BackendSettings as BackendSettings
    from backplane.config import HookSettings as HookSettings
    from backplane.config import Limits as Limits
    from backplane.config import RoutingSettings as RoutingSettings
    from backplane.config import Settings as Settings
    from backplane.contract.approval import Decision as Decision
    from backplane.contract.events import AgentEvent as AgentEvent
    from backplane.contract.events import Approval as Approval
    from backplane.contract.events import ApprovalAnswered as ApprovalAnswered
    from backplane.contract.events import AssistantDelta as AssistantDelta
    from backplane.contract.events import AssistantMessage as AssistantMessage
    from backplane.contract.events import CheckpointReported as CheckpointReported
    from backplane.contract.events import CommandExecuted as CommandExecuted
    from backplane.contract.events import Failed as Failed
    from backplane.contract.events import FileChanged as FileChanged
    from backplane.contract.events import LossReported as LossReported
    from backplane.contract.events import OutputReported as OutputReported
    from backplane.contract.events import Reasoning as Reasoning
    from backplane.contract.events import RetryReported as RetryReported
    from backplane.contract.events import RunCompleted as RunCompleted
    from backplane.contract.events import RunStarted as RunStarted
    from backplane.contract.events import SessionNamed as SessionNamed
    from backplane.contract.events import TaskReported as TaskReported
    from backplane.contract.events import ToolCall as ToolCall
    from backplane.contract.events import ToolResult as ToolResult
    from backplane.contract.events import TurnEnded as TurnEnded
    from backplane.contract.events import Unread as Unread
    from backplane.contract.events import UsageReported as UsageReported
    from backplane.contract.events import Warned as Warned
    from backplane.contract.receipt import Receipt as Receipt
    from backplane.contract.work import PolicyProfile as PolicyProfile
    from backplane.contract.work import RuntimeConfig as RuntimeConfig
    from backplane.contract.work import WorkOrder as WorkOrder
    from backplane.contract.work import WorkspaceSpec as WorkspaceSpec
    from backplane.errors import BackendError as BackendError
    from backplane.errors import BackplaneError as BackplaneError
    from backplane.errors import CapabilityError as CapabilityError
    from backplane.errors import ConfigError as ConfigError
    from backplane.errors import ContractError as ContractError
    from backplane.errors import PolicyError as PolicyError
    from backplane.errors import ProtocolError as ProtocolError
    from backplane.errors import RunCancelledError as RunCancelledError
    from backplane.errors import StoreError as StoreError
    from backplane.errors import WorkspaceError as WorkspaceError
    from backplane.runtime.backends import Backend as Backend
    from backplane.runtime.hook_calls import HookCall as HookCall
    from backplane.runtime.hooks import Hook as Hook
    from backplane.runtime.plane import ControlPlane as ControlPlane
    from backplane.runtime.run import Run as Run
    from backplane.scale.queue import Queue as Queue

__version__: Final = "0.1.0"

_NAMES: Final[dict[str, str]] = {
    "api": "TaskRouter run start",
    "config": "BackendSettings HookSettings Limits RoutingSettings Settings",
    "contract.approval": "Decision",
    "contract.events": "AgentEvent Approval ApprovalAnswered AssistantDelta AssistantMessage CheckpointReported "
    "CommandExecuted Failed FileChanged LossReported OutputReported Reasoning RetryReported RunCompleted RunStarted "
    "SessionNamed TaskReported ToolCall ToolResult TurnEnded Unread UsageReported Warned",
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
"""Modules → their public names; the imports above declare the same names for a type checker."""
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'backplane' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"backplane.{_MODULES[name]}"), name)
