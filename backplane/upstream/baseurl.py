"""Checks a base address without a request, and guesses the address that was meant. Pure.

No text here names a key, and every address is cut at its `?`. `probe` sends requests.
"""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import msgspec

from backplane.upstream.clients import is_http
from backplane.upstream.endpoint import PROTOCOLS, VERSION, cut_urls, is_local

_TAIL: Final = re.compile(r"/(chat/completions|completions|responses|messages(/count_tokens)?|models(/[^/]*:\w+)?)/*$")
"""Ends of requests' addresses, which are not part of a base."""

_KEY_NAMES: Final = frozenset({"key", "api_key", "apikey", "api-key", "token", "access_token"})


class Check(msgspec.Struct, frozen=True):
    """One finding about an address."""

    state: Literal["ok", "note", "missing"]
    fact: str
    fix: str = ""


def cut_tails(path: str) -> tuple[str, tuple[str, ...]]:
    """Cut the ends of requests off a path; return the rest, and the ends from the last one on."""
    tails: list[str] = []
    while found := _TAIL.search(path):
        tails.append(found[0].rstrip("/"))
        path = path[: found.start()]
    return path.rstrip("/"), tuple(tails)


def tidy(protocol: str, base_url: str) -> str:
    """Return the base that was most likely meant: a scheme, one version, no end of a request, no query, no user.

    Args:
        protocol: empty adds no version.
    """
    text = base_url.strip()
    if "://" not in text:
        text = f"{'http' if is_local(urlsplit(f'//{text}').hostname or '') else 'https'}://{text}"
    parts = urlsplit(text)
    steps = [step for step in cut_tails(parts.path)[0].split("/") if step]
    path = "".join(f"/{step}" for place, step in enumerate(steps) if steps[place - 1 : place] != [step])
    if protocol == "gemini_ai_studio":
        path = re.sub(r"/v1$", "", path.removesuffix("/openai"))
    if protocol and not VERSION.search(path):
        path += PROTOCOLS[protocol].version
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))


def moved_base(url: str, location: str) -> str:
    """Return the next step after a redirect: the base that it names; empty if its target is no request's address."""
    target, parts = urlsplit(location), urlsplit(url)
    path, tails = cut_tails(target.path)
    if not location or (not tails and path.rstrip("/") != parts.path.rstrip("/")):
        return ""
    base = urlunsplit((target.scheme or parts.scheme, target.netloc or parts.netloc, path, "", ""))
    return f"base_url = {cut_urls(base)!r}"


def key_doubts(base_url: str, *, has_key: bool) -> list[Check]:
    """Return findings about a key that others could read: in the address, or on the network."""
    parts = urlsplit(base_url.strip())
    right = tidy("", base_url)
    if parts.username is not None or _KEY_NAMES & {name.lower() for name, _ in parse_qsl(parts.query)}:
        fact = "a key stands in the address, and logs keep addresses"
        return [Check("missing", fact, f"set base_url = {right!r} and name the variable that holds the key")]
    if parts.scheme == "http" and has_key and not is_local(parts.hostname or ""):
        fact = f"{cut_urls(base_url.strip())} would send the key over plain http"
        return [Check("missing", fact, f"base_url = {right.replace('http:', 'https:', 1)!r}")]
    return []


def path_doubts(protocol: str, base_url: str) -> list[Check]:
    """Return findings about the spelling of an address; empty if it looks right."""
    text, shown = base_url.strip(), cut_urls(base_url.strip())
    if not is_http(text if "://" in text else f"http://{text}"):
        return [Check("missing", f"{shown} is not an http address", "write it as in https://example.com/v1")]
    fix = f"base_url = {tidy(protocol, text)!r}"
    if "://" not in text:
        return [Check("missing", f"{shown} has no http:// or https://", fix)]
    path, tails = cut_tails(urlsplit(text).path)
    versions, version = VERSION.findall(path), PROTOCOLS[protocol].version
    found: list[Check] = []
    if tails == (PROTOCOLS[protocol].path,):
        found.append(Check("note", f"the address ends in {tails[0]}, which is added to each request", fix))
    elif tails:
        owner = next((name for name, one in PROTOCOLS.items() if one.path == tails[0] and name != protocol), None)
        fact = f"the address ends in {''.join(reversed(tails))}, which is not part of a base"
        found.append(Check("missing", fact, f"protocol {owner}, or {fix}" if owner else fix))
    if protocol == "gemini_ai_studio" and path.endswith("/openai"):
        fact = "this is the vendor's address for openai_compatible"
        found.append(Check("missing", fact, f"protocol openai_compatible, or {fix}"))
    elif len(versions) > 1:
        found.append(Check("missing", f"the path has {len(versions)} versions: {''.join(versions)}", fix))
    elif not versions:
        found.append(Check("note", f"the address has no {version}; most services want it", fix))
    elif version != "/v1" and versions == ["/v1"]:
        found.append(Check("note", f"/v1 has fewer features than {version}", fix))
    return found
