"""What every dialect has, in the same words: names, tables, tools, orders, answers and streams as agent events."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from backplane.contract.capability import CAPABILITIES
from backplane.contract.events import AssistantDelta, AssistantMessage, Failed, Reasoning, ToolCall, carried
from backplane.contract.work import ContextPacket, RuntimeConfig, Snippet, WorkOrder
from backplane.dialects import (
    DIALECTS,
    agent_events,
    check_losses,
    dialect,
    ir,
    loss_event,
    read_stream,
    translate,
)
from backplane.dialects.common import MADE_ID
from backplane.errors import ConfigError, TranslationError
from backplane.upstream.prices import price_of
from tests.dialects.dialect_corpus import NAMES, canonical, documents, streams

SHAPE = [
    "NAME", "TOOL_NAMES", "CAPABILITIES", "DEFAULTS", "DONE", "to_ir",
    "from_ir", "response_to_ir", "response_from_ir", "map_work_order", "map_response", "StreamReader", "StreamWriter",
    "StreamState", "map_stream_event", "event_name",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_all_dialects_have_the_same_names_and_signatures(name: str) -> None:
    module, first = dialect(name), dialect(NAMES[0])
    for word in SHAPE:
        mine, other = getattr(module, word), getattr(first, word)
        assert type(mine) is type(other), word
        if inspect.isfunction(mine):
            assert str(inspect.signature(mine)).replace(name, "") == str(inspect.signature(other)).replace(
                NAMES[0], ""
            ), word
        if callable(mine):
            assert mine.__doc__, word
    assert name == module.NAME


def test_a_dialect_that_is_not_there_is_named() -> None:
    with pytest.raises(TranslationError, match="no dialect 'abc'") as caught:
        dialect("abc")
    assert caught.value.code == "dialect_unknown"
    assert set(DIALECTS) == set(NAMES)


# The tables of the surface --------------------------------------------------------------------------------------------

LEVELS = {
    "openai": "streaming=native tool_bash=emulated structured_output_json_schema=native mcp_client=unsupported",
    "claude": "streaming=native tool_bash=native tool_web_fetch=native mcp_client=native mcp_server=unsupported "
    "checkpointing=emulated hooks_pre_tool_use=native",
    "gemini": "streaming=native tool_read=native tool_write=emulated tool_glob=unsupported mcp_server=unsupported",
    "codex": "streaming=native tool_edit=native tool_grep=emulated hooks_post_tool_use=emulated mcp_client=unsupported",
    "kimi": "streaming=native tool_read=native tool_edit=unsupported tool_web_search=native "
    "structured_output_json_schema=emulated",
    "copilot": "streaming=native tool_bash=emulated tool_glob=unsupported tool_web_search=native",
}
MODELS = {
    "openai": "gpt-5.5", "claude": "claude-sonnet-5-5", "gemini": "gemini-3.8-flash",
    "codex": "gpt-5.5", "kimi": "kimi-k3", "copilot": "gpt-5.5",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_manifests_and_defaults_are_those_of_the_surface(name: str) -> None:
    module = dialect(name)
    wire = module.CAPABILITIES.to_wire()
    for row in LEVELS[name].split():
        capability, _, level = row.partition("=")
        assert wire[capability] == level, capability
    assert set(module.CAPABILITIES.levels) <= set(CAPABILITIES)
    assert {"model": MODELS[name], "max_tokens": 4096} == module.DEFAULTS


@pytest.mark.parametrize("name", [name for name in NAMES if name != "copilot"])
def test_a_default_model_is_one_whose_price_a_dated_page_gave(name: str) -> None:
    """Copilot is left out: it is paid for by subscription, and no page that was read lists its models."""
    price = price_of(dialect(name).DEFAULTS["model"])
    assert price is not None
    assert price.source
    assert price.read_on >= "2026"


# Orders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_order_becomes_a_request(name: str) -> None:
    order = WorkOrder(
        task="Fix the test",
        context=ContextPacket(files=("a.py",), snippets=(Snippet("log", "it broke"),)),
        config=RuntimeConfig(model="big-model"),
    )
    done = dialect(name).map_work_order(order, {"system": "Be careful.", "temperature": 0.5, "top_k": 3})
    text = canonical(done.value)
    assert all(word in text for word in ("Fix the test", "a.py", "it broke", "Be careful.", "big-model", "0.5", "4096"))
    read = dialect(name).to_ir(done.value).value
    assert [message.role for message in read.messages] == ["system", "user"]
    assert ("top_k" in read.options) == (name in ("claude", "gemini"))
    assert [loss.code for loss in done.losses] == ([] if name in ("claude", "gemini") else ["option"])


def test_a_parameter_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter 'temprature'"):
        dialect("openai").map_work_order(WorkOrder(task="x"), {"temprature": 1})


# Events ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_response_becomes_events_in_order(name: str) -> None:
    title = {"claude": "a call", "gemini": "text and two calls", "codex": "text and two calls"}.get(
        name, "text and two calls"
    )
    response = dict(documents(name, "response"))[title]
    found = dialect(name).map_response(response, "2026-01-01T00:00:00Z")
    kinds = [type(carried(event)).__name__ for event in found]
    assert kinds[:2] == ["AssistantMessage", "ToolCall"]
    assert kinds[-2:] == ["UsageReported", "TurnEnded"]
    assert isinstance(found[-1].ext, dict)
    assert found[-1].ext["turn"] == {"stop_reason": "tool_use"}
    assert all(msgspec.json.encode(event) for event in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_becomes_events_and_calls_come_whole(name: str) -> None:
    module = dialect(name)
    title = {"codex": "text, then two calls", "claude": "text, then a call"}.get(name, "text, then two calls")
    state = module.StreamState("2026-01-01T00:00:00Z")
    found = [event for chunk in dict(streams(name))[title] for event in module.map_stream_event(chunk, state)]
    found += agent_events.end_events(state)
    texts = "".join(event.text for event in found if type(event) is AssistantDelta)
    answer = state.sum.answer()
    parts = answer.candidates[0].message.parts
    assert texts == "".join(part.text for part in parts if isinstance(part, ir.Text))
    calls = [(event.tool_name, event.input) for event in found if isinstance(event, ToolCall)]
    assert calls == [(part.name, part.input) for part in parts if isinstance(part, ir.ToolUse)]
    assert calls


def test_thinking_comes_as_reasoning_with_its_proof() -> None:
    module = dialect("claude")
    state = module.StreamState()
    chunks = dict(streams("claude"))["thinking with its proof, then text"]
    found = [event for chunk in chunks for event in module.map_stream_event(chunk, state)]
    thoughts = [event for event in found if isinstance(event, Reasoning)]
    assert "".join(event.reasoning for event in thoughts) == "let me see"
    assert thoughts[-1].signature == "c2lnbmF0"
    whole = module.map_response(dict(documents("claude", "response"))["thinking, then text"])
    assert isinstance(whole[0], Reasoning)
    assert isinstance(whole[1], AssistantMessage)


@pytest.mark.parametrize("name", NAMES)
def test_an_error_becomes_an_event(name: str) -> None:
    found = dialect(name).map_response(dict(documents(name, "response"))["an error instead of an answer"])
    assert len(found) == 1
    assert isinstance(found[0], Failed)


# Losses ---------------------------------------------------------------------------------------------------------------


def test_a_caller_may_allow_warn_of_or_forbid_losses() -> None:
    request = {"model": "m", "max_tokens": 5, "top_k": 3, "messages": [{"role": "user", "content": "x"}]}
    assert translate(request, "claude", "openai", policy="allow").losses == ()
    assert [loss.path for loss in translate(request, "claude", "openai").losses] == ["/top_k"]
    with pytest.raises(TranslationError, match="1 losses; the first is /top_k") as caught:
        translate(request, "claude", "openai", policy="fail")
    assert caught.value.code == "mapping_lossy_conversion"
    check_losses((), "fail")


def test_a_loss_becomes_an_event_for_the_receipt() -> None:
    request = {"model": "m", "max_tokens": 5, "top_k": 3, "messages": [{"role": "user", "content": "x"}]}
    (loss,) = translate(request, "claude", "openai").losses
    event = carried(loss_event(loss, "2026-01-01T00:00:00Z"))
    assert isinstance(event.ext, dict)
    assert event.ext["loss"] == {
        "path": "/top_k", "dialect": "claude", "target": "openai", "kind": "dropped", "code": "option",
        "reason": "the target has no top_k", "size_chars": 1,
    }  # fmt: skip


def test_every_loss_has_a_known_code_and_no_value() -> None:
    secret = "s3cr3t-value"
    request = {"model": "m", "messages": [{"role": "user", "content": "x", "x_secret": secret}], "x_key": secret}
    losses = translate(request, "openai", "gemini").losses
    assert {loss.code for loss in losses} <= set(ir.LOSS_CODES)
    assert secret not in repr(losses)
    assert {"/x_key", "/messages/0/x_secret"} <= {loss.path for loss in losses}


def test_a_forced_tool_that_only_the_source_runs_is_refused() -> None:
    request = {
        "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }  # fmt: skip
    for target in ("openai", "gemini", "codex", "kimi", "copilot"):
        with pytest.raises(TranslationError, match="web_search is forced") as caught:
            translate(request, "claude", target)
        assert caught.value.code == "mapping_unsupported_capability"
    gemini = {
        "contents": [{"role": "user", "parts": [{"text": "x"}]}],
        "cachedContent": "cachedContents/1",
    }
    with pytest.raises(TranslationError, match="/cachedContent"):
        translate(gemini, "gemini", "claude")


def test_a_result_without_its_call_is_refused_elsewhere_and_kept_at_home() -> None:
    request = {"model": "m", "messages": [{"role": "tool", "tool_call_id": "gone", "content": "x"}]}
    with pytest.raises(TranslationError) as caught:
        translate(request, "openai", "claude")
    assert caught.value.code == "ir_invalid"
    assert translate(request, "openai", "openai").value == request


def test_made_ids_never_reach_their_own_vendor() -> None:
    request = dict(documents("gemini", "request"))["two calls of one name without ids"]
    there = translate(request, "gemini", "openai")
    assert there.value["messages"][1]["tool_calls"][0]["id"].startswith(MADE_ID)
    back = translate(there.value, "openai", "gemini").value
    assert back["contents"] == request["contents"]
    assert any(loss.kind == "synthesised" for loss in there.losses)


# Tokens ---------------------------------------------------------------------------------------------------------------

COUNTED: dict[str, dict[str, Any]] = {
    "claude": {
        "input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10, "output_tokens": 7,
    },
    "codex": {
        "input_tokens": 100, "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 107,
    },
    "openai": {
        "prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
    },
    "gemini": {
        "promptTokenCount": 100, "candidatesTokenCount": 7, "cachedContentTokenCount": 60, "totalTokenCount": 107,
    },
}  # fmt: skip
USAGE_KEYS = {"gemini": "usageMetadata"}


@pytest.mark.parametrize("source", COUNTED)
@pytest.mark.parametrize("target", COUNTED)
def test_counters_are_converted_by_the_one_rule(source: str, target: str) -> None:
    """Input 100, of these 60 read from and 10 written to the cache; output 7."""
    response = dict(documents(source, "response"))["a text"]
    response = {**response, USAGE_KEYS.get(source, "usage"): COUNTED[source]}
    written = translate(response, source, target, "response").value[USAGE_KEYS.get(target, "usage")]
    expected: dict[str, Any] = dict(COUNTED[target])
    if source == "gemini":  # it has no word for what was written to the cache
        read = dialect(target).response_to_ir({**translate(response, source, target, "response").value}).value.usage
        assert (read.input, read.cache_read, read.output) == (100, 60, 7)
        return
    assert {key: value for key, value in written.items() if key in expected} == expected


def test_thoughts_that_are_counted_apart_are_part_of_the_output() -> None:
    response = dict(documents("gemini", "response"))["thoughts, then text"]
    usage = translate(response, "gemini", "openai", "response").value["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (34, {"reasoning_tokens": 30})
    back = translate(
        {**dict(documents("openai", "response"))["a text"], "usage": usage}, "openai", "gemini", "response"
    )
    assert back.value["usageMetadata"]["candidatesTokenCount"] == 4
    assert back.value["usageMetadata"]["thoughtsTokenCount"] == 30


# What is no document -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [None, 7, "x", [], {}, {"messages": 3}, {"contents": {}}, {"choices": None}])
def test_what_is_no_document_is_refused_by_name(name: str, junk: Any) -> None:
    for read in (dialect(name).to_ir, dialect(name).response_to_ir):
        with pytest.raises(TranslationError) as caught:
            read(junk)
        assert caught.value.code == "dialect_mapping_failed"


def test_a_whole_stream_is_read_in_any_framing() -> None:
    chunks = streams("gemini")[0][1]
    assert read_stream(msgspec.json.encode(chunks), "gemini") == chunks
    lines = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\r\n\r\n" for chunk in chunks)
    assert read_stream(lines, "gemini") == chunks


@pytest.mark.parametrize(("name", "member"), [("openai", "max_completion_tokens"), ("copilot", "max_tokens")])
def test_a_limit_that_no_document_named_has_the_vendors_own_word(name: str, member: str) -> None:
    said = ir.Message(role="user", parts=(ir.Text(text="hello"),))
    own = ir.Conversation(dialect=name, messages=(said,), model="m", options={"max_tokens": 9})
    request = dialect(name).from_ir(own).value
    assert {key: value for key, value in request.items() if key.startswith("max_")} == {member: 9}
