"""What is wrong with a base address, by looking at it and by reading what answered there, and what would be right.

Pure: an address or the head of an answer comes in, a `Check` comes out. Who asks over the network is `probe`.
No key is ever part of what is said, and every address is cut at its `?`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing
from backplane.dialects.framing import UNREADABLE
from backplane.upstream.clients import is_http
from backplane.upstream.endpoint import cut_urls
from backplane.upstream.failure import clean, failure_of
from backplane.upstream.presets import is_local

State = Literal["ok", "note", "missing"]
Kind = Literal["works", "reached", "key", "busy", "elsewhere", "down"]

CANDIDATES_MAX: Final = 4
"""Other addresses that are tried: more guesses than this are no diagnosis."""

TITLE_CHARS_MAX: Final = 80

BASE_PATHS: Final[dict[str, str]] = {"gemini_ai_studio": "/v1beta"}
"""Protocol → where its version stands; `/v1` for all others."""

TAILS: Final[tuple[tuple[str, str | None], ...]] = (
    ("/chat/completions", "openai_compatible"),
    ("/completions", None),
    ("/responses", "openai_responses"),
    ("/messages/count_tokens", "anthropic"),
    ("/messages", "anthropic"),
    ("/models", None),
)
"""Ends of addresses that are no base, and whose they are."""

_MODEL_CALL: Final = re.compile(r"/models/[^/]*:\w+$")
_VERSION: Final = re.compile(r"/v\d+[a-z0-9]*(?=/|$)")
_TITLE: Final = re.compile(r"<title[^>]*>([^<]*)", re.IGNORECASE)
_KEY_NAMES: Final = frozenset({"key", "api_key", "apikey", "api-key", "token", "access_token"})


class Check(msgspec.Struct, frozen=True):
    """One thing that was found."""

    state: State
    fact: str
    fix: str = ""


class AddressVerdict(msgspec.Struct, frozen=True):
    """What an answer says about the address that it came from."""

    kind: Kind
    """`reached` and `busy` are the right place with something else amiss; `elsewhere` is the wrong place."""
    check: Check
    speaks: tuple[str, ...] = ()
    """Protocols whose form the answer has, when it is not the one that was asked for."""


# By looking -----------------------------------------------------------------------------------------------------------


def version_of(protocol: str) -> str:
    """Return where the version of a protocol stands: `/v1`, `/v1beta`."""
    return BASE_PATHS.get(protocol, "/v1")


def cut_tail(path: str) -> tuple[str, tuple[str, ...]]:
    """Cut the protocols' own ends off a path; return what is left and the ends, the last one first."""
    cut: list[str] = []
    path = path.rstrip("/")
    while True:
        found = _MODEL_CALL.search(path)
        tail = found[0] if found else next((end for end, _ in TAILS if path.endswith(end)), None)
        if tail is None:
            return path, tuple(cut)
        cut.append(tail)
        path = path[: -len(tail)].rstrip("/")


def owner_of(tail: str) -> str | None:
    """Return the protocol whose end of a path this is."""
    return "gemini_ai_studio" if _MODEL_CALL.search(tail) else dict(TAILS).get(tail)


def tidy(protocol: str, base_url: str) -> str:
    """Return the base that was most likely meant: a scheme, one version, no end, no query, no name.

    Args:
        protocol: empty leaves a missing version missing.
    """
    text = base_url.strip()
    if "://" not in text:
        host = urlsplit(f"//{text}").hostname or ""
        text = f"{'http' if is_local(host) else 'https'}://{text}"
    parts = urlsplit(text)
    path, _ = cut_tail(parts.path)
    steps: list[str] = []
    for step in path.split("/"):
        if step and (not steps or step != steps[-1]):
            steps.append(step)
    path = "".join(f"/{step}" for step in steps)
    if protocol == "gemini_ai_studio":
        path = path.removesuffix("/openai")
    if protocol and not _VERSION.search(path):
        path += version_of(protocol)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))


def key_doubts(base_url: str, *, has_key: bool) -> list[Check]:
    """Say where a key would be seen by others: in the address, or on its way."""
    parts = urlsplit(base_url.strip())
    right = tidy("", base_url)
    if parts.username is not None or _KEY_NAMES & {name.lower() for name, _ in parse_qsl(parts.query)}:
        fact = "a key stands in the address, where every log has it"
        return [Check("missing", fact, f"base_url = {right!r}, and the name of the variable that holds the key")]
    if parts.scheme == "http" and has_key and not is_local(parts.hostname or ""):
        fact = f"{cut_urls(base_url.strip())} would send the key over plain http"
        return [Check("missing", fact, f"base_url = {right.replace('http:', 'https:', 1)!r}")]
    return []


def path_doubts(protocol: str, base_url: str) -> list[Check]:
    """Say what is wrong with an address, without asking anybody; nothing when it looks right."""
    shown = cut_urls(base_url.strip())
    if not is_http(base_url.strip() if "://" in base_url else f"http://{base_url.strip()}"):
        return [Check("missing", f"{shown} is no http address", "write it as in https://example.com/v1")]
    fix = f"base_url = {tidy(protocol, base_url)!r}"
    if "://" not in base_url:
        return [Check("missing", f"{shown} is no address: http:// or https:// is missing", fix)]
    parts = urlsplit(base_url.strip())
    out: list[Check] = []
    path, tails = cut_tail(parts.path)
    owners = [owner for owner in map(owner_of, tails) if owner not in (None, protocol)]
    if owners:
        fact = f"the address ends in {tails[0]}, which is of {owners[0]}"
        out.append(Check("missing", fact, f"protocol {owners[0]}, or {fix}"))
    elif len(tails) > 1:
        out.append(Check("missing", f"the path {tails[0]} stands there {len(tails)} times", fix))
    elif tails:
        out.append(Check("note", f"the address ends in {tails[0]}, which is added by itself", fix))
    return out + _version_doubts(protocol, path, fix)


def _version_doubts(protocol: str, path: str, fix: str) -> list[Check]:
    versions = _VERSION.findall(path)
    wanted = version_of(protocol)
    if protocol == "gemini_ai_studio" and path.endswith("/openai"):
        fact = "this is the vendor's address for openai_compatible"
        return [Check("missing", fact, f"protocol openai_compatible, or {fix}")]
    if len(versions) > 1:
        return [Check("missing", f"the path has {len(versions)} versions: {''.join(versions)}", fix)]
    if not versions:
        return [Check("note", f"the address has no {wanted}; most services want it", fix)]
    if protocol == "gemini_ai_studio" and versions[0] == "/v1":
        return [Check("note", f"{versions[0]} has not all that {wanted} has", fix.replace("/v1'", f"{wanted}'"))]
    return []


def candidates(protocol: str, base_url: str) -> list[str]:
    """Return other bases that may have been meant, the likeliest first; all at the same host."""
    right = tidy(protocol, base_url)
    parts = urlsplit(right)
    version = version_of(protocol)
    bare = _VERSION.sub("", parts.path)
    paths = [parts.path, bare + version, version, f"/api{version}", bare]
    found = [urlunsplit((parts.scheme, parts.netloc, path, "", "")) for path in paths]
    given = base_url.strip().rstrip("/")
    return [one for one in dict.fromkeys(found) if one != given][:CANDIDATES_MAX]


# By the answer --------------------------------------------------------------------------------------------------------


def read_answer(
    protocol: str, url: str, status: int, headers: Mapping[str, str], head: bytes, key: tuple[str, str | None],
    now: datetime,
) -> AddressVerdict:  # fmt: skip
    """Say what an answer means.

    Args:
        url: what was asked.
        head: the body's beginning.
        key: the variable of the key, empty when none is named, and the key itself, so that it is taken out of words.
        now: for a date in `retry-after`.
    """
    where = cut_urls(url)
    if 300 <= status < 400:
        return _redirected(protocol, where, headers.get("location", ""))
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    text = head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    if status == 407:
        return AddressVerdict(
            "down", Check("missing", "a proxy on the way asks who you are", "put name and password into HTTPS_PROXY")
        )
    if media_type == "text/html" or text[:1] == "<":
        return _page(where, status, text, key[1])
    if 200 <= status < 300:
        return _answered(protocol, where, media_type, head, key[1])
    document = _document(head)
    failure = failure_of(status, headers, head, now, key[1])
    said = clean(failure.message, key[1])[:200]
    speaks = error_forms(document)
    foreign = speaks if speaks and protocol not in speaks else ()
    of_whom = f"; its error has the form of {' or '.join(foreign)}" if foreign else ""
    if failure.code == "backend_auth_failed":
        return AddressVerdict("key", _key_check(where, said + of_whom, key[0]), foreign)
    if failure.code == "backend_model_not_found" and "model" in said.lower() and document is not None:
        # A path that does not exist gets the label of an unknown model from some; only the words tell them apart.
        return AddressVerdict(
            "reached", Check("note", f"{where} is right, and the key; but {said}", "name a model with --model")
        )
    if status in (404, 405) or document is None:
        return AddressVerdict(
            "elsewhere", Check("missing", f"nothing for {protocol} at {where}: {said}{of_whom}"), foreign
        )
    if status == 429:
        wait = f"; wait {failure.retry_after_s:g} s" if failure.retry_after_s is not None else ""
        return AddressVerdict(
            "busy", Check("note", f"{where} is right; limited now: {said}", f"raise the limit there{wait}")
        )
    if status >= 500:
        return AddressVerdict("busy", Check("missing", f"{where} was reached and fails: {said}", "try later"))
    return AddressVerdict(
        "reached", Check("note", f"{where} was reached; {said}{of_whom}", "name a model with --model"), foreign
    )


def _key_check(where: str, said: str, name: str) -> Check:
    if name:
        return Check("missing", f"{where} refuses the key in {name}: {said}", f"put a valid key into {name}")
    return Check("missing", f"{where} wants a key: {said}", "name the variable that holds it: --key-env NAME")


def _redirected(protocol: str, where: str, location: str) -> AddressVerdict:
    target = urlsplit(location)
    parts = urlsplit(where)
    path, tails = cut_tail(target.path)
    if not tails and path.rstrip("/") != parts.path.rstrip("/"):
        return AddressVerdict(
            "elsewhere", Check("missing", f"{where} sends on to {cut_urls(location) or 'nowhere'}, a page and no API")
        )
    base = urlunsplit((target.scheme or parts.scheme, target.netloc or parts.netloc, path, "", ""))
    fact = f"{where} sends on to {cut_urls(location)}; keys are not sent after it"
    return AddressVerdict("elsewhere", Check("missing", fact, f"base_url = {base!r}"))


def _page(where: str, status: int, text: str, secret: str | None) -> AddressVerdict:
    found = _TITLE.search(text)
    title = clean(" ".join(found[1].split()), secret)[:TITLE_CHARS_MAX] if found else ""
    named = f" ({title!r})" if title else ""
    if "https port" in text.lower():
        right = where.replace("http:", "https:", 1)
        return AddressVerdict("elsewhere", Check("missing", f"{where} speaks https, not http", f"write https: {right}"))
    fact = f"{where} answers {status} with a web page{named}: a proxy, a login or a site, and no API"
    return AddressVerdict("elsewhere", Check("missing", fact, "check base_url, HTTPS_PROXY and NO_PROXY"))


def _answered(protocol: str, where: str, media_type: str, head: bytes, secret: str | None) -> AddressVerdict:
    is_stream = media_type == "text/event-stream" or head.lstrip()[:5] in (b"data:", b"event")
    reader = framing.Detecting()
    documents = [*reader.feed(head), *reader.finish()]
    if not documents:
        shown = clean(head[:TITLE_CHARS_MAX].decode("utf-8", "replace"), secret)
        return AddressVerdict(
            "elsewhere",
            Check(
                "missing", f"{where} answers {media_type or 'nothing known'}, and no JSON: {shown!r}", "check base_url"
            ),
        )
    speaks = answer_forms(documents)
    if protocol not in speaks and not speaks:
        if error_forms(documents[0]):
            words = clean(str(documents[0].get("error"))[:200], secret)
            return AddressVerdict(
                "reached", Check("note", f"{where} was reached; it failed: {words}", "name a model with --model")
            )
        return AddressVerdict(
            "elsewhere", Check("missing", f"{where} answers JSON that is not of {protocol}", "check base_url")
        )
    if protocol not in speaks:
        return AddressVerdict(
            "elsewhere", Check("missing", f"{where} speaks {' or '.join(speaks)}", f"protocol {speaks[0]}"), speaks
        )
    if not is_stream:
        why = "alt=sse is lost on the way" if protocol == "gemini_ai_studio" else "the answer comes at once"
        return AddressVerdict(
            "works",
            Check("note", f"{where} answers {media_type}, not text/event-stream: {why}", "works, without streaming"),
        )
    return AddressVerdict("works", Check("ok", f"{where} answers text/event-stream"))


def _document(head: bytes) -> Json:
    try:
        return msgspec.json.decode(head)
    except UNREADABLE:
        return None


def error_forms(document: Json) -> tuple[str, ...]:
    """Return the protocols whose form an error has; empty when it has none that is known."""
    found: Any = document[0] if isinstance(document, list) and document else document
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return ()
    if found.get("type") == "error":
        return ("anthropic",)
    if isinstance(error.get("code"), int) and isinstance(error.get("status"), str):
        return ("gemini_ai_studio",)
    return ("openai_compatible", "openai_responses") if error.keys() & {"type", "param"} else ()


def answer_forms(documents: list[Json]) -> tuple[str, ...]:
    """Return the protocols whose form an answer or a stream has."""
    for document in documents:
        if not isinstance(document, dict):
            continue
        kind = str(document.get("type", ""))
        if kind == "message" or kind.startswith(("message_", "content_block")):
            return ("anthropic",)
        if kind.startswith("response.") or document.get("object") == "response":
            return ("openai_responses",)
        if "choices" in document:
            return ("openai_compatible",)
        if "candidates" in document or "usageMetadata" in document:
            return ("gemini_ai_studio",)
    return ()
