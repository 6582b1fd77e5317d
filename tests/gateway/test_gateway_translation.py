"""A history that is known is not translated again, and the result is that of a translation of the whole."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.errors import TranslationError
from backplane.gateway import translation
from backplane.gateway.fronts import CHAT, GEMINI, MESSAGES, RESPONSES, Front
from backplane.gateway.translation import Route, Translations, WrittenRequest, write

Step = dict[str, Any]
TARGETS = {"openai": "openai_compatible", "codex": "openai_responses", "claude": "anthropic",
           "gemini": "gemini_ai_studio"}  # fmt: skip
FRONTS = (CHAT, RESPONSES, MESSAGES, GEMINI)
PAIRS = [(front, target) for front in FRONTS for target in TARGETS if front.dialect != target]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ODD = ("", " ", "go", "A", "x-anthropic-billing-header: 1")

# Conversations of any kind, in steps that each interface writes in its own way.

WORDS = st.sampled_from(ODD)
IDS = st.sampled_from(["a", "b", "c:1", "call_" + "x" * 70, None])
CALL = st.fixed_dictionaries({
    "id": IDS, "name": st.sampled_from(["read", "mcp.tool/one", "apply_patch"]),
    "arguments": st.sampled_from(['{"path": "a"}', "{}", "", "nonsense", "[1]"]),
})  # fmt: skip


@st.composite
def turns(draw: st.DrawFn) -> list[Step]:
    """A turn as agents have it: the model speaks and calls, and each call is answered."""
    calls = [{"id": f"id{draw(st.integers(0, 10**6))}", "name": draw(st.sampled_from(["read", "write"])),
              "arguments": '{"path": "a"}'} for _ in range(draw(st.integers(0, 2)))]  # fmt: skip
    results = [{"speaker": "tool", "id": call["id"], "name": call["name"], "text": draw(WORDS)} for call in calls]
    said = {"speaker": "model", "text": draw(WORDS), "calls": calls, "thinking": draw(st.booleans())}
    return [said, *(draw(st.permutations(results)) if results else [{"speaker": "user", "text": draw(WORDS)}])]


STEP = st.one_of(
    st.fixed_dictionaries({"speaker": st.just("user"), "text": WORDS, "mark": st.booleans(), "image": st.booleans()}),
    st.fixed_dictionaries({"speaker": st.just("system"), "text": WORDS}),
    st.fixed_dictionaries({
        "speaker": st.just("model"), "text": WORDS, "calls": st.lists(CALL, max_size=2), "thinking": st.booleans(),
    }),
    st.fixed_dictionaries({"speaker": st.just("tool"), "id": IDS, "name": st.just("read"), "text": WORDS}),
    st.fixed_dictionaries({"speaker": st.just("strange")}),
)  # fmt: skip
CONVERSATION = st.one_of(
    st.lists(st.one_of(turns(), turns(), turns(), STEP.map(lambda step: [step])), max_size=7).map(
        lambda parts: [{"speaker": "user", "text": "begin"}, *(step for part in parts for step in part)]
    ),
    st.lists(STEP, max_size=10),
)


def elements(front: Front, step: Step) -> Iterator[Any]:
    """Write a step in an interface's JSON."""
    text, speaker, calls = step.get("text", ""), step["speaker"], step.get("calls", [])
    if speaker == "strange":
        yield {"role": "strange", "type": "strange", "content": [{"type": "strange"}]}
    elif front is CHAT:
        if speaker == "tool":
            yield {"role": "tool", **_given("tool_call_id", step["id"]), "content": text}
        elif speaker == "model":
            made = [{**_given("id", one["id"]), "type": "function",
                     "function": {"name": one["name"], "arguments": one["arguments"]}} for one in calls]  # fmt: skip
            yield {"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {}),
                   **({"reasoning_content": "I think"} if step["thinking"] else {})}  # fmt: skip
        else:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
            content = [{"type": "text", "text": text}, image] if step.get("image") else text
            yield {"role": speaker, "content": content}
    elif front is MESSAGES:
        mark = {"cache_control": {"type": "ephemeral"}} if step.get("mark") else {}
        if speaker == "tool":
            block = {"type": "tool_result", "tool_use_id": step["id"] or "none", "content": text}
            yield {"role": "user", "content": [block, *([{"type": "text", "text": "x"}] if text == "A" else [])]}
        else:
            blocks: list[Any] = [{"type": "text", "text": text, **mark}]
            if step.get("thinking"):
                blocks.insert(0, {"type": "thinking", "thinking": "I think", "signature": "s"})
            blocks += [{"type": "tool_use", "id": one["id"] or "none", "name": one["name"],
                        "input": _read(one["arguments"])} for one in calls]  # fmt: skip
            yield {"role": "assistant" if speaker == "model" else speaker, "content": blocks}
    elif front is GEMINI:
        if speaker == "tool":
            answer = {"name": step["name"], "response": {"output": text}, **_given("id", step["id"])}
            yield {"role": "user", "parts": [{"functionResponse": answer}]}
        else:
            parts: list[Any] = [{"text": text}]
            parts += [{"functionCall": {"name": one["name"], "args": {"path": "a"}, **_given("id", one["id"])}}
                      for one in calls]  # fmt: skip
            yield {"role": "model" if speaker == "model" else "user", "parts": parts}
    elif speaker == "tool":
        yield {"type": "function_call_output", "call_id": step["id"] or "none", "output": text}
    else:
        if step.get("thinking"):
            yield {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"}
        if text or speaker != "model":
            kind = "output_text" if speaker == "model" else "input_text"
            role = "assistant" if speaker == "model" else speaker
            yield {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        for one in calls:
            yield {"type": "function_call", "call_id": one["id"] or "none", "name": one["name"],
                   "arguments": one["arguments"]}  # fmt: skip


def _given(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def document(front: Front, steps: list[Step]) -> dict[str, Any]:
    """Write a conversation as a request, with tools and options."""
    messages = [one for step in steps for one in elements(front, step)]
    tool = {"name": "read", "description": "Reads a file."}
    if front is GEMINI:
        config = {"temperature": 0.5, "maxOutputTokens": 100}
        return {"contents": messages, "tools": [{"functionDeclarations": [{**tool, "parameters": SCHEMA}]}],
                "generationConfig": config, "systemInstruction": {"parts": [{"text": "Be brief."}]}}  # fmt: skip
    if front is MESSAGES:
        return {"model": "m", "max_tokens": 100, "system": [{"type": "text", "text": "Be brief."}],
                "messages": messages, "tools": [{**tool, "input_schema": SCHEMA}]}  # fmt: skip
    if front is RESPONSES:
        return {"model": "m", "instructions": "Be brief.", "input": messages, "store": False,
                "tools": [{"type": "function", **tool, "parameters": SCHEMA}]}  # fmt: skip
    return {"model": "m", "messages": messages, "logit_bias": {"5": 1},
            "tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]}  # fmt: skip


def route(front: Front, target: str) -> Route:
    return Route(front=front, dialect=target, protocol=TARGETS[target], model="gemini-3-pro", stream=True)


def outcome(of: Any) -> Any:
    """Return a translation as bytes with its losses, or its error."""
    try:
        found: WrittenRequest = of()
    except TranslationError as error:
        return error.code, error.message
    return msgspec.json.encode(found.request), found.losses, found.customs


@pytest.mark.parametrize(("front", "target"), PAIRS, ids=lambda one: getattr(one, "name", one))
@given(steps=CONVERSATION, ends=st.lists(st.integers(0, 30), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_conversation_cut_anywhere_is_translated_as_a_whole(
    front: Front, target: str, steps: list[Step], ends: list[int]
) -> None:
    store, way = Translations(), route(front, target)
    for end in [*sorted(ends), len(steps), *ends]:
        asked = document(front, steps[:end])
        before = copy.deepcopy(asked)
        assert outcome(lambda a=asked: store.write(way, "me", a)) == outcome(lambda a=asked: write(way, a))
        assert asked == before


def conversation(count: int) -> list[Step]:
    steps: list[Step] = [{"speaker": "user", "text": "begin"}]
    for number in range(count):
        call = {"id": f"id{number}", "name": "read", "arguments": '{"path": "a"}'}
        steps += [{"speaker": "model", "text": "I look.", "calls": [call], "thinking": False},
                  {"speaker": "tool", "id": f"id{number}", "name": "read", "text": "some lines\n" * 50}]  # fmt: skip
    return steps


@pytest.mark.parametrize(("front", "target"), PAIRS, ids=lambda one: getattr(one, "name", one))
def test_only_what_is_new_is_translated(front: Front, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, way, sizes = Translations(), route(front, target), list[int]()
    plain, name = translation.write, translation.LISTS[front.dialect]

    def counted(way: Route, asked: dict[str, Any], *rest: Any) -> WrittenRequest:
        sizes.append(len(asked[name]))
        return plain(way, asked, *rest)

    monkeypatch.setattr(translation, "write", counted)
    for count in range(20, 30):
        asked = document(front, conversation(count))
        assert outcome(lambda a=asked: store.write(way, "me", a)) == outcome(lambda a=asked: plain(way, a))
    assert sum(size > 15 for size in sizes) == 1
    assert max(sizes[1:]) <= 6


def test_a_client_that_marks_its_last_message_is_known_from_its_third_request_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, way, sizes = Translations(), route(MESSAGES, "openai"), list[int]()
    plain = translation.write

    def counted(way: Route, asked: dict[str, Any], *rest: Any) -> WrittenRequest:
        sizes.append(len(asked["messages"]))
        return plain(way, asked, *rest)

    monkeypatch.setattr(translation, "write", counted)
    for count in range(20, 30):
        asked = document(MESSAGES, conversation(count))
        asked["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        asked["system"].insert(0, {"type": "text", "text": f"x-anthropic-billing-header: {count}"})
        assert outcome(lambda a=asked: store.write(way, "me", a)) == outcome(lambda a=asked: plain(way, a))
    assert sum(size > 15 for size in sizes) <= 2
    assert max(sizes[4:]) <= 6


def test_histories_of_other_clients_models_and_tools_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    store, way, count = Translations(), route(CHAT, "claude"), 0
    plain = translation.write

    def counted(*given: Any) -> WrittenRequest:
        nonlocal count
        count += 1
        return plain(*given)

    monkeypatch.setattr(translation, "write", counted)
    asked = document(CHAT, conversation(20))
    other = msgspec.structs.replace(way, model="other")
    for owner, one, tools in (("me", way, 1), ("you", way, 1), ("me", other, 1), ("me", way, 0)):
        store.write(one, owner, {**asked, "tools": asked["tools"][:tools]})
    assert count == 4
    store.write(way, "me", asked)
    assert count == 5  # Its lead, to know that nothing depends on it.


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "BYTES_MAX", 100_000)
    monkeypatch.setattr(translation, "ROWS_MAX", 50)
    store, way = Translations(), route(CHAT, "claude")
    for number in range(100):
        store.write(way, str(number), document(CHAT, conversation(20)))
        assert store._size <= 100_000
        assert len(store._rows) <= 50


def test_a_known_history_of_50_kb_takes_a_part_of_the_time() -> None:
    store, way = Translations(), route(CHAT, "claude")
    asked = [document(CHAT, conversation(count)) for count in range(70, 90)]
    assert len(msgspec.json.encode(asked[0])) > 50_000
    began = time.process_time()
    for one in asked:
        write(way, one)
    whole = time.process_time() - began
    store.write(way, "me", asked[0])
    began = time.process_time()
    for one in asked:
        store.write(way, "me", one)
    assert time.process_time() - began < whole / 2
