"""Hooks of this agent, as a way to ask us: its settings for them, and the trust it wants.

Hooks are ours by their hash: those of a user or a workspace that the agent finds beside them get no trust here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from backplane.agents import hook
from backplane.agents.events import mappings
from backplane.agents.hooked import COMMAND
from backplane.agents.order import toml
from backplane.contract.canonical import Json
from backplane.errors import BackendError

SOCKET: Final = hook.SOCKET
BEFORE: Final = "PreToolUse"
AFTER: Final = "PostToolUse"
TOOLS: Final = {BEFORE: "Bash|mcp__.*", AFTER: ""}
"""Tools that are asked about then, as the agent's hooks call them; a patch comes before it is made, by approval."""

HOOK_S: Final = hook.ANSWER_S_MAX + 40
"""The agent's own bound of a hook: after it the tool's output would be shown as it is."""
Must = Callable[[str, Json], Awaitable[dict[str, Any]]]
"""Asks the agent for something that has to be had."""


def settings(*, after: bool) -> tuple[str, ...]:
    """The agent's settings that make it ask us.

    Args:
        after: after its tools, too.
    """
    return tuple(
        f"hooks.{event}=[{{matcher={toml(TOOLS[event])},hooks=[{{type='command',"
        f"command={toml(COMMAND)},timeout={HOOK_S}}}]}}]"
        for event in ((BEFORE, AFTER) if after else (BEFORE,))
    )


async def trust(must: Must, root: str) -> None:
    """Have the agent trust these hooks and no others. Raises BackendError: it would not ask us."""
    rows = await _ours(must, root)
    trusted = {str(row.get("key")): {"trusted_hash": row.get("currentHash")} for row in rows}
    edit = {"keyPath": "hooks.state", "value": trusted, "mergeStrategy": "upsert"}
    await must("config/batchWrite", {"edits": [edit], "reloadUserConfig": True})
    rows = await _ours(must, root)
    if not rows or any(row.get("trustStatus") != "trusted" for row in rows):
        raise BackendError("backend_unavailable", "the agent does not trust our hooks, so it would not ask us")


async def _ours(must: Must, root: str) -> list[dict[str, Any]]:
    found = mappings((await must("hooks/list", {"cwds": [root]})).get("data"))
    return [row for each in found for row in mappings(each.get("hooks")) if row.get("source") == "sessionFlags"]
