"""Model services by name, and the options of a `[backends.NAME]` for the host `api`.

Options come in, one checked `Service` comes out: protocol, address, the variable that holds the key. No key passes
through here, and nothing is connected to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from backplane.errors import ConfigError
from backplane.upstream.clients import is_http

HOST: Final = "api"
"""Name of the shipped host with these options."""

VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
"""A variable in the value of a header."""

OPTIONS: Final = "BACKPLANE_API_OPTIONS"
"""Variable that holds the host's options as JSON; other users can read a command line."""

ProtocolName = Literal["openai_compatible", "openai_responses", "anthropic", "gemini_ai_studio"]
"""Protocol of a service; `endpoint.PROTOCOLS` has the details."""
PROTOCOLS: Final[tuple[ProtocolName, ...]] = get_args(ProtocolName)


class Preset(msgspec.Struct, frozen=True):
    """A service that is known by name."""

    protocol: ProtocolName
    base_url: str
    key_env: str | None = None
    """Variable that usually holds its key; None for a service without a key."""
    base_url_env: str | None = None
    """Variable from which the vendor's own programs take the address."""
    listed: bool = False
    """True if the table of prices applies: the service is the vendor of its models."""
    dialect: str | None = None
    """Member of the family of `openai_compatible`; see `Service`."""


_OPENAI: Final = ("https://api.openai.com/v1", "OPENAI_API_KEY", "OPENAI_BASE_URL", True)
PRESETS: Final[dict[str, Preset]] = {
    "openai": Preset("openai_responses", *_OPENAI),
    "openai_chat": Preset("openai_compatible", *_OPENAI),
    "anthropic": Preset(
        "anthropic", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", listed=True),
    "gemini": Preset(
        "gemini_ai_studio", "https://generativelanguage.googleapis.com/v1beta", "GEMINI_API_KEY",
        "GOOGLE_GEMINI_BASE_URL", listed=True),
    "kimi": Preset("openai_compatible", "https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", listed=True, dialect="kimi"),
    "copilot": Preset("openai_compatible", "https://api.githubcopilot.com", "GITHUB_COPILOT_TOKEN", dialect="copilot"),
    "ollama": Preset("openai_compatible", "http://127.0.0.1:11434/v1"),
    "llama_cpp": Preset("openai_compatible", "http://127.0.0.1:8080/v1"),
    "vllm": Preset("openai_compatible", "http://127.0.0.1:8000/v1"),
}  # fmt: skip
"""Addresses from the vendors' pages in 2026; local servers at their default ports."""


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service, ready for requests."""

    protocol: ProtocolName
    """The protocol that the service speaks; a preset has one."""
    base_url: str
    """Address of the service, with the version at its end (`/v1`); a preset has one."""
    dialect: Literal["openai", "kimi", "copilot"] | None = None
    """Which of the family that `openai_compatible` is it speaks; None is the plain one, or the protocol's only one."""
    key_env: str | None = None
    """Variable that holds the key; None sends no key."""
    model: str | None = None
    """Taken when an order names none."""
    headers: dict[str, str] = {}
    """Sent with every request; `$B` in a value stands for the variable B."""
    key_in_query: bool = False
    """Send the key in the address, which is written down in many places: for a service that takes it nowhere else."""
    query: dict[str, str] = {}
    """Added to the address of every request."""
    max_output_tokens: int | None = None
    """Most tokens of one answer; None leaves it to the service."""
    stream: bool = True
    """Ask for answers piece by piece; false asks for whole ones."""
    parallel_tools: bool = True
    """Let the model call several tools at once."""
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read, cache_write."""
    listed: bool = False
    timeout_s: float = 240.0
    """Longest silence before an answer and between two pieces of it; a control plane ends a silent run after five
    minutes."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that hold the service's secrets."""
        named = (self.key_env, *(name for value in self.headers.values() for name in VARIABLE.findall(value)))
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def has_key_headers(self) -> bool:
        return any(VARIABLE.search(value) for value in self.headers.values())

    @property
    def endpoint(self) -> str:
        """The address that a sandbox lets the host connect to, as `host:port`."""
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_OWN: Final = ("protocol", "base_url", "key_env", "dialect")
SETTABLE: Final = ("preset", *(name for name in Service.__struct_fields__ if name != "listed"))


def with_address(options: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return options with the address from the preset's variable, if they have no address."""
    name = options.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    address = environ.get(preset.base_url_env or "") if preset is not None else None
    return {**options, "base_url": address} if address and "base_url" not in options else options


VERSIONS: Final = {"anthropic": "/v1", "gemini_ai_studio": "/v1beta"}
"""Protocol → version that the vendor's own programs add to an address."""
_VERSION: Final = re.compile(r"/v\d\w*/?\Z")


def with_version(protocol: str, base_url: str) -> str:
    """Return an address with its version at the end."""
    version = VERSIONS.get(protocol)
    return base_url if version is None or _VERSION.search(base_url) else base_url.rstrip("/") + version


def read_options(options: Mapping[str, Any], where: str) -> Service:
    """Read a backend's options: a preset, a protocol with an address, or a preset with changed parts.

    Args:
        where: place of the options, for errors.

    Raises:
        ConfigError: `config_invalid`.
    """
    values = dict(options)
    unknown = sorted(set(values) - set(SETTABLE))
    if unknown:
        raise _invalid(f"{where} has no {unknown[0]!r}", f"known are {', '.join(SETTABLE)}")
    name = values.pop("preset", None)
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if name is not None and preset is None:
        raise _invalid(f"{where}.preset is {str(name)[:40]!r}", f"one of: {', '.join(PRESETS)}")
    if preset is not None:
        values["listed"] = preset.listed and "base_url" not in values
        if "protocol" in values:
            values.setdefault("dialect", None)
        values = {**{own: getattr(preset, own) for own in _OWN}, **values}
    if not {"protocol", "base_url"} <= set(values):
        raise _invalid(f"{where} names no model service", 'give preset = "…", or protocol and base_url')
    if values["protocol"] not in PROTOCOLS:
        raise _invalid(f"{where}.protocol is {str(values['protocol'])[:40]!r}", f"one of: {', '.join(PROTOCOLS)}")
    try:
        service = msgspec.convert(values, Service)
        service = msgspec.structs.replace(service, base_url=with_version(service.protocol, service.base_url))
    except msgspec.ValidationError as error:
        raise _invalid(f"{where}: {error}", f"it may have {', '.join(SETTABLE)}") from error
    return _checked(service, where)


def _checked(service: Service, where: str) -> Service:
    parts = urlsplit(service.base_url if is_http(service.base_url) else "")
    if not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        # The address may hold a key, so it is not shown.
        raise _invalid(f"{where}.base_url is not a plain http or https address", "as https://host/v1, without a query")
    if parts.scheme == "http" and service.variables and not is_local(parts.hostname or ""):
        raise _invalid(f"{where}.base_url would send a key over plain http", "use https, or a host of this machine")
    if service.dialect is not None and service.protocol != "openai_compatible":
        raise _invalid(f"{where}.dialect is for the protocol openai_compatible alone", "leave it out")
    if not 0 < service.timeout_s <= 86_400:
        raise _invalid(f"{where}.timeout_s is not above 0 s and at most a day", "leave it out for the default")
    if service.max_output_tokens is not None and service.max_output_tokens < 1:
        raise _invalid(f"{where}.max_output_tokens is not above 0", "leave it out for the service's own")
    return service


def is_local(host: str) -> bool:
    """Return True for a host of this machine or its own network, where plain http is usual."""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)
