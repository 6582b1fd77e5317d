"""Limits on a run's workspace."""

from __future__ import annotations

from backplane.config import Limits
from backplane.workspace import Quota


def quota_of(limits: Limits) -> Quota:
    """Return how large a workspace may be."""
    return Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
