"""The vendors' SDKs for Python as readers of answers: what each gives its user, in the script's words.

An SDK reads an answer in three ways: `whole`; `stream`, its iterator over events; `helper`, its accumulator or
conversation. `tests/all/clients/sdks.mjs` does the same for Node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

from backplane.testing import ProtocolName
from tests.dialects import referees
from tests.scripted import WAYS, Heard

KEY = "dummy"
MODEL = "m"
DIALECTS: dict[ProtocolName, str] = {
    "openai_compatible": "openai",
    "openai_responses": "codex",
    "anthropic": "claude",
    "gemini_ai_studio": "gemini",
}
COMMENTS = {protocol: 0 if protocol == "gemini_ai_studio" else 2 for protocol in DIALECTS}
"""Keep-alive comments before each frame; one client takes a comment for a broken answer (google-genai 3.4.0)."""
Tools = list[dict[str, Any]] | None


class Service(Protocol):
    """A scripted model server, or a gateway in front of it."""

    @property
    def url(self) -> str: ...

    def base_url(self, protocol: ProtocolName) -> str: ...


# OpenAI ---------------------------------------------------------------------------------------------------------------


def openai_client(service: Service, retries: int = 0) -> Any:
    return referees.sdk("openai").OpenAI(
        base_url=service.base_url("openai_compatible"), api_key=KEY, max_retries=retries
    )


def hear_chat(client: Any, way: str, tools: Tools, think: bool) -> Heard:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "go"}]}
    if tools:
        ask["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if think:
        ask["reasoning_effort"] = "high"
    if way == "whole":
        answer = client.chat.completions.create(**ask)
        return chat_heard(answer, thought_of(answer.choices[0].message))
    ask["stream_options"] = {"include_usage": True}
    if way == "stream":
        return chat_chunks(list(client.chat.completions.create(**ask, stream=True)))
    openai = referees.sdk("openai")
    with client.chat.completions.stream(**ask) as events:
        # The accumulator keeps the last piece of a member that is no part of its interface.
        reasoning = "".join(
            thought_of(event.chunk.choices[0].delta)
            for event in events
            if event.type == "chunk" and event.chunk.choices
        )
        try:
            answer = events.get_final_completion()
        except (openai.LengthFinishReasonError, openai.ContentFilterFinishReasonError) as error:
            answer = error.completion  # so this helper says that an answer was cut short or refused
    return chat_heard(answer, reasoning)


def thought_of(message: Any) -> str:
    return (message.model_extra or {}).get("reasoning_content") or ""


def chat_heard(answer: Any, reasoning: str) -> Heard:
    message, usage = answer.choices[0].message, answer.usage
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    cached = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
    return Heard(
        (message.content or "") + (message.refusal or ""), reasoning, calls, usage.prompt_tokens,
        usage.completion_tokens, cached, answer.choices[0].finish_reason,
    )  # fmt: skip


def chat_chunks(chunks: list[Any]) -> Heard:
    """What a user of the iterator puts together."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or ()):
        call = calls.setdefault(part.index, ["", ""])
        call[0] += part.function.name or ""
        call[1] += part.function.arguments or ""
    (stop,) = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    return Heard(
        "".join((delta.content or "") + (delta.refusal or "") for delta in deltas), "".join(map(thought_of, deltas)),
        [(name, json.loads(text)) for _, (name, text) in sorted(calls.items())], usage.prompt_tokens,
        usage.completion_tokens, getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0, stop,
    )  # fmt: skip


def hear_responses(client: Any, way: str, tools: Tools, think: bool) -> Heard:
    ask: dict[str, Any] = {"model": MODEL, "input": "go"}
    if tools:
        ask["tools"] = [{"type": "function", "strict": False, **tool} for tool in tools]
    if think:
        ask["reasoning"] = {"effort": "high", "summary": "auto"}
    if way == "whole":
        return responses_heard(client.responses.create(**ask))
    if way == "helper":
        with client.responses.stream(**ask) as helped:
            *_, last = helped
            # `get_final_response` takes an answer that was cut short for none at all.
            return responses_heard(helped.get_final_response() if last.type == "response.completed" else last.response)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = ("response.output_text.delta", "response.refusal.delta")
    heard = responses_heard(events[-1].response)
    return heard._replace(text="".join(event.delta for event in events if event.type in said))


def responses_heard(answer: Any) -> Heard:
    text = reasoning = ""
    calls = []
    for item in answer.output:
        if item.type == "message":
            text += "".join(part.text if part.type == "output_text" else part.refusal for part in item.content)
        elif item.type == "reasoning":
            reasoning += "".join(part.text for part in item.summary)
        else:
            calls.append((item.name, json.loads(item.arguments)))
    stop = answer.incomplete_details.reason if answer.incomplete_details else answer.status
    usage = answer.usage
    cached = usage.input_tokens_details.cached_tokens
    return Heard(text, reasoning, calls, usage.input_tokens, usage.output_tokens, cached, stop)


# Anthropic ------------------------------------------------------------------------------------------------------------


def anthropic_client(service: Service, retries: int = 0) -> Any:
    return referees.sdk("anthropic").Anthropic(base_url=service.url, api_key=KEY, max_retries=retries)


def hear_messages(client: Any, way: str, tools: Tools, think: bool) -> Heard:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4000, "messages": [{"role": "user", "content": "go"}]}
    if tools:
        ask["tools"] = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in tools
        ]
    if think:
        ask["thinking"] = {"type": "enabled", "budget_tokens": 2000}
    if way == "whole":
        return messages_heard(client.messages.create(**ask))
    if way == "stream":
        return messages_events(list(client.messages.create(**ask, stream=True)))
    with client.messages.stream(**ask) as events:
        text = "".join(events.text_stream)
        heard = messages_heard(events.get_final_message())
    assert text == heard.text
    return heard


def messages_heard(answer: Any) -> Heard:
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in answer.content:
        if block.type == "tool_use":
            calls.append((block.name, block.input))
        else:
            texts[block.type] += getattr(block, block.type)
    usage = answer.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return Heard(
        texts["text"], texts["thinking"], calls, usage.input_tokens + read + written, usage.output_tokens, read,
        answer.stop_reason,
    )  # fmt: skip


def messages_events(events: list[Any]) -> Heard:
    """What a user of the iterator puts together."""
    texts = {"text": "", "thinking": "", "signature": ""}
    calls: dict[int, list[str]] = {}
    usage: dict[str, int] = {}
    stop = ""
    for event in events:
        if event.type == "message_start":
            usage |= event.message.usage.to_dict()
        elif event.type == "content_block_start" and event.content_block.type == "tool_use":
            calls[event.index] = [event.content_block.name, ""]
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            calls[event.index][1] += event.delta.partial_json
        elif event.type == "content_block_delta":
            kind = event.delta.type.removesuffix("_delta")
            texts[kind] += getattr(event.delta, kind)
        elif event.type == "message_delta":
            stop = event.delta.stop_reason
            usage |= {name: value for name, value in event.usage.to_dict().items() if value is not None}
    read, written = (usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
    return Heard(
        texts["text"], texts["thinking"], [(name, json.loads(text or "{}")) for name, text in calls.values()],
        usage["input_tokens"] + read + written, usage["output_tokens"], read, stop,
    )  # fmt: skip


# Google ---------------------------------------------------------------------------------------------------------------


def gemini_client(service: Service, retries: int = 0) -> Any:
    options: dict[str, Any] = {"base_url": service.url, "api_version": "v1beta"}
    if retries:
        options["retry_options"] = {"attempts": retries + 1, "initial_delay": 0.01, "max_delay": 0.01}
    return referees.sdk("google.genai").Client(api_key=KEY, http_options=options)


def hear_gemini(client: Any, way: str, tools: Tools, think: bool) -> Heard:
    config: dict[str, Any] = {}
    if tools:
        offered = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "parameters_json_schema": tool["parameters"],
            }
            for tool in tools
        ]
        config["tools"] = [{"function_declarations": offered}]
    if think:
        config["thinking_config"] = {"include_thoughts": True, "thinking_budget": 2000}
    if way == "whole":
        return gemini_heard([client.models.generate_content(model=MODEL, contents="go", config=config)])
    if way == "stream":
        return gemini_heard(list(client.models.generate_content_stream(model=MODEL, contents="go", config=config)))
    talk = client.chats.create(model=MODEL, config=config)
    heard = gemini_heard(list(talk.send_message_stream("go")))
    kept = [part for content in talk.get_history()[1:] for part in content.parts]
    assert "".join(part.text or "" for part in kept if not part.thought) == heard.text
    return heard


def gemini_heard(answers: list[Any]) -> Heard:
    text = reasoning = ""
    calls = []
    for part in (part for answer in answers for part in answer.candidates[0].content.parts):
        if part.function_call:
            calls.append((part.function_call.name, part.function_call.args))
        elif part.thought:
            reasoning += part.text
        else:
            text += part.text or ""
    usage = answers[-1].usage_metadata
    return Heard(
        text, reasoning, calls, usage.prompt_token_count,
        usage.candidates_token_count + (usage.thoughts_token_count or 0), usage.cached_content_token_count or 0,
        answers[-1].candidates[0].finish_reason.name,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------

CLIENTS: dict[ProtocolName, Callable[..., Any]] = {
    "openai_compatible": openai_client,
    "openai_responses": openai_client,
    "anthropic": anthropic_client,
    "gemini_ai_studio": gemini_client,
}
READERS: dict[ProtocolName, Callable[[Any, str, Tools, bool], Heard]] = {
    "openai_compatible": hear_chat,
    "openai_responses": hear_responses,
    "anthropic": hear_messages,
    "gemini_ai_studio": hear_gemini,
}


@contextmanager
def listening(protocol: ProtocolName, service: Service, retries: int = 0) -> Iterator[Callable[..., Heard]]:
    """Give a function that asks a service by one client of an SDK, and returns what the client heard."""
    with closing(CLIENTS[protocol](service, retries)) as client:

        def hear(way: str, tools: Tools = None, think: bool = False) -> Heard:
            assert way in WAYS
            return READERS[protocol](client, way, tools, think)

        yield hear


def hear(protocol: ProtocolName, service: Service, stream: bool, retries: int = 0) -> Heard:
    """Ask once, by a client for this one request."""
    with listening(protocol, service, retries) as asked:
        return asked("helper" if stream else "whole")
