"""Writes `contracts/dialects/README.md`: what each of the 36 pairs carries, degrades, drops or refuses, by trying.

`python -m tests.dialects.pairs_page` prints the page; a test compares it with the file.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from backplane.dialects import dialect, ir, translate
from backplane.errors import TranslationError
from tests.dialects.dialect_corpus import NAMES

TEXT = ir.Text(text="Hello")
PNG = "iVBORw0KGgo="
CALL = ir.ToolUse(id="call_1", name="look", input={"at": "sky"})
TOOL = ir.ToolSpec(name="look", description="Looks.", schema={"type": "object", "properties": {}})


def ask(*parts: ir.Part, role: Any = "user", **more: Any) -> ir.Conversation:
    messages = (ir.Message(role=role, parts=parts or (TEXT,)),)
    return ir.Conversation(dialect="probe", **{"model": "m", "messages": messages, "options": LIMIT, **more})


def turn(*messages: ir.Message, **more: Any) -> ir.Conversation:
    return ask(messages=(ir.Message(role="user", parts=(TEXT,)), *messages), **more)


def result(**more: Any) -> ir.Conversation:
    part = ir.ToolOutput(id="call_1", name="look", **{"content": (ir.Text(text="blue"),), **more})
    return turn(ir.Message(role="assistant", parts=(CALL,)), ir.Message(role="tool", parts=(part,)), tools=(TOOL,))


def option(**options: Any) -> ir.Conversation:
    return ask(options={**LIMIT, **options})


LIMIT = {"max_tokens": 99}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
SAID = ir.Message(role="assistant", parts=(TEXT,))

REQUESTS: Final[dict[str, ir.Conversation]] = {
    "text": ask(),
    "system text": ask(messages=(ir.Message(role="system", parts=(TEXT,)), ir.Message(role="user", parts=(TEXT,)))),
    "system text in the middle": turn(
        SAID, ir.Message(role="system", parts=(TEXT,)), ir.Message(role="user", parts=(TEXT,))
    ),
    "developer's text": ask(
        messages=(
            ir.Message(role="system", native_role="developer", parts=(TEXT,)),
            ir.Message(role="user", parts=(TEXT,)),
        )
    ),
    "message with a name": ask(messages=(ir.Message(role="user", name="ada", parts=(TEXT,)),)),
    "image, base64": ask(TEXT, ir.Media(kind="image", media_type="image/png", data=PNG)),
    "image, address": ask(TEXT, ir.Media(kind="image", url="https://example.org/a.png")),
    "image, level of detail": ask(TEXT, ir.Media(kind="image", media_type="image/png", data=PNG, detail="high")),
    "sound": ask(TEXT, ir.Media(kind="audio", media_type="audio/wav", data="UklGRg==")),
    "film": ask(TEXT, ir.Media(kind="video", media_type="video/mp4", data="AAAA")),
    "document, base64": ask(
        TEXT, ir.Media(kind="document", media_type="application/pdf", data="JVBERi0=", name="a.pdf")
    ),
    "document, address": ask(TEXT, ir.Media(kind="document", url="https://example.org/a.pdf")),
    "document, plain text": ask(TEXT, ir.Media(kind="document", media_type="text/plain", text="words")),
    "file of the vendor's store": ask(TEXT, ir.Media(kind="document", file_id="file_1")),
    "cache breakpoint": ask(ir.Text(text="long", cache={})),
    "call and result": result(),
    "result that is an error": result(is_error=True),
    "result with an image": result(
        content=(ir.Text(text="see"), ir.Media(kind="image", media_type="image/png", data=PNG))
    ),
    "thinking given back": turn(
        ir.Message(role="assistant", parts=(ir.Thinking(text="hm", field="reasoning_content"), TEXT)),
        ir.Message(role="user", parts=(TEXT,)),
    ),
    "thinking with its proof": turn(
        ir.Message(role="assistant", parts=(ir.Thinking(text="hm", signature="c2ln"), TEXT)),
        ir.Message(role="user", parts=(TEXT,)),
    ),
    "tool": ask(tools=(TOOL,)),
    "strict tool": ask(tools=(msgspec.structs.replace(TOOL, strict=True),)),
    "custom tool, free text": ask(tools=(ir.ToolSpec(name="patch", description="Edits.", kind="custom"),)),
    "tool forced": ask(tools=(TOOL,), options={**LIMIT, "tool_choice": {"mode": "tool", "name": "look"}}),
    "some tool forced": ask(tools=(TOOL,), options={**LIMIT, "tool_choice": {"mode": "required"}}),
    "one call at a time": ask(tools=(TOOL,), options={**LIMIT, "parallel_tool_calls": False}),
    "temperature and top_p": option(temperature=0.5, top_p=0.9),
    "top_k": option(top_k=40),
    "stop texts": option(stop=["END"]),
    "seed": option(seed=7),
    "penalties": option(frequency_penalty=0.1, presence_penalty=0.1),
    "several answers": option(n=2),
    "probabilities": option(logprobs=True, top_logprobs=2),
    "answer by a schema": option(response_format={"type": "schema", "schema": SCHEMA}),
    "answer as JSON": option(response_format={"type": "json"}),
    "thinking, effort in words": option(reasoning_effort="medium"),
    "thinking, budget in tokens": option(reasoning_budget=8192),
    "verbosity": option(verbosity="low"),
    "end user": option(user="u-1"),
    "labels": option(metadata={"team": "blue"}),
    "stream": option(stream=True),
}


def answer(*parts: ir.Part, stop: Any = "end", **more: Any) -> ir.Answer:
    candidate = ir.Candidate(message=ir.Message(role="assistant", parts=parts or (TEXT,)), stop=stop)
    usage = ir.TokenCounts(input=10, output=5)
    return ir.Answer(dialect="probe", **{"id": "a1", "model": "m", "candidates": (candidate,), "usage": usage, **more})


ANSWERS: Final[dict[str, ir.Answer]] = {
    "text": answer(),
    "call": answer(CALL, stop="tool_use"),
    "text after a call": answer(CALL, TEXT, stop="tool_use"),
    "thinking": answer(ir.Thinking(text="hm"), TEXT),
    "thinking with its proof": answer(ir.Thinking(text="hm", signature="c2ln"), TEXT),
    "refusal": answer(ir.Refusal(text="No."), stop="end"),
    "citation of an address": answer(
        ir.Text(text="See", citations=(ir.Citation(kind="url", url="https://e.org", title="E", start=0, end=3),))
    ),
    "picture": answer(ir.Media(kind="image", media_type="image/png", data=PNG)),
    "cut by the limit": answer(stop="max_tokens"),
    "filtered": answer(stop="content_filter"),
    "ended by a stop text": answer(
        candidates=(
            ir.Candidate(
                message=ir.Message(role="assistant", parts=(TEXT,)), stop="stop_sequence", stop_sequence="END"
            ),
        )
    ),
    "paused": answer(stop="pause"),
    "tokens read from the cache": answer(usage=ir.TokenCounts(input=10, output=5, cache_read=4)),
    "tokens written to the cache": answer(usage=ir.TokenCounts(input=10, output=5, cache_write=4)),
    "tokens of thinking": answer(usage=ir.TokenCounts(input=10, output=5, reasoning=3)),
    "two answers": answer(candidates=(answer().candidates[0], answer().candidates[0])),
    "time": answer(created=1_760_000_000),
}

WORDS: Final = {"refused": "refused", "dropped": "dropped", "degraded": "degraded", "carried": "yes", "unsaid": "·"}


def said(probe: Any, name: str, kind: str) -> Any:
    """Return the probe in a dialect's words, None where it cannot say it whole."""
    module = dialect(name)
    write = module.from_ir if kind == "request" else module.response_from_ir
    read = module.to_ir if kind == "request" else module.response_to_ir
    for one in (probe, msgspec.structs.replace(probe, dialect=name)):  # what every vendor says only of itself
        try:
            document = write(one).value
        except TranslationError:
            return None
        if holds(essence(read(document).value), essence(probe)):
            return document
    return None


def holds(found: Any, wanted: Any) -> bool:
    """Return whether everything that is wanted is there."""
    if isinstance(wanted, dict) and wanted:
        return isinstance(found, dict) and all(holds(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(holds, found, wanted))
    return wanted is None or wanted == {} or bool(found == wanted)


def essence(value: Any) -> Any:
    """What of a probe must survive to count as said: everything but places and memory."""
    if isinstance(value, tuple):
        return [essence(part) for part in value]
    if not isinstance(value, msgspec.Struct):
        return value
    besides = {"at", "ext", "raw", "dialect", "flat", "field", "options_at", "stop_at", "stop_raw"}
    if isinstance(value, ir.ToolOutput):
        besides |= {"name", "is_error"} if not value.is_error else {"name"}
    elif isinstance(value, ir.Media):
        besides |= {"name", "title", "media_type"}
    elif isinstance(value, ir.ToolUse | ir.Message):
        besides |= {"text"} if isinstance(value, ir.ToolUse) or value.role != "tool" else {"role"}
    fields = {name: essence(getattr(value, name)) for name in value.__struct_fields__ if name not in besides}
    return {"what": type(value).__name__, **fields}


def verdict(probe: Any, source: str, target: str, kind: Any) -> str:
    """Say what becomes of a probe between two dialects."""
    document = said(probe, source, kind)
    if document is None:
        return WORDS["unsaid"]
    try:
        losses = translate(document, source, target, kind).losses
    except TranslationError:
        return WORDS["refused"]
    # The probes have no extensions: what is lost of that kind the source's writer says in every document.
    besides = ("identity", "required")
    kinds = {loss.kind for loss in losses if loss.is_material and loss.code not in besides}
    return WORDS[next((one for one in ("dropped", "degraded") if one in kinds), "carried")]


HEAD = """\
# Dialects

Six dialects are read into one neutral form and written from it: {names}.
This page is generated by trying every row on every pair
(`python -m tests.dialects.pairs_page > contracts/dialects/README.md`); a test fails when it is stale.

## Use

```python
from backplane.dialects import StreamTranslation, dialect, translate

done = translate(document, "openai", "claude", "request")  # or "response"; policy="fail" raises on a loss
done.value, done.losses  # the other vendor's JSON, and what could not be said

stream = StreamTranslation("gemini", "openai")
for chunk in chunks:
    send(stream.feed(chunk))  # chunks of the other vendor, without waiting for the end
send(stream.finish())
```

`sum_stream(chunks, "claude")` adds a stream up to the vendor's answer.
`backplane translate --from D --to D --kind request|response|stream [FILE]` does the same on the command line.
A dialect (`dialect("claude")`) has `to_ir`, `from_ir`, `response_to_ir`, `response_from_ir`,
`map_work_order`, `map_response`, `map_stream_event` with its `StreamState`, `StreamReader`, `StreamWriter`,
`TOOL_NAMES`, `CAPABILITIES` and `DEFAULTS`.
`framing` cuts bytes into chunks: server-sent events, and JSON documents as lines or one array.

## Losses

Each has a `path` (JSON pointer into the source), a `kind` (dropped, degraded, synthesised, refused), a `code` and a
reason; values are never copied. Losses are found by one comparison: the written document is read by the target, written
back by the source's dialect, and what does not come back equal is named. Null, absent and empty are one, and so are a
text and a list of one text. What the way back mends by itself (a limit, an order, a picture that moved) the writer
notes. Additions that the target requires have the kind `synthesised` and the code `required`; they do not count for
`--strict`. What would change the meaning is an error and no loss: state that the vendor keeps (`previous_response_id`,
a container, a cache), a result without its call, a forced tool that only the other vendor runs.

To its own dialect a document goes back as it came. After an edit it is the same document with that edit: what the edit
does not change keeps its spelling. Where both would contradict each other, the document is written in our form, and
what is then written in another form is named.

| code | meaning |
|---|---|
{codes}

## Counting tokens

One rule: input is everything that was sent, reads and writes of the cache are parts of it; output is everything that
was made, thinking is part of it. The Messages dialect counts cache reads and writes beside its input, and Gemini
counts thoughts beside its output; both are converted on the way in and out. The vendor's own counters are kept.

## Another dialect

One file that ends with `DIALECT: Final = Dialect(…)`, and one row of `backplane.dialects.DIALECTS`; from a wheel of
your own, an entry point instead:

```toml
[project.entry-points."backplane.dialects"]
acme = "your_package.acme:DIALECT"
```

`tests/dialects/acme.py` is a whole one for a made-up vendor. The functions stand in this order in every file:

1. **Words.** Roles, and `Endings(stops, words)`: the vendor's reasons to stop → ours, and ours → the vendor's. Every
   reason of `ir.Stop` and `None` needs a word; where the vendor has none, one that does not say that all went well.
2. **`read_block`, `write_block`.** Copy the object, `pop` what is known, and leave the rest in `ext_of(NAME, rest)`. A
   block of an unknown kind is an `ir.NativePart`. To write, `match` on our blocks; `notes.own` puts the rest back if
   the target is the vendor itself. A block without a word here is named by `notes.lose_part`. If the kind of a block is
   its member `type`, `read_part` and `write_part` do all this around the `match`. `write_parts` and `write_content`
   write lists of blocks, and texts; `takes` asks a table which media the vendor accepts. One form of each thing is
   enough: `vendor` keeps the spelling of the document.
3. **`read_request`, `write_request`.** `members_of`, `pop_list`, `pop_inner` and `put_back` take members,
   `read_content` a text or a list of blocks, `OptionsRead` options of the same value, which `write_options` writes
   within the server's bounds; `options_at` says where each was. `notes.bounded`, `notes.change_option` and
   `notes.lose_option` name what the server refuses. `outside` parts the system text from the messages. `ServerLimits`
   says which letters, blocks and arguments the server takes: what it refuses has another form before it is written.
   `conversation_of`, `tool_of` and `answer_of` take the head of a document, a tool, and the head of an answer.
4. **`read_answer`, `write_answer`.** What was said as one message, and why it ended; `read_error` is for bodies that
   only say an error, which `vendor` writes. `Counters({{"heard": "input"}})` reads and writes token counters: path →
   field of `ir.TokenCounts`; `apart` where the vendor counts a field beside another one, `total=""` where it says no
   sum.
5. **`StreamReader`.** `handlers`, kind of a chunk → what reads it (`tag` is the member that says the kind), or its own
   `read`: `begun(id, model)`, `self.begin(key, part)`, `self.more(key, text)`, `self.end(key)`,
   `self.count(counters, at)`, `self.stop(word, at)`, `failure(…)` and, at a last chunk, `self.finish()`.
6. **`StreamWriter`.** Templates: `head`; `begin` notes in `self.opened` what it calls the block, or returns None for a
   block that is written `whole`; `piece`, `close`, `stop` or `end` (the word is in `self.words`, which is empty where
   the stream failed; `counted()` are the counters), `fail`. Flags say what the target cannot do: `is_serial`,
   `has_choices`, `has_refusals`, `takes_objects`.
7. **The value.** Each member of `Dialect` is described in `backplane/dialects/vendor.py`; most have a default.

Then the measures: `tests/dialects/measures.py` says what M1 to M6 are, `test_measures.py` runs them. They want a corpus
(`contracts/dialects/NAME/` for a row of the table), a judge (`referees.py`: the vendor's SDK, else types written from
its page), what its server refuses (`rules.py`), and its reasons to stop (`STOP_WORDS` of `measures.py`).
"""


def table(probes: dict[str, Any], source: str, kind: str) -> list[str]:
    others = [name for name in NAMES if name != source]
    rows = [f"| {kind} from {source} | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|"]
    for title, probe in probes.items():
        cells = [verdict(probe, source, target, kind) for target in others]
        if set(cells) != {WORDS["unsaid"]}:
            rows.append(f"| {title} | {' | '.join(cells)} |")
    return [*rows, ""]


def page() -> str:
    """Return the whole page."""
    codes = "\n".join(f"| `{code}` | {meaning} |" for code, meaning in ir.LOSS_CODES.items())
    lines = [HEAD.format(names=", ".join(NAMES), codes=codes)]
    lines.append("## What each pair carries\n")
    lines.append("To its own dialect everything goes back as it came. A row that the source cannot say is left out.\n")
    for source in NAMES:
        lines += [f"### From {source}\n", *table(REQUESTS, source, "request"), *table(ANSWERS, source, "response")]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
