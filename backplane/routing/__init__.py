"""Chooses the backend of an order, explains the choice, and decides what follows a failure.

The rule is `docs/guide/routing-rule.md`. `router` and `failover` are pure: tasks, candidates and measures come in,
decisions come out. `driver` reads settings, manifests and receipts; `compare` runs an order on several backends.
"""

from backplane.routing.estimates import Measures, Observation
from backplane.routing.router import BackendState, Model, Obstacle, Option, RoutingDecision, choose
from backplane.routing.task import STRATEGIES, TYPES, Strategy, TaskDescriptor, TaskType

__all__ = [
    "STRATEGIES",
    "TYPES",
    "BackendState",
    "Measures",
    "Model",
    "Observation",
    "Obstacle",
    "Option",
    "RoutingDecision",
    "Strategy",
    "TaskDescriptor",
    "TaskType",
    "choose",
]
