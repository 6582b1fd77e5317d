"""Addresses, keys and headers of the four protocols. Pure: settings go in, an address and headers come out.

A key goes into a header; it goes into the address only if a setting asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import ConfigError
from backplane.upstream.clients import is_http
from backplane.upstream.presets import VARIABLE, Service

CONNECT_S: Final = 10.0
"""Seconds to connect; a slow handshake takes two. A server that takes longer counts as down."""

TRIES_MAX: Final = 3
"""Attempts at the same request if the fault may pass, as in the vendors' own clients."""

BACKOFF_MS: Final = 500
"""Milliseconds before the second attempt; doubled for each further one."""

ANTHROPIC_VERSION: Final = "2023-06-01"
"""Version of the interface in the vendor's reference (docs.anthropic.com, read November 2026)."""


class Protocol(msgspec.Struct, frozen=True):
    """The address and headers of a protocol."""

    dialect: str
    """Dialect of its documents."""
    path: str
    """Path below the base; empty if the model is part of the path."""
    key_header: str
    key_prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers that the settings can replace."""
    ids_optional: bool = False
    """True if a result finds its call by name and order."""


PROTOCOLS: Final[dict[str, Protocol]] = {
    "openai_compatible": Protocol("openai", "/chat/completions", "authorization", "Bearer "),
    "openai_responses": Protocol("codex", "/responses", "authorization", "Bearer "),
    "anthropic": Protocol("claude", "/messages", "x-api-key", headers=(("anthropic-version", ANTHROPIC_VERSION),)),
    "gemini_ai_studio": Protocol("gemini", "", "x-goog-api-key", ids_optional=True),
}
"""Protocol → its details. A fifth needs a name in `presets`, a row here, a ladder, and a dialect."""

KEY_HEADERS: Final = frozenset({"authorization", "x-api-key", "x-goog-api-key", "api-key"})
"""A header of the settings with one of these names replaces the key."""

VERSION: Final = re.compile(r"/v\d+[a-z0-9]*(?=/|$)")


class Endpoint(Service, frozen=True, kw_only=True):
    """A service with its key; the values of its headers are final.

    Raises:
        ConfigError: `config_invalid`, no such protocol, or the base is no HTTP address.
    """

    api_key: str | None = None
    """None sends no key, as for local servers."""
    tries_max: int = TRIES_MAX
    backoff_ms: int = BACKOFF_MS

    @property
    def key(self) -> str | None:
        """The key without the blanks and the newline of a file."""
        return self.api_key.strip() if self.api_key is not None else None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                "config_invalid", f"no protocol {self.protocol!r}", hint=f"there are {', '.join(PROTOCOLS)}"
            )
        if not is_http(self.base_url):
            raise ConfigError(
                "config_invalid", f"base_url {cut_urls(self.base_url)!r} is no http address",
                hint="write the whole address, as in https://example.com/v1",
            )  # fmt: skip


def address(endpoint: Endpoint, model: str, *, stream: bool) -> str:
    """Return the address that a request is sent to."""
    parts = urlsplit(endpoint.base_url)
    path = parts.path.rstrip("/")
    query = {**dict(parse_qsl(parts.query)), **endpoint.query}
    own = PROTOCOLS[endpoint.protocol].path
    if own:
        path = path if path.endswith(own) else path + own
    else:
        if not VERSION.search(path):
            path += "/v1beta"
        name = model if "/" in model else f"models/{model}"
        path += f"/{quote(name, safe='/-._~:@')}:{'streamGenerateContent' if stream else 'generateContent'}"
        if stream:
            query["alt"] = "sse"
        if endpoint.key_in_query and endpoint.key is not None:
            query["key"] = endpoint.key
    return f"{parts.scheme}://{parts.netloc}{path}" + (f"?{urlencode(query)}" if query else "")


def headers_of(endpoint: Endpoint, *, stream: bool) -> dict[str, str]:
    """Return the headers of a request; the settings replace default ones, in any case."""
    own = {name.lower(): value for name, value in endpoint.headers.items()}
    protocol = PROTOCOLS[endpoint.protocol]
    found = {
        "content-type": "application/json",
        "accept": "text/event-stream" if stream else "application/json",
        # A packed stream waits until the packer's window is full.
        "accept-encoding": "identity",
        "user-agent": "backplane",
        **dict(protocol.headers),
    }
    in_query = endpoint.key_in_query and not protocol.path
    if endpoint.key is not None and not in_query and not own.keys() & KEY_HEADERS:
        found[protocol.key_header] = protocol.key_prefix + endpoint.key
    return {**found, **own}


def body_of(endpoint: Endpoint, request: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return the body of a request; Gemini has model and streaming in the address."""
    if not PROTOCOLS[endpoint.protocol].path:
        return {name: value for name, value in request.items() if name not in ("model", "stream")}
    if stream or request.get("stream"):
        return {**request, "stream": stream}
    return request


_ADDRESS: Final = re.compile(r"https?://[^\s\"'<>]*", re.IGNORECASE)
_USER: Final = re.compile(r"(https?://)[^\s/@\"'<>]*@", re.IGNORECASE)


def cut_urls(text: str) -> str:
    """Cut every address in a text at its `?`, and take names and passwords out: both may hold keys."""
    return _USER.sub(r"\1", _ADDRESS.sub(lambda found: found[0].partition("?")[0], text))


def model_of(request: Json) -> str:
    """Return the model that a request names; empty when it names none."""
    found = request.get("model") if isinstance(request, dict) else None
    return found if isinstance(found, str) else ""


def endpoint_of(service: Service, variables: Mapping[str, str]) -> Endpoint:
    """Return a configured service with its key and headers from these variables."""
    headers = {
        name: VARIABLE.sub(lambda found: variables.get(found[1], ""), value) for name, value in service.headers.items()
    }
    values = {**msgspec.structs.asdict(service), "headers": headers}
    return Endpoint(api_key=variables.get(service.key_env or ""), **values)
