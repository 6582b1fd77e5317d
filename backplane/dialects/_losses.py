"""What cannot be said: blocks, proofs, breakpoints and counters that a target has no word for, by their pointers.

Writers of all dialects report with these; what would mean something else is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from backplane.dialects._parts import Ledger, give_back, is_plain
from backplane.ir import (
    Answer,
    Candidate,
    Citation,
    Conversation,
    Media,
    Message,
    Opaque,
    Part,
    ServerTool,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Usage,
)


def lose_marks(part: Part, ledger: Ledger, *, cache: bool = True, signature: bool = True) -> None:
    """Report a block's signature and breakpoint where the target cannot carry them."""
    if signature and part.signature is not None:
        lose_signature(part, ledger)
    if cache and part.cache is not None:
        ledger.drop(part.at, "cache", "the target has no breakpoint here", part.cache)


def lose_signature(part: Part, ledger: Ledger) -> None:
    """Report a block's proof, which no other vendor can read."""
    at = part.signature_at or part.at
    ledger.drop(at, "signature", f"only {ledger.source} can read it", part.signature)


def lose_thinking(part: Thinking, ledger: Ledger, reason: str | None = None) -> None:
    """Report thinking that the target does not take, in a request as a rule because it wants its own proof."""
    words = part.text or part.redacted
    ledger.drop(part.at, "thinking", reason or f"only {ledger.source} takes its thinking back", words)
    lose_marks(part, ledger)
    give_back(part, {}, ledger)


def lose_name(message: Message, ledger: Ledger) -> None:
    """Report who it was that spoke."""
    if message.name is not None:
        ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)


def lose_error(result: ToolResult, ledger: Ledger) -> None:
    """Report whether a result is an error, where the target does not say it."""
    if result.is_error:
        ledger.drop(result.at, "tool_field", "the target does not say that a result is an error", True)
    elif result.is_error is False:
        ledger.drop(result.at, "shape", "no error, said in words")


def lose_candidates(answer: Answer, ledger: Ledger) -> None:
    """Report the answers beyond the first."""
    for candidate in answer.candidates[1:]:
        ledger.drop(candidate.at, "candidates", "the target gives one answer", msgspec.to_builtins(candidate))


def split_results(message: Message, ledger: Ledger) -> tuple[list[ToolResult], Message | None]:
    """Part a message where results stand alone: the results, and the rest of it, None when nothing is left."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if not results:
        return [], message
    others = tuple(part for part in message.parts if not isinstance(part, ToolResult))
    if not others:
        return results, None
    if not isinstance(message.parts[0], ToolResult):
        ledger.degrade(message.at, "order", "results come before the rest of their message")
    flat = None if is_plain(others) else message.flat
    return results, msgspec.structs.replace(message, role="user", parts=others, native_role=None, ext={}, flat=flat)


def address_citation(citation: Citation, part: Text, ledger: Ledger, begin: int = 0) -> dict[str, Any] | None:
    """Write a citation as OpenAI does, by an address and its span in the text; None where it has no address.

    Args:
        part: the text that it stands on; all of it is the span where the source says none.
        begin: where this text begins in the one that is written, in characters.
    """
    if citation.url is None and not ledger.is_home:
        ledger.drop(citation.at, "citation", "only an address can be cited here")
        return None
    start, end = citation.start, citation.end
    if not ledger.is_home and (start is None or end is None):
        start, end = 0, len(part.text)
        ledger.degrade(citation.at, "citation", "its span here is the text that it stands on")
    body: dict[str, Any] = {"url": citation.url, "title": citation.title}
    body |= {key: value + begin for key, value in (("start_index", start), ("end_index", end)) if value is not None}
    body = {key: value for key, value in body.items() if value is not None}
    if not ledger.is_home:
        body.setdefault("title", citation.url)
    if citation.quote is not None:
        ledger.drop(citation.at, "citation", "the words cited are not said here", citation.quote)
    return body


def put_counters(out: dict[str, Any], counters: Iterable[tuple[str, int | None]], usage: Usage, ledger: Ledger) -> None:
    """Write counters that every answer has; one that was not said elsewhere is 0."""
    for key, value in counters:
        if value is not None:
            out[key] = value
        elif not ledger.is_home:
            ledger.synthesise(f"{usage.at}/{key}", "required", "a counter that was not said is written as 0")
            out[key] = 0


def require(out: dict[str, Any], members: Mapping[str, Any], ledger: Ledger) -> None:
    """Write what an answer must have and the source did not say."""
    for key, value in members.items():
        if out.get(key) is None:
            ledger.synthesise(f"/{key}", "required", f"an answer has {key} here")
            out[key] = value


def stop_word(candidate: Candidate, ledger: Ledger) -> None:
    """Report what a reason to stop says beside its word."""
    if candidate.stop_raw is not None and ":" in candidate.stop_raw:
        ledger.degrade(candidate.stop_at, "shape", "the reason is said in one word here")
    if candidate.stop_sequence is not None:
        at = f"{candidate.stop_at.rpartition('/')[0]}/stop_sequence"
        ledger.drop(at, "stop", "the matched text is not said here", candidate.stop_sequence)


def created_path(ledger: Ledger) -> str:
    """Return where the source says when an answer was made."""
    return "/created_at" if ledger.source == "codex" else "/created"


def detail_path(part: Part, ledger: Ledger) -> str:
    """Return where the source says how closely to look at an image."""
    return f"{part.at}/detail" if ledger.source == "codex" else f"{part.at}/image_url/detail"


def lose_detail(part: Media, ledger: Ledger) -> None:
    """Report how closely an image is to be looked at; `auto` asks for nothing."""
    if part.detail == "auto":
        ledger.degrade(detail_path(part, ledger), "shape", "the usual level of detail, said in words")
    elif part.detail is not None:
        ledger.drop(detail_path(part, ledger), "media", "no such level of detail here", part.detail)


CACHE_WRITE: Final[dict[str, str]] = {
    "claude": "cache_creation_input_tokens",
    "codex": "input_tokens_details/cache_write_tokens",
}

COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "claude": ("cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens_details"),
    "gemini": ("cachedContentTokenCount", "thoughtsTokenCount"),
    "kimi": ("cached_tokens", "prompt_tokens_details", "completion_tokens_details"),
}
"""Source → where a counter that was not said would have stood."""

LIMITS: Final[dict[str, str]] = {
    "openai": "/max_completion_tokens",
    "gemini": "/generationConfig",
    "codex": "/max_output_tokens",
}


def limit_path(ledger: Ledger) -> str:
    """Return where the source would have said the limit of its answer."""
    return LIMITS.get(ledger.source, "/max_tokens")


def lose_silence(at: str, ledger: Ledger) -> None:
    """Report counters that were not said and have to be said in the target."""
    for name in COUNTERS.get(ledger.source, ("prompt_tokens_details", "completion_tokens_details")):
        ledger.synthesise(f"{at}/{name}", "shape", "a counter that was not said is written as 0")


def cache_write_path(at: str, ledger: Ledger) -> str:
    """Return where the source counts what was written to the cache."""
    return f"{at}/{CACHE_WRITE.get(ledger.source, 'prompt_tokens_details/cache_write_tokens')}"


def lose_part(part: Part, ledger: Ledger) -> None:
    """Report a block that the target has no word for; one that points to kept state is refused."""
    if isinstance(part, Opaque) and part.bound:
        ledger.refuse(part.at, "part_bound", f"{part.label} points to state that {ledger.source} keeps")
    elif isinstance(part, ServerTool):
        ledger.drop(part.at, "tool", f"{part.name} was run by {ledger.source} itself", part.payload)
    elif isinstance(part, Opaque):
        ledger.drop(part.at, "part", f"{part.label} has no counterpart", part.payload)
    else:
        ledger.drop(part.at, "part", f"{type(part).__name__} has no counterpart here", msgspec.to_builtins(part))
    give_back(part, {}, ledger)


def result_text(result: ToolResult, ledger: Ledger) -> str:
    """Return a result as one text for a dialect that takes only that."""
    texts = [part.text for part in result.content if isinstance(part, Text | Media) and part.text is not None]
    if len(result.content) > 1 and len(texts) == len(result.content):
        ledger.degrade(result.at, "order", "several texts became one")
    for part in result.content:
        if isinstance(part, Text):
            lose_marks(part, ledger)
            if part.ext:
                give_back(part, {}, ledger)
        elif isinstance(part, Media) and part.text is not None:
            ledger.degrade(part.at, "media", "a document of plain text became a text")
            give_back(part, {}, ledger)
        else:
            lose_part(part, ledger)
    return "\n".join(texts)


def known_calls(messages: Iterable[Message]) -> set[str]:
    return {part.id for message in messages for part in message.parts if isinstance(part, ToolUse)}


STATE: Final = frozenset(
    {"previous_response_id", "conversation", "container", "cachedContent", "cached_content", "prompt"}
)
"""Members of requests, of any vendor, that point to what it keeps."""


def check_meaning(conversation: Conversation, ledger: Ledger) -> None:
    """Refuse what would mean something else: pointers to kept state, results without their calls."""
    if ledger.is_home:
        return
    entries = conversation.ext.get(ledger.source, {})
    for key in sorted(STATE & entries.keys()):
        if entries[key] is not None:
            ledger.refuse(f"/{key}", "state", f"it points to what {ledger.source} keeps")
    calls = known_calls(conversation.messages)
    for message in conversation.messages:
        for part in message.parts:
            if isinstance(part, ToolResult) and part.id not in calls:
                ledger.refuse(part.at, "call_missing", f"the call {part.id} is not in the conversation", "ir_invalid")
