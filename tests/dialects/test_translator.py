"""A history that grows turn by turn is translated as the whole would be, and what is old costs next to nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.dialects import translate
from backplane.dialects.translator import Translator
from tests.dialects.dialect_corpus import NAMES


def history(turns: int, chars: int) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "x" * chars}]
    for turn in range(turns):
        arguments = json.dumps({"path": "a" * chars, "turn": turn})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "read", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "y" * chars, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn} {'z' * chars}"})
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
    return {"model": "m", "messages": messages, "tools": [tool]}


def bare(value: Any) -> Any:
    """Leave out ids of items, which stand for nothing outside of the request."""
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items() if not (k == "id" and value.get("type") == "message")}
    return [bare(one) for one in value] if isinstance(value, list) else value


def marks(losses: Any) -> set[tuple[str, str]]:
    return {(loss.path, loss.code) for loss in losses}


@pytest.mark.parametrize("target", [name for name in NAMES if name != "openai"])
def test_a_growing_history_is_translated_as_the_whole_would_be(target: str) -> None:
    kept = Translator("openai", target)
    for turns in range(4):
        document = history(turns, 20)
        done, whole = kept.request(document), translate(document, "openai", target)
        assert bare(done.value) == bare(whole.value)
        assert marks(done.losses) == marks(whole.losses)
