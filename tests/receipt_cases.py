"""Hypothesis strategies for any event and any receipt."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    RunCompleted,
    RunStarted,
    ToolCall,
    ToolResult,
    Warned,
)
from backplane.contract.receipt import Artifact, BackendIdentity, Usage, Verification
from tests.receipt_writer import TS, receipt_of

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"trace":[]', '],"usage":{', "\n", '\\"trace\\":[', "\u2028\x7f\x01"]
)
numbers = (
    st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([-0.0, 1e16, 1e21, 5e-324, 1.7976931348623157e308])
)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts | st.just("trace"), json_values, max_size=3)
_ts = st.sampled_from([TS, "2025-01-15T12:00:00Z", "2025-01-15T12:00:00.123456789Z"])
_maybe = st.none() | texts


def _event(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[AgentEvent]:
    plain = st.builds(kind, ts=_ts, **fields)
    return plain | st.builds(kind, ts=_ts, ext=objects, **fields)


events = st.one_of(
    _event(RunStarted, message=texts),
    _event(RunCompleted, message=texts),
    _event(Warned, message=texts),
    _event(AssistantDelta, text=texts),
    _event(AssistantMessage, text=texts),
    _event(ToolCall, tool_name=texts, input=json_values, tool_use_id=_maybe, parent_tool_use_id=_maybe),
    _event(ToolResult, tool_name=texts, output=json_values, is_error=st.booleans(), tool_use_id=_maybe),
    _event(FileChanged, path=texts, summary=texts),
    _event(CommandExecuted, command=texts, exit_code=st.none() | st.integers(-1, 255), output_preview=_maybe),
    _event(Failed, message=texts, error_code=st.sampled_from([msgspec.UNSET, "internal"])),
)
receipts = st.builds(
    receipt_of,
    st.lists(events, max_size=5),
    backend=st.builds(BackendIdentity, texts, _maybe, _maybe),
    capabilities=st.dictionaries(st.sampled_from(["streaming", "tool_read", "tool_bash"]), st.just("native")),
    usage_raw=json_values | objects,
    usage=st.builds(
        Usage,
        input_tokens=st.none() | st.integers(0, 2**64 - 1),
        estimated_cost_usd=st.none() | st.floats(0, 1e20),
    ),
    artifacts=st.lists(st.builds(Artifact, texts, texts), max_size=2).map(tuple),
    verification=st.builds(Verification, harness_ok=st.booleans(), git_diff=_maybe, git_status=_maybe),
    outcome=st.sampled_from(["complete", "partial", "failed"]),
    mode=st.sampled_from(["passthrough", "mapped"]),
    receipt_sha256=st.none() | texts,
)
