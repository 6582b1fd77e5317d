"""`doctor`'s checks of the addresses and keys of models' services.

An address is looked at always, asked over the network only where the caller wants it. Keys are read from the
environment, go into a request's header, and are never printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from backplane.errors import BackplaneError
from backplane.upstream import presets
from backplane.upstream.baseurl import Check, key_doubts, path_doubts
from backplane.upstream.endpoint import Endpoint, cut_urls

if TYPE_CHECKING:
    from backplane.config import Settings


def check_backends(
    settings: Settings, environ: Mapping[str, str], *, over_network: bool
) -> Iterator[tuple[str, Check]]:
    """Look at every configured backend that speaks with a service, or try it; yields its name with each check."""
    for name, backend in settings.backends.items():
        if backend.host != presets.HOST:
            continue
        try:
            told = presets.with_address(backend.options, {**environ, **backend.env})
            service = presets.read_options(told, f"backends.{name}.options")
        except BackplaneError as error:
            yield name, Check("missing", error.message, error.hint or "")
            continue
        key = environ.get(service.key_env, "").strip() if service.key_env else ""
        if not over_network:
            doubts = [
                *key_doubts(service.base_url, has_key=bool(key)),
                *path_doubts(service.protocol, service.base_url),
            ]
            yield from ((name, check) for check in doubts)
            yield name, Check("ok", f"asks {cut_urls(service.base_url)}")
            continue
        if service.key_env and not key:
            yield name, Check("missing", f"{service.key_env} is not set", f"export {service.key_env}=…")
            continue
        headers = {
            label: environ.get(value[1:], "") if value.startswith("$") else value
            for label, value in service.headers.items()
        }
        endpoint = _endpoint(
            service.protocol, service.base_url, key or None, headers, service.query, key_in_query=service.key_in_query
        )
        yield from ((name, check) for check in _tried(endpoint, service.model, service.key_env or ""))


def _endpoint(
    protocol: str, base_url: str, key: str | None, headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None, *, key_in_query: bool = False,
) -> Endpoint:  # fmt: skip
    from backplane.upstream import probe

    return Endpoint(
        protocol=protocol, base_url=base_url.strip(), api_key=key, headers=dict(headers or {}), query=dict(query or {}),
        key_in_query=key_in_query, connect_s=probe.CONNECT_S, first_byte_s=probe.FIRST_BYTE_S,
    )  # fmt: skip


def _tried(endpoint: Endpoint, model: str | None, key_env: str) -> list[Check]:
    import anyio

    from backplane.upstream.probe import probe

    return anyio.run(probe, endpoint, model, key_env)
