"""What gateways do wrong, mended where it is asked for; and what real recordings held that was once read wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from backplane.dialects import StreamTranslation, agent_events, dialect, ir, translate
from tests.dialects.dialect_corpus import NAMES, documents, streams


def said(name: str, chunks: list[Any], *, mends: bool = False) -> tuple[str, list[Any], str | None]:
    done = StreamTranslation(name, "openai")
    done.reader.mends = mends
    state = dialect("openai").StreamState()
    for chunk in [made for one in chunks for made in done.feed(one)] + done.finish():
        dialect("openai").map_stream_event(chunk, state)
    agent_events.end_events(state)
    candidate = state.sum.answer().candidates[0]
    texts = "".join(part.text for part in candidate.message.parts if isinstance(part, ir.Text))
    calls = [(part.name, part.input) for part in candidate.message.parts if isinstance(part, ir.ToolUse)]
    return texts, calls, candidate.stop


def without(name: str, title: str, *kinds: str) -> list[Any]:
    return [chunk for chunk in dict(streams(name))[title] if chunk.get("type") not in kinds]


def chat(delta: Any, finish: Any = None) -> Any:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def gemini(*parts: Any, finish: Any = None) -> Any:
    candidate = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    return {"candidates": [{**candidate, **({"finishReason": finish} if finish else {})}]}


LONG = "The whole text so far, "
FAULTS: dict[tuple[str, str], tuple[list[Any], tuple[str, list[Any], str | None]]] = {
    ("openai", "the old form of a call"): (
        dict(streams("openai"))["the old form of a call"], ("", [("f", {"a": 1})], "tool_use"),
    ),
    ("openai", "no end"): (dict(streams("openai"))["a text in three pieces"][:-2], ("Hello!", [], None)),
    ("openai", "stop although a call came"): (
        [
            chat({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}),
            chat({}, "stop"),
        ],
        ("", [("f", {})], "tool_use"),
    ),
    ("openai", "calls without places"): (
        [
            chat({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a"'}}]}),
            chat({"tool_calls": [{"function": {"arguments": ":1}"}}]}),
            chat({}, "tool_calls"),
        ],
        ("", [("f", {"a": 1})], "tool_use"),
    ),
    ("openai", "an answer instead of a stream"): (
        [dict(documents("openai", "response"))["text and two calls"]],
        ("Both then.", [("a", {}), ("b", {"k": [1, 2.5, None]})], "tool_use"),
    ),
    ("claude", "no message_stop"): (without("claude", "a text in three pieces", "message_stop"), ("Hello!", [], "end")),
    ("claude", "no content_block_stop"): (
        without("claude", "text, then a call", "content_block_stop"), ("Look", [("f", {"a": "b"})], "tool_use"),
    ),
    ("claude", "no content_block_start"): (
        without("claude", "a text in three pieces", "content_block_start"), ("Hello!", [], "end"),
    ),
    ("claude", "an answer instead of a stream"): (
        [dict(documents("claude", "response"))["a call"]], ("ok", [("f", {"a": "b"})], "tool_use"),
    ),
    ("codex", "no added and no done"): (dict(streams("codex"))["no starts and no ends"], ("no starts", [], "end")),
    ("codex", "no terminal event"): (dict(streams("codex"))["a text in three pieces"][:-1], ("Hello!", [], None)),
    ("codex", "a call that only the end tells of"): (
        dict(streams("codex"))["a call that only the end tells of"], ("", [("f", {"a": 1})], "tool_use"),
    ),
    ("codex", "an answer instead of a stream"): (
        [dict(documents("codex", "response"))["a text"]], ("A step.", [], "end"),
    ),
    ("gemini", "the whole text so far"): (
        [gemini({"text": LONG}), gemini({"text": LONG + "and "}), gemini({"text": LONG + "and more"}, finish="STOP")],
        (LONG + "and more", [], "end"),
    ),
    ("gemini", "a call that comes twice"): (
        [
            gemini({"functionCall": {"name": "f", "args": {}, "id": "x"}}),
            gemini({"functionCall": {"name": "f", "args": {}, "id": "x"}}, finish="STOP"),
        ],
        ("", [("f", {})], "tool_use"),
    ),
    ("gemini", "no closing piece"): (
        dict(streams("gemini"))["arguments in pieces without an end"], ("", [("f", {"a": "x"})], "tool_use"),
    ),
    ("kimi", "counters inside the choice"): (dict(streams("kimi"))["counters inside the choice"], ("ja", [], "end")),
    ("copilot", "named events between"): (
        dict(streams("copilot"))["references before the text"], ("In a.ts", [], "end"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_gateways_fault_does_not_change_what_was_said(name: str, fault: str) -> None:
    chunks, expected = FAULTS[name, fault]
    texts, calls, stop = said(name, chunks, mends=True)
    assert (texts, calls) == expected[:2]
    assert stop == expected[2] or expected[2] is None


@given(st.text(min_size=1, max_size=40), st.lists(st.integers(1, 12), min_size=1, max_size=8), st.booleans(),
       st.booleans(), st.booleans())  # fmt: skip
@example("The quick brown fox", [1, 8, 6], True, True, False)
@example("I", [1], True, True, True)
@example("OK", [1], True, True, True)
def test_a_text_is_said_once_whether_it_comes_in_pieces_or_as_all_so_far(
    text: str, sizes: list[int], is_all: bool, has_finish: bool, repeats_last: bool
) -> None:
    """Streams that both ways of sending could make are not tried as pieces: each piece begins with all before it."""
    cuts = [sum(sizes[:count]) for count in range(1, len(sizes) + 1)]
    ends = [*(cut for cut in cuts if cut < len(text)), len(text)]
    if is_all:
        assume(any(map(str.isalpha, text[: ends[0]])))
        sent = [text[:end] for end in ends] + ([text] if repeats_last else [])
    else:
        starts = [0, *ends[:-1]]
        sent = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        assume(not any(piece.startswith(text[:start]) for piece, start in zip(sent[1:], starts[1:], strict=True)))
    chunks = [gemini({"text": one}) for one in sent]
    if has_finish:
        chunks[-1] = gemini({"text": sent[-1]}, finish="STOP")
    assert said("gemini", chunks, mends=True)[0] == text


@pytest.mark.parametrize(("sent", "expected"), [
    (["1", "12 apples"], "112 apples"), (["#", "# A"], "## A"), (["\n", "\n", "a"], "\n\na"),
    (["I", "I think", " so"], "I think so"), (["a", "ab", "abc", "abcd"], "abcd"), (["ha", "ha", "ha!"], "ha!"),
])  # fmt: skip
def test_what_both_ways_of_sending_could_make_is_read_as_it_is_likelier(sent: list[str], expected: str) -> None:
    assert said("gemini", [gemini({"text": one}) for one in sent], mends=True)[0] == expected


def test_what_was_worked_around_is_a_loss() -> None:
    done = StreamTranslation("gemini", "openai")
    done.reader.mends = True
    for chunk in FAULTS["gemini", "the whole text so far"][0]:
        done.feed(chunk)
    assert [(loss.code, loss.target, loss.chunk) for loss in done.losses] == [("fallback", "openai", 1)]


def test_what_the_vendor_itself_says_twice_is_said_twice() -> None:
    by_title = dict(streams("gemini"))
    assert said("gemini", by_title["a text that repeats its own beginning"])[0] == "tick tock tick tock tick tock!"
    assert len(said("gemini", by_title["the same call in two chunks"])[1]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_junk_between_the_chunks_ends_no_stream(name: str) -> None:
    _, chunks = streams(name)[0]
    noisy: list[Any] = [None, "text", 7, [], {"type": "from_the_future"}]
    clean = said(name, chunks)
    assert said(name, [one for chunk in chunks for one in (chunk, *noisy)]) == clean


# Met in recordings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["openai", "gemini", "codex"])
@pytest.mark.parametrize("title", ["a document of two blocks, with a title", "search results of the caller's own"])
def test_the_words_of_a_document_in_blocks_reach_every_vendor(target: str, title: str) -> None:
    document = dict(documents("claude", "request"))[title]
    told = str(translate(document, "claude", target).value)
    words = ("Moss is green.", "Rust is red.") if "two blocks" in title else ("It is soft.", "Tin shines.")
    assert all(word in told for word in words)


def test_a_turn_of_calls_alone_has_no_empty_list_of_content() -> None:
    document = dict(documents("claude", "request"))["search results of the caller's own"]
    turn = next(turn for turn in translate(document, "claude", "openai").value["messages"] if "tool_calls" in turn)
    assert turn["content"] is None


def test_a_word_that_only_labels_an_item_is_no_loss() -> None:
    items = [{"type": "message", "role": "user", "content": "Hi"}]
    done = translate({"model": "m", "input": items}, "codex", "gemini", policy="fail")
    assert done.value["contents"] == [{"role": "user", "parts": [{"text": "Hi"}]}]


def test_thinking_without_words_is_not_sent_to_another_vendor() -> None:
    document = dict(documents("codex", "request"))["thinking with an empty summary"]
    done = translate(document, "codex", "gemini")
    assert "thought" not in str(done.value)
    assert "/input/1" in {loss.path for loss in done.losses}


@pytest.mark.parametrize("source", ["openai", "codex"])
def test_an_address_where_data_is_asked_stays_an_address(source: str) -> None:
    document = dict(documents(source, "request"))["as met: an address where data is asked"]
    parts = translate(document, source, "gemini").value["contents"][0]["parts"]
    assert parts[-1]["fileData"]["fileUri"] == "https://example.org/a.pdf"


def test_thinking_that_is_counted_beside_the_output_is_part_of_it() -> None:
    document = dict(documents("openai", "response"))["as met: thinking counted beside the output"]
    usage = dialect("openai").response_to_ir(document).value.usage
    assert (usage.output, usage.reasoning) == (105, 100)
    written = translate(document, "openai", "gemini", "response").value["usageMetadata"]
    assert (written["candidatesTokenCount"], written["thoughtsTokenCount"]) == (5, 100)
