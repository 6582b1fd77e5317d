"""Describes an exchange of the gateway in words: its state, its facts, and why it ended as it did. Pure."""

from __future__ import annotations

from typing import Final

from backplane.errors import CODES, STEPS
from backplane.gateway.record import LOSSES_MAX, RecordedExchange
from backplane.view.figures import ID_CHARS, count, lasting, milliseconds, money
from backplane.view.picture import Evidence
from backplane.view.text import one_line
from backplane.view.why import Diagnosis

_TONES: Final = {"complete": "good", "left": "warn"}

_VERDICTS: Final[dict[str, tuple[str, ...]]] = {
    "complete": ("nothing is wrong: the client got the whole answer",),
    "left": ("the client closed its connection before the answer's end, or did not read it for ten minutes",
             "look at the client's own time limit, and at how it ended"),
    "refused": ("the gateway refused the request before it asked a service", "change what the error names"),
    "interrupted": ("the gateway ended before the exchange did", "send the request again"),
    "asked": ("nothing is wrong: the service has been asked, and has not begun to answer",
              "wait: `timeout_s` of the backend ends it"),
    "answered": ("nothing is wrong: the service is answering", "wait"),
    "cut_off": ("the gateway was killed before the exchange ended", "send the request again"),
}  # fmt: skip
"""End of an exchange, or its state → verdict and next step."""


def exchange_standing(one: RecordedExchange) -> tuple[str, str]:
    """Return a word for an exchange's state, and the word's tone: good, warn, bad or live."""
    if one.end is not None:
        return one.end, _TONES.get(one.end, "bad")
    if one.state == "live":
        return ("asking" if one.first_ms is None else "answering"), "live"
    return "cut off", "bad"


def given_of(one: RecordedExchange) -> str:
    """Return the service that was asked last and its model, such as `mine/qwen3`; empty if none was asked."""
    return one_line("/".join(filter(None, (one.backend, one.model))))


def models_of(one: RecordedExchange) -> str:
    """Return the requested model, and after an arrow the service and its model; no arrow if both models are equal."""
    asked, given = one_line(one.asked), given_of(one)
    return asked if not given else f"{asked} → {given}" if one.model != one.asked else given


def exchange_facts(one: RecordedExchange, now_ms: int) -> dict[str, str]:
    """Return the facts of an exchange, by label; a fact that is unknown or does not apply is an empty text."""
    tokens = one.tokens or {}
    cached = [f"{count(tokens[name])} {words}" for name, words in _CACHED.items() if tokens.get(name)]
    sent = f"{count(tokens.get('input'))} in" + (f" ({', '.join(cached)})" if cached else "")
    return {
        "client": one_line(one.client),
        "asked": f"{one_line(one.asked)}  ({one.front}, {'a stream' if one.stream else 'one document'})",
        "given": given_of(one),
        "chosen": "; ".join(map(one_line, one.considered)),
        "before": ", ".join(map(one_line, one.tried)),
        "began": one.began_at,
        "first": f"after {lasting(one.first_ms)}" if one.first_ms is not None else "",
        "took": _took(one, now_ms),
        "tokens": f"{sent}, {count(tokens.get('output'))} out" if tokens else "",
        "cost": _cost(one),
        "losses": _losses(one),
        "error": one_line(": ".join(filter(None, (one.code, one.error)))),
    }


_CACHED: Final = {"cache_read": "from the cache", "cache_write": "into it"}


def _took(one: RecordedExchange, now_ms: int) -> str:
    if one.end == "interrupted" or one.state == "cut_off":
        return "?"
    began_ms = milliseconds(one.began_at)
    if one.ms is None:
        return f"{lasting(now_ms - began_ms)} so far" if began_ms is not None else "?"
    return lasting(one.ms) if one.ms >= 1000 else f"{one.ms} ms"


def _cost(one: RecordedExchange) -> str:
    if one.end is None:
        return f"at most {money(one.reserved_usd_micros)} is reserved" if one.reserved_usd_micros else ""
    is_other = one.charged_usd_micros and one.charged_usd_micros != one.cost_usd_micros
    more = f"  ({money(one.charged_usd_micros)} of the client's budget)" if is_other else ""
    return money(one.cost_usd_micros) + more


def _losses(one: RecordedExchange) -> str:
    if not one.losses:
        return ""
    more = f" and {one.losses - LOSSES_MAX} more" if one.losses > LOSSES_MAX else ""
    return f"{one.losses}: {', '.join(map(one_line, one.lost))}{more}"


def diagnose_exchange(one: RecordedExchange, now_ms: int) -> Diagnosis:
    """Return the reason for an exchange's state: what it waits for, or why it ended so; with next steps."""
    far = "answered" if one.first_ms is not None else "asked"
    kind = one.code or one.end or ("cut_off" if one.state == "cut_off" else far)
    is_ours = one.end == "refused" and one.backend is None
    words = _VERDICTS["refused"] if is_ours else _VERDICTS.get(kind)
    if words is None:
        code = one.code if one.code in CODES else None
        verdict = CODES[code].meaning if code else f"the service's answer reported a failure ({one.end})"
        words = (verdict, *([STEPS[code]] if code else ["send the request again, or look at the service's status"]))
    facts = exchange_facts(one, now_ms)
    began_ms = milliseconds(one.began_at)
    evidence = [f"{label}: {facts[label]}" for label in ("error", "before", "given", "first", "losses") if facts[label]]
    return Diagnosis(
        run_id=one.id,
        kind={"asked": "nothing", "answered": "nothing", "complete": "nothing"}.get(kind, kind),
        sure=True,
        verdict=words[0],
        since_ms=now_ms - began_ms if one.state == "live" and began_ms is not None else None,
        evidence=tuple(Evidence(text=one_line(text, 200)) for text in evidence),
        next=(*words[1:], *([f"backplane show {one.id[:ID_CHARS]}"] if one.losses else [])),
    )


def mentions_all(one: RecordedExchange, words: list[str]) -> bool:
    """Return True if an exchange's id, client, models, services, end and error contain all words, in any case."""
    texts = (one.id, one.client, one.front, one.asked, one.backend, one.model, one.end, one.code, one.error, *one.tried)
    whole = " ".join(filter(None, texts)).lower()
    return all(word.lower() in whole for word in words)


def figures_of(one: RecordedExchange) -> str:
    """Return the tokens and the number of losses of an exchange, as `12 in, 3 out, 1 loss`."""
    tokens = one.tokens or {}
    words = [f"{count(tokens.get('input'))} in, {count(tokens.get('output'))} out"] if tokens else []
    if one.losses:
        words.append("1 loss" if one.losses == 1 else f"{one.losses} losses")
    return ", ".join(words)
