"""Describes one model service, and makes the address, headers and body of a request to it. Pure.

A key goes into a header; it goes into the address only if a setting asks for it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from backplane.errors import ConfigError
from backplane.upstream.clients import is_http

CONNECT_S: Final = 10.0
"""Seconds to connect; a slow handshake takes two. A server that takes longer counts as unavailable."""

TRIES_MAX: Final = 3
"""Most attempts at the same request if the fault may pass, as in the vendors' own clients."""

BACKOFF_MS: Final = 500
"""Milliseconds before the second attempt; doubled for each further one."""

ANTHROPIC_VERSION: Final = "2023-06-01"
"""Value of Anthropic's version header, from the vendor's reference (docs.anthropic.com, read November 2026)."""


ProtocolName = Literal["openai_compatible", "openai_responses", "anthropic", "gemini_ai_studio"]
PROTOCOL_NAMES: Final[tuple[ProtocolName, ...]] = get_args(ProtocolName)


class Protocol(msgspec.Struct, frozen=True):
    """The address and headers of a protocol."""

    dialect: str
    """Name of the dialect that reads and writes the protocol's documents."""
    path: str
    """Path of a request below the base address; empty if the model is part of the path."""
    key_header: str
    key_prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers that the settings can replace."""
    ids_optional: bool = False
    """True if tool calls and results need no ids, as results belong to calls by name and order."""
    version: str = "/v1"
    """Version at the end of the service's usual address."""
    adds_version: bool = False
    """True if the vendor's own programs add the version to an address."""


PROTOCOLS: Final[dict[str, Protocol]] = {
    "openai_compatible": Protocol("openai", "/chat/completions", "authorization", "Bearer "),
    "openai_responses": Protocol("codex", "/responses", "authorization", "Bearer "),
    "anthropic": Protocol(
        "claude", "/messages", "x-api-key", headers=(("anthropic-version", ANTHROPIC_VERSION),), adds_version=True),
    "gemini_ai_studio": Protocol(
        "gemini", "", "x-goog-api-key", ids_optional=True, version="/v1beta", adds_version=True),
}  # fmt: skip
"""Protocol → its details. A fifth needs a row here, a ladder, and a dialect."""

KEY_HEADERS: Final = frozenset({"authorization", "x-api-key", "x-goog-api-key", "api-key"})
"""Names of headers that carry a key; one of these in the settings replaces the header made from the key."""

VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
"""Pattern of a variable in the value of a header."""

VERSION: Final = re.compile(r"/v\d+[a-z0-9]*(?=/|$)")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service; with its key, and the values of its headers, it is ready for requests.

    Raises:
        ConfigError: `config_invalid`, no such protocol, or the base is no HTTP address.
    """

    protocol: ProtocolName
    """The protocol that the service speaks; a preset has one."""
    base_url: str
    """Address of the service, with the version at its end (`/v1`); a preset has one."""
    dialect: Literal["openai", "kimi", "copilot"] | None = None
    """Variant of the protocol `openai_compatible` that the service speaks; None is the protocol's usual dialect."""
    key_env: str | None = None
    """Variable that holds the key; None sends no key."""
    model: str | None = None
    """Model for orders that name none; None if each order has to."""
    headers: dict[str, str] = {}
    """Headers of every request; `$B` in a value stands for the variable B."""
    key_in_query: bool = False
    """Send the key in the address, for a service that takes it nowhere else; addresses are logged in many places."""
    query: dict[str, str] = {}
    """Parameters that are added to the address of every request."""
    max_output_tokens: int | None = None
    """Most tokens of one answer; None leaves it to the service."""
    stream: bool = True
    """Ask for answers piece by piece; false asks for whole ones."""
    parallel_tools: bool = True
    """Let the model call several tools at once."""
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read, cache_write; None if not configured."""
    timeout_s: float = 240.0
    """Most seconds without progress, before an answer and between two pieces of it; a control plane ends a silent run
    after five minutes."""
    listed: bool = False
    """True if the table of prices applies: the service is a preset, and the vendor of its models."""
    api_key: str | None = None
    """The key itself; None sends no key, as for local servers."""
    tries_max: int = TRIES_MAX
    backoff_ms: int = BACKOFF_MS

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                "config_invalid", f"no protocol {str(self.protocol)[:40]!r}", hint=f"one of: {', '.join(PROTOCOLS)}"
            )
        if not is_http(self.base_url):
            # The address may hold a key, so it is not shown.
            raise ConfigError(
                "config_invalid", "base_url is not a plain http or https address", hint="as https://host/v1"
            )

    @property
    def key(self) -> str | None:
        """The key, without blanks or a newline around it; None if there is none."""
        return self.api_key.strip() if self.api_key is not None else None

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that hold the service's secrets."""
        named = (self.key_env, *(name for value in self.headers.values() for name in VARIABLE.findall(value)))
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def has_key_headers(self) -> bool:
        return any(VARIABLE.search(value) for value in self.headers.values())

    @property
    def host_and_port(self) -> str:
        """The address that a sandbox lets the host connect to, as `host:port`."""
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address(endpoint: Endpoint, model: str, *, stream: bool, other: str = "") -> str:
    """Return the address that a request is sent to.

    Args:
        other: path in place of the protocol's own, as `/embeddings`; where the model is in the path, the word behind
            the colon, as `countTokens`.
    """
    parts = urlsplit(endpoint.base_url)
    path = parts.path.rstrip("/")
    query = {**dict(parse_qsl(parts.query)), **endpoint.query}
    own = PROTOCOLS[endpoint.protocol].path
    if own:
        path = path.removesuffix(own) + (other or own)
    else:
        if not VERSION.search(path):
            path += PROTOCOLS[endpoint.protocol].version
        name = model if "/" in model else f"models/{model}"
        path += f"/{quote(name, safe='/-._~:@')}:{other or ('streamGenerateContent' if stream else 'generateContent')}"
        if stream:
            query["alt"] = "sse"
        if endpoint.key_in_query and endpoint.key is not None:
            query["key"] = endpoint.key
    return f"{parts.scheme}://{parts.netloc}{path}" + (f"?{urlencode(query)}" if query else "")


def headers_of(endpoint: Endpoint, *, stream: bool) -> dict[str, str]:
    """Return the headers of a request; those of the settings replace default ones, in upper or lower case."""
    own = {name.lower(): value for name, value in endpoint.headers.items()}
    protocol = PROTOCOLS[endpoint.protocol]
    found = {
        "content-type": "application/json",
        "accept": "text/event-stream" if stream else "application/json",
        # A packed stream would be delayed until the packer's window is full.
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


def model_of(request: Any) -> str:
    """Return the model that a request names; empty if it names none."""
    found = request.get("model") if isinstance(request, dict) else None
    return found if isinstance(found, str) else ""


def with_keys(endpoint: Endpoint, variables: Mapping[str, str]) -> Endpoint:
    """Return a configured service with its key and headers from these variables."""
    headers = {
        name: VARIABLE.sub(lambda found: variables.get(found[1], ""), value) for name, value in endpoint.headers.items()
    }
    return msgspec.structs.replace(endpoint, api_key=variables.get(endpoint.key_env or ""), headers=headers)


def is_local(host: str) -> bool:
    """Return True for a host of this machine or its own network, where plain http is usual."""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False
