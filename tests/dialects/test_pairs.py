"""Generated conversations over all 36 pairs: nothing is lost unnamed, whatever is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backplane.dialects import dialect, ir, translate
from tests.dialects import differ, measures
from tests.dialects.dialect_corpus import NAMES, PAIRS, canonical

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)
WORDS = st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
INPUTS = st.dictionaries(WORDS, VALUES, max_size=4)
IMAGES = st.builds(
    lambda data: ir.Media(kind="image", media_type="image/png", data=data), st.sampled_from(["aGk=", "aGVsbG8="])
)


@st.composite
def conversations(draw: st.DrawFn, pictures: int = 0) -> ir.Conversation:
    """A conversation that every vendor could have had: turns in order, every call answered.

    Args:
        pictures: most of them in a result; Chat has none there.
    """
    messages: list[ir.Message] = []
    if draw(st.booleans()):
        messages.append(ir.Message(role="system", parts=(ir.Text(text=draw(TEXTS)),)))
    count = 0
    for _ in range(draw(st.integers(1, 3))):
        said = [ir.Text(text=text) for text in draw(st.lists(TEXTS, min_size=1, max_size=2))]
        messages.append(ir.Message(role="user", parts=(*draw(st.lists(IMAGES, max_size=1)), *said)))
        parts: list[ir.Part] = [ir.Text(text=draw(TEXTS))]
        calls = draw(st.lists(st.tuples(WORDS, INPUTS), max_size=2))
        for name, value in calls:
            parts.append(ir.ToolUse(id=f"call_{count}", name=name, input=value))
            count += 1
        messages.append(ir.Message(role="assistant", parts=tuple(parts)))
        for place in range(len(calls)):
            call_id = f"call_{count - len(calls) + place}"
            shown = draw(st.lists(IMAGES, max_size=pictures))
            result = ir.ToolOutput(id=call_id, content=(ir.Text(text=draw(TEXTS)), *shown))
            messages.append(ir.Message(role="tool", parts=(result,)))
    options: dict[str, Any] = {"max_tokens": draw(st.integers(1, 9999))}
    if draw(st.booleans()):
        options["temperature"] = draw(st.sampled_from([0, 0.5, 1]))
    tools = tuple(
        ir.ToolSpec(name=name, description=draw(TEXTS), schema={"type": "object", "properties": {}})
        for name in draw(st.lists(WORDS, max_size=2, unique=True))
    )
    return ir.Conversation(dialect="made", messages=tuple(messages), model="m-1", tools=tools, options=options)


EXAMPLES = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def native(conversation: ir.Conversation, name: str) -> Any:
    return dialect(name).from_ir(msgspec.structs.replace(conversation, dialect="made")).value


@pytest.mark.parametrize(("source", "target"), PAIRS)
@EXAMPLES
@given(conversation=conversations(pictures=1))
def test_no_difference_goes_unlisted(source: str, target: str, conversation: ir.Conversation) -> None:
    document = native(conversation, source)
    done = translate(document, source, target)
    assert measures.silent(document, done, source, target, "request") == []
    back = translate(done.value, target, source)
    named = {loss.path for loss in (*done.losses, *back.losses)}
    assert [at for at in differ.unequal(document, back.value) if not differ.is_named(at, named)] == []


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(conversation=conversations())
def test_what_is_written_is_read_as_it_was(name: str, conversation: ir.Conversation) -> None:
    document = native(conversation, name)
    read = dialect(name).to_ir(document)
    assert canonical(dialect(name).from_ir(read.value).value) == canonical(document)
    texts = [part.text for message in read.value.messages for part in message.parts if isinstance(part, ir.Text)]
    assert texts == [
        part.text for message in conversation.messages for part in message.parts if isinstance(part, ir.Text)
    ]
    calls = [(part.name, part.input) for m in read.value.messages for part in m.parts if isinstance(part, ir.ToolUse)]
    assert calls == [
        (part.name, part.input) for m in conversation.messages for part in m.parts if isinstance(part, ir.ToolUse)
    ]


JUNK = st.dictionaries(
    st.sampled_from(["x_new", "#odd", "a/b", "~t", "content", "type", "role", "parts", "usage"]), VALUES, max_size=3
)


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(conversation=conversations(), junk=JUNK)
def test_members_that_nobody_knows_come_back(name: str, conversation: ir.Conversation, junk: dict[str, Any]) -> None:
    document = native(conversation, name)
    unknown = {key: value for key, value in junk.items() if key not in document}
    document = {**document, **unknown}
    assert canonical(dialect(name).from_ir(dialect(name).to_ir(document).value).value) == canonical(document)
