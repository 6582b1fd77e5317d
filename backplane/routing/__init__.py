"""Which backend an order gets, why, and what follows when it fails there (`docs/guide/routing-rule.md`).

Pure: tasks, candidates and measures come in, decisions come out. Reading settings, manifests and
receipts, and running what was chosen, is done in `driver`.
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
