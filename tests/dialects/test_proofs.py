"""Calls that Gemini 3 wants a signature on: histories of other vendors, of older models, and its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backplane.dialects import translate
from backplane.dialects.gemini import PROOF, prove_calls
from backplane.dialects.ir import Message, ToolOutput, ToolUse
from backplane.testing import Turn
from tests.upstream.talk import READ, conversation, talk, worked

MODELS = {
    "gemini-3-pro": True, "gemini-3-flash-preview": True, "gemini-3.8-flash": True, "models/gemini-3-pro": True,
    "gemini-10-pro": True, "gemini-flash-latest": True, "publishers/google/models/gemini-4": True,
    "gemini-2.5-pro": False, "gemini-2.0-flash": False, "gemini-1.5-flash-8b": False, "m": False,
}  # fmt: skip


def call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def chat(model: str, *turns: int) -> dict[str, Any]:
    """A history of Chat Completions with as many calls a turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    number = 0
    for count in turns:
        calls = [call("f", number + place) for place in range(count)]
        messages.append({"role": "assistant", "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in calls]
        number += count
    return {"model": model, "messages": messages}


def proofs(document: dict[str, Any]) -> list[list[str | None]]:
    """Return the signatures of the calls of each content that has calls."""
    found = [
        [part.get("thoughtSignature") for part in content["parts"] if "functionCall" in part]
        for content in document["contents"]
    ]
    return [one for one in found if one]


@pytest.mark.parametrize("model", MODELS)
def test_a_call_of_another_vendor_has_the_stand_in_where_the_model_wants_a_signature(model: str) -> None:
    done = translate(chat(model, 1, 3), "openai", "gemini")
    wanted = PROOF if MODELS[model] else None
    assert proofs(done.value) == [[wanted], [wanted, None, None]]
    assert [loss.code for loss in done.losses].count("signature") == (2 if MODELS[model] else 0)


@pytest.mark.parametrize("source", ["claude", "codex", "kimi", "copilot"])
def test_every_source_gets_the_stand_in(source: str) -> None:
    document = translate(chat("gemini-3-pro", 1, 1), "openai", source).value
    done = translate(document, source, "gemini")
    assert proofs(done.value) == [[PROOF], [PROOF]]


def test_the_models_own_signature_stays() -> None:
    document = {"model": "gemini-3-pro", "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "c2ln"},
                                    {"functionCall": {"name": "f", "args": {}}}]},
        {"role": "model", "parts": [{"function_call": {"name": "f"}, "thought_signature": "c2ln"}]},
    ]}  # fmt: skip
    assert prove_calls(document) == (document, ())
    assert prove_calls(document)[0] is document


@pytest.mark.parametrize(("model", "wanted"), [("gemini-3-pro", [PROOF]), ("gemini-2.5-pro", [None])])
def test_the_host_sends_the_stand_in_for_calls_of_an_older_conversation(model: str, wanted: list[Any]) -> None:
    done = talk("gemini_ai_studio", [Turn(text="done")], conversation("gemini_ai_studio", *worked(), tools=(READ,)))
    assert proofs(done.bodies[-1]) == [[None]]
    asked = msgspec.structs.replace(conversation("gemini_ai_studio", *worked(), tools=(READ,)), model=model)
    done = talk("gemini_ai_studio", [Turn(text="done")], asked)
    assert proofs(done.bodies[-1]) == [wanted]
    assert ("signature" in {loss.code for loss in done.turn.losses}) == (wanted == [PROOF])


def test_a_signature_of_the_model_goes_back_beside_the_stand_in_of_an_older_turn() -> None:
    own = ToolUse(id="b", name="read", input={}, signature="c2ln")
    messages = (*worked(), Message(role="assistant", parts=(own,)), Message(role="tool", parts=(ToolOutput(id="b"),)))
    asked = msgspec.structs.replace(conversation("gemini_ai_studio", *messages), model="gemini-3-pro")
    done = talk("gemini_ai_studio", [Turn(text="done")], asked)
    assert proofs(done.bodies[-1]) == [[PROOF], ["c2ln"]]
