"""Answers of the Chat Completions family, their reasons to stop and counters, read and written."""

from __future__ import annotations

from typing import Any

from backplane.contract.canonical import Json
from backplane.dialects._chat import STOP_WORDS, STOPS, Flavour
from backplane.dialects._chat_read import read_message
from backplane.dialects._chat_write import write_assistant
from backplane.dialects._losses import put_counters, require, stop_word
from backplane.dialects._parts import (
    ABSENT,
    Calls,
    Ledger,
    give_back,
    kind_of,
    need_list,
    need_object,
    put_constants,
    put_rest,
    shape,
    slot,
    take,
    take_constant,
    take_number,
)
from backplane.dialects._reading import failed_answer, stop_of, take_details
from backplane.ir import Answer, Candidate, Message, Part, Stop, Translated, Usage


def read_answer(response: Json, flavour: Flavour) -> Translated[Answer]:
    """Read a response; a body that only says an error becomes an answer without candidates.

    Raises:
        TranslationError: `dialect_mapping_failed`, it has neither choices nor an error.
    """
    rest = need_object(response, "")
    ext: dict[str, Any] = {}
    absent: list[str] = []
    if rest.get("choices") is None and ("error" in rest or rest.get("object") == "error"):
        return Translated(failed_answer(flavour.name, rest, rest.get("message")))
    calls = Calls()
    found = need_list(rest, "choices", "")
    candidates = tuple(
        _read_choice(choice, place, f"/choices/{place}", flavour, calls) for place, choice in enumerate(found)
    )
    take_constant(rest, "object", "chat.completion", absent)
    usage = read_usage(rest.pop("usage"), "/usage", flavour) if type(rest.get("usage")) is dict else None
    answer_id, model, created = take(rest, "id", str), take(rest, "model", str), take_number(rest, "created")
    if absent:
        ext[ABSENT] = tuple(absent)
    put_rest(ext, rest)
    ledger = Ledger(flavour.name, flavour.name)
    if calls.made:
        ledger.synthesise("/choices", "identity", f"ids for {calls.made} calls that had none")
    answer = Answer(
        dialect=flavour.name, id=answer_id, model=model, created=created, candidates=candidates, usage=usage,
        ext=slot(flavour.name, ext),
    )  # fmt: skip
    return Translated(answer, ledger.done())


def _read_choice(choice: Json, place: int, at: str, flavour: Flavour, calls: Calls) -> Candidate:
    rest = need_object(choice, at)
    absent: list[str] = []
    take_constant(rest, "index", place, absent)
    body = take(rest, "message", dict)
    if body is None:
        absent.append("message")
    message = read_message({"role": "assistant", **(body or {})}, f"{at}/message", flavour, calls)
    if body is not None and "role" not in body:
        absent.append("message/role")
    raw = take(rest, "finish_reason", str)
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Candidate(
        message=message, stop=read_stop(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finish_reason", at=at,
        ext=slot(flavour.name, ext),
    )  # fmt: skip


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a reason to stop; vendors that say `stop` after a call mean the call."""
    return stop_of(raw, STOPS, parts) if raw else None


def read_usage(usage: dict[str, Any], at: str, flavour: Flavour) -> Usage:
    """Read token counters; the family's input includes what the cache gave."""
    rest = usage.copy()
    ext: dict[str, Any] = {}
    absent: list[str] = []
    sent, made = take(rest, "prompt_tokens", int), take(rest, "completion_tokens", int)
    take_constant(rest, "total_tokens", (sent or 0) + (made or 0), absent)
    inputs = take_details(rest, "prompt_tokens_details")
    outputs = take_details(rest, "completion_tokens_details")
    read = take(inputs, "cached_tokens", int)
    if read is None and (read := take(rest, "cached_tokens", int)) is not None:
        if not flavour.cached_tokens_on_top:
            ext["#on_top"] = True
    elif read is not None and flavour.cached_tokens_on_top:
        ext["#details"] = True
    write, thought = take(inputs, "cache_write_tokens", int), take(outputs, "reasoning_tokens", int)
    put_rest(ext, inputs, "prompt_tokens_details/")
    put_rest(ext, outputs, "completion_tokens_details/")
    put_rest(ext, rest)
    if absent:
        ext[ABSENT] = tuple(absent)
    return Usage(
        input=sent, output=made, cache_read=read, cache_write=write, reasoning=thought, at=at,
        ext=slot(flavour.name, ext),
    )  # fmt: skip


def write_answer(answer: Answer, flavour: Flavour) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, flavour.name, flavour.kin)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out and not (ledger.is_home and out):
            out["error"] = {"message": answer.error, "type": "upstream_error", "param": None, "code": None}
        return Translated(out, ledger.done())
    for key, value in (("id", answer.id), ("created", answer.created), ("model", answer.model)):
        if value is not None:
            out[key] = int(value) if key == "created" and not ledger.is_home else value
    out["choices"] = [
        _write_choice(candidate, place, flavour, ledger) for place, candidate in enumerate(answer.candidates)
    ]
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, flavour, ledger)
    give_back(answer, out, ledger)
    put_constants(answer, out, flavour.name, {"object": "chat.completion"})
    if not ledger.is_home:
        require(out, {"id": "chatcmpl-translated", "created": 0, "model": "unknown"}, ledger)
    return Translated(out, ledger.done())


def _write_choice(candidate: Candidate, place: int, flavour: Flavour, ledger: Ledger) -> Json:
    message: dict[str, Any] = {}
    if candidate.message.name is not None:
        message["name"] = candidate.message.name
    write_assistant(candidate.message, message, flavour, ledger, is_answer=True)
    give_back(candidate.message, message, ledger)
    if not ledger.is_home:
        _keep_citations(message, candidate.message, ledger)
    absent = shape(candidate, flavour.name, ABSENT) or ()
    if "message/role" not in absent:
        native = candidate.message.native_role if ledger.is_home else None
        message.setdefault("role", native if native is not None else "assistant")
    choice: dict[str, Any] = {} if "message" in absent and ledger.is_home else {"message": message}
    word = write_stop(candidate, ledger)
    if word is not None:
        choice["finish_reason"] = word
    give_back(candidate, choice, ledger)
    if not ledger.is_home:
        _keep_logprobs(choice, candidate, ledger)
    put_constants(candidate, choice, flavour.name, {"index": place})
    return choice


def _keep_citations(message: dict[str, Any], source: Message, ledger: Ledger) -> None:
    """Leave out what a gateway hangs on a message beside citations of addresses."""
    found = message.get("annotations")
    if type(found) is list and any(kind_of(one) != "url_citation" for one in found):
        ledger.drop(f"{source.at}/annotations", "citation", "only citations of addresses are said here", found)
        message["annotations"] = [one for one in found if kind_of(one) == "url_citation"]


def _keep_logprobs(choice: dict[str, Any], source: Candidate, ledger: Ledger) -> None:
    """Leave out probabilities in the form of a gateway."""
    if (found := choice.get("logprobs")) is None:
        return
    tokens = [one for key in ("content", "refusal") for one in found.get(key) or ()]
    if not {"content", "refusal"} & found.keys() or not all(
        type(one) is dict and {"token", "logprob", "top_logprobs"} <= one.keys() for one in tokens
    ):
        ledger.drop(f"{source.at}/logprobs", "extension", "probabilities in a form of its own", found)
        del choice["logprobs"]


def write_stop(candidate: Candidate, ledger: Ledger) -> str | None:
    """Return the word for why the answer stopped: the vendor's own while it means the same."""
    raw, stop = candidate.stop_raw, candidate.stop
    is_kin = ledger.is_home or ledger.source in ledger.kin
    if (
        is_kin
        and raw is not None
        and read_stop(raw, candidate.message.parts) == stop
        and (ledger.is_home or raw in STOPS)
    ):
        return raw
    if stop is None and ledger.is_home:
        return None
    word = STOP_WORDS.get(stop or "", "stop")
    if stop not in ("end", "max_tokens", "tool_use", "content_filter"):
        ledger.degrade(candidate.stop_at, "stop", f"{raw or stop} became {word}")
    stop_word(candidate, ledger)
    return word


def write_usage(usage: Usage, flavour: Flavour, ledger: Ledger) -> Json:
    """Write token counters."""
    out: dict[str, Any] = {}
    put_counters(out, (("prompt_tokens", usage.input), ("completion_tokens", usage.output)), usage, ledger)
    memory = "#details" if flavour.cached_tokens_on_top else "#on_top"
    on_top = flavour.cached_tokens_on_top != bool(shape(usage, flavour.name, memory))
    if usage.cache_read is not None and on_top:
        out["cached_tokens"] = usage.cache_read
    details = (
        ("prompt_tokens_details", "cached_tokens", None if on_top else usage.cache_read),
        ("prompt_tokens_details", "cache_write_tokens", usage.cache_write),
        ("completion_tokens_details", "reasoning_tokens", usage.reasoning),
    )
    for key, name, value in details:
        if value is not None:
            out.setdefault(key, {})[name] = value
    give_back(usage, out, ledger)
    put_constants(usage, out, flavour.name, {"total_tokens": (usage.input or 0) + (usage.output or 0)})
    return out
