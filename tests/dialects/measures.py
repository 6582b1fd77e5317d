"""The six measures of the translation, over the corpus; run as a program it prints them.

M1 there and back through the neutral form · M2 what does not come back is named, and nothing is written that the
target's types or its server's documented rules refuse · M3 a stream adds up as the vendor's SDK says · M4 the same
across · M5 read, not replayed · M6 to another vendor and back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from backplane.dialects import StreamTranslation, dialect, ir, sum_stream, translate
from backplane.errors import TranslationError
from tests.dialects import differ, referees, rules
from tests.dialects.dialect_corpus import CONTRACTS, KINDS, Corpus, canonical

Finding = tuple[str, str | None]
"""What was judged, and what is wrong with it."""


def reader(name: str, kind: str) -> Callable[[Any], Any]:
    module = dialect(name)
    return module.to_ir if kind == "request" else module.response_to_ir  # type: ignore[no-any-return]


def writer(name: str, kind: str) -> Callable[[Any], Any]:
    module = dialect(name)
    return module.from_ir if kind == "request" else module.response_from_ir  # type: ignore[no-any-return]


# M1 -------------------------------------------------------------------------------------------------------------------


def m1(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    for name in corpus.names:
        for kind in KINDS:
            for title, document in corpus.documents(name, kind):
                written = writer(name, kind)(reader(name, kind)(document).value)
                same = canonical(written.value) == canonical(document)
                where = f"{name} {kind} {title!r}"
                yield (
                    where,
                    None
                    if same and not written.losses
                    else f"{differ.changed(document, written.value)} {written.losses}",
                )


def edited(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    """M1 after an edit: the first text, else the model, is another one, and all else stands as it was or is named."""
    for name in corpus.names:
        for kind in KINDS:
            for title, document in corpus.documents(name, kind):
                done: list[int] = []
                value = edit_first(reader(name, kind)(document).value, done)
                if not done:
                    value, done = edit_head(value), [1]
                written = writer(name, kind)(value)
                named = {loss.path for loss in written.losses}
                found = [at for at in differ.changed(document, written.value) if not differ.is_named(at, named)]
                yield f"{name} {kind} {title!r}", str(found) if len(found) != len(done) else None


def edit_first(value: Any, done: list[int]) -> Any:
    """Change the first text of a document; `done` gets one member if there is one."""
    if isinstance(value, ir.Text) and value.text and not value.citations and not done:
        done.append(1)
        return msgspec.structs.replace(value, text=f"{MARK}: {value.text}")
    if isinstance(value, ir.Conversation | ir.Answer | ir.Candidate | ir.Message):
        held = [name for name in ("messages", "parts", "candidates", "message") if name in value.__struct_fields__]
        return msgspec.structs.replace(value, **{name: edit_first(getattr(value, name), done) for name in held})
    return tuple(edit_first(one, done) for one in value) if isinstance(value, tuple) else value


def edit_head(value: Any) -> Any:
    """Change the model of a document, or the words of an error."""
    field = "error" if getattr(value, "error", None) and not value.candidates else "model"
    return msgspec.structs.replace(value, **{field: MARK})


# M2 -------------------------------------------------------------------------------------------------------------------


def across(document: Any, source: str, target: str, kind: str) -> Any:
    """Translate; None when it is refused, which is an error and no silent loss."""
    try:
        return translate(document, source, target, kind)  # type: ignore[arg-type]
    except TranslationError as error:
        if error.code not in ("mapping_unsupported_capability", "ir_invalid"):
            raise
        return None


def silent(document: Any, done: Any, source: str, target: str, kind: str) -> list[str]:
    """Return what does not come back equal from a translation and is not named by it."""
    back = writer(source, kind)(reader(target, kind)(done.value).value)
    named = {path for loss in done.losses for path in spellings(loss.path)}
    return [at for at in unequal(source, document, back.value) if not differ.is_named(at, named)]


def spellings(path: str) -> set[str]:
    """Return a loss's path, also as `one_spelling` writes it."""
    out = {path, camel(path)}
    for one, other in (
        ("/max_completion_tokens", "/max_tokens"), ("/parameters/", "/parametersJsonSchema/"),
        ("/responseSchema/", "/responseJsonSchema/"),
    ):  # fmt: skip
        out |= {f"{found}/".replace(f"{one.rstrip('/')}/", f"{other.rstrip('/')}/").rstrip("/") for found in out}
    return out


def camel(value: Any) -> Any:
    """Write a pointer, or the members of a document, in camelCase: Google takes both spellings."""
    if isinstance(value, str):
        return re.sub("(?<=[a-z])_([a-z])", lambda found: found[1].upper(), value)
    if isinstance(value, list):
        return [camel(one) if isinstance(one, dict | list) else one for one in value]
    if not isinstance(value, dict):
        return value
    return {camel(key): camel(one) if isinstance(one, dict | list) else one for key, one in value.items()}


def unequal(source: str, document: Any, back: Any) -> list[str]:
    """Return what does not come back equal; the two spellings that a vendor takes of one thing are one."""
    return differ.unequal(*(one_spelling(source, value) for value in (document, back)))


def one_spelling(source: str, document: Any) -> Any:
    """Return a document in one of the spellings that its vendor documents as equal."""
    if source == "gemini":  # ai.google.dev, FunctionDeclaration and GenerationConfig: two members for one schema
        return schemas_alike(camel(document))
    if source in ("openai", "kimi", "copilot") and isinstance(document, dict) and "max_tokens" not in document:
        return {{"max_completion_tokens": "max_tokens"}.get(key, key): value for key, value in document.items()}
    return document


def schemas_alike(value: Any) -> Any:
    """Say each schema of a Gemini document as JSON Schema, at the newer of its two places."""
    if isinstance(value, list):
        return [schemas_alike(one) for one in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, one in value.items():
        place = {"parameters": "parametersJsonSchema", "responseSchema": "responseJsonSchema"}.get(key, key)
        if place != key and place not in value:
            out[place] = as_json_schema(one)
        else:
            out[key] = one if key in ("args", "response", "parametersJsonSchema") else schemas_alike(one)
    return out


def as_json_schema(value: Any) -> Any:
    """Write types in lower case and `nullable` as a type, as JSON Schema does."""
    if isinstance(value, list):
        return [as_json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    out = {key: as_json_schema(one) if isinstance(one, dict | list) else one for key, one in value.items()}
    if isinstance(out.get("type"), str):
        out["type"] = out["type"].lower()
        if out.pop("nullable", False):
            out["type"] = [out["type"], "null"]
    return out


def m2(corpus: Corpus = CONTRACTS, *, with_types: bool = True) -> Iterator[Finding]:
    for source, target in corpus.pairs:
        if source == target:
            continue
        for kind in KINDS:
            for title, document in corpus.documents(source, kind):
                where = f"{source} → {target} {kind} {title!r}"
                done = across(document, source, target, kind)
                if done is None:
                    yield where, None
                    continue
                gone = silent(document, done, source, target, kind)
                bad = f"silent: {gone}" if gone else None
                if with_types and "error" not in done.value:
                    why = referees.invalid(target, kind, done.value)
                    bad = f"invalid: {why}" if why else bad
                if kind == "request" and (broke := rules.broken(target, done.value)):
                    bad = f"refused by the server: {broke}"
                yield where, bad


# M3 and M4 ------------------------------------------------------------------------------------------------------------


def answer_of(name: str, chunks: list[Any]) -> ir.Answer:
    """Add a stream up by our own reader."""
    return sum_stream(chunks, name).value


STOP_WORDS = {
    "stop": "end", "end_turn": "end", "completed": "end", "STOP": "end", "stop_sequence": "end",
    "length": "max", "max_tokens": "max", "MAX_TOKENS": "max", "incomplete:max_output_tokens": "max",
    "tool_calls": "tool", "tool_use": "tool", "function_call": "tool",
    "content_filter": "filter", "refusal": "filter", "SAFETY": "filter", "incomplete:content_filter": "filter",
    "failed": "failed",
    "done": "end", "halt_word": "end", "full": "max", "invoke": "tool", "refused": "filter",
}  # fmt: skip


def stop_class(word: Any, calls: Any) -> Any:
    found = STOP_WORDS.get(word, word)
    return "tool" if found == "end" and calls else found


def our_facts(answer: ir.Answer) -> dict[str, Any]:
    """Say our answer in the referee's words."""
    parts = answer.candidates[0].message.parts
    usage = answer.usage
    return {
        "text": "".join(part.text for part in parts if isinstance(part, ir.Text)),
        "thinking": "".join(part.text for part in parts if isinstance(part, ir.Thinking)),
        "refusal": "".join(part.text for part in parts if isinstance(part, ir.Refusal)),
        "calls": [
            (None if part.id_made else part.id, part.name, part.input) for part in parts if isinstance(part, ir.ToolUse)
        ],
        "usage": usage and (usage.input or 0, usage.output or 0, usage.cache_read or 0, usage.cache_write or 0),
        "stop": answer.candidates[0].stop_raw,
    }


def judged(name: str, chunks: list[Any]) -> dict[str, Any] | None:
    """Let the referee add a stream up; where it refuses, its last event is the judge, else nobody."""
    try:
        return referees.facts(name, chunks)
    except referees.Refused:
        whole = wholes(chunks)[-1] if name == "codex" else {"output": []}
        return referees.response_facts(whole) if whole["output"] else None


def wholes(chunks: list[Any]) -> list[Any]:
    """Return the whole answers that events repeat, after one that says nothing."""
    found = (chunk.get("response") for chunk in chunks)
    return [{"output": []}, *(whole for whole in found if type(whole) is dict and "output" in whole)]


def m3(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    for name in corpus.names:
        for title, chunks in corpus.streams(name):
            truth = judged(name, chunks)
            if truth is None:
                continue
            ours = our_facts(answer_of(name, chunks))
            if name == "codex" and not wholes(chunks)[-1]["output"]:
                truth["text"] = ours["text"]  # the referee believes the empty list
            wrong = {key: (truth[key], ours[key]) for key in truth if truth[key] != ours[key]}
            yield f"{name} stream {title!r}", str(wrong) if wrong else None


def m4(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    for source, target in corpus.pairs:
        if source == target:
            continue
        for title, chunks in corpus.streams(source):
            where = f"{source} → {target} stream {title!r}"
            ours = our_facts(answer_of(source, chunks))
            if ours["stop"] is None and not any((ours["text"], ours["thinking"], ours["calls"])):
                continue  # it only failed: there is nothing to add up
            done = StreamTranslation(source, target)
            written = [made for chunk in chunks for made in done.feed(chunk)] + done.finish()
            broken = [why for made in written if (why := referees.invalid_chunk(target, made))]
            if broken:
                yield where, f"invalid: {broken[0]}"
                continue
            try:
                theirs = referees.facts(target, written)
            except referees.Refused as error:
                yield where, f"refused: {error}"
                continue
            yield where, unlike(ours, theirs, source, {loss.code for loss in done.losses})


def unlike(ours: dict[str, Any], theirs: dict[str, Any], source: str, codes: set[str]) -> str | None:
    """Return in what a stream says something else on the other side."""
    wrong = []
    said = ours["text"] + ours["refusal"]
    if said != theirs["text"] + theirs["refusal"]:
        wrong.append(f"text {said!r} {theirs!r}")
    if ours["thinking"] != theirs["thinking"]:
        wrong.append(f"thinking {ours['thinking']!r} {theirs['thinking']!r}")
    calls = [(call[1], call[2]) for call in ours["calls"]]
    if calls != [(call[1], _object(call[2], calls)) for call in theirs["calls"]]:
        wrong.append(f"calls {calls} {theirs['calls']}")
    ids = [call[0] for call in ours["calls"]]
    if any(mine is not None and mine != other[0] for mine, other in zip(ids, theirs["calls"], strict=False)):
        wrong.append(f"ids {ids} {theirs['calls']}")
    if ours["usage"] and theirs["usage"] and ours["usage"][:3] != theirs["usage"][:3]:
        wrong.append(f"usage {ours['usage']} {theirs['usage']}")
    mine, other = stop_class(ours["stop"], calls), stop_class(theirs["stop"], theirs["calls"])
    if mine != other and "stop" not in codes and ours["stop"] is not None:
        wrong.append(f"stop {ours['stop']} {theirs['stop']}")
    return "; ".join(wrong) or None


def _object(value: Any, calls: list[Any]) -> Any:
    """Free text of a custom tool may stand in an object."""
    if isinstance(value, dict) and list(value) == ["input"] and any(isinstance(call[1], str) for call in calls):
        return value["input"]
    return value


# M5 -------------------------------------------------------------------------------------------------------------------


def strip(value: Any) -> Any:
    """Empty every extension slot."""
    if isinstance(value, ir.Node):
        changes: dict[str, Any] = {
            name: strip(getattr(value, name)) for name in value.__struct_fields__ if name not in ("ext", "raw")
        }
        return type(value)(**changes, ext={})
    if isinstance(value, tuple):
        return tuple(strip(inner) for inner in value)
    return value


MARK = "an edit made in the neutral form"


def edit(value: Any, done: list[int]) -> Any:
    """Change every text, call and result."""
    if isinstance(value, ir.Text | ir.Refusal):
        done[0] += 1
        return msgspec.structs.replace(value, text=f"{MARK} {done[0]}")
    if isinstance(value, ir.ToolUse):
        done[0] += 1
        new: Any = f"{MARK} {done[0]}" if value.kind == "custom" else {"edit": f"{MARK} {done[0]}"}
        return msgspec.structs.replace(value, input=new)
    if isinstance(value, ir.Node):
        inner = {
            name: edit(getattr(value, name), done)
            for name in ("messages", "parts", "content", "candidates", "message")
            if name in value.__struct_fields__
        }
        return msgspec.structs.replace(value, **inner)
    if isinstance(value, tuple):
        return tuple(edit(one, done) for one in value)
    return value


def m5(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    for name in corpus.names:
        for kind in KINDS:
            for title, document in corpus.documents(name, kind):
                where = f"{name} {kind} {title!r}"
                read = reader(name, kind)(document).value
                count = [0]
                edited = edit(read, count)
                text = canonical(writer(name, kind)(edited).value)
                lost = [n for n in range(1, count[0] + 1) if f"{MARK} {n}" not in text]
                bare = reader(name, kind)(writer(name, kind)(strip(read)).value).value
                same = essence(bare) == essence(read)
                bad = f"edits {lost} of {count[0]} not seen" if lost else None
                yield where, bad if same else f"without slots it says {essence(bare)} for {essence(read)}"


def essence(value: Any) -> Any:
    """What an answer or a conversation says: roles, texts, calls, results, media."""
    if isinstance(value, ir.Conversation):
        return [(message.role, essence(message.parts)) for message in value.messages]
    if isinstance(value, ir.Answer):
        return [(essence(candidate.message.parts), candidate.stop) for candidate in value.candidates] or value.error
    if isinstance(value, tuple):
        return [essence(part) for part in value]
    if isinstance(value, ir.ToolUse):
        return ("call", value.name, value.input)
    if isinstance(value, ir.ToolOutput):
        return ("result", essence(value.content), value.is_error)
    if isinstance(value, ir.Media):
        return ("media", value.kind, value.data, value.url, value.file_id)
    if isinstance(value, ir.NativePart):
        return ("native", canonical(value.payload))
    return (type(value).__name__, value.text)


# M6 -------------------------------------------------------------------------------------------------------------------


def m6(corpus: Corpus = CONTRACTS) -> Iterator[Finding]:
    for source, target in corpus.pairs:
        if source == target:
            continue
        for kind in KINDS:
            for title, document in corpus.documents(source, kind):
                there = across(document, source, target, kind)
                if there is None:
                    continue
                back = across(there.value, target, source, kind)
                where = f"{source} → {target} → {source} {kind} {title!r}"
                if back is None:
                    yield where, "refused on the way back"
                    continue
                named = {loss.path for loss in (*there.losses, *back.losses) if loss.kind == "synthesised"}
                named |= {loss.path for loss in there.losses}
                named = {path for one in named for path in spellings(one)}
                wrong = [at for at in unequal(source, document, back.value) if not differ.is_named(at, named)]
                yield where, str(wrong) if wrong else None


MEASURES: dict[str, Callable[[Corpus], Iterator[Finding]]] = {
    "M1": m1,
    "edited": edited,
    "M2": m2,
    "M3": m3,
    "M4": m4,
    "M5": m5,
    "M6": m6,
}


def report(corpus: Corpus, names: list[str]) -> int:
    """Print the measures of a corpus and return how much is wrong; names print what that is."""
    missed = 0
    for name, measure in MEASURES.items():
        if names and name not in names:
            continue
        found = list(measure(corpus))
        wrong = [(where, why) for where, why in found if why]
        missed += len(wrong)
        print(f"{name} {len(found) - len(wrong)} of {len(found)}, {100 - 100 * len(wrong) / max(1, len(found)):.2f} %")
        if names:
            for where, why in wrong:
                print(f"  {where}: {why}")
    return missed


if __name__ == "__main__":
    report(CONTRACTS, sys.argv[1:])
