"""What the vendors' servers refuse by their documented rules, although their SDKs' types take it.

One row a rule: what it says, where it is documented, the day it was read, and the check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

OPENAI_CHAT = "platform.openai.com/docs/api-reference/chat/create"
OPENAI_RESPONSES = "platform.openai.com/docs/api-reference/responses/create"
ANTHROPIC = "docs.anthropic.com/en/api/messages"
ANTHROPIC_THINKING = "docs.anthropic.com/en/docs/build-with-claude/extended-thinking"
GOOGLE = "ai.google.dev/api/generate-content"
GOOGLE_CALLS = "ai.google.dev/gemini-api/docs/function-calling"
READ_ON = "2026-11"

Check = Callable[[dict[str, Any]], bool]


class Rule(NamedTuple):
    """One documented rule."""

    dialects: tuple[str, ...]
    says: str
    source: str
    holds: Check
    read_on: str = READ_ON


CHATS = ("openai", "kimi", "copilot")


def messages(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in document.get("messages", ()) if isinstance(message, dict)]


def blocks(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every block of a Messages request, those of the system text and of results included."""
    holders = [document.get("system"), *(message.get("content") for message in messages(document))]
    for content in holders:
        for block in content if isinstance(content, list) else ():
            yield block
            inner = block.get("content")
            yield from inner if isinstance(inner, list) else ()


def items(document: dict[str, Any]) -> list[dict[str, Any]]:
    found = document.get("input")
    return found if isinstance(found, list) else []


def parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for content in document.get("contents", ()) for part in content.get("parts", ())]


def chat_calls(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for message in messages(document) for call in message.get("tool_calls") or ()]


def names_of(document: dict[str, Any]) -> list[str]:
    """Return every name of a tool in a request of any dialect."""
    found = [call[call["type"]]["name"] for call in chat_calls(document)]
    found += [block["name"] for block in blocks(document) if block.get("type") == "tool_use"]
    found += [item["name"] for item in items(document) if item.get("type") in ("function_call", "custom_tool_call")]
    for key in ("functionCall", "functionResponse"):
        found += [part[key]["name"] for part in parts(document) if key in part]
    for tool in document.get("tools", ()):
        found += [one["name"] for one in tool.get("functionDeclarations", ())]
        inner = tool.get(tool.get("type", ""), tool)
        found += [inner["name"]] if "name" in inner else []
    return found


def ids_of(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the ids of the calls and of the results of a request."""
    calls = [call["id"] for call in chat_calls(document)]
    calls += [block["id"] for block in blocks(document) if block.get("type") == "tool_use"]
    calls += [item["call_id"] for item in items(document) if str(item.get("type")).endswith("_call")]
    results = [message["tool_call_id"] for message in messages(document) if message.get("role") == "tool"]
    results += [block["tool_use_id"] for block in blocks(document) if block.get("type") == "tool_result"]
    results += [item["call_id"] for item in items(document) if str(item.get("type")).endswith("_call_output")]
    return calls, results


def all_match(pattern: str, words: list[str]) -> bool:
    return all(re.fullmatch(pattern, word) for word in words)


def has_tools(document: dict[str, Any]) -> bool:
    return bool(document.get("tools"))


def is_within(value: Any, least: float, most: float) -> bool:
    return value is None or least <= value <= most


def is_answered(document: dict[str, Any]) -> bool:
    calls, results = ids_of(document)
    return sorted(calls) == sorted(results)


def thinks(document: dict[str, Any]) -> bool:
    return document.get("thinking", {}).get("type") in ("enabled", "adaptive")


def config(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document.get("generationConfig", {})
    return found


def budget_fits(document: dict[str, Any]) -> bool:
    budget = document.get("thinking", {}).get("budget_tokens")
    return budget is None or 1024 <= budget < document["max_tokens"]


def audio_formats(document: dict[str, Any]) -> list[str]:
    found = [part for message in messages(document) if isinstance(message.get("content"), list)
             for part in message["content"]]  # fmt: skip
    return [part["input_audio"]["format"] for part in found if part.get("type") == "input_audio"]


def image_urls(document: dict[str, Any]) -> list[str]:
    found = [part for message in messages(document) if isinstance(message.get("content"), list)
             for part in message["content"]]  # fmt: skip
    return [part["image_url"]["url"] for part in found if part.get("type") == "image_url"]


def schemas(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of the functions that a request of any dialect offers."""
    found: list[Any] = []
    for tool in document.get("tools", ()):
        bodies = tool.get("functionDeclarations", [tool.get("function", tool)])
        found += [body.get(name) for body in bodies for name in ("parameters", "input_schema", "parametersJsonSchema")]
    return [schema for schema in found if isinstance(schema, dict)]


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema in a schema, the values of listed constants not."""
    if not isinstance(value, dict):
        return
    yield value
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        for inner in value[name].values() if isinstance(value.get(name), dict) else ():
            yield from nodes(inner)
    for name in ("items", "anyOf", "oneOf", "allOf", "prefixItems", "not", "additionalProperties"):
        found = value.get(name)
        for inner in found if isinstance(found, list) else [found]:
            yield from nodes(inner)


def is_object_at_top(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object" and not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys()


def is_bare(schema: dict[str, Any], *kept: str) -> bool:
    """Return whether each reference in a schema stands alone, but for what may stand beside it."""
    return all(
        "$ref" not in node or all(name.startswith("$") or name in kept for name in node) for node in nodes(schema)
    )


def is_typed(schema: dict[str, Any]) -> bool:
    """Return whether each schema in a schema says one type, or has alternatives that do."""
    return all(
        "$ref" in node or ("anyOf" in node) != isinstance(node.get("type"), str) or "allOf" in node
        for node in nodes(schema)
    )


MFJS = "github.com/MoonshotAI/walle/blob/main/docs/mfjs-spec.md"

RULES: tuple[Rule, ...] = (
    Rule(("claude", "codex", *CHATS), "a tool's schema is of an object, without alternatives at its top",
         "the services' own words: langchain-ai/langchainjs#9804, anthropics/claude-code#5319",
         lambda one: all(map(is_object_at_top, schemas(one)))),
    Rule(("openai", "copilot", "codex"), "a tool's schema has members and neither enum nor not at its top",
         "the service's own words: nspady/google-calendar-mcp#39",
         lambda one: all("properties" in schema and not {"enum", "not"} & schema.keys() for schema in schemas(one))),
    Rule(("gemini",), "beside a reference stand a description and a default only",
         "docs.cloud.google.com, GenerationConfig.responseJsonSchema",
         lambda one: all(is_bare(schema, "description", "default") for schema in schemas(one))),
    Rule(("kimi",), "each schema says one type, and nothing stands beside a reference", MFJS,
         lambda one: all(is_typed(schema) and is_bare(schema) for schema in schemas(one))),
    Rule((*CHATS, "codex"), "tool_choice is only allowed when tools are specified", OPENAI_CHAT,
         lambda one: has_tools(one) or "tool_choice" not in one),
    Rule((*CHATS, "codex"), "parallel_tool_calls is only allowed when tools are specified", OPENAI_CHAT,
         lambda one: has_tools(one) or "parallel_tool_calls" not in one),
    Rule((*CHATS, "codex"), "a tool's name has letters, digits, underscores and dashes, 64 at most", OPENAI_CHAT,
         lambda one: all_match(r"[a-zA-Z0-9_-]{1,64}", names_of(one))),
    Rule(CHATS, "an id of a call has 40 letters at most", OPENAI_CHAT,
         lambda one: all(0 < len(word) <= 40 for word in ids_of(one)[0])),
    Rule(("codex",), "an id of a call has 64 letters at most", OPENAI_RESPONSES,
         lambda one: all(0 < len(word) <= 64 for word in ids_of(one)[0])),
    Rule((*CHATS, "claude", "codex"), "no two calls have one id", OPENAI_CHAT,
         lambda one: len(set(ids_of(one)[0])) == len(ids_of(one)[0])),
    Rule((*CHATS, "claude", "codex"), "every call has its result", OPENAI_CHAT, is_answered),
    Rule(CHATS, "a sound is wav or mp3, by name", "platform.openai.com/docs/guides/audio",
         lambda one: set(audio_formats(one)) <= {"wav", "mp3"}),
    Rule(("kimi",), "an image is given as data or by the id of a file, not by an address",
         "platform.moonshot.ai/docs/guide/use-kimi-vision-model",
         lambda one: not any(url.startswith("http") for url in image_urls(one))),
    Rule(CHATS, "an assistant's message has a content or calls", OPENAI_CHAT,
         lambda one: all(message.get("content") is not None or message.get("tool_calls") or message.get("refusal")
                         for message in messages(one) if message["role"] == "assistant")),
    Rule(CHATS, "a list of content is not empty", OPENAI_CHAT,
         lambda one: all(message.get("content") != [] for message in messages(one))),
    Rule(("openai",), "four stop sequences at most",
         "help.openai.com/en/articles/5072263-how-do-i-use-stop-sequences-in-the-openai-api",
         lambda one: type(one.get("stop")) is not list or len(one["stop"]) <= 4),
    Rule(("codex",), "max_output_tokens is 16 at least", OPENAI_RESPONSES,
         lambda one: one.get("max_output_tokens", 16) >= 16),
    Rule(("codex",), "no two items have one id", OPENAI_RESPONSES,
         lambda one: len({i["id"] for i in items(one) if "id" in i}) == len([i for i in items(one) if "id" in i])),
    Rule(("claude",), "ids of calls have letters, digits, underscores and dashes", ANTHROPIC,
         lambda one: all_match(r"[a-zA-Z0-9_-]+", ids_of(one)[0])),
    Rule(("claude",), "a tool's name has letters, digits, underscores and dashes, 128 at most", ANTHROPIC,
         lambda one: all_match(r"[a-zA-Z0-9_-]{1,128}", names_of(one))),
    Rule(("claude",), "text blocks must have words", ANTHROPIC,
         lambda one: all(block["text"].strip() for block in blocks(one) if block.get("type") == "text")),
    Rule(("claude",), "a message has a content", ANTHROPIC,
         lambda one: len(messages(one)) == 1 or all(message["content"] for message in messages(one))),
    Rule(("claude",), "the temperature is within 0 and 1", ANTHROPIC,
         lambda one: is_within(one.get("temperature"), 0, 1)),
    Rule(("claude",), "max_tokens is 1 at least", ANTHROPIC, lambda one: one["max_tokens"] >= 1),
    Rule(("claude",), "the budget for thinking is 1024 at least and below max_tokens", ANTHROPIC_THINKING, budget_fits),
    Rule(("claude",), "no temperature and no top_k beside thinking", ANTHROPIC_THINKING,
         lambda one: not thinks(one) or not {"temperature", "top_k"} & one.keys()),
    Rule(("claude",), "top_p beside thinking is 0.95 at least", ANTHROPIC_THINKING,
         lambda one: not thinks(one) or one.get("top_p", 1) >= 0.95),
    Rule(("claude",), "no tool is forced beside thinking", ANTHROPIC_THINKING,
         lambda one: not thinks(one) or one.get("tool_choice", {}).get("type") not in ("any", "tool")),
    Rule(("claude",), "tool_choice is only allowed when tools are specified", ANTHROPIC,
         lambda one: has_tools(one) or "tool_choice" not in one),
    Rule(("gemini",), "a function's name begins with a letter or underscore, 64 at most", GOOGLE_CALLS,
         lambda one: all_match(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}", names_of(one))),
    Rule(("gemini",), "a content has parts", GOOGLE,
         lambda one: len(one["contents"]) == 1 or all(content["parts"] for content in one["contents"])),
    Rule(("gemini",), "a function calling config needs functions", GOOGLE_CALLS,
         lambda one: has_tools(one) or "toolConfig" not in one),
    Rule(("gemini",), "five stop sequences at most", GOOGLE,
         lambda one: len(config(one).get("stopSequences", ())) <= 5),
    Rule(("gemini",), "the temperature is within 0 and 2", GOOGLE,
         lambda one: is_within(config(one).get("temperature"), 0, 2)),
)  # fmt: skip


def broken(dialect: str, document: dict[str, Any]) -> list[str]:
    """Return the rules that a request of a dialect breaks."""
    return [rule.says for rule in RULES if dialect in rule.dialects and not rule.holds(document)]
