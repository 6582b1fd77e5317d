"""Defines the abilities of backends, and the levels at which a backend supports them.

A manifest maps an ability to a level. Unknown abilities and levels are kept when they are read, but not written.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from backplane.contract.canonical import Json

CAPABILITIES: Final[tuple[str, ...]] = (
    "streaming", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob", "tool_grep",
    "tool_web_search", "tool_web_fetch", "tool_ask_user", "hooks_pre_tool_use", "hooks_post_tool_use",
    "session_resume", "session_fork", "checkpointing", "structured_output_json_schema", "mcp_client",
    "mcp_server", "tool_use", "extended_thinking", "image_input", "pdf_input", "code_execution", "logprobs",
    "seed_determinism", "stop_sequences", "function_calling", "vision", "audio", "json_mode",
    "system_message", "temperature", "top_p", "top_k", "max_tokens", "frequency_penalty",
    "presence_penalty", "cache_control", "batch_mode", "embeddings", "image_generation",
)  # fmt: skip
"""The 41 abilities of `abp/v0.1`, in the contract's order; strict peers refuse any other."""

Threshold = Literal["native", "emulated", "any"]
"""Minimum level that a requirement accepts; `any` accepts each level, but the manifest must name the ability."""


class Level(msgspec.Struct, frozen=True):
    """Level at which one ability is supported."""

    name: Literal["native", "emulated", "restricted", "unsupported"]
    reason: str | None = None
    """Why it is restricted; None for the other levels."""

    def satisfies(self, threshold: Threshold) -> bool:
        return self.name in _SATISFIED_BY[threshold]

    def to_wire(self) -> Json:
        return {"restricted": {"reason": self.reason or ""}} if self.name == "restricted" else self.name


_SATISFIED_BY: Final[dict[str, frozenset[str]]] = {
    "native": frozenset({"native"}),
    "emulated": frozenset({"native", "emulated", "restricted"}),
    "any": frozenset({"native", "emulated", "restricted", "unsupported"}),
}

NATIVE: Final = Level("native")
EMULATED: Final = Level("emulated")
UNSUPPORTED: Final = Level("unsupported")


def restricted(reason: str) -> Level:
    return Level("restricted", reason)


class Requirement(msgspec.Struct, frozen=True):
    """One ability that the order needs."""

    capability: str
    min_support: Threshold


class Requirements(msgspec.Struct, frozen=True):
    required: tuple[Requirement, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The abilities that a backend declares."""

    levels: dict[str, Level] = {}
    """Ability → level, for abilities and levels that the contract has."""
    unknown: dict[str, Json] = {}
    """Abilities or levels that the contract does not have, as they were sent."""

    def to_wire(self) -> dict[str, Json]:
        return {name: self.levels[name].to_wire() for name in CAPABILITIES if name in self.levels}


def read_level(value: Json) -> Level | None:
    """Read one level from the wire; return None if the contract has no such level."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, body),) = value.items()
        if name == "restricted" and isinstance(body, dict) and isinstance(body.get("reason"), str):
            return restricted(body["reason"])
        value = name if body is None else None
    if value in ("native", "emulated", "unsupported"):
        return Level(value)
    return None


def read_manifest(wire: dict[str, Json]) -> Manifest:
    """Read a manifest from the wire; abilities and levels that the contract does not have go to `unknown`."""
    levels: dict[str, Level] = {}
    unknown: dict[str, Json] = {}
    for name, value in wire.items():
        level = read_level(value) if name in CAPABILITIES else None
        if level is None:
            unknown[name] = value
        else:
            levels[name] = level
    return Manifest(levels, unknown)
