"""Reads the options of a `[backends.NAME]` for the host `api`, and has the known model services by name.

Options come in, one checked `Endpoint` comes out: protocol, address, the variable that holds the key. This module reads
no key and opens no connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from backplane.errors import ConfigError
from backplane.upstream.endpoint import PROTOCOLS, VERSION, Endpoint, is_local

HOST: Final = "api"
"""Name of the shipped host with these options."""

OPTIONS: Final = "BACKPLANE_API_OPTIONS"
"""Variable that holds the host's options as JSON; other users can read a command line."""

_OPENAI: Final[dict[str, Any]] = {
    "base_url": "https://api.openai.com/v1", "key_env": "OPENAI_API_KEY", "listed": True
}  # fmt: skip
PRESETS: Final[dict[str, Endpoint]] = {
    "openai": Endpoint(protocol="openai_responses", **_OPENAI),
    "openai_chat": Endpoint(protocol="openai_compatible", **_OPENAI),
    "anthropic": Endpoint(
        protocol="anthropic", base_url="https://api.anthropic.com/v1", key_env="ANTHROPIC_API_KEY", listed=True),
    "gemini": Endpoint(
        protocol="gemini_ai_studio", base_url="https://generativelanguage.googleapis.com/v1beta",
        key_env="GEMINI_API_KEY", listed=True),
    "kimi": Endpoint(
        protocol="openai_compatible", base_url="https://api.moonshot.ai/v1", key_env="MOONSHOT_API_KEY", listed=True,
        dialect="kimi"),
    "copilot": Endpoint(
        protocol="openai_compatible", base_url="https://api.githubcopilot.com", key_env="GITHUB_COPILOT_TOKEN",
        dialect="copilot"),
    "ollama": Endpoint(protocol="openai_compatible", base_url="http://127.0.0.1:11434/v1"),
    "llama_cpp": Endpoint(protocol="openai_compatible", base_url="http://127.0.0.1:8080/v1"),
    "vllm": Endpoint(protocol="openai_compatible", base_url="http://127.0.0.1:8000/v1"),
}  # fmt: skip
"""Name → service; addresses are from the vendors' pages in 2026, those of local servers have the default ports."""

ADDRESS_VARIABLES: Final = {
    "openai": "OPENAI_BASE_URL", "openai_chat": "OPENAI_BASE_URL", "anthropic": "ANTHROPIC_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
}  # fmt: skip
"""Preset → variable from which the vendor's own programs take the address."""

_OWN: Final = ("protocol", "base_url", "key_env", "dialect")
SETTABLE: Final = (
    "preset",
    *(name for name in Endpoint.__struct_fields__ if name not in ("listed", "api_key", "tries_max", "backoff_ms")),
)


def with_address(options: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return options with the address from the preset's variable, if they have no address."""
    address = environ.get(ADDRESS_VARIABLES.get(str(options.get("preset")), ""))
    return {**options, "base_url": address} if address and "base_url" not in options else options


def read_options(options: Mapping[str, Any], where: str) -> Endpoint:
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
    try:
        found = msgspec.convert(values, Endpoint)
    except msgspec.ValidationError as error:
        raise _invalid(f"{where}: {error}", f"it may have {', '.join(SETTABLE)}") from error
    except ConfigError as error:
        raise _invalid(f"{where}: {error.message}", error.hint or "") from error
    protocol, base_url = PROTOCOLS[found.protocol], found.base_url.rstrip("/")
    if protocol.adds_version and not VERSION.search(base_url):
        found = msgspec.structs.replace(found, base_url=base_url + protocol.version)
    _check(found, where)
    return found


def _check(service: Endpoint, where: str) -> None:
    """Refuse values that the types allow. Raises ConfigError `config_invalid`."""
    parts = urlsplit(service.base_url)
    is_sent_plain = parts.scheme == "http" and service.variables and not is_local(parts.hostname or "")
    for is_wrong, fact, hint in (
        (parts.username is not None or parts.query or parts.fragment,
            "base_url is not a plain http or https address", "as https://host/v1, without a query"),
        (is_sent_plain, "base_url would send a key over plain http", "use https, or a host of this machine"),
        (service.dialect is not None and service.protocol != "openai_compatible",
            "dialect is for the protocol openai_compatible alone", "leave it out"),
        (not 0 < service.timeout_s <= 86_400,
            "timeout_s is not above 0 s and at most a day", "leave it out for the default"),
        (service.max_output_tokens is not None and service.max_output_tokens < 1,
            "max_output_tokens is not above 0", "leave it out for the service's own"),
    ):  # fmt: skip
        if is_wrong:
            raise _invalid(f"{where}.{fact}", hint)


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)
