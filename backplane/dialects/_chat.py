"""The Chat Completions family: its words, and what sets its dialects apart.

What one flavour has and another has not is in its `Flavour`; the flavours' files hold these. Documents are read in
`_chat_read`, written in `_chat_write`, streams in `_chat_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.dialects._options import EFFORT_BUDGETS, NUMBER, OptionTable, Writer
from backplane.dialects._parts import Kin
from backplane.ir import Role, Stop

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

STOPS: Final[dict[str, Stop]] = {
    "stop": "end",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "content_filter",
}

STOP_WORDS: Final[dict[str, str]] = {
    "end": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "content_filter",
    "stop_sequence": "stop",
}

SIMPLE: Final[OptionTable] = {
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "seed": ("seed", int),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "n": ("n", int),
    "logprobs": ("logprobs", bool),
    "top_logprobs": ("top_logprobs", int),
    "stream": ("stream", bool),
    "parallel_tool_calls": ("parallel_tool_calls", bool),
    "user": ("user", str),
    "metadata": ("metadata", dict),
    "reasoning_effort": ("reasoning_effort", str),
    "verbosity": ("verbosity", str),
    "service_tier": ("service_tier", str),
}

MEMBERS: Final[dict[str, type[Any]]] = {
    "tool_calls": list, "annotations": list, "audio": dict, "logprobs": dict, "system_fingerprint": str,
    "function_call": dict, "logit_bias": dict, "store": bool, "stream_options": dict, "prediction": dict,
    "modalities": list, "prompt_cache_key": str, "safety_identifier": str, "functions": list,
    "prompt_tokens_details/audio_tokens": int, "completion_tokens_details/audio_tokens": int,
    "completion_tokens_details/accepted_prediction_tokens": int,
    "completion_tokens_details/rejected_prediction_tokens": int, "expires_at": int, "#stop": str,
}  # fmt: skip
"""Members that every flavour of the family takes from its sisters, and the type that they must have for it."""

SERVICE_TIERS: Final = frozenset({"auto", "default", "flex", "scale", "priority", "fast"})
DETAILS: Final = frozenset({"auto", "low", "high"})
EFFORTS: Final = frozenset(EFFORT_BUDGETS)


class Flavour(msgspec.Struct, frozen=True):
    """What sets one dialect of the family apart."""

    name: str
    roles: frozenset[str] = frozenset(ROLES)
    max_tokens: str = "max_tokens"
    """The member that is written for a limit that came from elsewhere."""
    thinking_request: str | None = None
    """The message member that takes thinking in a request; None where there is none."""
    thinking_answer: str = "reasoning_content"
    """The same in an answer, where readers accept more than the vendor documents."""
    thinking_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_text")
    signature_field: str | None = None
    """The message member that holds the proof of the thinking."""
    cached_tokens_on_top: bool = False
    """`usage.cached_tokens` instead of a member of the details."""
    builtin_tools: bool = False
    """Tools of type `builtin_function` exist."""
    has_files: bool = True
    special: Mapping[str, Writer] = {}
    """Options that this flavour writes in its own way."""
    unknown_options: frozenset[str] = frozenset()
    """Options of the family that this flavour does not have."""
    kin: Kin = {}
